"""Any value may cross from one stage to the next; the unsplit model is the oracle."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock import Chunk, Pipe, PipeSequential
from tests.pairs import each_pair
from tests.support import (
    CHECKPOINTS,
    DOORS,
    RUNTIMES,
    Do,
    closely,
    each_checkpoint,
    each_door,
    each_runtime,
)


class Pair(NamedTuple):
    left: Any
    right: Any


class Table(nn.Module):
    """A layer that passes its parameter and its buffer on, along with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.register_buffer("shift", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Any:
        return x, self.weight, self.shift


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def uncoalesced() -> Tensor:
    """Return an uncoalesced sparse tensor: one entry is stored in two parts."""
    ones = torch.ones(5, dtype=torch.float64)
    at = torch.tensor([[0, 1, 2, 3, 3]])
    return torch.sparse_coo_tensor(at, ones, (4,), check_invariants=True)


def mixed(x: Tensor) -> dict[str, Any]:
    return {
        "double": x,
        "single": x.float(),
        "half": x.to(torch.bfloat16),
        "int": (x * 3).long(),
        "byte": x.abs().to(torch.uint8),
        "bool": x > 0,
        "complex": torch.complex(x, -x),
    }


def unmixed(given: dict[str, Any]) -> Tensor:
    wholes = given["int"] + given["byte"] + given["bool"]
    reals = given["single"].double() + given["half"].double() + given["complex"].abs()
    total: Tensor = given["double"] * wholes + reals
    return total


CASES: dict[str, list[Callable[..., Any]]] = {
    "nothing": [lambda x: (x, None), lambda pair: pair[0] if pair[1] is None else None],
    "plain values": [
        lambda x: {"x": x, "times": 3, "really": True, "by": 0.5, "name": "n", "none": [None]},
        lambda d: d["x"] * d["times"] * d["by"] if d["really"] and d["name"] == "n" else None,
    ],
    "dtypes": [mixed, unmixed],
    "trees": [
        lambda x: [Pair(x, (x * 2, [])), OrderedDict(b=x.sin(), a={}), ((), [x.cos()])],
        lambda v: v[0].left * v[0].right[0] + v[1]["b"] * v[2][1][0],
    ],
    "not contiguous": [
        lambda x: (x.t().contiguous().t(), x[:, ::2], x.unsqueeze(2).transpose(1, 2)),
        lambda v: v[0] + v[1].repeat(1, 2) * v[2].squeeze(1),
    ],
    "expanded": [
        lambda x: (x[:, :1].expand(-1, 4), x.mean(1, keepdim=True).expand_as(x)),
        lambda v: v[0] * v[1],
    ],
    "without gradient": [
        lambda x: (x, x.detach() * 2, torch.ones_like(x)),
        lambda v: v[0] * v[1] + v[2],
    ],
    "only without gradient": [lambda x: x.detach(), lambda x: x * 2],
    "unused": [lambda x: (x, x.exp(), x.sin()), lambda v: v[0] + v[2].detach()],
    "unused for a while": [
        lambda x: (x, x.exp()),
        lambda v: (v[0] * 2, v[1]),
        lambda v: v[0] + v[1],
    ],
    "sparse": [
        lambda x: (x, torch.eye(4, dtype=x.dtype).to_sparse(), x.t().to_sparse(), uncoalesced()),
        lambda v: torch.sparse.mm(v[1], v[0].t()).t() + v[2].to_dense().t() * v[3].to_dense(),
    ],
    "the same twice": [lambda x: [x * 2] * 2, lambda v: v[0] * v[1]],
    "a view and its base": [
        lambda x: (x, x * 2),
        lambda v: (v[1], v[1][:, :2]),
        lambda v: v[0] * v[1][:, :1],
    ],
    "the input itself": [lambda x: x, lambda x: (x, x), lambda v: v[0] * v[1]],
    "no rows, no dims": [
        lambda x: (x, x[:0], x.new_tensor(2.0)),
        lambda v: v[0] * v[2] + v[1].sum(),
    ],
    "sizes": [lambda x: (x, x.shape, x.dtype), lambda v: v[0].reshape(v[1]).to(v[2])],
}


def layers(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [linear(), *map(Do, CASES[name]), linear()]


def trained(
    model: nn.Module, x: Tensor, door: str
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    x = x.detach().clone().requires_grad_(x.requires_grad)
    if door == "step" and isinstance(model, Pipe):
        loss = model.step(x, loss_fn=torch.sum).loss
    else:
        loss = model(x).sum()
        loss.backward()
    return loss.detach(), x.grad, [p.grad for p in model.parameters()]


def same(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return closely(mine, theirs)


def compare(pipe: Pipe, model: nn.Module, x: Tensor, door: str) -> None:
    for _ in range(2):  # the second step relies on what was recorded in the first
        pipe.zero_grad()
        model.zero_grad()
        loss, gradient, gradients = trained(pipe, x, door)
        expected, wanted, all_wanted = trained(model, x, "call")
        assert closely(loss, expected)
        assert same(gradient, wanted)
        assert all(map(same, gradients, all_wanted))


def options(door: str) -> dict[str, Any]:
    return {"schedule": "1f1b", "reduction": "sum"} if door == "step" else {}


@each_pair(door=DOORS, runtime=RUNTIMES, checkpoint=CHECKPOINTS, name=CASES)
def test_any_value_crosses_a_stage_boundary(
    name: str, checkpoint: str, runtime: str, door: str
) -> None:
    model = nn.Sequential(*layers(name)).double()
    pipe = Pipe(
        copy.deepcopy(model),
        3,
        checkpoint,
        stages=len(model),
        devices=["cpu"] * len(model),
        runtime=runtime,
        **options(door),
    )
    for learns in (False, True):
        x = torch.randn(7, 4, dtype=torch.float64, requires_grad=learns)
        compare(pipe, model, x, door)


@each_door
@each_checkpoint
def test_parameters_and_buffers_cross_a_stage_boundary(checkpoint: str, door: str) -> None:
    torch.manual_seed(0)
    joined = Do(lambda x, weight, shift: x * weight + shift)
    model = PipeSequential(linear(), Table(), joined, linear()).double()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4, **options(door))
    compare(pipe, model, torch.randn(7, 4, dtype=torch.float64), door)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(4, 7, dtype=torch.float64).t(),
    "sliced": lambda: torch.randn(14, 8, dtype=torch.float64)[::2, ::2],
    "expanded": lambda: torch.randn(1, 4, dtype=torch.float64).expand(7, 4),
    "expanded columns": lambda: torch.randn(7, 1, dtype=torch.float64).expand(7, 4),
}


@each_door
@each_checkpoint
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_pipe_inputs_with_any_strides(name: str, learns: bool, checkpoint: str, door: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=3, **options(door))
    found = []
    for each in (pipe, model):
        torch.manual_seed(1)
        x = INPUTS[name]().requires_grad_(learns)
        if each is pipe and door == "step":
            loss = pipe.step(x, loss_fn=torch.sum).loss
        else:
            loss = each(x).sum()
            loss.backward()
        found.append((loss.detach(), x.grad))
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


@each_door
@each_runtime
@each_checkpoint
def test_pipe_inputs_in_a_tree_of_mixed_values(checkpoint: str, runtime: str, door: str) -> None:
    """The tree has None, numbers and several kinds of tensors, some of which require gradients."""

    def begin(given: dict[str, Any], flag: bool, none: None) -> Tensor:
        assert flag is True
        assert none is None
        by: Tensor = given["parts"][0] * given["parts"][1].to(torch.float64) * given["times"]
        total: Tensor = by * given["on"] + given["whole"] + given["columns"].t()
        return total

    torch.manual_seed(0)
    model = nn.Sequential(Do(begin), linear(), linear()).double()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=3, runtime=runtime, **options(door))
    found = []
    for each in (pipe, model):
        torch.manual_seed(1)
        x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        whole = torch.randn((), dtype=torch.float64, requires_grad=True)
        columns = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
        given = {
            "parts": [x, torch.arange(7)[:, None]],
            "on": torch.rand(7, 4) > 0.5,
            "whole": whole,
            "columns": Chunk(columns, dim=1) if each is pipe else columns,
            "times": 2,
        }
        if each is pipe and door == "step":
            loss = pipe.step(given, True, None, loss_fn=torch.sum).loss
        else:
            loss = each(given, True, None).sum() if each is pipe else _chain(model, given).sum()
            loss.backward()
        learned = [p.grad for p in each.parameters()]
        found.append([loss.detach(), x.grad, whole.grad, columns.grad, *learned])
    assert all(map(same, *found))


def _chain(model: nn.Sequential, given: dict[str, Any]) -> Tensor:
    first, *rest = model
    y: Tensor = first(given, True, None)
    for layer in rest:
        y = layer(y)
    return y
