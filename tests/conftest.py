"""How the tests are run: more at once than there are cores, and without looking at torch's objects.

Tests of faults wait most of their time for a rank that gives no sign of life; others run meanwhile.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

import pytest
import torch


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` is: three for two cores."""
    cores = len(os.sched_getaffinity(0))
    return cores + cores // 2


def pytest_configure(config: pytest.Config) -> None:
    """Without an accelerator, seeding is seeding the CPU's generator.

    Else torch keeps each seed for every kind of accelerator that may come yet, with the stack of
    who gave it, for good: that takes half a millisecond a call, and tests make thousands.
    """
    if not torch.accelerator.is_available():
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: a test that collects garbage need not go through it each time.

    Torch has some 300,000 objects: with them it takes a third of a second.
    """
    import_module("torch._dynamo")  # or else the first optimizer does, and it would not be frozen
    gc.collect()
    gc.freeze()
