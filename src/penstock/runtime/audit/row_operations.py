"""Whether the operations of a forward compute every row by itself.

A few rows that run together and apart show no mixing that needs more rows or other numbers: pairs
that are nearer than a limit, an expert that is full, a maximum over rows behind a threshold. The
operations show it. The forward runs with two numbers of rows anyway, so the dims that have other
sizes are those of the rows:

    one row           two rows          rows are on
    mm (1, 8) (8, 4)  mm (2, 8) (8, 4)  dim 0, and the product adds up dim 1: row by row
    mm (1, 8) (8, 1)  mm (2, 8) (8, 2)  two dims of the result: a table of pairs
    cumsum(0) (1, 8)  cumsum(0) (2, 8)  the dim along which it adds up

An operation is known to compute row by row only if a rule here says so. Otherwise nothing is
wrong: the whole batch is compared (rows.py). So an unknown operation costs time, and no rule has to
be complete. Code that PyTorch's function modes do not see, such as `torch.jit.script`, has the same
operations.

A sum over rows, as in a loss, has no rows any more. It is a total, and what follows must be linear.
A total must not meet rows again: `x - x.mean(0)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.runtime.audit.write_log import get_storage_address, list_written
from penstock.state_copy import SCALAR_TYPES
from penstock.torch_compat import (
    CompileFriendlyDispatchMode,
    pop_dispatch_mode,
    push_dispatch_mode,
)

Shape = tuple[int, ...]


def _split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The names of operations by their rules, without the underscores around them. Those that PyTorch
# marks as pointwise are not listed.
_FREE = _split_names(
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
_CONSTANT = _split_names(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
)
_REDUCTIONS = _split_names(
    """
    sum nansum mean nanmean prod std var std_mean var_mean max min amax amin aminmax any all
    argmax argmin median nanmedian norm linalg_vector_norm logsumexp count_nonzero dot vdot
    """
)
_LINEAR_REDUCTIONS = _split_names("sum nansum mean count_nonzero dot vdot")
# Those whose result says which rows there are, and not how many.
_DECISIONS = _REDUCTIONS - _LINEAR_REDUCTIONS
_LOSSES = re.compile("loss|binary_cross_entropy")
# Each entry of their tensors is computed by itself.
_ENTRY_LOSSES = re.compile("(mse|l1|smooth_l1|huber|soft_margin)_loss|binary_cross_entropy")
# Each entry of their first dim is computed by itself.
_BATCHED = re.compile("conv(?!_tbc|ert)|pool|upsample|grid_sampler|scaled_dot_product|group_norm")
_PADS = re.compile("_pad|pixel_(un)?shuffle|im2col|col2im")
# The positions of the factors of products, and the dims of each that are not summed.
_PRODUCTS: dict[str, tuple[int, frozenset[int], frozenset[int]]] = {
    "mm": (0, frozenset({0}), frozenset({1})),
    "addmm": (1, frozenset({0}), frozenset({1})),
    "mv": (0, frozenset({0}), frozenset()),
    "addmv": (1, frozenset({0}), frozenset()),
    "bmm": (0, frozenset({0, 1}), frozenset({0, 2})),
    "baddbmm": (1, frozenset({0, 1}), frozenset({0, 2})),
}
# Operations that are linear in totals. A product or a quotient has one total.
_LINEAR = _split_names(
    """
    add sub rsub neg sum mean stack cat clone detach alias to_copy view unsafe_view expand squeeze
    unsqueeze reshape_alias select slice permute transpose t unbind split lift_fresh
    """
)
_DIM_NAMES = frozenset(("dim", "dims", "dimension", "dim0"))


# They only show another layout, which the next operation has, and they differ for a single row: it
# is contiguous in more layouts, so that `reshape` need not copy it, and need not be expanded.
_UNRECORDED = (
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
)
# Those that return memory without numbers.
_EMPTY = _split_names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
_RESIZES = (
    torch.ops.aten.resize_.default,
    torch.ops.aten.resize_as_.default,
    torch.ops.aten.set_.source_Tensor,
    torch.ops.aten.set_.source_Storage_storage_offset,
)
_UNRECORDED_IDS = frozenset(map(id, _UNRECORDED))  # their hash is computed in Python


class _Operation(NamedTuple):
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
        if tensor is None:
            return None
        if not named:
            return None
        dims: set[int] = set()
        for name in named:
            value = self.arguments[name]
            values = value if isinstance(value, list | tuple) else [value]
            if value is None or not values:
                return set(range(tensor.dim()))
            dims |= {int(dim) % max(tensor.dim(), 1) for dim in values}
        return dims


class _Call(NamedTuple):
    func: Any
    shapes: Sequence[Shape]  # of its tensors and of its results


class RowOperations(CompileFriendlyDispatchMode):
    """Records the operations of a forward, or compares them with those for other rows.

    Args:
        row_count: The number of rows of this forward.
        other: A record of a forward of another number of rows. None: to record only.

    Attributes:
        problem: Why it is not known that each row is computed by itself, or None.
    """

    supports_higher_order_operators = True

    def __init__(self, row_count: int, other: RowOperations | None = None) -> None:
        super().__init__()
        self.row_count, self._other = row_count, other
        self._calls: list[_Call] = []
        self._totals: dict[int, Tensor] = {}  # by id
        # Those that are not linear in the rows: `x.mean() > 5`. They are for Python, and may not
        # become numbers again.
        self._decisions: dict[int, Tensor] = {}
        # By id, with the tensor. On the dim of the rows there may be several blocks of all rows: a
        # `view` joins dims before that of the rows with it, and may take only those apart again.
        self._blocks: dict[int, tuple[Tensor, int]] = {}
        self._positions: dict[int, Tensor] = {}  # by id, those that hold the positions of the rows
        # By the address of their memory. Views with rows have been taken of tensors without rows.
        self._tables: dict[int, Tensor] = {}
        # Kernels that the dispatcher does not see (Triton, pybind) write to those that are empty.
        self._unwritten: dict[int, Tensor] = {}
        self.problem: str | None = None

    @property
    def is_comparison(self) -> bool:
        """Return whether it compares the operations with others."""
        return self._other is not None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at the operations of this thread."""
        push_dispatch_mode(self)
        try:
            yield
        finally:
            pop_dispatch_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and note the sizes of its tensors."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        try:
            self._note(func, args, kwargs, result)
        except Exception as error:  # an operation with arguments that no rule expects
            problem = f"{func} cannot be followed: {type(error).__name__}: {error}"
            self.problem = self.problem or problem
        return result

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        inputs, results = _list_tensors(args), _list_tensors(result)
        if kwargs:
            inputs += _list_tensors(kwargs)
        if id(func) in _UNRECORDED_IDS:
            self._follow_layout(inputs[0], results[0])
            return
        if func is torch.ops.aten._unsafe_view.default:  # the other half of such a `reshape`
            func = torch.ops.aten.view.default
        if self._other is not None:
            self._follow_memory(func, inputs, results, list_written(func, args, kwargs))
        shapes = [tensor.shape for tensor in (*inputs, *results)]
        self._calls.append(_Call(func, shapes))
        if self._other is None or self.problem is not None:
            return
        calls = self._other._calls
        index = len(self._calls) - 1
        if index >= len(calls) or calls[index].func is not func:
            self.problem = f"other operations run for another number of rows, at {func}"
            return
        others = calls[index].shapes
        if shapes == others and not self._totals:
            return  # no rows
        if [*map(len, shapes)] != [*map(len, others)]:
            self.problem = f"{func} has other dims for another number of rows"
            return
        row_dims = {}
        for tensor, shape, other in zip((*inputs, *results), shapes, others, strict=True):
            dims = frozenset([i for i, size in enumerate(shape) if size != other[i]])
            if len(dims) > 1:
                self.problem = f"{func} has rows on two dims, as a table of pairs"
                return
            for dim in dims:
                if shape[dim] * self._other.row_count != other[dim] * self.row_count:
                    self.problem = f"{func} has a dim that does not grow with the rows"
                    return
            if dims:
                row_dims[id(tensor)] = dims
        schema = getattr(func, "_schema", None)
        if schema is None:
            if row_dims or self._has_totals(inputs):
                self.problem = f"nothing is known of {func}"
            return
        defaults = _get_defaults(func)
        operation = _Operation(
            schema.name.partition("::")[2].strip("_") + ("_" if schema.is_mutable else ""),
            {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs},
            inputs,
            results,
            row_dims,
            self.row_count,
            self._blocks,
            self._positions.keys(),
        )
        self._follow(func, operation)

    def finish(self) -> None:
        """Note if the other forward has run more operations."""
        if self._other is not None and len(self._other._calls) != len(self._calls):
            self.problem = self.problem or "fewer operations run for another number of rows"
        if self._unwritten:  # it may be the output
            self.problem = self.problem or "a tensor holds what PyTorch has not written"

    def _has_totals(self, tensors: Sequence[Tensor]) -> bool:
        return any(id(tensor) in self._totals for tensor in tensors)

    def _follow(self, func: Any, operation: _Operation) -> None:
        has_rows = any(id(tensor) in operation.row_dims for tensor in operation.inputs)
        has_total = self._has_totals(operation.inputs)
        if has_rows and has_total:
            self.problem = f"{func} takes a total of rows and rows"
        elif has_rows:
            if not _is_row_by_row(func, operation):
                self.problem = f"{func} may mix rows"
            blocks = _count_result_blocks(operation)
            if blocks is None:
                self.problem = f"{func} takes rows in different orders"
            elif blocks > 1:
                self._blocks.update({id(tensor): (tensor, blocks) for tensor in operation.results})
            if operation.name in _CONSTANT:
                return
            totals = {id(t): t for t in operation.results if id(t) not in operation.row_dims}
            self._totals.update(totals)
            if not _keeps_precision(operation) or operation.name in _DECISIONS:
                self._decisions.update(totals)
        elif has_total:
            self._follow_total(func, operation)
        elif results_with_rows := [t for t in operation.results if operation.find_rows(t)]:
            # Views of a part of it: `table[:len(x)] = x` writes rows to a tensor without rows.
            tables = {get_storage_address(tensor): tensor for tensor in operation.inputs}
            self._tables |= {
                address: tables[address]
                for address in map(get_storage_address, results_with_rows)
                if address in tables
            }
        if _has_positions(operation):
            self._positions.update({id(tensor): tensor for tensor in operation.results})

    def _follow_layout(self, tensor: Tensor, result: Tensor) -> None:
        """Note that a tensor is another one in another layout."""
        for table in (self._totals, self._decisions, self._positions):
            if id(tensor) in table:
                table[id(result)] = result
        if id(tensor) in self._blocks:
            self._blocks[id(result)] = result, self._blocks[id(tensor)][1]

    def _follow_memory(
        self,
        func: Any,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        written: Sequence[Any],
    ) -> None:
        """Note what writes to memory that other tensors show, or that no operation has written."""
        if func in _RESIZES:
            self.problem = self.problem or f"{func} changes the size of a tensor"
        addresses = {get_storage_address(t) for t in written if isinstance(t, Tensor)}
        if addresses & self._tables.keys():
            self.problem = self.problem or f"{func} writes to some entries of a table"
        for key, tensor in list(self._positions.items()) if addresses else ():
            if get_storage_address(tensor) in addresses:
                del self._positions[key]
        name = func.__name__.partition(".")[0]
        if name in _EMPTY:
            self._unwritten.update({get_storage_address(t): t for t in results if t.numel()})
        elif self._unwritten:
            for address in addresses:
                self._unwritten.pop(address, None)
            read = {get_storage_address(tensor) for tensor in inputs} & self._unwritten.keys()
            if read - {get_storage_address(tensor) for tensor in results}:
                self.problem = self.problem or f"{func} reads what PyTorch has not written"

    def _follow_total(self, func: Any, operation: _Operation) -> None:
        name = operation.name
        values = operation.list_values()
        totals = [id(value) in self._totals for value in values]
        is_scaled = name == "mul" or (name == "div" and totals[0])
        is_linear = (
            (name.strip("_") in _LINEAR or (is_scaled and sum(totals) == 1))
            and operation.arguments.get("rounding_mode") is None
            and _keeps_precision(operation)
            and not any(id(tensor) in self._decisions for tensor in operation.inputs)
        )
        if not is_linear:
            if any(t.is_floating_point() or t.is_complex() for t in operation.results):
                self.problem = f"{func} of a total of rows is not linear"
            self._decisions.update({id(tensor): tensor for tensor in operation.results})
        if name.endswith("_"):
            self.problem = self.problem or f"{func} writes a total of rows"
        self._totals.update({id(tensor): tensor for tensor in operation.results})


