"""Rules for the operations of a forward: which of them compute each row by itself.

An operation is known to do so only if a rule here says so. Otherwise nothing is wrong: the whole
batch is compared (rows.py). So an unknown operation costs time, and no rule has to be complete. A
rule that says too much is a wrong result in silence, so each has a counter-example in
test_row_operations.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.stage.row_means import split_names

# The names of operations by their rules, without the underscores around them. Those that PyTorch
# marks as pointwise are not listed.
_ROW_BY_ROW = split_names(
    """
    to_copy copy copy_ clone detach alias lift_fresh expand permute transpose t unsqueeze squeeze
    repeat zeros_like ones_like full_like empty_like rand_like
    randn_like fill fill_ zero zero_ rsub conj conj_physical real imag view_as_real view_as_complex
    polar complex angle prelu prelu_kernel native_dropout fused_dropout bernoulli bernoulli_
    rrelu_with_noise uniform_ normal_ exponential_ geometric_ random_ new_zeros new_ones new_full
    new_empty stack view_dtype thnn_fused_lstm_cell thnn_fused_gru_cell isnan frexp
    """
)
# Those whose result has nothing of the numbers of their tensor.
CONSTANT = split_names(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
)
_REDUCTIONS = split_names(
    """
    sum nansum mean nanmean prod std var std_mean var_mean max min amax amin aminmax any all
    argmax argmin median nanmedian norm linalg_vector_norm logsumexp count_nonzero dot vdot
    """
)
_LINEAR_REDUCTIONS = split_names("sum nansum mean count_nonzero dot vdot")
# Those whose result says which rows there are, and not how many.
DECISIONS = _REDUCTIONS - _LINEAR_REDUCTIONS
_LOSSES = re.compile("loss|binary_cross_entropy")
# Each entry of their tensors is computed by itself.
_ENTRY_LOSSES = re.compile("(mse|l1|smooth_l1|huber|soft_margin)_loss|binary_cross_entropy")
# Each entry of their first dim is computed by itself.
_BATCHED = re.compile("conv(?!_tbc|ert)|pool|upsample|grid_sampler|scaled_dot_product|group_norm")
# Each entry of their first dim, or of those that they take apart or join, is computed by itself.
_CHANNELS_FIRST = re.compile("_pad|pixel_(un)?shuffle|im2col|col2im")
# The positions of the factors of products, and the dims of each that are not summed.
_PRODUCTS: dict[str, tuple[int, frozenset[int], frozenset[int]]] = {
    "mm": (0, frozenset({0}), frozenset({1})),
    "addmm": (1, frozenset({0}), frozenset({1})),
    "mv": (0, frozenset({0}), frozenset()),
    "addmv": (1, frozenset({0}), frozenset()),
    "bmm": (0, frozenset({0, 1}), frozenset({0, 2})),
    "baddbmm": (1, frozenset({0, 1}), frozenset({0, 2})),
}
_DIM_NAMES = frozenset(("dim", "dims", "dimension", "dim0"))


class Operation(NamedTuple):
    """A call of an operation, with the dims of its tensors on which rows are.

    Attributes:
        name: Its name, without the underscores around it.
        arguments: Its arguments by name.
        inputs: Its tensors.
        results: The tensors that it has returned.
        row_dims: By id of a tensor, the dims that have other sizes for other numbers of rows.
        row_count: The number of rows.
        blocks: By id of a tensor, the tensor, and how many blocks of all rows the dim of its rows
            has; one if it is not listed.
        positions: The ids of tensors with the positions of the rows: `arange(n)`.
    """

    name: str
    arguments: Mapping[str, Any]
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]
    row_dims: Mapping[int, frozenset[int]]
    row_count: int
    blocks: Mapping[int, tuple[Tensor, int]]
    positions: Collection[int]

    def list_with_rows(self) -> list[Tensor]:
        """Return its tensors that have rows."""
        return [tensor for tensor in self.inputs if id(tensor) in self.row_dims]

    def count_blocks(self, tensor: Tensor) -> int:
        """Return how many blocks of all rows the dim of the rows of a tensor has."""
        return self.blocks[id(tensor)][1] if id(tensor) in self.blocks else 1

    def find_rows(self, value: Any) -> frozenset[int]:
        """Return the dims of a tensor on which rows are. Of other values, none."""
        return self.row_dims.get(id(value), frozenset())

    def list_values(self) -> list[Any]:
        """Return the arguments in order."""
        return list(self.arguments.values())

    def list_dims(self) -> set[int] | None:
        """Return the dims along which it computes. All if it does not say; None: it has no dims."""
        named = [name for name in self.arguments if name in _DIM_NAMES]
        tensor = next(iter(self.inputs), None)
        if tensor is None or not named:
            return None
        dims: set[int] = set()
        for name in named:
            value = self.arguments[name]
            values = value if isinstance(value, list | tuple) else [value]
            if value is None or not values:
                return set(range(tensor.dim()))
            dims |= {int(dim) % max(tensor.dim(), 1) for dim in values}
        return dims


def is_row_by_row(func: Any, operation: Operation) -> bool:
    """Return whether an operation on rows is known to compute each row, or a total, by itself."""
    name = operation.name
    base = name.strip("_")
    if func.namespace != "aten":  # a rule is of what PyTorch means by a name
        return False
    if name in _ROW_BY_ROW or base in _ROW_BY_ROW or _is_pointwise(func):
        return True
    rule = _RULES.get(base)
    if rule is not None:
        return rule(operation)
    if base in _PRODUCTS:
        return _is_product_by_row(operation, *_PRODUCTS[base])
    if base in _REDUCTIONS:
        return _is_reduction_by_row(operation)
    if "ctc_loss" in base:  # of (time, rows, class)
        return operation.find_rows(operation.inputs[0]) <= {1}
    if _LOSSES.search(base):
        is_by_entry = _ENTRY_LOSSES.match(base)
        return bool(is_by_entry) or all(operation.find_rows(t) <= {0} for t in operation.inputs)
    if "batch_norm" in base:
        return _is_batch_norm_by_row(operation)
    if _BATCHED.search(base):
        return all(operation.find_rows(tensor) <= {0} for tensor in operation.inputs)
    if _CHANNELS_FIRST.search(base):
        return _is_pad_by_row(operation)
    if base == "linalg_check_errors":  # raises, and returns nothing
        return True
    if base.startswith("linalg_"):
        return _is_matrix_operation_by_row(operation)
    dims = operation.list_dims()
    if dims is None:
        return False
    rows = [operation.find_rows(tensor) for tensor in operation.inputs]
    # A result without rows has entries of some of them: `x.gather(1, index[:1])`.
    has_rows = bool(rows[0]) and all(map(operation.find_rows, operation.results))
    return has_rows and all(dims.isdisjoint(own) and own <= rows[0] for own in rows)


def _is_pointwise(func: Any) -> bool:
    """Return whether PyTorch marks an operation, or what an operation in place does, so."""
    if torch.Tag.pointwise in func.tags:
        return True
    if not func._schema.name.endswith("_"):
        return False
    packet = getattr(torch.ops.aten, func._schema.name.partition("::")[2][:-1], None)
    overload = getattr(packet, func._overloadname, None)
    return bool(torch.Tag.pointwise in getattr(overload, "tags", ()))


def _is_product_by_row(
    operation: Operation, position: int, left: frozenset[int], right: frozenset[int]
) -> bool:
    """Return whether the rows of two factors are on dims that a product does not add up."""
    values = operation.list_values()
    return operation.find_rows(values[position]) <= left and (
        operation.find_rows(values[position + 1]) <= right
    )


def keeps_precision(operation: Operation) -> bool:
    """Return whether no number is rounded to a whole one, or to a flag."""
    has_fractions = any(t.is_floating_point() or t.is_complex() for t in operation.inputs)
    return all(
        t.is_floating_point() or t.is_complex() or not (has_fractions or t.dtype is torch.bool)
        for t in operation.results
    )


def _is_reduction_by_row(operation: Operation) -> bool:
    """Return whether a sum or maximum is one of each row, or of all rows, which is a total."""
    dims, rows = operation.list_dims(), operation.find_rows(operation.inputs[0])
    if dims is not None and dims.isdisjoint(rows):
        return True
    # A total has to be linear in what the rows are: a maximum or a deviation of rows is none.
    # Whole numbers and flags are for Python, which other watches follow.
    result = operation.results[0]
    is_linear = operation.name in _LINEAR_REDUCTIONS or not result.is_floating_point()
    return is_linear and not operation.find_rows(result)


_MASK_TYPES = frozenset((torch.bool, torch.uint8))


def has_positions(operation: Operation) -> bool:
    """Return whether the results are the positions of the rows, or the same in another layout."""
    if operation.name == "arange":
        start, step = (operation.arguments.get(k, d) for k, d in (("start", 0), ("step", 1)))
        return (start, step) == (0, 1) and any(map(operation.find_rows, operation.results))
    names = "view", "reshape_alias", "to_copy"
    return operation.name in names and id(operation.inputs[0]) in operation.positions


def _is_lookup_by_row(operation: Operation) -> bool:
    """Return whether an index takes something of each row, or looks rows up in a table."""
    tensor, indices = operation.list_values()[:2]
    if any(i is not None and i.dtype in _MASK_TYPES and i.dim() > 1 for i in indices):
        return not operation.find_rows(tensor)  # one mask takes several dims
    for dim in operation.find_rows(tensor):
        index = indices[dim] if dim < len(indices) else None
        if index is None:
            continue
        # Other numbers may be the positions of the rows by chance. A single row shows nothing.
        is_position = id(index) in operation.positions and index.dtype not in _MASK_TYPES
        if not is_position or operation.row_count < 2:
            return False
        numbers = torch.arange(tensor.shape[dim], device=index.device)
        if not torch.equal(index.flatten(), numbers):
            return False
    return True


def _is_written_by_row(operation: Operation) -> bool:
    """Return whether an index writes to each row what is that row's, or one number by a mask."""
    tensor, indices, values = operation.list_values()[:3]
    rows = operation.find_rows(tensor)
    is_mask = len(indices) == 1 and indices[0].dtype in _MASK_TYPES
    if is_mask and values.numel() == 1 and not operation.find_rows(values):
        return operation.find_rows(indices[0]) == rows
    return bool(rows) and _is_lookup_by_row(operation)


