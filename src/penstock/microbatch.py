"""A batch cut into micro-batches, and outputs put together again.

The first tensor says how many rows the batch has. Another is cut only where it has as many: what
could be meant in two ways is refused, with the two ways to say it, `NoChunk` and `Chunk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ArgumentError, BatchShapeError, PenstockTypeError, RunError
from penstock.torch_compat import pytree


class NoChunk:
    """A tensor that every micro-batch gets whole: `pipe(x, NoChunk(mask))`."""

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise PenstockTypeError(
                f"NoChunk is for tensors, not {type(inp).__name__}: others stay whole"
            )
        self._tensor = inp

    @property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._tensor


class Chunk:
    """A tensor whose rows are on the dim that is named: `pipe(x, Chunk(mask, dim=1))`.

    It has as many as the batch there, or as many times more or fewer in every micro-batch.
    """

    def __init__(self, inp: Tensor, dim: int) -> None:
        if not isinstance(inp, Tensor):
            raise PenstockTypeError(
                f"Chunk is for tensors, not {type(inp).__name__}: others stay whole"
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise PenstockTypeError(f"dim is a whole number, not {dim!r}")
        if not -inp.dim() <= dim < inp.dim():
            raise ArgumentError(
                f"a tensor of shape {tuple(inp.shape)} has no dim {dim} to be cut on: it has "
                f"{inp.dim()}, counted from 0"
            )
        self._tensor, self._dim = inp, dim % inp.dim()

    @property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._tensor

    @property
    def dim(self) -> int:
        """Where its rows are, counted from 0."""
        return self._dim


# ---- what a pipe takes --------------------------------------------------------------------


def check_inputs(inputs: Sequence[Any], side: Iterable[Any], device: torch.device | None) -> None:
    """There is a tensor, and those that are not side inputs are where the first stage is.

    Without a device, it is in another process.
    """
    if len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].device == device:
        return
    tensors = _list_tensors(list(inputs))
    if not tensors and not _list_tensors(list(side)):
        kinds = ", ".join(type(value).__name__ for value in (*inputs, *side)) or "nothing"
        raise PenstockTypeError(f"a pipe needs a tensor among its inputs, and got {kinds}")
    wrong = sorted({str(t.device) for t in tensors if t.device != device})
    if wrong and device is not None:
        raise ArgumentError(
            f"an input is on {', '.join(wrong)}, but the first stage is on {device}: "
            f"move it there, x.to('{device}')"
        )


def move_to_device(value: Any, device: torch.device | None) -> Any:
    """The same on the device; without one, as it is."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, NoChunk):
            return NoChunk(move(leaf.tensor))
        if isinstance(leaf, Chunk):
            return Chunk(move(leaf.tensor), leaf.dim)
        if isinstance(leaf, Tensor) and device is not None:
            return leaf.to(device, non_blocking=device.type == "cuda")
        return leaf

    return pytree.tree_map(move, value)


def _list_tensors(values: Any) -> list[Tensor]:
    return [t for t in map(_unwrap_chunk, pytree.tree_leaves(values)) if isinstance(t, Tensor)]


def _unwrap_chunk(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk | Chunk) else leaf


# ---- cutting ------------------------------------------------------------------------------


