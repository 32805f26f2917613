"""Split a batch into micro-batches, and join the outputs of the micro-batches.

    scatter   (x, mask, flag), chunks=2   ->   [(x[:3], mask[:3], flag), (x[3:], mask[3:], flag)]
    gather    [output 0, output 1]        ->   torch.cat([output 0, output 1])

The first tensor of the batch sets the number of rows. Every other tensor must have the same number
of rows on dim 0, and is split in the same way. A tensor with another size could be meant in two
ways: it is needed whole (a table, a mask for all rows), or its rows are on another dim. Guessing
would train on wrong numbers, so such a tensor is refused until the caller wraps it in `NoChunk` or
`Chunk`. Values that are not tensors go to every micro-batch as they are. An object that holds a
tensor with the batch's rows is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.device.accelerator import has_streams
from penstock.errors import ArgumentError, BatchShapeError, PenstockTypeError, RunError
from penstock.nested_values import flatten, iter_hidden_tensors, unflatten
from penstock.state_copy import is_of_numpy
from penstock.torch_compat import pytree


class NoChunk:
    """A wrapper for a tensor that every micro-batch receives whole.

    Args:
        inp: The tensor.

    Raises:
        PenstockTypeError: If `inp` is not a tensor. Other values are never split, so they do not
            need the wrapper.

    >>> from torch import nn
    >>> from penstock import Pipe, PipeSequential
    >>> class Add(nn.Module):
    ...     def forward(self, x, table):
    ...         return x + table.sum()
    >>> pipe = Pipe(PipeSequential(Add()), chunks=2)
    >>> pipe(torch.zeros(4), NoChunk(torch.ones(3)))
    tensor([3., 3., 3., 3.])
    """

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise PenstockTypeError(
                f"NoChunk is for tensors, not {type(inp).__name__}. Other values are passed whole "
                "to every micro-batch without it."
            )
        self._tensor = inp

    @property
    def tensor(self) -> Tensor:
        """The tensor inside the wrapper."""
        return self._tensor


class Chunk:
    """A wrapper for a tensor whose rows are on another dim than 0.

    The size of that dim is the number of rows of the batch, or a multiple or fraction of it that
    gives every micro-batch a whole number of rows.

    Args:
        inp: The tensor.
        dim: The dim to split on. Negative numbers count from the end.

    Raises:
        PenstockTypeError: If `inp` is not a tensor or `dim` is not an integer.
        ArgumentError: If the tensor has no such dim.

    >>> from torch import nn
    >>> from penstock import Pipe, PipeSequential
    >>> class Add(nn.Module):
    ...     def forward(self, x, bias):
    ...         return x + bias[0]
    >>> pipe = Pipe(PipeSequential(Add()), chunks=2)
    >>> pipe(torch.zeros(4), Chunk(torch.arange(4.0).unsqueeze(0), dim=1))
    tensor([0., 1., 2., 3.])
    """

    def __init__(self, inp: Tensor, dim: int) -> None:
        if not isinstance(inp, Tensor):
            raise PenstockTypeError(
                f"Chunk is for tensors, not {type(inp).__name__}. Other values are passed whole "
                "to every micro-batch."
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise PenstockTypeError(f"dim must be an integer, not {dim!r}")
        if not -inp.dim() <= dim < inp.dim():
            raise ArgumentError(
                f"a tensor of shape {tuple(inp.shape)} has no dim {dim} to split. It has "
                f"{inp.dim()} dims, counted from 0."
            )
        self._tensor, self._dim = inp, dim % inp.dim()

    @property
    def tensor(self) -> Tensor:
        """The tensor inside the wrapper."""
        return self._tensor

    @property
    def dim(self) -> int:
        """The dim that the tensor is split on, counted from 0."""
        return self._dim


# ---- the inputs of a pipe ------------------------------------------------------------------------


def check_inputs(inputs: Sequence[Any], side: Iterable[Any], device: torch.device | None) -> None:
    """Raise if no input is a tensor, or if an input is not on the device of the first stage.

    Side inputs (those given by name) may be on any device, because each goes to its own stages.
    `device` is None if the first stage is in another process.
    """
    # The common case, in front because this runs in every step.
    if len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].device == device:
        return
    tensors = [t for t in map(unwrap_chunk, flatten(list(inputs))[0]) if isinstance(t, Tensor)]
    if not tensors and not list_tensors(list(side)):
        kinds = ", ".join(type(value).__name__ for value in (*inputs, *side)) or "nothing"
        raise PenstockTypeError(
            f"a pipe needs a tensor among its inputs, but got {kinds}. Pass the batch as tensors, "
            f"whose rows are split into micro-batches.{explain_objects((*inputs, *side))}"
        )
    wrong = sorted({str(t.device) for t in tensors if t.device != device})
    if wrong and device is not None:
        raise ArgumentError(
            f"an input is on {', '.join(wrong)}, but the first stage is on {device}. "
            f"Move it there with x.to('{device}')."
        )


def explain_objects(values: Iterable[Any]) -> str:
    """Return a sentence about the first value that hides tensors in its attributes, or ""."""
    for value in values:
        # A loader has tensors in its dataset.
        if isinstance(value, Iterable | type):
            continue
        if next(iter_hidden_tensors(value), None) is not None:
            kind = type(value).__name__
            return (
                f" A {kind} has tensors in its attributes, where they are not split: pass them in "
                f"a tuple, a dict or a dataclass, and make the {kind} in the forward."
            )
    return ""


def move_to_device(value: Any, device: torch.device | None) -> Any:
    """Return the value with all tensors in it on the device; None leaves them where they are."""
    if device is None:
        return value
    move = partial(Tensor.to, device=device, non_blocking=has_streams(device.type))
    return move(value) if isinstance(value, Tensor) else map_batch_tensors(value, move)


def map_batch_tensors(values: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """Return the values with each tensor transformed, also inside a `Chunk` or `NoChunk`."""

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, NoChunk):
            return NoChunk(transform(leaf.tensor))
        if isinstance(leaf, Chunk):
            return Chunk(transform(leaf.tensor), leaf.dim)
        return transform(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(map_leaf, values)


def list_tensors(values: Any) -> list[Tensor]:
    """Return all tensors in the values of a batch, without wrappers."""
    return [t for t in map(unwrap_chunk, pytree.tree_leaves(values)) if isinstance(t, Tensor)]


def unwrap_chunk(leaf: Any) -> Any:
    """Return the tensor inside a `Chunk` or `NoChunk`, or the leaf itself."""
    return leaf.tensor if isinstance(leaf, NoChunk | Chunk) else leaf


# ---- splitting -----------------------------------------------------------------------------------


class MicrobatchRows(NamedTuple):
    """The number of rows of each micro-batch, and the dim that they are on."""

    counts: tuple[int, ...] = ()  # empty if the batch contains nothing to split
    dim: int = 0
    # by index of a leaf of the output, the dim that its rows are on; others are found by their size
    output_dims: tuple[tuple[int, int], ...] = ()

    def fractions(self) -> list[float]:
        """Return each micro-batch's fraction of all rows.

        >>> MicrobatchRows((2, 2, 1)).fractions()
        [0.4, 0.4, 0.2]
        """
        total = sum(self.counts)
        return [count / total if total else 1.0 for count in self.counts] or [1.0]

    def split_size(self, size: int) -> list[int] | None:
        """Split a dim of this size in the proportions of the rows; None if that leaves fractions.

        >>> MicrobatchRows((2, 2, 1)).split_size(10)
        [4, 4, 2]
        """
        total = sum(self.counts)
        if size == total:
            return list(self.counts)
        if not total or any(count * size % total for count in self.counts):
            return None
        return [count * size // total for count in self.counts]


def scatter(
    values: tuple[Any, ...], chunks: int, names: Sequence[str] = ()
) -> tuple[list[tuple[Any, ...]], MicrobatchRows]:
    """Split a batch and return the values of each micro-batch, with the rows of each.

    There are as many micro-batches as `torch.chunk` makes: fewer than `chunks` if there are not
    enough rows. The pieces are views. `names` are the names of the values for error messages.

    >>> scatter((torch.arange(5), "same"), chunks=3)[0]
    [(tensor([0, 1]), 'same'), (tensor([2, 3]), 'same'), (tensor([4]), 'same')]
    """
    # Flattening a tree costs more than splitting a few tensors, and most batches are a few tensors.
    if have_equal_rows(values):
        _check_no_attributes(values)
        return _split_equal_rows(values, chunks)
    leaves, spec = flatten(values)
    _check_no_attributes(leaves)
    for leaf in leaves:
        _check_layout(leaf, chunks)
    row_leaf = next((i for i, leaf in enumerate(leaves) if _row_dim(leaf) is not None), None)
    if row_leaf is None or (chunks == 1 and not _have_common_rows(leaves, row_leaf)):
        return [unflatten(list(map(unwrap_chunk, leaves)), spec)], MicrobatchRows()
    dim = _row_dim(leaves[row_leaf])
    assert dim is not None
    counts = [piece.size(dim) for piece in torch.chunk(unwrap_chunk(leaves[row_leaf]), chunks, dim)]
    rows = MicrobatchRows(tuple(counts), dim)
    if not all(_is_splittable(leaf, rows) for leaf in leaves):
        raise _build_shape_error(
            values, row_leaf, rows, names or [f"input {index}" for index in range(len(values))]
        )
    if len(counts) > 1:
        _check_no_hidden_rows(leaves, sum(counts))
        _check_no_row_lists(values, sum(counts))
    microbatches = _split_leaves(leaves, rows)
    return [pytree.tree_unflatten(pieces, spec) for pieces in microbatches], rows


def take_rows(values: Any, rows: MicrobatchRows, *ranges: tuple[int, int]) -> Any:
    """Return the values of a batch for some of its rows, as `scatter` would split them.

    A range has its first row and the row after its last. The rows of several ranges are joined.

    >>> take_rows((torch.arange(5), "same"), MicrobatchRows((2, 2, 1)), (1, 3))
    (tensor([1, 2]), 'same')
    """
    pieces: dict[tuple[int, int], Tensor] = {}  # by id of the tensor, and dim
    total = sum(rows.counts)

    def take_from(leaf: Any) -> Any:
        dim, tensor = _row_dim(leaf), unwrap_chunk(leaf)
        if dim is None or not total:
            return tensor
        if (id(tensor), dim) not in pieces:
            times = tensor.size(dim) // total
            parts = [
                tensor.narrow(dim, start * times, (stop - start) * times) for start, stop in ranges
            ]
            piece = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            # Without gradients, `narrow` keeps `requires_grad` and `cat` does not.
            pieces[id(tensor), dim] = piece.requires_grad_(tensor.requires_grad)
        return pieces[id(tensor), dim]

    return pytree.tree_map(take_from, values)


def find_constant_inputs(
    values: Any, rows: MicrobatchRows, indices: Collection[int] | None = None
) -> list[int]:
    """Return the inputs that are split and whose rows are all equal, by their numbers.

    Args:
        values: The inputs of a batch.
        rows: How it is split.
        indices: The inputs to look at, if not at all of them.

    >>> find_constant_inputs((torch.ones(3), "same", torch.arange(3)), MicrobatchRows((2, 1)))
    [0]
    """
    leaves = pytree.tree_leaves(values)
    chosen = range(len(leaves)) if indices is None else [i for i in indices if i < len(leaves)]
    return [index for index in chosen if _is_constant(leaves[index], sum(rows.counts))]


def _is_constant(leaf: Any, row_count: int) -> bool:
    dim, tensor = _row_dim(leaf), unwrap_chunk(leaf)
    if dim is None or not row_count or tensor.is_meta or not tensor.numel():
        return False
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    table = tensor.detach().movedim(dim, 0).reshape(row_count, -1)
    return bool((table == table[:1]).all())


def have_different_rows(values: Any, rows: MicrobatchRows) -> bool:
    """Return whether not all rows of a batch are equal.

    >>> have_different_rows((torch.ones(5), "same"), MicrobatchRows((2, 2, 1)))
    False
    """
    split = [i for i, leaf in enumerate(pytree.tree_leaves(values)) if _row_dim(leaf) is not None]
    return len(find_constant_inputs(values, rows, split)) < len(split)


def find_unlike_rows(values: Any, row_count: int) -> tuple[int, int] | None:
    """Return the two rows of a batch that differ most in how many of their numbers may be left out.

    Those are zeros, and targets below 0, such as -100. None means that no rows differ.

    >>> find_unlike_rows(torch.tensor([[1, 2], [3, -100], [-100, -100]]), 3)
    (0, 2)
    """
    pairs = []
    for tensor in list_tensors(values):
        if tensor.dim() and len(tensor) == row_count and tensor.numel():
            has_order = not (tensor.is_floating_point() or tensor.is_complex())
            is_empty = tensor <= 0 if has_order else tensor == 0
            counts = is_empty.reshape(row_count, -1).sum(1).tolist()
            least, most = min(counts), max(counts)
            spread = (most - least) / is_empty.numel()
            pairs.append((spread, counts.index(least), counts.index(most)))
    spread, *row_pair = max(pairs, default=(0.0, 0, 0))
    return (row_pair[0], row_pair[1]) if spread else None


def find_related_rows(values: Any, row_count: int) -> list[tuple[int, int, int]]:
    """Return rows that a model may relate to each other: two with the same id, and another one.

    An id is the only number that a tensor has for each row: a group, a class, a length. Rows of
    one group may be far apart, and the first rows of a batch may all have the same length.

    >>> find_related_rows(torch.tensor([3, 4, 5, 3]), 4)
    [(0, 3, 1)]
    """
    related = []
    for tensor in list_tensors(values):
        if not tensor.dim() or len(tensor) != row_count or tensor.numel() != row_count:
            continue
        ids = tensor.detach().reshape(-1).tolist()
        first_rows: dict[Any, int] = {}
        # A zero or a number below it may stand for no group.
        repeated = sorted(
            (not (isinstance(number, int | float) and number > 0), first_rows[number], row)
            for row, number in enumerate(ids)
            if first_rows.setdefault(number, row) != row
        )
        if repeated and len(first_rows) > 1:
            _, earlier, later = repeated[0]
            other = next(row for number, row in first_rows.items() if number != ids[earlier])
            related.append((earlier, later, other))
    return related


def find_shared_ids(values: Any, counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return rows of different micro-batches that have the same id: a user, a sample, a class.

    An id is the only whole number that a tensor has for each row. For each such tensor there is at
    most one pair of rows, after the index of the tensor.

    >>> find_shared_ids(torch.tensor([3, 3, 4, 3]), (2, 2))
    [(0, 0, 3)]
    """
    microbatches = [index for index, count in enumerate(counts) for _ in range(count)]
    pairs = []
    for index, tensor in enumerate(list_tensors(values)):
        is_id = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() > 0
        if not is_id or len(tensor) != len(microbatches) or tensor.numel() != len(tensor):
            continue
        first_rows: dict[Any, int] = {}
        for row, number in enumerate(tensor.detach().reshape(-1).tolist()):
            earlier = first_rows.setdefault(number, row)
            if microbatches[earlier] != microbatches[row]:
                pairs.append((index, earlier, row))
                break
    return pairs


