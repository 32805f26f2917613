"""No patch of a PyTorch object remains after a call of the library."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._functorch import apis as functorch_apis
from torch.utils import checkpoint as torch_checkpoint

import penstock

OWNERS: tuple[tuple[Any, str], ...] = (
    (torch.autograd.Function, "apply"),
    (torch.jit.ScriptFunction, "__call__"),
    (functorch_apis, "vmap_impl"),
    (torch_checkpoint, "_checkpoint_without_reentrant_generator"),
    (torch_checkpoint, "checkpoint"),
    (torch, "vmap"),
    (torch.cuda, "is_current_stream_capturing"),
)


def own_objects() -> list[Any]:
    return [vars(owner).get(name) for owner, name in OWNERS]


ORIGINALS = own_objects()


class Net(nn.Module):
    saw_patches: ClassVar[SimpleQueue[bool]] = SimpleQueue()  # a shared list would be refused

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        self.saw_patches.put(own_objects() != ORIGINALS)
        if self.fails:
            raise ValueError("a bad batch")
        return torch.tanh(self.second(x))


def split() -> None:
    penstock.split(Net(), 2, torch.ones(4, 4))


def pipe(runtime: str = "inline") -> penstock.Pipe:
    return penstock.Pipe(
        Net(),
        chunks=2,
        stages=2,
        devices=["cpu", "cpu"],
        example=torch.ones(4, 4),
        loss_fn=nn.functional.mse_loss,
        runtime=runtime,
    )


def step(runtime: str) -> None:
    x = torch.ones(4, 4)
    pipe(runtime).step(x, target=x)


def forward_and_backward() -> None:
    pipe()(torch.ones(4, 4)).sum().backward()


def failing_trace() -> None:
    with pytest.raises(Exception, match="a bad batch"):
        penstock.split(Net(fails=True), 2, torch.ones(4, 4))


def failing_step() -> None:
    failing = pipe("threads")
    for module in failing.modules():
        if isinstance(module, Net):
            module.fails = True
    with pytest.raises(Exception):  # noqa: B017
        failing.step(torch.ones(5, 3), target=torch.ones(5, 3))


def check() -> None:
    penstock.check(Net(), torch.ones(4, 4), schedules=["1f1b"], stages=2, quiet=True)


@pytest.mark.parametrize(
    "call",
    [
        split,
        lambda: step("inline"),
        lambda: step("threads"),
        forward_and_backward,
        failing_trace,
        failing_step,
        check,
    ],
    ids=["split", "inline", "threads", "backward", "failing trace", "failing step", "check"],
)
def test_torch_is_not_patched_after_a_call(call: Callable[[], None]) -> None:
    before = Net.saw_patches.qsize()
    call()
    saw = [Net.saw_patches.get() for _ in range(Net.saw_patches.qsize())][before:]
    assert any(saw), "this call patched nothing, so the test proves nothing"
    assert own_objects() == ORIGINALS
