"""Tests of state that a model writes and its blocks read, besides what they are called with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import CutError, Pipe
from tests.model.traced.splitting import assert_same, batches, piped
from tests.models.architecture import squares

SHARED: dict[str, Any] = {}


class Block(nn.Module):
    """A layer that scales its output by something that it reads from a shared object."""

    def __init__(self, read: Callable[[Any], Any], held: Any) -> None:
        super().__init__()
        self.linear, self.read, self.held = nn.Linear(4, 4), read, held

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(torch.tanh(self.linear(x)), self.read(self.held))


class Whole(Block):
    """The same, with a parameter in place of a submodule."""

    def __init__(self, read: Callable[[Any], Any], held: Any) -> None:
        nn.Module.__init__(self)
        self.weight, self.read, self.held = nn.Parameter(torch.eye(4)), read, held

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x @ self.weight, self.read(self.held))


class Sharing(nn.Module):
    """A model that writes a tensor into an object that its blocks hold."""

    def __init__(self, held: Any, write: Any, read: Any, block: type[Block] = Block) -> None:
        super().__init__()
        self.scale: Any = 1.0
        self.held = [self] if held is None else held
        self.first, self.write = nn.Linear(4, 4), write
        self.blocks = nn.ModuleList(block(read, self.held) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.write(self, x.mean(-1, keepdim=True))
        for block in self.blocks:
            x = block(x)
        return x


class Bag(dict[str, Any]):
    """A class that Penstock does not copy."""


def _set_on_blocks(model: Sharing, value: Tensor) -> None:
    for block in model.blocks:
        block.held = value


def _read_global(_: Any) -> Any:
    return SHARED["scale"]


WAYS: dict[str, tuple[Any, Any, Any]] = {
    "dict": ({}, lambda m, v: m.held.update(scale=v), lambda held: held["scale"]),
    "nested dict": (
        {"inner": {}},
        lambda m, v: m.held["inner"].update(scale=v),
        lambda held: held["inner"]["scale"],
    ),
    "namespace": (
        SimpleNamespace(scale=1.0),
        lambda m, v: setattr(m.held, "scale", v),
        lambda held: held.scale,
    ),
    "number": ({"scale": 1}, lambda m, v: m.held.update(scale=v.shape[1]), lambda h: h["scale"]),
    "back reference": (
        None,
        lambda m, v: setattr(m, "scale", v),
        lambda held: held[0].scale,
    ),
    "attribute of the blocks": (1.0, _set_on_blocks, lambda held: held),
}


@pytest.mark.parametrize("way", WAYS)
def test_blocks_read_what_the_model_wrote_for_their_microbatch(way: str) -> None:
    """Each stage wrote into its own copy, which the blocks did not have."""
    held, write, read = WAYS[way]
    torch.manual_seed(0)
    model = Sharing(held, write, read).double()
    unsplit = copy.deepcopy(model)
    given = batches(5, 7)
    pipe = piped(model, given[0], 3, "threads")
    for x in given:
        expected = squares(unsplit(x))
        expected.backward()
        assert torch.allclose(pipe.step(x).loss, expected, rtol=1e-10)
    for mine, theirs in zip(pipe.parameters(), unsplit.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10)


def test_indivisible_unit_that_reads_a_shared_object_is_refused() -> None:
    held, write, read = WAYS["dict"]
    (x,) = batches(5)
    with pytest.raises(CutError, match=r"unit 'blocks\.0' shares an object with the forward"):
        piped(Sharing(held, write, read, Whole).double(), x, 2)


class SharingGlobal(Sharing):
    """Writes into a global variable."""

    def forward(self, x: Tensor) -> Tensor:
        SHARED["scale"] = float(x.mean())
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Sharing(Bag(), *WAYS["dict"][1:]), r"self\.held \(Sharing\)"),
        (SharingGlobal({}, lambda m, v: None, _read_global), "SHARED"),
    ],
    ids=["class of its own", "global variable"],
)
def test_state_that_all_stages_would_overwrite_is_refused(model: nn.Module, name: str) -> None:
    (x,) = batches(5)
    with pytest.raises(CutError, match=f"the forward changes {name}, which all stages share"):
        piped(model.double(), x, 2)


# ---- what one layer leaves for another -----------------------------------------------------------


class Leaving(nn.Module):
    """A layer that leaves its result in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.linear(x)
        return torch.tanh(self.left)