def _check_no_hidden_rows(leaves: Sequence[Any], row_count: int) -> None:
    """Raise if an object that cannot be split holds a tensor with the rows of the batch."""
    for leaf in leaves:
        if isinstance(leaf, Tensor | Chunk | NoChunk | nn.Module):
            continue
        if is_of_numpy(leaf) and getattr(leaf, "shape", ())[:1] == (row_count,):
            raise ArgumentError(
                f"an input is a NumPy array of shape {leaf.shape}, with the batch's {row_count} "
                "rows, and only tensors are split into micro-batches. Pass a tensor."
            )
        for tensor in iter_hidden_tensors(leaf):
            if tensor.dim() and len(tensor) == row_count:
                kind = type(leaf).__name__
                raise ArgumentError(
                    f"an input is a {kind}, which cannot be split into micro-batches, but it holds "
                    f"a tensor of shape {tuple(tensor.shape)} with the batch's {row_count} rows. "
                    f"Pass its tensors, in a dict or a dataclass, say, and make the {kind} in the "
                    "forward, or use chunks=1."
                )


def _check_no_row_lists(values: Any, row_count: int) -> None:
    """Raise if a list has a plain value for each row, as a list of lengths or of captions has.

    A tuple of a few numbers is a size, and one of names is a column of a DataLoader's batch.
    """
    parts: Iterable[Any] = ()
    if isinstance(values, Mapping):
        parts = values.values()
    elif isinstance(values, list | tuple):
        parts = values
    is_list = isinstance(values, list) or (
        type(values) is tuple and (len(values) > 4 or any(isinstance(v, str) for v in values))
    )
    plain = str | int | float | None
    if is_list and len(values) == row_count > 1 and all(isinstance(v, plain) for v in values):
        raise ArgumentError(
            f"an input is a {type(values).__name__} of {row_count} plain values, as many as the "
            "batch has rows. Every micro-batch would get all of them, and take the first ones for "
            "its rows. Pass a tensor, which is split; or a dict, if every micro-batch needs all of "
            "them."
        )
    for part in parts:
        _check_no_row_lists(part, row_count)


