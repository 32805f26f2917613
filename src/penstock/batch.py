"""A batch cut into micro-batches, and outputs put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ArgumentError


class NoChunk:
    """A tensor that every micro-batch gets whole: `pipe(x, NoChunk(mask))`."""

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise TypeError(f"NoChunk is for tensors, not {type(inp).__name__}: others stay whole")
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
        raise TypeError(f"a pipe needs a tensor among its inputs, and got {kinds}")
    wrong = sorted({str(t.device) for t in tensors if t.device != device})
    if wrong:
        raise ArgumentError(
            f"an input is on {', '.join(wrong)}, but the first stage is on {device}: "
            f"move it there, x.to('{device}')"
        )


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
    counts = {len(pieces) for pieces in cut if pieces is not None}
    if len(counts) > 1:
        rows = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise RuntimeError(
            f"the inputs give different numbers of micro-batches, {sorted(counts)}: their shapes "
            f"are {', '.join(map(str, rows))}, and each is cut on dim 0 into {chunks}; wrap what "
            "every micro-batch needs whole in NoChunk"
        )
    each = counts.pop() if counts else 1
    return [
        pytree.tree_unflatten(
            [_bare(leaf) if p is None else p[i] for leaf, p in zip(leaves, cut, strict=True)], spec
        )
        for i in range(each)
    ]


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


def rows_of(values: tuple[Any, ...]) -> list[int]:
    """The rows of each tensor that was cut, in order."""
    return [leaf.size(0) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


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