def _is_joined_by_row(operation: Operation) -> bool:
    """Return whether tensors are joined along another dim than that of the rows."""
    (result,) = operation.results
    rows = operation.find_rows(result)
    dim = int(operation.arguments["dim"]) % result.dim()
    return bool(rows) and dim not in rows


def _is_table_lookup(operation: Operation) -> bool:
    """Return whether rows look something up in a table, which itself has no rows."""
    return not operation.find_rows(operation.list_values()[0])


def _is_bucket_lookup(operation: Operation) -> bool:
    """Return whether rows are looked up among limits that have no rows."""
    return not operation.find_rows(operation.list_values()[1])


def _is_batch_norm_by_row(operation: Operation) -> bool:
    """Return whether each row has statistics of its own, or those of training are used.

    Each entry of dim 1 has statistics of its own. The rows of an instance norm are on that dim, and
    on dim 0 of its weights.
    """
    tensor, *weights = operation.inputs
    rows = operation.find_rows(tensor)
    if rows == {1}:
        return all(operation.find_rows(weight) <= {0} for weight in weights)
    is_fixed = operation.arguments.get("training") is False
    return is_fixed and rows == {0} and not any(map(operation.find_rows, weights))


def _is_pad_by_row(operation: Operation) -> bool:
    """Return whether what changes the size of dims leaves that of the rows."""
    (tensor,), (result,) = operation.inputs, operation.results
    # They begin with the last dim. `(0, 0, 1, -1)` shifts the rows of a matrix by one.
    pads = operation.arguments.get("pad", ())
    if len(pads) >= 2 * tensor.dim() and any(pads[-2:]):
        return False
    return operation.find_rows(tensor) == operation.find_rows(result) == {0}