def have_equal_rows(values: tuple[Any, ...]) -> bool:
    """Return whether all values are plain tensors with the same number of rows on dim 0."""
    plain = all(isinstance(v, Tensor) and has_split_rows(v) for v in values)
    # `len` of a tensor takes three times as long as its shape.
    return plain and len({value.size(0) for value in values}) == 1


def has_split_rows(tensor: Tensor) -> bool:
    """Return whether a tensor has a dim 0 that `torch.chunk` splits: not if it is sparse, say."""
    if tensor.is_nested:
        return tensor.layout is torch.jagged
    return tensor.layout is torch.strided and tensor.dim() > 0


def _have_common_rows(leaves: Sequence[Any], row_leaf: int) -> bool:
    """Return whether all tensors have the rows of one of them, and could be split."""
    tensors = [unwrap_chunk(leaf) for leaf in leaves if _row_dim(leaf) is not None]
    if not all(map(has_split_rows, tensors)):
        return False
    dim = _row_dim(leaves[row_leaf])
    assert dim is not None
    rows = MicrobatchRows((unwrap_chunk(leaves[row_leaf]).size(dim),), dim)
    return all(_is_splittable(leaf, rows) for leaf in leaves)


def _check_layout(leaf: Any, chunks: int) -> None:
    """Raise if a tensor is of a kind that cannot be split."""
    tensor = unwrap_chunk(leaf)
    if _row_dim(leaf) is None or has_split_rows(tensor):
        return
    if tensor.is_nested:
        raise ArgumentError(
            "an input is a nested tensor without layout=torch.jagged, which cannot be split into "
            "micro-batches. Make it with that layout, or pad it, "
            "torch.nested.to_padded_tensor(x, 0.0), and pass a mask."
        )
    if chunks > 1:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ArgumentError(
            f"an input is a {layout} tensor, whose rows cannot be split into micro-batches. Pass "
            "x.to_dense(); or NoChunk(x), if every micro-batch needs all of it; or use chunks=1."
        )


