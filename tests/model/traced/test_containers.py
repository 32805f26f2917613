"""Tests that lists, dicts and dataclasses which units change have the right contents."""

from __future__ import annotations

from collections import UserDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.traced.splitting import Four, assert_same


class Filling(nn.Module):
    """A layer that puts its result into a container that it receives."""

    def __init__(self, put: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.put = put

    def forward(self, x: Tensor, box: Any) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.put(box, y)
        return x + y


class Boxed(nn.Module):
    """Four blocks that share one container."""

    def __init__(self, put: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Filling(put) for _ in range(4))

    def run(self, x: Tensor, box: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, box)
        return x


class Lists(Boxed):
    """A list that grows."""

    def __init__(self) -> None:
        super().__init__(lambda box, y: box.append(y))

    def forward(self, x: Tensor) -> Any:
        box: list[Tensor] = []
        x = self.run(x, box)
        assert len(box) == 4
        return x + sum(box)


class Queues(Boxed):
    """A deque that keeps only the last two results."""

    def __init__(self) -> None:
        super().__init__(lambda box, y: box.append(y))

    def forward(self, x: Tensor) -> Any:
        box: deque[Tensor] = deque(maxlen=2)
        x = self.run(x, box)
        return x + torch.stack([*box]).sum(0)


class Caches(nn.Module):
    """A model that caches keys for the later parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()

        def put(box: Any, y: Tensor) -> None:
            box["keys"] = torch.cat([box["keys"], y], 1) if "keys" in box else y

        self.layers = nn.ModuleList(Filling(put) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        boxes: list[Any] = [{} for _ in self.layers]
        for layer, box in zip(self.layers, boxes, strict=True):
            x = torch.cat([layer(part, box) for part in x.split(2, 1)], 1)
            assert box["keys"].shape == x.shape
        return x + sum(box["keys"] for box in boxes)


class Nested(Boxed):
    """A dict in a dict, of which the inner one stays the same object, and a counter."""

    def __init__(self) -> None:
        def put(box: Any, y: Tensor) -> None:
            box["inner"]["last"] = (y, y * 2)
            box["turns"] += 1

        super().__init__(put)

    def forward(self, x: Tensor) -> Any:
        inner: Any = UserDict()
        box = {"inner": inner, "turns": 0}
        x = self.run(x, box)
        assert box["turns"] == 4
        assert box["inner"] is inner
        return x * box["turns"] + inner["last"][1]


@dataclass
class Carried:
    """The record that goes from block to block."""

    x: Tensor
    turns: int = 0


class Changing(nn.Module):
    """A layer that changes the record that it receives, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, carried: Carried) -> None:
        carried.x = torch.tanh(self.linear(carried.x)) + carried.x
        carried.turns += 1


class Records(nn.Module):
    """A model whose units change a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Changing() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        carried = Carried(x)
        for block in self.blocks:
            block(carried)
        return carried.x * carried.turns


@pytest.mark.parametrize(
    "kind", [Lists, Queues, Caches, Nested, Records], ids=lambda kind: kind.__name__
)
def test_containers_changed_by_units(kind: type[nn.Module]) -> None:
    """Units received copies, so their changes were lost and the results were wrong."""
    assert_same(kind)


class Compared(Four):
    """Compares a local tensor with one of another stage, in both orders."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.c(self.b(y))
        more, less = (x < y).to(x.dtype), (y >= x * 2).to(x.dtype)
        return self.d(z + more + 2 * less)


def test_comparison_of_a_local_and_a_remote_tensor() -> None:
    """Python evaluates `a < b` as `b > a` if the class of b is derived from that of a.

    This was taken for another operation than the traced one.
    """
    assert_same(Compared)
