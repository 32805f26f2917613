from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, is_checkpointing, is_recomputing
from penstock.stage.recompute import mark_checkpointing, mark_recomputing
from tests.support import each_door, each_runtime


class Asks(nn.Module):
    """Notes what it is told, for each micro-batch: the number in its first row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.heard: list[tuple[int, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.heard.append((int(x[0]), is_checkpointing(), is_recomputing()))
        return x * self.weight


FORWARD, WATCHED, AGAIN = (False, False), (True, False), (False, True)


@each_runtime
@each_door
@pytest.mark.parametrize(
    ("checkpoint", "chunks", "expected"),
    [
        ("never", 2, [(0, *FORWARD), (1, *FORWARD)]),
        ("except_last", 2, [(0, *WATCHED), (1, *FORWARD), (0, *AGAIN)]),
        ("always", 2, [(0, *WATCHED), (1, *WATCHED), (1, *AGAIN), (0, *AGAIN)]),
        ("except_last", 1, [(0, *FORWARD)]),
        ("always", 1, [(0, *WATCHED), (0, *AGAIN)]),
    ],
)
def test_layers_are_told(
    checkpoint: str,
    chunks: int,
    expected: list[tuple[int, bool, bool]],
    door: str,
    runtime: str,
) -> None:
    layers = nn.Sequential(Asks(), Asks())
    pipe = Pipe(layers, chunks, checkpoint, stages=2, runtime=runtime, loss_fn=torch.sum)
    x = torch.arange(float(chunks))
    pipe.step(x) if door == "step" else pipe(x).sum().backward()
    assert [layer.heard for layer in pipe] == [expected, expected]
    assert not is_checkpointing()
    assert not is_recomputing()


@each_runtime
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_nothing_is_recomputed_where_nothing_is_learned(mode: str, runtime: str) -> None:
    pipe = Pipe(nn.Sequential(Asks()), 2, "always", runtime=runtime)
    x = torch.arange(2.0)
    if mode == "eval":
        pipe.eval()
        pipe(x).sum().backward()
    else:
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            pipe(x)
    assert pipe[0].heard == [(0, *FORWARD), (1, *FORWARD)]


def test_outside_a_pipe_nobody_is_told() -> None:
    layer = Asks()
    layer(torch.zeros(1))
    assert layer.heard == [(0, *FORWARD)]


def test_what_is_told_ends_with_the_forward_also_if_that_fails() -> None:
    for mode, told in ((mark_checkpointing, is_checkpointing), (mark_recomputing, is_recomputing)):
        with suppress(ZeroDivisionError), mode():
            assert told()
            raise ZeroDivisionError
        assert not told()