def _is_layer_norm_by_row(operation: Operation) -> bool:
    """Return whether the dims of a norm are all behind that of the rows."""
    tensor, sizes = operation.list_values()[:2]
    return bool(max(operation.find_rows(tensor), default=-1) < tensor.dim() - len(sizes))


def _is_slice_by_row(operation: Operation) -> bool:
    """Return whether a slice takes the same part of each row, or all rows."""
    dims = operation.list_dims()
    (tensor, *_), (result, *_) = operation.inputs, operation.results
    rows = operation.find_rows(tensor)
    return dims is None or dims.isdisjoint(rows) or result.shape == tensor.shape


def _is_view_by_row(operation: Operation) -> bool:
    """Return whether another shape leaves the numbers of each row in rows of the result."""
    return _count_view_blocks(operation) is not None


def _count_view_blocks(operation: Operation) -> int | None:
    """Return how many blocks of all rows the dim of the rows has in another shape.

    Row r has the numbers at the flat positions p where p // inner % rows == r. They are on a dim of
    the result if its blocks divide those before: `(time, rows, dim)` as `(time * rows, dim)` has
    one block of all rows for each time. None: `(time * rows, dim)` as `(rows, time, dim)`.
    """
    tensor, result = operation.inputs[0], operation.results[0]
    for dim in operation.find_rows(tensor):
        before = math.prod(tensor.shape[:dim]) * operation.count_blocks(tensor)
        for other in operation.find_rows(result):
            blocks, rest = divmod(before, math.prod(result.shape[:other]))
            if blocks and not rest and not result.shape[other] % (blocks * operation.row_count):
                return blocks
    return None