def _check_no_attributes(leaves: Iterable[Any]) -> None:
    """Raise if a tensor has an attribute of the user's own, such as `x.scale = 3`.

    Micro-batches are views of it, which have no such attributes. A layer that asks for it with
    `getattr(x, "scale", 1)` would compute with the default. A class of tensors may hand its
    attributes on to views.
    """
    for leaf in leaves:
        tensor = unwrap_chunk(leaf)
        if not isinstance(tensor, Tensor) or not tensor.__dict__:
            continue
        view = torch.chunk(tensor, 1)[0] if tensor.dim() else tensor.detach()
        for name in tensor.__dict__:
            if not name.startswith("_") and not hasattr(view, name):  # PyTorch marks some with _
                raise ArgumentError(
                    f"an input of shape {tuple(tensor.shape)} has the attribute '{name}', which "
                    "its micro-batches would not have. Pass the value as an input of its own, or "
                    f"delete the attribute: del x.{name}."
                )


def _split_equal_rows(
    values: tuple[Tensor, ...], chunks: int
) -> tuple[list[tuple[Any, ...]], MicrobatchRows]:
    # By id, so that a tensor that was given twice is one tensor in each micro-batch, too: an
    # in-place change of it must be seen in both places, as in the unsplit model.
    pieces_by_id = {id(value): torch.chunk(value, chunks) for value in values}
    columns = [pieces_by_id[id(value)] for value in values]
    return list(zip(*columns, strict=True)), MicrobatchRows(
        tuple([piece.size(0) for piece in columns[0]])
    )


