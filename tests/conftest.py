"""Test configuration: more workers than cores, cheap seeding, and cheap garbage collection.

Fault tests spend most of their time waiting for a rank that no longer responds, so other tests can
run in the meantime.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

import pytest
import torch


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of `-n auto`: three for every two cores."""
    cores = len(os.sched_getaffinity(0))
    return cores + cores // 2


def pytest_configure(config: pytest.Config) -> None:
    """Without an accelerator, replace `torch.manual_seed` by the seeding of the CPU generator.

    Otherwise torch queues each seed, with a stack trace, for every accelerator that might be
    initialized later, and never frees it. That takes half a millisecond per call, and the tests
    make thousands of calls.
    """
    if not torch.accelerator.is_available():
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt all objects imported so far from garbage collection.

    Torch has about 300,000 objects. With them, each `gc.collect()` in a test takes a third of a
    second.
    """
    import_module("torch._dynamo")  # otherwise the first optimizer imports it, after the freeze
    gc.collect()
    gc.freeze()