def _list_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in an argument or in several. It is called for each operation."""
    kind = type(values)
    if kind in _TENSOR_TYPES:
        return [values]
    if kind in SCALAR_TYPES:  # PyTorch asks Python whether one is a tensor
        return []
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    tensors = []
    for value in values:
        if type(value) in _TENSOR_TYPES:
            tensors.append(value)
        elif type(value) not in SCALAR_TYPES:
            tensors += _list_tensors(value)
    return tensors


_TENSOR_TYPES = frozenset((Tensor, torch.nn.Parameter))


def _get_defaults(func: Any) -> dict[str, Any]:
    """Return the names of the arguments of an operation, with their default values."""
    entry = _defaults.get(id(func))
    if entry is None or entry[0] is not func:
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        entry = _defaults[id(func)] = func, defaults
    return entry[1]


# By id of an operation, with the operation: its hash is computed in Python. There are about as many
# entries as PyTorch has operations.
_defaults: dict[int, tuple[Any, dict[str, Any]]] = {}


def _is_row_by_row(func: Any, operation: _Operation) -> bool:
    """Return whether an operation on rows is known to compute each row, or a total, by itself."""
    name = operation.name
    base = name.strip("_")
    if func.namespace != "aten":  # a rule is of what PyTorch means by a name
        return False
    if name in _FREE or base in _FREE or _is_pointwise(func):
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
    if _PADS.search(base):
        return _is_pad_by_row(operation)
    if base == "linalg_check_errors":  # raises, and returns nothing
        return True
    if base.startswith("linalg_"):
        return all(max(operation.find_rows(t), default=-1) < t.dim() - 2 for t in operation.inputs)
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
    operation: _Operation, position: int, left: frozenset[int], right: frozenset[int]
) -> bool:
    values = operation.list_values()
    return operation.find_rows(values[position]) <= left and (
        operation.find_rows(values[position + 1]) <= right
    )


def _keeps_precision(operation: _Operation) -> bool:
    """Return whether no number is rounded to a whole one, or to a flag."""
    has_fractions = any(t.is_floating_point() or t.is_complex() for t in operation.inputs)
    return all(
        t.is_floating_point() or t.is_complex() or not (has_fractions or t.dtype is torch.bool)
        for t in operation.results
    )


def _is_reduction_by_row(operation: _Operation) -> bool:
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


def _has_positions(operation: _Operation) -> bool:
    """Return whether the results are the positions of the rows, or the same in another layout."""
    if operation.name == "arange":
        start, step = (operation.arguments.get(k, d) for k, d in (("start", 0), ("step", 1)))
        return (start, step) == (0, 1) and any(map(operation.find_rows, operation.results))
    names = "view", "reshape_alias", "to_copy"
    return operation.name in names and id(operation.inputs[0]) in operation.positions


def _is_lookup_by_row(operation: _Operation) -> bool:
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


def _is_written_by_row(operation: _Operation) -> bool:
    """Return whether an index writes to each row what is that row's, or one number by a mask."""
    tensor, indices, values = operation.list_values()[:3]
    rows = operation.find_rows(tensor)
    is_mask = len(indices) == 1 and indices[0].dtype in _MASK_TYPES
    if is_mask and values.numel() == 1 and not operation.find_rows(values):
        return operation.find_rows(indices[0]) == rows
    return bool(rows) and _is_lookup_by_row(operation)