def _row_dim(leaf: Any) -> int | None:
    """Return the dim that a leaf is split on, or None if it stays whole."""
    if isinstance(leaf, Chunk):
        return leaf.dim
    return 0 if isinstance(leaf, Tensor) and leaf.dim() else None


def _is_splittable(leaf: Any, rows: MicrobatchRows) -> bool:
    """Return whether a leaf stays whole or can be split like the batch.

    Only a `Chunk` may have a multiple of the rows. For a plain tensor that would be a guess.
    """
    if isinstance(leaf, Chunk):
        return rows.split_size(leaf.tensor.size(leaf.dim)) is not None
    return _row_dim(leaf) is None or len(leaf) == sum(rows.counts)


def _split_leaves(leaves: Sequence[Any], rows: MicrobatchRows) -> Iterator[list[Any]]:
    """Return the leaves of each micro-batch.

    A tensor that occurs twice in the batch is one tensor in each micro-batch.
    """
    pieces_by_key: dict[tuple[int, int], list[Tensor]] = {}  # by id of the tensor, and dim
    columns: list[list[Any]] = []
    for leaf in leaves:
        dim, tensor = _row_dim(leaf), unwrap_chunk(leaf)
        if dim is None:
            columns.append([tensor] * len(rows.counts))
            continue
        if (id(tensor), dim) not in pieces_by_key:
            sizes = rows.split_size(tensor.size(dim))
            assert sizes is not None
            pieces_by_key[id(tensor), dim] = list(torch.split(tensor, sizes, dim))
        columns.append(pieces_by_key[id(tensor), dim])
    return map(list, zip(*columns, strict=True))


