"""Test configuration: hidden GPUs, workers, long tests first, one thread, cheap seeding.

Fault tests spend most of their time waiting for a rank that no longer responds, so other tests can
run in the meantime.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Generator
from importlib import import_module
from pathlib import Path

import pytest

# PyTorch is imported where it is needed: xdist's controller runs no tests, and its workers start
# after it has read this file.


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of `-n auto`: three for two cores, as in the Makefile."""
    return max(2, len(os.sched_getaffinity(0)) * 3 // 2)


# Files whose tests take several seconds each, most of them waiting. At the end of a run they would
# keep one worker busy while the others have nothing left to do.
LONG = (
    "examples/test_processes.py",
    "checkpoint/test_killed_saves.py",
    "distributed/test_any_model.py",
    "hugging_face/test_pipes_over_ranks.py",
    "launch/",
    "doctor/",
    "faults/",
    "compat/test_install.py",
    "test_packaging.py",
    "test_surroundings.py",
    "runtime/distributed/failure/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long tests first."""
    folder = Path(__file__).parent

    def is_short(item: pytest.Item) -> bool:
        return not str(item.path.relative_to(folder)).startswith(LONG)

    items.sort(key=lambda item: item.path.is_relative_to(folder) and is_short(item))


# Tests in which pipes audit their first step, as they do for users. Other tests count the calls of
# layers, watch the memory or need the time.
AUDITED = tuple(
    f"tests/{name}"
    for name in (
        "exactness/",
        "models/",
        "features/",
        "hugging_face/",
        "integrations/",
        "runtime/audit/",
        "stage/test_loss_kinks.py",
        "gpu/test_audit_on_gpu.py",
        "test_docs.py",
        "test_public_surface.py",
    )
)


@pytest.fixture
def double() -> Generator[None]:
    """Make new tensors and layers float64, from one seed."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def audit_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the audit off by default, except in the tests above."""
    if not request.node.nodeid.startswith(AUDITED):
        from penstock import Pipe

        defaults = inspect.unwrap(Pipe.__init__).__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "audit", "off")


# Tests that see the machine's GPUs. The code blocks of the documentation must run on any machine.
SEE_GPUS = ("tests/gpu/", "tests/test_docs.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide all GPUs from the other tests, and from the processes that they start.

    Without `devices=`, a pipe takes GPUs where there are any. These tests mean CPU ranks. What they
    see is what PyTorch built for CUDA shows on a machine without a GPU.
    """
    import torch

    if item.nodeid.startswith(SEE_GPUS) or not torch.accelerator.is_available():
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        for module in (torch.accelerator, torch.cuda):
            patch.setattr(module, "is_available", lambda: False)
            patch.setattr(module, "device_count", lambda: 0)
        # Libraries that have imported `device_count` by name count no GPUs now, and PyTorch would
        # remember their answer.
        patch.setattr(torch.cuda, "_cached_device_count", 0)
        try:
            return (yield)
        finally:
            # PyTorch remembers that Triton does not work without a GPU.
            triton = sys.modules.get("torch.utils._triton")
            if triton is not None:
                triton.has_triton.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    """Set up PyTorch for thousands of small tests at the same time.

    All processes that tests start compute on one thread. The models are tiny, and threads that wait
    for their share of one keep the cores from other tests.

    Without an accelerator, `torch.manual_seed` is the seeding of the CPU generator. Otherwise torch
    queues each seed, with a stack trace, for every accelerator that might be initialized later, and
    never frees it. That takes half a millisecond per call, and the tests make thousands of calls.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's controller
    import torch

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


last_file: Path | None = None  # the one whose tests run in this process


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test of a file, exempt what others have left from garbage collection.

    The models of transformers are imported when they are first used, and compilers keep caches.
    After some of these tests each `gc.collect()` took a tenth of a second again, so that files with
    hundreds of calls took three to ten times as long as by themselves.
    """
    global last_file
    if item.path != last_file:
        last_file = item.path
        gc.collect()
        gc.freeze()