def count_result_blocks(operation: Operation) -> int | None:
    """Return how often rows are repeated on their dim in the results. None: not in one way."""
    base = operation.name.strip("_")
    if _RULES.get(base) is _is_view_by_row:
        return _count_view_blocks(operation)
    tensors = operation.list_with_rows()
    counts = set(map(operation.count_blocks, tensors))
    if len(counts) > 1:
        return None
    (blocks,) = counts
    if base == "repeat":
        (tensor,), (result,) = operation.inputs, operation.results
        offset = result.dim() - tensor.dim()
        for dim in operation.find_rows(tensor):
            blocks *= result.shape[dim + offset] // tensor.shape[dim]
        return blocks
    with_rows = (*tensors, *(t for t in operation.results if operation.find_rows(t)))
    sizes = {tensor.shape[dim] for tensor in with_rows for dim in operation.find_rows(tensor)}
    return blocks if blocks == 1 or len(sizes) == 1 else None


def _is_matrix_operation_by_row(operation: Operation) -> bool:
    """Return whether each row has matrices of its own, on the last two dims."""
    return all(max(operation.find_rows(t), default=-1) < t.dim() - 2 for t in operation.inputs)


def _is_choice_by_row(operation: Operation) -> bool:
    """Return whether entries are chosen for each row, and not among the rows."""
    tensor = operation.inputs[0]
    return max(operation.find_rows(tensor), default=-1) < tensor.dim() - 1


def _is_rnn_by_row(operation: Operation) -> bool:
    """Return whether the steps of a recurrence are on another dim than the rows."""
    # oneDNN gets time first even if `batch_first` is set; cuDNN gets what the user has passed.
    is_batch_first = operation.name == "cudnn_rnn" and bool(operation.arguments["batch_first"])
    return operation.find_rows(operation.inputs[0]) == ({0} if is_batch_first else {1})


def _may_mix_rows(operation: Operation) -> bool:
    """Return False: the operation may mix rows, whatever its arguments are."""
    return False


_RULES: dict[str, Callable[[Operation], bool]] = {
    "cat": _is_joined_by_row,
    "index": _is_lookup_by_row,
    "unsafe_index": _is_lookup_by_row,
    "index_put": _is_written_by_row,
    "embedding": _is_table_lookup,
    "searchsorted": _is_table_lookup,
    "bucketize": _is_bucket_lookup,
    "isin": _is_bucket_lookup,
    "native_layer_norm": _is_layer_norm_by_row,
    "fused_rms_norm": _is_layer_norm_by_row,
    "slice": _is_slice_by_row,
    "view": _is_view_by_row,
    "reshape_alias": _is_view_by_row,
    "multinomial": _is_choice_by_row,
    "tril": _is_matrix_operation_by_row,
    "triu": _is_matrix_operation_by_row,
    "mkldnn_rnn_layer": _is_rnn_by_row,
    "cudnn_rnn": _is_rnn_by_row,
    # Their dims are the ones that are kept, or they look at entries in all others.
    "renorm": _may_mix_rows,
    "weight_norm_interface": _may_mix_rows,
    "unique_dim": _may_mix_rows,
    "unique_consecutive": _may_mix_rows,
}
