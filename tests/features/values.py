"""Rows of the table about values: what stages send to each other, and what a pipe is given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock import Chunk, NoChunk, PipeSequential, pop, skippable, stash
from tests.features.common import SIZE, blocks, made_of
from tests.features.table import given
from tests.oracle import Batch
from tests.support import Do, Pop, Stash

# ---- values between stages ----------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def uncoalesced() -> Tensor:
    """Return an uncoalesced sparse tensor: one entry is stored in two parts."""
    at = torch.tensor([[*range(SIZE), SIZE - 1]])
    ones = torch.ones(SIZE + 1, dtype=torch.float64)
    return torch.sparse_coo_tensor(at, ones, (SIZE,), check_invariants=True)


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


BOUNDARIES: dict[str, list[Callable[..., Any]]] = {
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
        lambda x: (x[:, :1].expand(-1, SIZE), x.mean(1, keepdim=True).expand_as(x)),
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
        lambda x: (x, torch.eye(SIZE, dtype=x.dtype).to_sparse(), x.t().to_sparse(), uncoalesced()),
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


def crossing(name: str) -> nn.Sequential:
    """Return linear layers, with functions between them that pass these values on."""
    torch.manual_seed(0)
    return made_of(nn.Linear(SIZE, SIZE), *map(Do, BOUNDARIES[name]), nn.Linear(SIZE, SIZE))


class Table(nn.Module):
    """A layer that passes its parameter and its buffer on, along with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, SIZE))
        self.register_buffer("shift", torch.linspace(0, 1, SIZE))

    def forward(self, x: Tensor) -> Any:
        return x, self.weight, self.shift


def passing_parameters() -> nn.Sequential:
    torch.manual_seed(0)
    joined = Do(lambda x, weight, shift: x * weight + shift)
    linear = [nn.Linear(SIZE, SIZE) for _ in range(2)]
    return PipeSequential(linear[0], Table(), joined, linear[1]).double()


def sum_of_all(output: Tensor, target: Any = None) -> Tensor:
    return output.sum()


# ---- inputs -------------------------------------------------------------------------------

STRIDES: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(SIZE, 7, dtype=torch.float64).t(),
    "sliced": lambda: torch.randn(14, 2 * SIZE, dtype=torch.float64)[::2, ::2],
    "expanded": lambda: torch.randn(1, SIZE, dtype=torch.float64).expand(7, SIZE),
    "expanded columns": lambda: torch.randn(7, 1, dtype=torch.float64).expand(7, SIZE),
}


def strided(name: str, learns: bool) -> Batch:
    """Return a batch whose input has other strides."""
    torch.manual_seed(1)
    return Batch((STRIDES[name]().requires_grad_(learns),), {}, given(7).target)


def begin(given: dict[str, Any], flag: bool, none: None) -> Tensor:
    assert flag is True
    assert none is None
    by: Tensor = given["parts"][0] * given["parts"][1].to(torch.float64) * given["times"]
    total: Tensor = by * given["on"] + given["whole"] + given["columns"].t()
    return total


def begun() -> nn.Sequential:
    return made_of(Do(begin), *list(blocks())[1:])


def tree() -> Batch:
    """Return inputs with None, numbers and several kinds of tensors, some with gradients."""
    torch.manual_seed(1)
    x, whole, columns = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((7, SIZE), (), (SIZE, 7))
    )
    values = {
        "parts": [x, torch.arange(7)[:, None]],
        "on": torch.rand(7, SIZE) > 0.5,
        "whole": whole,
        "columns": Chunk(columns, dim=1),
        "times": 2,
    }
    return Batch((values, True, None), {}, given(7).target)


class Scaled(nn.Linear):
    def forward(self, scale: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def scaled_first() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Scaled(SIZE, SIZE), *list(blocks())[1:])


def with_scale(*shape: int) -> Batch:
    """Return a first input that every micro-batch gets as a whole: it does not give the rows."""
    batch = given(7)
    scale = torch.full(shape, 2.0, dtype=torch.float64)
    return Batch((NoChunk(scale), *batch.inputs), {}, batch.target)


# ---- skip connections ---------------------------------------------------------------------


@skippable(stash=["far"])
class StashOf(nn.Module):
    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", self.value(x))
        return x


@skippable(pop=["far"])
class PopOf(nn.Module):
    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        return self.use(x, (yield pop("far")))


SKIPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "integers": (lambda x: (x > 0).long(), lambda x, far: x * far),
    "booleans": (lambda x: x > 0, lambda x, far: x * far),
    "without a gradient": (lambda x: x.detach() + 1, lambda x, far: x * far),
    "not used": (lambda x: x * 2, lambda x, far: x),
    "none": (lambda x: None, lambda x, far: x),
}


def skipping(name: str) -> nn.Sequential:
    first, second, third, last = blocks()
    value, use = SKIPS[name]
    return made_of(
        nn.Sequential(first, StashOf(value)), second, third, nn.Sequential(PopOf(use), last)
    )


def nested_skips() -> nn.Sequential:
    first, second, third, last = blocks()
    pops = nn.Sequential(second, nn.Sequential(Pop()))
    return made_of(nn.Sequential(first, nn.Sequential(Stash())), third, pops, last)


@skippable(stash=["far"])
class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Generator[Any, Any, Any]:
        yield stash("far", a * b)
        return {"sum": a + b, "both": [a, b], "scale": scale}


class ByKeyword(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.inner(a, b=b, scale=2.0)


@skippable(pop=["far"])
class Join(nn.Module):
    def forward(self, found: dict[str, Any]) -> Generator[Any, Any, Any]:
        far = yield pop("far")
        a, b = found["both"]
        return found["sum"] * found["scale"] + far + a - b


def several_inputs() -> nn.Sequential:
    return made_of(ByKeyword(Two()), nn.Identity(), Join(), blocks()[3])


def two_inputs() -> Batch:
    batch, other = given(5), given(5, seed=2)
    return Batch((*batch.inputs, *other.inputs), {}, batch.target)


# ---- tensors that a layer may not change in place ------------------------------------------


def add_one(x: Tensor) -> Tensor:
    return x.add_(1)


class Both(nn.Linear):
    """A layer that returns its input beside its result."""

    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x)


class Queries(nn.Module):
    """A layer that returns its parameter, or its buffer."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        table = torch.zeros(2, SIZE)
        if learns:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.table


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    made = x * 1
    return made, made.view(-1, 2, 3)


CHANGES: dict[str, Callable[[], list[nn.Module]]] = {
    "two views": lambda: [
        Do(two_views),
        Do(lambda pair: add_one(pair[0]) + pair[1].view(-1, SIZE)),
    ],
    "an input passed on": lambda: [nn.Identity(), Do(add_one)],
    "an input beside a result": lambda: [
        Both(SIZE, SIZE),
        Do(lambda pair: add_one(pair[0]) + pair[1]),
    ],
    "a skip": lambda: [StashOf(lambda x: x), PopOf(lambda x, far: x + add_one(far))],
    "a buffer": lambda: [Queries(False), Do(add_one)],
    "a parameter": lambda: [Queries(True), Do(add_one)],
}


def changing(name: str) -> nn.Sequential:
    """Return a model whose second stage changes in place what others still read."""
    torch.manual_seed(0)
    return made_of(*CHANGES[name](), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))


# ---- models that are not a Sequential ------------------------------------------------------


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return once * 2


class Residual(nn.Module):
    """A list of blocks with a skip from the first to the last, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks())
        self.scale = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = x = x * self.scale
        for block in self.blocks:
            x = block(x)
        x = x + first * self.scale
        return {"loss": x.square().mean(), "x": x}