class MicrobatchRows(NamedTuple):
    """How a batch was cut: how many rows each micro-batch has, and on which dim."""

    counts: tuple[int, ...] = ()  # none: there was nothing to cut
    dim: int = 0

    def fractions(self) -> list[float]:
        """The part of the rows that each micro-batch has.

        >>> MicrobatchRows((2, 2, 1)).fractions()
        [0.4, 0.4, 0.2]
        """
        total = sum(self.counts)
        return [count / total if total else 1.0 for count in self.counts] or [1.0]

    def split_size(self, size: int) -> list[int] | None:
        """So many cut in the same parts; None if that gives fractions."""
        total = sum(self.counts)
        if size == total:
            return list(self.counts)
        if not total or any(count * size % total for count in self.counts):
            return None
        return [count * size // total for count in self.counts]


def scatter(
    values: tuple[Any, ...], chunks: int, names: Sequence[str] = ()
) -> tuple[list[tuple[Any, ...]], MicrobatchRows]:
    """The values of each micro-batch, and its rows; `names` are the values' for errors.

    As many as `torch.chunk` makes: fewer than `chunks` if the rows do not suffice.

    >>> scatter((torch.arange(5), "same"), chunks=3)[0]
    [(tensor([0, 1]), 'same'), (tensor([2, 3]), 'same'), (tensor([4]), 'same')]
    """
    if have_equal_rows(values):  # in most calls
        return _split_equal_rows(values, chunks)
    leaves, spec = pytree.tree_flatten(values)
    first = next((at for at, leaf in enumerate(leaves) if _row_dim(leaf) is not None), None)
    if first is None:
        return [pytree.tree_unflatten(map(_unwrap_chunk, leaves), spec)], MicrobatchRows()
    dim = _row_dim(leaves[first])
    assert dim is not None
    counts = [piece.size(dim) for piece in torch.chunk(_unwrap_chunk(leaves[first]), chunks, dim)]
    rows = MicrobatchRows(tuple(counts), dim)
    if not all(_is_splittable(leaf, rows) for leaf in leaves):
        raise _build_shape_error(
            values, first, rows, names or [f"input {at}" for at in range(len(values))]
        )
    cut = _split_leaves(leaves, rows)
    return [pytree.tree_unflatten(each, spec) for each in cut], rows


def have_equal_rows(values: tuple[Any, ...]) -> bool:
    """Are they tensors, with as many rows each?"""
    plain = all(isinstance(value, Tensor) and value.dim() for value in values)
    return plain and len({len(value) for value in values}) == 1


def _split_equal_rows(
    values: tuple[Tensor, ...], chunks: int
) -> tuple[list[tuple[Any, ...]], MicrobatchRows]:
    made = {id(value): torch.chunk(value, chunks) for value in values}
    columns = [made[id(value)] for value in values]
    return list(zip(*columns, strict=True)), MicrobatchRows(
        tuple([piece.size(0) for piece in columns[0]])
    )


def _row_dim(leaf: Any) -> int | None:
    """Where its rows are; None if it stays whole."""
    if isinstance(leaf, Chunk):
        return leaf.dim
    return 0 if isinstance(leaf, Tensor) and leaf.dim() else None


def _is_splittable(leaf: Any, rows: MicrobatchRows) -> bool:
    if isinstance(leaf, Chunk):
        return rows.split_size(leaf.tensor.size(leaf.dim)) is not None
    return _row_dim(leaf) is None or len(leaf) == sum(rows.counts)


def _split_leaves(leaves: Sequence[Any], rows: MicrobatchRows) -> Iterator[list[Any]]:
    """The leaves of each micro-batch. What was one tensor is one in each."""
    made: dict[tuple[int, int], list[Tensor]] = {}
    columns: list[list[Any]] = []
    for leaf in leaves:
        dim, tensor = _row_dim(leaf), _unwrap_chunk(leaf)
        if dim is None:
            columns.append([tensor] * len(rows.counts))
            continue
        if (id(tensor), dim) not in made:
            sizes = rows.split_size(tensor.size(dim))
            assert sizes is not None
            made[id(tensor), dim] = list(torch.split(tensor, sizes, dim))
        columns.append(made[id(tensor), dim])
    return map(list, zip(*columns, strict=True))


def _build_shape_error(
    values: tuple[Any, ...], first: int, rows: MicrobatchRows, names: Sequence[str]
) -> BatchShapeError:
    """An error that lists every tensor that does not fit, with what could be meant."""
    found = []
    for path, leaf in pytree.tree_flatten_with_path(values)[0]:
        name = names[path[0].idx] + pytree.keystr(path[1:])  # type: ignore[attr-defined]
        found.append((name, leaf))
    problems = [
        _describe_mismatch(name, leaf, rows)
        for name, leaf in found
        if not _is_splittable(leaf, rows)
    ]
    name, leaf = found[first]
    shape = tuple(_unwrap_chunk(leaf).shape)
    return BatchShapeError(
        "the inputs would give different numbers of micro-batches, or different parts of them: "
        f"the batch has {sum(rows.counts)} rows, taken from dim {rows.dim} of {name}, of shape "
        f"{shape}, and is cut into {', '.join(map(str, rows.counts))}",
        list(dict.fromkeys(problems)),
    )


def _describe_mismatch(name: str, leaf: Any, rows: MicrobatchRows) -> str:
    tensor = _unwrap_chunk(leaf)
    shape = tuple(tensor.shape)
    said = "x" if name.startswith("input ") else name  # what a caller could write
    whole = f"NoChunk({said}) if every micro-batch needs it whole"
    fitting = [dim for dim, size in enumerate(shape) if rows.split_size(size) is not None]
    other = f"Chunk({said}, dim={next(iter(fitting), min(1, tensor.dim() - 1))})"
    if isinstance(leaf, Chunk):
        begin = f"{name}, a Chunk of shape {shape}, has {shape[leaf.dim]} on dim {leaf.dim}"
    else:
        begin = f"{name}, of shape {shape}, has {shape[0]} on dim 0"
    if fitting:
        return f"{begin}: write {whole}, or {other} to cut it there"
    return f"{begin}, and no dim has the batch's rows: write {whole}; {other} needs as many there"


# ---- putting together ---------------------------------------------------------------------


def gather(
    outputs: Sequence[Any], rows: MicrobatchRows, known_leaves: Mapping[int, Any] | None = None
) -> Any:
    """One output from those of the micro-batches: tensors by rows, other values as a list.

    What some of its leaves are may be `known`, by their numbers. A tensor has rows if its dim 0 has
    as many as the micro-batch, or so many times as many. If the batch was cut on another dim, it
    has them there or on dim 0, and just as many.

    >>> gather([(torch.zeros(2), "a"), (torch.ones(1), "b")], MicrobatchRows((2, 1)))
    (tensor([0., 0., 1.]), ['a', 'b'])
    """
    if all(isinstance(output, Tensor) for output in outputs):
        return _join_outputs(tuple(outputs), rows)
    flat = [pytree.tree_flatten(output) for output in outputs]
    if len({str(spec) for _, spec in flat}) > 1:
        return list(outputs)
    columns: Iterable[tuple[Any, ...]] = zip(*(leaves for leaves, _ in flat), strict=True)
    known_leaves = known_leaves or {}
    leaves = [
        known_leaves[at] if at in known_leaves else _join_outputs(c, rows)
        for at, c in enumerate(columns)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _join_outputs(outputs: tuple[Any, ...], rows: MicrobatchRows) -> Any:
    if not all(isinstance(value, Tensor) for value in outputs):
        return list(outputs)
    if not rows.counts:  # one micro-batch, of nothing that was cut
        return outputs[0] if outputs[0].dim() else list(outputs)
    dims = [d for d in dict.fromkeys((rows.dim, 0)) if _has_rows(outputs, rows, d)]
    if not dims:
        return list(outputs)
    if len(dims) > 1 and len(outputs) > 1:
        raise RunError(
            f"an output of shape {tuple(outputs[0].shape)} has the rows of its micro-batch, "
            f"{rows.counts[0]}, on dim {rows.dim} and on dim 0, so that it cannot be told which "
            "is meant: let the model give the rows on dim 0 of a tensor whose "
            f"dim {rows.dim} has another size, or set another number of chunks"
        )
    return torch.cat(outputs, dims[0])


def _has_rows(column: Sequence[Tensor], rows: MicrobatchRows, dim: int) -> bool:
    """Are they alike but for dim, where each has its rows?"""
    shapes = [tuple(value.shape) for value in column]
    if dim >= min(map(len, shapes)):
        return False
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        return False
    sizes = [shape[dim] for shape in shapes]
    total = sum(rows.counts)
    times = sum(sizes) // total if total and not rows.dim else 1
    return times > 0 and sizes == [count * times for count in rows.counts]
