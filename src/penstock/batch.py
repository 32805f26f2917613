"""A batch cut into micro-batches, and outputs put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ArgumentError, KindError, RunError


class NoChunk:
    """A tensor that every micro-batch gets whole: `pipe(x, NoChunk(mask))`."""

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise KindError(f"NoChunk is for tensors, not {type(inp).__name__}: others stay whole")
        self._tensor = inp

    @property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._tensor


def check_inputs(inputs: Sequence[Any], device: torch.device) -> None:
    """There is a tensor, and all are where the first stage is."""
    tensors = [t for t in map(_bare, pytree.tree_leaves(list(inputs))) if isinstance(t, Tensor)]
    if not tensors:
        kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
        raise KindError(f"a pipe needs a tensor among its inputs, and got {kinds}")
    wrong = sorted({str(t.device) for t in tensors if t.device != device})
    if wrong:
        raise ArgumentError(
            f"an input is on {', '.join(wrong)}, but the first stage is on {device}: "
            f"move it there, x.to('{device}')"
        )


def moved(value: Any, device: torch.device) -> Any:
    """The same on the device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, NoChunk):
            return NoChunk(move(leaf.tensor))
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=device.type == "cuda")
        return leaf

    return pytree.tree_map(move, value)


def scatter(values: tuple[Any, ...], chunks: int) -> list[tuple[Any, ...]]:
    """The values of each micro-batch: tensors cut on dim 0, all else as it is.

    As many as `torch.chunk` makes: fewer than `chunks` if the rows do not suffice.

    >>> scatter((torch.arange(5), "same"), chunks=3)
    [(tensor([0, 1]), 'same'), (tensor([2, 3]), 'same'), (tensor([4]), 'same')]
    """
    if len(values) == 1 and isinstance(values[0], Tensor) and values[0].dim():
        return [(piece,) for piece in torch.chunk(values[0], chunks)]
    leaves, spec = pytree.tree_flatten(values)
    cut: list[Any] = [_cut(leaf, chunks) for leaf in leaves]
    each = _how_many(leaves, [pieces for pieces in cut if pieces is not None], chunks)
    return [
        pytree.tree_unflatten(
            [_bare(leaf) if p is None else p[i] for leaf, p in zip(leaves, cut, strict=True)], spec
        )
        for i in range(each)
    ]


def _how_many(leaves: Sequence[Any], cut: Sequence[Sequence[Tensor]], chunks: int) -> int:
    """Micro-batches, each of which has the same part of every tensor."""
    parts = {
        tuple(Fraction(piece.size(0), sum(map(len, pieces)) or 1) for piece in pieces)
        for pieces in cut
    }
    if len(parts) > 1:
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise RunError(
            "the inputs give different numbers of micro-batches, or different parts of them: "
            f"their shapes are {', '.join(map(str, shapes))}, and each is cut on dim 0 into at "
            f"most {chunks}; wrap what every micro-batch needs whole in NoChunk"
        )
    return len(parts.pop()) if parts else 1


def _bare(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _cut(leaf: Any, chunks: int) -> tuple[Tensor, ...] | None:
    if not isinstance(leaf, Tensor):
        return None
    if leaf.dim() == 0:
        raise ArgumentError(
            "a tensor without dimensions cannot be cut into micro-batches: wrap it in NoChunk"
        )
    return torch.chunk(leaf, chunks)


def shares(values: tuple[Any, ...], chunks: int) -> list[float]:
    """The part of the rows that each micro-batch has, by the first tensor that is cut.

    >>> shares((torch.zeros(5),), chunks=3)
    [0.4, 0.4, 0.2]
    """
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            rows = [piece.size(0) for piece in torch.chunk(leaf, chunks)]
            return [row / sum(rows) if sum(rows) else 1.0 for row in rows]
    return [1.0]


def gather(outputs: Sequence[Any]) -> Any:
    """One output from those of the micro-batches: tensors by rows, other values as a list.

    >>> gather([(torch.zeros(2), "a"), (torch.ones(1), "b")])
    (tensor([0., 0., 1.]), ['a', 'b'])
    """
    if all(isinstance(output, Tensor) for output in outputs):
        return _joined(tuple(outputs))
    flat = [pytree.tree_flatten(output) for output in outputs]
    if len({str(spec) for _, spec in flat}) > 1:
        return list(outputs)
    columns: Iterable[tuple[Any, ...]] = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined(column) for column in columns], flat[0][1])


def _joined(column: tuple[Any, ...]) -> Any:
    if all(isinstance(value, Tensor) and value.dim() for value in column):
        return torch.cat(column)
    return list(column)