def _build_shape_error(
    values: tuple[Any, ...], first: int, rows: MicrobatchRows, names: Sequence[str]
) -> BatchShapeError:
    """Return an error that lists every tensor that does not fit, and the ways to wrap it.

    `first` is the index of the leaf that sets the number of rows.
    """
    named_leaves = []
    for path, leaf in pytree.tree_flatten_with_path(values)[0]:
        name = names[path[0].idx] + pytree.keystr(path[1:])  # type: ignore[attr-defined]
        named_leaves.append((name, leaf))
    problems = [
        _describe_mismatch(name, leaf, rows)
        for name, leaf in named_leaves
        if not _is_splittable(leaf, rows)
    ]
    name, leaf = named_leaves[first]
    shape = tuple(unwrap_chunk(leaf).shape)
    for index, value in enumerate(values):
        if not isinstance(value, list) or not all(map(_is_row_leaf, value)):
            continue
        if len({len(item) for item in value}) > 1:
            problems.append(
                f"{names[index]} is a list of {len(value)} tensors, each of which is split on its "
                "dim 0. If it has a tensor for each row, pad them to one tensor, "
                "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), and pass a mask; or use "
                "chunks=1."
            )
    return BatchShapeError(
        "the inputs would give different numbers of micro-batches, or micro-batches of different "
        f"sizes: the batch has {sum(rows.counts)} rows (dim {rows.dim} of {name}, which has shape "
        f"{shape}), and is split into {', '.join(map(str, rows.counts))}",
        list(dict.fromkeys(problems)),
    )