def _is_joined_by_row(operation: _Operation) -> bool:
    """Return whether tensors are joined along another dim than that of the rows."""
    (result,) = operation.results
    rows = operation.find_rows(result)
    dim = int(operation.arguments["dim"]) % result.dim()
    return bool(rows) and dim not in rows


def _is_table_lookup(operation: _Operation) -> bool:
    """Return whether rows look something up in a table, which itself has no rows."""
    return not operation.find_rows(operation.list_values()[0])


def _is_bucket_lookup(operation: _Operation) -> bool:
    return not operation.find_rows(operation.list_values()[1])


def _is_batch_norm_by_row(operation: _Operation) -> bool:
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


def _is_pad_by_row(operation: _Operation) -> bool:
    """Return whether what changes the size of dims leaves that of the rows."""
    (tensor,), (result,) = operation.inputs, operation.results
    # They begin with the last dim. `(0, 0, 1, -1)` shifts the rows of a matrix by one.
    pads = operation.arguments.get("pad", ())
    if len(pads) >= 2 * tensor.dim() and any(pads[-2:]):
        return False
    return operation.find_rows(tensor) == operation.find_rows(result) == {0}


def _is_layer_norm_by_row(operation: _Operation) -> bool:
    tensor, sizes = operation.list_values()[:2]
    return bool(max(operation.find_rows(tensor), default=-1) < tensor.dim() - len(sizes))


