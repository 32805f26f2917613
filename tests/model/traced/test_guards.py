"""Tests of state that a forward keeps in objects, and of objects that units share."""

from __future__ import annotations

from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import CutError, Pipe
from tests.model.traced.splitting import Four, assert_same, batches, made, piped


class Notes:
    """A plain object with state."""

    def __init__(self) -> None:
        self.last: Any = None
        self.all: list[Tensor] = []


class InAnObject(Four):
    """Keeps state in an object instead of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.notes, self.space = Notes(), SimpleNamespace(turns=0)

    def forward(self, x: Tensor) -> Any:
        self.notes.last, self.space.turns = x, 0
        self.notes.all.clear()
        for unit in (self.a, self.b, self.c, self.d):
            self.notes.last = torch.tanh(unit(self.notes.last))
            self.notes.all.append(self.notes.last)
            self.space.turns += 1
        return self.notes.last + sum(self.notes.all) / self.space.turns


class Block(nn.Module):
    """A layer that puts its result into an object that it holds."""

    def __init__(self, put: Any, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.put, self.held = put, held

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        more: Tensor | int = self.put(self.held, x)
        return x + more


def _append(held: Any, x: Tensor) -> Any:
    held.append(x)
    return 0


def _note(held: Any, x: Tensor) -> Any:
    held.all.append(x)
    return 0


def _read(held: Any, x: Tensor) -> Any:
    held["last"] = x + held.get("last", 0) if held.get("shape") == x.shape else x
    held["shape"] = x.shape
    return held["last"]


def _set(held: Any, x: Tensor) -> Any:
    held[0].notes = x if held[0].notes is None else held[0].notes + x
    return 0


class SharedList(nn.Module):
    """Blocks and their parent share one list."""

    def __init__(self, put: Any = _append) -> None:
        super().__init__()
        self.notes: Any = [] if put is _append else Notes()
        self.blocks = nn.ModuleList(Block(put, self.notes) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        notes = self.notes if isinstance(self.notes, list) else self.notes.all
        notes.clear()
        for block in self.blocks:
            x = block(x)
        return x + sum(notes)


class SharedObject(SharedList):
    """Blocks and their parent share one object."""

    def __init__(self) -> None:
        super().__init__(_note)


class AmongBlocks(nn.Module):
    """Blocks communicate through a dict."""

    def __init__(self) -> None:
        super().__init__()
        held: dict[str, Any] = {}
        self.first = nn.ModuleList(Block(_read, held) for _ in range(4))
        self.held = held

    def forward(self, x: Tensor) -> Any:
        self.held.clear()
        for block in self.first:
            x = block(x)
        return x


class OnTheParent(nn.Module):
    """Blocks set an attribute of their parent, which is optional there."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: Any = None
        self.blocks = nn.ModuleList(Block(_set, [self]) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        self.notes = None
        for block in self.blocks:
            x = block(x)
        found, self.notes = x if self.notes is None else x + self.notes, None
        return found


def cached(function: Any) -> Any:
    """Wrap a cached function as transformers does, so that a compiler does not see the cache."""
    remembering = lru_cache(maxsize=1)(function)

    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return remembering(*args)

    return wrapper


class Remembering(Four):
    """Caches positions by length."""

    @cached
    def positions(self, length: int) -> Tensor:
        return torch.linspace(0, 1, length, dtype=torch.float64)[:, None]

    @staticmethod
    @lru_cache(maxsize=1)
    def ramp(length: int) -> Tensor:
        return torch.linspace(1, 2, length, dtype=torch.float64)[:, None]

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        x = self.b(self.a(x) + self.positions(length))
        return self.d(self.c(x * self.ramp(length)) + self.positions(length))


class ByAClosure(Four):
    """Holds a recursive function that captures the module."""

    def __init__(self) -> None:
        super().__init__()

        def run(x: Tensor, turn: int = 0) -> Tensor:
            if turn == 4:
                return x
            unit = (self.a, self.b, self.c, self.d)[turn]
            return run(torch.tanh(unit(x)), turn + 1)

        self.run: Any = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class Helper:
    """A plain object that holds the units."""

    def __init__(self, *units: nn.Module) -> None:
        self.units = units

    def run(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x


class ByAHelper(Four):
    """Delegates its forward to a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self.a, self.b, self.c, self.d)

    def forward(self, x: Tensor) -> Any:
        return self.helper.run(x)


@pytest.mark.parametrize(
    "kind",
    [
        *(InAnObject, SharedList, SharedObject, AmongBlocks, OnTheParent, Remembering),
        *(ByAClosure, ByAHelper),
    ],
    ids=lambda kind: kind.__name__,
)
def test_state_in_objects_closures_and_caches(kind: type[nn.Module]) -> None:
    """Stages shared an object, or missed what units put into a list or attribute of a parent."""
    assert_same(kind)


class Whole(nn.Module):
    """A unit without submodules."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.eye(4)), held

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(x @ self.weight)
        return x @ self.weight


class SharedWhole(SharedList):
    """Shares a list with units that cannot be split further."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Whole(self.notes) for _ in range(4))


def test_indivisible_unit_that_fills_a_shared_list_is_refused() -> None:
    (x,) = batches(5)
    with pytest.raises(CutError, match=r"a tensor that unit 'blocks\.0' made but did not return"):
        piped(made(SharedWhole), x, stages=2)


class AsksForCapture(Four):
    """Leaves a check of its input out in a capture, as the masks of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing() and bool((x == 0).all()):
            x = x + 1
        for unit in (self.a, self.b, self.c, self.d):
            x = torch.tanh(unit(x))
        return x


def test_forward_that_asks_for_a_capture_takes_the_path_of_its_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (x,) = made(AsksForCapture), batches(2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    expected = model(x)
    pipe = Pipe(model, 1, stages=2, devices=["cpu"] * 2, example=x, runtime="inline")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(pipe(x), expected)
    assert torch.cuda.is_current_stream_capturing()