def _is_row_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _describe_mismatch(name: str, leaf: Any, rows: MicrobatchRows) -> str:
    tensor = unwrap_chunk(leaf)
    shape = tuple(tensor.shape)
    variable = "x" if name.startswith("input ") else name  # an expression the caller could write
    whole = f"NoChunk({variable}) to pass it whole to every micro-batch"
    fitting = [dim for dim, size in enumerate(shape) if rows.split_size(size) is not None]
    other = f"Chunk({variable}, dim={next(iter(fitting), min(1, tensor.dim() - 1))})"
    if isinstance(leaf, Chunk):
        begin = f"{name}, a Chunk of shape {shape}, has size {shape[leaf.dim]} on dim {leaf.dim}"
    else:
        begin = f"{name}, of shape {shape}, has size {shape[0]} on dim 0"
    if fitting:
        return f"{begin}. Use {whole}, or {other} to split it there."
    return (
        f"{begin}, and no dim has the batch's rows. Use {whole}. ({other} would need them there.)"
    )


def is_row_dim_ambiguous(shape: Sequence[int], count: int) -> bool:
    """Return whether an output of a micro-batch has its rows on dim 0 or on another dim.

    Both have the size for it, as in `torch.stack(hidden)` of two layers and two rows.

    >>> [is_row_dim_ambiguous(shape, 2) for shape in [(2, 2, 5), (4, 2), (2, 5)]]
    [True, True, False]
    """
    return len(shape) > 1 and count > 0 and shape[0] % count == 0 and count in shape[1:]


# ---- joining -------------------------------------------------------------------------------------


def gather(
    outputs: Sequence[Any], rows: MicrobatchRows, known_leaves: Mapping[int, Any] | None = None
) -> Any:
    """Join the outputs of the micro-batches to one output.

    Tensors that have rows are concatenated. Other tensors and other values become a list with one
    entry for each micro-batch. `known_leaves` are leaves of the result that need not be joined, by
    their index.

    A tensor has rows if the size of its dim 0 is the number of rows of the micro-batch, or the same
    multiple of it in every micro-batch. If the batch was split on another dim, the tensor has rows
    on that dim or on dim 0, and multiples do not count.

    >>> gather([(torch.zeros(2), "a"), (torch.ones(1), "b")], MicrobatchRows((2, 1)))
    (tensor([0., 0., 1.]), ['a', 'b'])
    """
    known_dims = dict(rows.output_dims)
    if _are_tensors(outputs):
        return _join_tensors(tuple(outputs), rows, known_dims.get(0))
    flat = [pytree.tree_flatten(output) for output in outputs]
    # Outputs of different structure have no common leaves to join.
    if len({str(spec) for _, spec in flat}) > 1:
        return list(outputs)
    columns: list[tuple[Any, ...]] = list(zip(*(leaves for leaves, _ in flat), strict=True))
    known_leaves = known_leaves or {}
    views = {} if rows.dim else _find_output_views(columns, {*known_leaves, *known_dims})
    leaves: list[Any] = []
    joined: dict[tuple[int, ...], Any] = {}  # a tensor that a model returns twice stays one tensor
    for index, column in enumerate(columns):
        key = tuple(map(id, column))
        if index in known_leaves:
            leaves.append(known_leaves[index])
        elif index in views:
            leaves.append(None)
        elif key in joined and isinstance(joined[key], Tensor):
            leaves.append(joined[key])
        elif _are_tensors(column):
            joined[key] = _join_tensors(column, rows, known_dims.get(index))
            leaves.append(joined[key])
        else:
            leaves.append(list(column))
    for index, base in views.items():
        key = tuple(map(id, columns[index]))
        if key not in joined:
            joined[key] = _build_output_view(columns[index], columns[base], leaves[base], rows)
        leaves[index] = joined[key]
    return pytree.tree_unflatten(leaves, flat[0][1])


# A model may return a tensor and a view of it: `h, h[:, 0]`. What the caller changes in one of them
# in place is seen in the other, so the joined outputs are a tensor and a view of it as well.


def _find_output_views(
    columns: Sequence[Sequence[Any]], excluded: Collection[int]
) -> dict[int, int]:
    """Return the index of the output that each output is a view of, for those that are one.

    A column has an output of all micro-batches.
    """
    by_memory: dict[int, list[int]] = {}
    for index, column in enumerate(columns):
        if index not in excluded and all(_has_plain_memory(value) for value in column):
            by_memory.setdefault(column[0].untyped_storage().data_ptr(), []).append(index)
    views = {}
    for indices in by_memory.values():
        if len(indices) > 1:
            base = max(indices, key=lambda index: _rate_as_base(columns[index][0]))
            base_ids = list(map(id, columns[base]))
            for index in indices:
                is_same = list(map(id, columns[index])) == base_ids
                if not is_same and _is_view_by_rows(columns[index], columns[base]):
                    views[index] = base
    return views


