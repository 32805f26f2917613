"""Random forwards of units and operations in any order, cut anywhere, equal the unsplit model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

from penstock import Pipe

WIDTH = 4
OPERATIONS = (
    *("unit", "unit", "unit", "add", "scale", "view", "mask", "gate", "again"),
    *("in place", "in place of a view", "cat", "noise", "attribute", "buffer"),
)
Instruction = tuple[str, int, int]


class Forward(nn.Module):
    """A model that runs a list of instructions on a growing list of values."""

    ramp: Tensor
    seen: Tensor
    last: Tensor

    def __init__(self, program: list[Instruction]) -> None:
        super().__init__()
        units = max(2, sum(kind == "unit" for kind, _, _ in program))
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(units))
        self.scales = nn.Parameter(torch.rand(3, WIDTH) + 0.5)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("ramp", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.program = program

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        values = [x]
        turns = iter(self.units)
        for kind, first, second in self.program:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(self._carried_out(kind, a, b, first, turns, factor))
        for unit in turns:
            values.append(torch.tanh(unit(values[-1])))
        total = values[-1] + sum(values[1::2])
        found: Tensor = self.head(total).square().mean(0).sum()
        return found

    def _carried_out(
        self, kind: str, a: Tensor, b: Tensor, which: int, turns: Any, factor: Tensor
    ) -> Tensor:
        if kind == "unit":
            return torch.tanh(next(turns)(a)) + a
        if kind == "again":
            return torch.tanh(self.units[0](a))
        if kind == "add":
            return a + b
        if kind == "scale":
            return a * self.scales[which % 3]
        if kind == "view":
            return a.view(len(a), 2, -1).transpose(1, 2).reshape(len(a), -1)
        if kind == "mask":
            return a * (self.ramp > 0.8) + self.ramp
        if kind == "gate":  # the host reads an input
            return a * 2 if bool((factor > 0).all()) else a + b
        if kind == "in place":
            made = a + 0
            made += b
            made[:, 0] = 0.25
            return made
        if kind == "in place of a view":
            made = a.clone()
            made[:, 1:].mul_(factor)
            return made
        if kind == "cat":
            return torch.cat([a[:, :2], b[:, 2:]], 1)
        if kind == "noise":
            return a + 0.0 * torch.rand_like(a)
        if kind == "attribute":
            self.last = a * 0.5
            return self.last + b
        assert kind == "buffer"
        return a / (1 + self.ramp.sum())


instructions = some.lists(
    some.tuples(some.sampled_from(OPERATIONS), some.integers(0, 7), some.integers(0, 7)),
    min_size=2,
    max_size=9,
)


@settings(max_examples=40, deadline=None)
@given(
    program=instructions,
    stages=some.integers(2, 4),
    chunks=some.integers(1, 4),
    rows=some.integers(1, 6),
    schedule=some.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    checkpoint=some.sampled_from(["never", "always", "except_last"]),
    runtime=some.sampled_from(["threads", "inline"]),
    units=some.sampled_from([None, nn.Linear]),
    seed=some.integers(0, 3),
)
def test_traced_random_forwards_equal_the_unsplit_model(
    program: list[Instruction],
    stages: int,
    chunks: int,
    rows: int,
    schedule: str,
    checkpoint: str,
    runtime: str,
    units: Any,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = Forward(program).double()
    unsplit = copy.deepcopy(model)
    calls = len(model.units) + 1 + sum(kind == "again" for kind, _, _ in program)
    example = torch.randn(4, WIDTH).double(), torch.randn(4, 1).double()
    pipe = Pipe(
        model,
        chunks,
        checkpoint,
        stages=min(stages, calls),
        example=example,
        schedule=schedule,
        runtime=runtime,
        units=units,
        balance="parameters",
    )
    for _ in range(2):
        x, factor = torch.randn(rows, WIDTH).double(), torch.randn(rows, 1).double()
        unsplit.zero_grad()
        pipe.zero_grad()
        total = 0.0
        for part, some_factor in zip(x.chunk(chunks), factor.chunk(chunks), strict=True):
            loss = unsplit(part, some_factor) * (len(part) / rows)
            loss.backward()
            total += loss.item()
        assert abs(pipe.step(x, factor).loss.item() - total) < 1e-10
        mine = dict(pipe.named_parameters())
        for name, parameter in unsplit.named_parameters():
            found, wanted = mine[name].grad, parameter.grad
            assert (found is None) == (wanted is None), name
            if wanted is not None and found is not None:
                assert (found - wanted).abs().max() < 1e-10, name
