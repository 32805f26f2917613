"""Tests that what a forward caches or collects belongs to its own micro-batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.traced.splitting import Four, assert_same, batches, made, piped


def mask(length: int, like: Tensor) -> Tensor:
    return torch.ones(length, 4, dtype=like.dtype).cumsum(0)


class Attribute(Four):
    """Keeps a mask in an attribute until another length comes."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.kept is None or len(self.kept) != x.shape[1]:
            self.kept = mask(x.shape[1], x)
        return self.d(self.c(self.b(self.a(x) + self.kept)) + self.kept)


class Dict(Four):
    """Keeps masks in a dict, by length."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        if length not in self.kept:
            self.kept[length] = mask(length, x)
        return self.d(self.c(self.b(self.a(x) + self.kept[length])) + self.kept[length])


class Cached(Four):
    """Keeps masks by a cached method."""

    @lru_cache(maxsize=8)  # noqa: B019 (a common way to write it)
    def mask(self, length: int) -> Tensor:
        return torch.ones(length, 4, dtype=torch.float64).cumsum(0)

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        return self.d(self.c(self.b(self.a(x) + self.mask(length))) + self.mask(length))


class Buffer(Four):
    """Keeps a table in a buffer that grows with the lengths."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if len(self.table) < x.shape[1]:
            self.table = mask(x.shape[1], x)
        table = self.table[: x.shape[1]]
        return self.d(self.c(self.b(self.a(x) + table)) + table)


class History(Four):
    """Appends to a list that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        self.seen += [x.shape, y]
        return self.d(self.c(y))


class ByHooks(Four):
    """Hooks fill a dict of the model, and the head reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self.a.register_forward_hook(lambda *args: self.keep("a", args[-1]))
        found = self.found

        def keep(_: nn.Module, args: Any, output: Tensor) -> None:
            found["b"] = output

        self.b.register_forward_hook(keep)
        self.c.register_forward_hook(self.after)

    def keep(self, name: str, value: Tensor) -> None:
        self.found[name] = value

    def after(self, _: nn.Module, args: Any, output: Tensor) -> None:
        self.keep("c", output)

    def forward(self, x: Tensor) -> Any:
        self.found.clear()
        y = self.c(self.b(self.a(x)))
        return self.d(y + self.found["a"] + self.found["b"] + self.found["c"])


@lru_cache(maxsize=8)
def remembered(length: int) -> Tensor:
    return torch.ones(length, 4, dtype=torch.float64).cumsum(0)


class Remembered(Four):
    """Keeps masks by a cached function of the module."""

    def forward(self, x: Tensor) -> Any:
        table = remembered(x.shape[1])
        return self.d(self.c(self.b(self.a(x) + table))) + remembered(x.shape[1])


class Unlearned(Four):
    """Runs a unit without gradients, where a stage may end."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        with torch.no_grad():
            z = self.b(y)
        return self.d(self.c(y) + z)


KINDS = [Attribute, Dict, Cached, History, ByHooks, Remembered, Unlearned]


@pytest.mark.parametrize("kind", [*KINDS, Buffer], ids=lambda kind: kind.__name__)
def test_cached_state_of_each_micro_batch_is_separate(kind: type[nn.Module]) -> None:
    assert_same(kind, buffers=kind is not Buffer)  # stages may keep other tables


@pytest.mark.parametrize("kind", [Dict, History, ByHooks], ids=lambda kind: kind.__name__)
def test_traced_runs_leave_no_state_in_the_model(kind: type[nn.Module]) -> None:
    model, given = made(kind), batches(5, 7)
    pipe = piped(model, given[0], 3, "threads")
    for batch in given:
        pipe.step(batch)
    left = {name: value for name, value in vars(model).items() if isinstance(value, dict | list)}
    assert not left.get("kept")
    assert not left.get("seen")
    assert not left.get("found")


# ---- side effects of a dry run ------------------------------------------------------------


class Norms(Four):
    """Has a batch counter in a unit, and an LSTM, whose attributes are lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.a(x).transpose(1, 2)).transpose(1, 2)
        return self.d(self.c(self.b(self.lstm(y)[0])))


class Caching(nn.Module):
    """A block that caches its mask by length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] not in self.kept:
            self.kept[x.shape[1]] = mask(x.shape[1], x)
        return self.linear(x + self.kept[x.shape[1]])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_dry_run_leaves_no_cache_in_a_block() -> None:
    assert_same(Blocks)


def test_dry_run_does_not_count_batches() -> None:
    model, given = made(Norms), batches(5, 7)
    pipe = piped(model, given[0], 3)
    norm = model.get_submodule("norm")
    assert norm.num_batches_tracked == 0
    pipe.step(given[1])
    assert norm.num_batches_tracked == 2