def _rate_as_base(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is largest for the tensor that others are views of."""
    # A detached tensor has no gradient to give to its views.
    return tensor.requires_grad, tensor.numel(), tensor.is_contiguous(), -len(tensor)


def _has_plain_memory(value: Any) -> bool:
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return (
        is_plain
        and value.dim() > 0
        and value.numel() > 0
        and not (value.is_meta or value.is_conj())
    )


def _is_view_by_rows(column: Sequence[Tensor], bases: Sequence[Tensor]) -> bool:
    """Return whether each tensor has, in each of its rows, a part of the same row of its base."""
    first_offset = column[0].storage_offset() - bases[0].storage_offset()
    for tensor, base in zip(column, bases, strict=True):
        offset, strides = tensor.storage_offset() - base.storage_offset(), tensor.stride()
        times, remainder = divmod(len(tensor), len(base))
        sizes = times, *tensor.shape[1:]
        extent = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if (
            tensor.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
            or (tensor.dtype, tensor.shape[1:]) != (base.dtype, column[0].shape[1:])
            or (base.shape[1:], strides) != (bases[0].shape[1:], column[0].stride())
            or not base.is_contiguous()
            or remainder
            or times * strides[0] != base.stride(0)
            or offset != first_offset
            or offset < 0
            or offset + extent >= base.stride(0)
        ):
            return False
    return True


def _build_output_view(
    column: tuple[Tensor, ...], bases: tuple[Tensor, ...], joined: Any, rows: MicrobatchRows
) -> Any:
    """Return the view of a joined output that each tensor of a column is of its base."""
    view, base = column[0], bases[0]
    if not isinstance(joined, Tensor) or joined.stride() != base.stride():
        return _join_tensors(column, rows, None)
    whole = joined if view.requires_grad or not joined.requires_grad else joined.detach()
    size = len(view) // len(base) * len(joined), *view.shape[1:]
    offset = view.storage_offset() - base.storage_offset() + joined.storage_offset()
    return whole.as_strided(size, view.stride(), offset)


def _are_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _join_tensors(outputs: tuple[Tensor, ...], rows: MicrobatchRows, known_dim: int | None) -> Any:
    if known_dim is not None:
        return torch.cat(outputs, known_dim)
    if not rows.counts:  # the batch contained nothing to split, so there is one micro-batch
        return outputs[0] if outputs[0].dim() else list(outputs)
    dims = [d for d in dict.fromkeys((rows.dim, 0)) if _has_rows(outputs, rows, d)]
    if not dims:
        return list(outputs)
    if len(dims) > 1 and len(outputs) > 1:
        raise RunError(
            f"an output of shape {tuple(outputs[0].shape)} has the {rows.counts[0]} rows of its "
            f"micro-batch on dim {rows.dim} and on dim 0, so it is not clear on which dim the "
            f"outputs are joined. Return a tensor whose dim {rows.dim} has another size, with the "
            "rows on dim 0, or use another number of chunks."
        )
    return torch.cat(outputs, dims[0])


def _has_rows(column: Sequence[Tensor], rows: MicrobatchRows, dim: int) -> bool:
    """Return whether the tensors differ in shape on one dim at most, where each has its rows."""
    shapes = [value.shape for value in column]
    if dim >= min(map(len, shapes)):
        return False
    # Most micro-batches have the same shape, and cutting it into two takes longer than comparing.
    if len({shape[:dim] + shape[dim + 1 :] for shape in set(shapes)}) > 1:
        return False
    sizes = [shape[dim] for shape in shapes]
    total = sum(rows.counts)
    # A model may return several rows for each row of the batch.
    times = sum(sizes) // total if total and not rows.dim else 1
    return times > 0 and sizes == [count * times for count in rows.counts]
