"""Whether the operations of a forward compute every row by itself.

A few rows that run together and apart show no mixing that needs more rows or other numbers: pairs
that are nearer than a limit, an expert that is full, a maximum over rows behind a threshold. The
operations show it. The forward runs with two numbers of rows anyway, so the dims that have other
sizes are those of the rows:

    one row           two rows          rows are on
    mm (1, 8) (8, 4)  mm (2, 8) (8, 4)  dim 0, and the product adds up dim 1: row by row
    mm (1, 8) (8, 1)  mm (2, 8) (8, 2)  two dims of the result: a table of pairs
    cumsum(0) (1, 8)  cumsum(0) (2, 8)  the dim along which it adds up

The rules are in row_rules.py. If they do not know an operation, the whole batch is compared
(rows.py). Code that PyTorch's function modes do not see, such as `torch.jit.script`, has the same
operations.

A sum over rows, as in a loss, has no rows any more. It is a total, and what follows must be linear.
A total must not meet rows again: `x - x.mean(0)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.nested_values import list_operands
from penstock.runtime.audit.row_rules import (
    CONSTANT,
    DECISIONS,
    Operation,
    count_result_blocks,
    has_positions,
    is_row_by_row,
    keeps_precision,
)
from penstock.runtime.audit.write_log import get_storage_address, list_written
from penstock.stage.row_means import split_names
from penstock.torch_compat import (
    CompileFriendlyDispatchMode,
    pop_dispatch_mode,
    push_dispatch_mode,
)

Shape = tuple[int, ...]

# Operations that are linear in totals. A product or a quotient has one total.
_LINEAR = split_names(
    """
    add sub rsub neg sum mean stack cat clone detach alias to_copy view unsafe_view expand squeeze
    unsqueeze reshape_alias select slice permute transpose t unbind split lift_fresh
    """
)

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
_UNRECORDED_IDS = frozenset(map(id, _UNRECORDED))  # their hash is computed in Python
# Those that return memory without numbers.
_EMPTY = split_names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
_RESIZES = (
    torch.ops.aten.resize_.default,
    torch.ops.aten.resize_as_.default,
    torch.ops.aten.set_.source_Tensor,
    torch.ops.aten.set_.source_Storage_storage_offset,
)


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
        inputs, results = list_operands(args), list_operands(result)
        if kwargs:
            inputs += list_operands(kwargs)
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
        operation = Operation(
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

    def _follow(self, func: Any, operation: Operation) -> None:
        has_rows = any(id(tensor) in operation.row_dims for tensor in operation.inputs)
        has_total = self._has_totals(operation.inputs)
        if has_rows and has_total:
            self.problem = f"{func} takes a total of rows and rows"
        elif has_rows:
            if not is_row_by_row(func, operation):
                self.problem = f"{func} may mix rows"
            blocks = count_result_blocks(operation)
            if blocks is None:
                self.problem = f"{func} takes rows in different orders"
            elif blocks > 1:
                self._blocks.update({id(tensor): (tensor, blocks) for tensor in operation.results})
            if operation.name in CONSTANT:
                return
            totals = {id(t): t for t in operation.results if id(t) not in operation.row_dims}
            self._totals.update(totals)
            if not keeps_precision(operation) or operation.name in DECISIONS:
                self._decisions.update(totals)
        elif has_total:
            self._follow_total(func, operation)
        elif results_with_rows := [t for t in operation.results if operation.find_rows(t)]:
            # Views of a part of it: `table[:len(x)] = x` writes rows to a tensor without rows.
            tables = {get_storage_address(tensor): tensor for tensor in operation.inputs}
            viewed = {
                address: tables[address]
                for address in map(get_storage_address, results_with_rows)
                if address in tables
            }
            self._tables |= viewed
            # The entries of the first rows may be equal, and others not: `table[:len(x)] * x`.
            if viewed:
                self.problem = f"{func} takes entries of a table by the positions of rows"
        if has_positions(operation):
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

    def _follow_total(self, func: Any, operation: Operation) -> None:
        name = operation.name
        values = operation.list_values()
        totals = [id(value) in self._totals for value in values]
        is_scaled = name == "mul" or (name == "div" and totals[0])
        is_linear = (
            (name.strip("_") in _LINEAR or (is_scaled and sum(totals) == 1))
            and operation.arguments.get("rounding_mode") is None
            and keeps_precision(operation)
            and not any(id(tensor) in self._decisions for tensor in operation.inputs)
        )
        if not is_linear:
            if any(t.is_floating_point() or t.is_complex() for t in operation.results):
                self.problem = f"{func} of a total of rows is not linear"
            self._decisions.update({id(tensor): tensor for tensor in operation.results})
        if name.endswith("_"):
            self.problem = self.problem or f"{func} writes a total of rows"
        self._totals.update({id(tensor): tensor for tensor in operation.results})


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