class LeavingWhole(Leaving):
    """The same, with a parameter in place of a submodule."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight, self.left = nn.Parameter(torch.eye(4)), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.left = x @ self.weight
        return torch.tanh(self.left)


class Finding(nn.Module):
    """A layer that adds what another one has left."""

    def __init__(self, held: Any, find: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.held, self.find = nn.Linear(4, 4), held, find

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.linear(x), self.find(self.held))


class Passing(nn.Module):
    """A model whose last layer finds what the first has left."""

    def __init__(self, first: type[Leaving] = Leaving) -> None:
        super().__init__()
        self.first, self.middle = first(), nn.Linear(4, 4)
        self.last = Finding([self.first], lambda held: held[0].left)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


def test_layer_that_reads_what_an_earlier_one_left() -> None:
    torch.manual_seed(0)
    model = Passing().double()
    unsplit = copy.deepcopy(model)
    (x,) = batches(5)
    pipe = piped(model, x, 3, "threads")
    expected = squares(unsplit(x))
    assert torch.allclose(pipe.step(x).loss, expected, rtol=1e-10)
    with torch.no_grad():
        assert torch.allclose(pipe(x), unsplit(x), rtol=1e-10)


def test_indivisible_layer_that_leaves_a_tensor_for_another_is_refused() -> None:
    (x,) = batches(5)
    with pytest.raises(CutError, match="a tensor that unit 'first' made but did not return"):
        piped(Passing(LeavingWhole).double(), x, 2)


# ---- buffers that the forward asks and writes ----------------------------------------------------


class Counting(nn.Module):
    """A model that does something else in its first calls, which it counts in a buffer."""

    count: Tensor

    def __init__(self, in_unit: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(5), nn.Linear(4, 4)])
        self.in_unit = in_unit

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self.layers[1]
        is_first = bool((norm.num_batches_tracked if self.in_unit else self.count) == 0)
        self.count += 1
        for layer in self.layers:
            x = layer(x)
        return x * 2 if is_first else x


@pytest.mark.parametrize("in_unit", [False, True], ids=["around the units", "in a unit"])
def test_buffer_that_decides_the_path_and_is_written(in_unit: bool) -> None:
    """The paths of all micro-batches were found before the first one had written the buffer."""
    torch.manual_seed(0)
    model, (x,) = Counting(in_unit).double(), batches(5)
    unsplit = copy.deepcopy(model)
    one = Pipe(
        copy.deepcopy(model), 1, stages=3, devices=["cpu"] * 3, example=x, balance="parameters"
    )
    for _ in range(2):
        assert torch.allclose(one.step(x, loss_fn=squares).loss, squares(unsplit(x)), rtol=1e-10)
    two = piped(model, x, 3)
    name = r"layers\.1\.num_batches_tracked" if in_unit else "count"
    with pytest.raises(CutError, match=f"the path of the forward depends on '{name}', and the"):
        two.step(x)


# ---- what one call leaves for the next -----------------------------------------------------------


class Carrying(nn.Module):
    """A model that keeps something from one call to the next."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.kind, self.calls = kind, 0
        self.left: Tensor | None = None
        self.settings = SimpleNamespace(factor=0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.kind == "counter":
            self.calls += 1
            x = x / self.calls
        if self.kind == "recurrent":
            x = x if self.left is None else x + self.left
        if self.kind == "object":
            x = x * self.settings.factor
            self.settings.factor = 1.0 + x.shape[0]
        if self.kind == "cache" and self.calls != x.shape[-1]:
            self.calls = x.shape[-1]
            self.mask = torch.arange(self.calls)
        self.left = x.detach()
        return x * self.mask if self.kind == "cache" else x


@pytest.mark.parametrize(
    ("kind", "name"),
    [("counter", "calls, left"), ("recurrent", "left"), ("object", "left, settings")],
)
def test_forward_that_depends_on_its_earlier_call_is_refused(kind: str, name: str) -> None:
    """The state was set back after each micro-batch, and later calls found the first one."""
    (x,) = batches(5)
    with pytest.raises(CutError, match=f"the forward changes {name} .* and depends on what"):
        piped(Carrying(kind).double(), x, 2)


@pytest.mark.filterwarnings("ignore:the forward changes calls")
@pytest.mark.parametrize("kind", ["none", "cache"])
def test_forward_may_leave_what_no_later_call_depends_on(kind: str) -> None:
    model, (x,) = Carrying(kind).double(), batches(5)
    pipe = piped(model, x, 3)
    with torch.no_grad():
        assert torch.allclose(pipe(x), model(x), rtol=1e-10)


class Counter(nn.Linear):
    """A layer that scales by the number of its calls, or that has a cache."""

    def __init__(self, counts: bool) -> None:
        super().__init__(4, 4)
        self.counts, self.calls, self.length = counts, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts
        self.length = max(self.length, len(x))
        return super().forward(x) / (1 + self.calls)


class CalledTwice(nn.Module):
    """A model that calls one unit at its beginning and at its end."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counter(counts), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](torch.tanh(self.layers[1](self.layers[0](x))))
        return y


def test_unit_that_counts_its_calls_on_two_stages_is_refused() -> None:
    """The copy of the second stage started each step from what the first one had counted."""
    (x,) = batches(5)
    with pytest.raises(CutError, match=r"unit 'layers.0' changes calls in each .* on stages 0, 1"):
        piped(CalledTwice(True).double(), x, 2)
    assert_same(lambda: CalledTwice(False), cuts=((2, "inline"), (3, "threads")))