def _is_slice_by_row(operation: _Operation) -> bool:
    """Return whether a slice takes the same part of each row, or all rows."""
    dims = operation.list_dims()
    (tensor, *_), (result, *_) = operation.inputs, operation.results
    rows = operation.find_rows(tensor)
    return dims is None or dims.isdisjoint(rows) or result.shape == tensor.shape


def _is_view_by_row(operation: _Operation) -> bool:
    """Return whether another shape leaves the numbers of each row in rows of the result."""
    return _count_view_blocks(operation) is not None


def _count_view_blocks(operation: _Operation) -> int | None:
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


def _count_result_blocks(operation: _Operation) -> int | None:
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


def _is_triangle_by_row(operation: _Operation) -> bool:
    tensor = operation.inputs[0]
    return max(operation.find_rows(tensor), default=-1) < tensor.dim() - 2


def _is_choice_by_row(operation: _Operation) -> bool:
    """Return whether entries are chosen for each row, and not among the rows."""
    tensor = operation.inputs[0]
    return max(operation.find_rows(tensor), default=-1) < tensor.dim() - 1


def _is_rnn_by_row(operation: _Operation) -> bool:
    # oneDNN gets time first even if `batch_first` is set; cuDNN gets what the user has passed.
    is_batch_first = operation.name == "cudnn_rnn" and bool(operation.arguments["batch_first"])
    return operation.find_rows(operation.inputs[0]) == ({0} if is_batch_first else {1})


def _never(operation: _Operation) -> bool:
    return False


_RULES: dict[str, Callable[[_Operation], bool]] = {
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
    "tril": _is_triangle_by_row,
    "triu": _is_triangle_by_row,
    "mkldnn_rnn_layer": _is_rnn_by_row,
    "cudnn_rnn": _is_rnn_by_row,
    # Their dims are the ones that are kept, or they look at entries in all others.
    "renorm": _never,
    "weight_norm_interface": _never,
    "unique_dim": _never,
    "unique_consecutive": _never,
}
