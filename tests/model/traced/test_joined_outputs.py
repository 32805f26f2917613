"""Tests of outputs whose size alone does not tell on which dim their rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe
from penstock.errors import RunError
from tests.support import closely, each_door


class Hidden(nn.Module):
    """A model that returns a function of the outputs of all blocks."""

    def __init__(self, end: Callable[[list[Tensor]], Any], most_rows: int = 100) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.end, self.most_rows = end, most_rows

    def forward(self, x: Tensor) -> Any:
        assert len(x) <= self.most_rows
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return self.end(hidden)


ENDS: dict[str, Callable[[list[Tensor]], Any]] = {
    "as many layers as rows": lambda hidden: torch.stack(hidden[:2]),
    "twice as many layers as rows": torch.stack,
    "rows first": lambda hidden: torch.stack(hidden[:2], 1),
    "several rows for each row": lambda hidden: hidden[0].repeat_interleave(2, 0)[:, :2],
    "in a dict": lambda hidden: {"last": hidden[-1], "all": torch.stack(hidden)},
}


@each_door
@pytest.mark.parametrize("chunks", [4, 8])
@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_outputs_are_joined_on_the_dim_that_has_the_rows(
    end: Callable[[list[Tensor]], Any], chunks: int, door: str
) -> None:
    torch.manual_seed(0)
    model, x = Hidden(end).double(), torch.randn(8, 4, dtype=torch.float64)
    pipe = Pipe(model, chunks, stages=2, devices=["cpu"] * 2, example=x)
    if door == "step":
        result = pipe.step(x, loss_fn=lambda _: x.new_ones((), requires_grad=True), outputs=True)
        found = result.outputs
    else:
        found = pipe(x)
    expected = model(x)
    if isinstance(expected, Tensor):
        found, expected = {"": found}, {"": expected}
    for name, tensor in expected.items():
        assert closely(found[name].detach(), tensor.detach())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Hidden(lambda hidden: hidden[-1] @ hidden[-1].t()), r"has rows on the dims \[0, 1\]"),
        (Hidden(torch.stack, most_rows=2), "has the 2 rows of its micro-batch on dim 0 or on"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(model: nn.Module, message: str) -> None:
    x = torch.randn(8, 4)
    pipe = Pipe(model, 4, stages=2, devices=["cpu"] * 2, example=x[:2])
    with pytest.raises(RunError, match=message):
        pipe(x)
