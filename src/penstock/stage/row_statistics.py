"""Numbers of several rows that Python reads, computed for the whole batch as well.

A layer may go by a sum, a deviation or a norm of its rows: `if x.std() > 3`. All micro-batches may
go one way, and the batch another way. So the operations that lead from rows to such a number are
noted, and repeated after the step on the rows of all micro-batches together:

    micro-batch 0    x0.sum() > 10    False
    micro-batch 1    x1.sum() > 10    False
    the batch        torch.cat([x0, x1]).sum() > 10    perhaps True

Many numbers need no such comparison, as that of the batch lies between those of its micro-batches:
`mask.all()`, `x.max() > 3`, a mean. Only where a forward has others, its operations are followed.

A number may also meet rows again without Python: `torch.where(x.sum() > 10, y, z)`,
`x / x.norm().clamp(min=4)`. It must be the same for all micro-batches and for the batch then, or
the whole batch is compared. (Where it never is the same, few rows show it.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.nested_values import iter_tensors, list_operands, map_tensors
from penstock.torch_compat import is_functorch_active, unwrap_transformed

# The names of functions that reduce the dims of their argument `dim`, with its position.
_DIM_POSITIONS = {
    **dict.fromkeys(
        (
            *("sum", "nansum", "mean", "nanmean", "prod", "std", "var", "logsumexp", "any", "all"),
            *("max", "min", "amax", "amin", "median", "nanmedian", "count_nonzero", "argmax"),
            *("argmin", "std_mean", "var_mean"),
        ),
        1,
    ),
    **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm", "quantile", "nanquantile"), 2),
}
# Those whose result for a batch lies between its results for the micro-batches.
_BETWEEN = frozenset(("any", "all", "max", "min", "amax", "amin", "mean"))
# They return a number that is one of the entries, and not one of several rows.
_ENTRIES = frozenset(("__getitem__", "select", "squeeze", "view", "reshape", "__get__"))
# Functions that keep the order of numbers.
_MONOTONE = frozenset(
    (
        *("gt", "lt", "ge", "le", "eq", "ne", "add", "sub", "mul", "div", "truediv", "to", "float"),
        *("double", "int", "long", "bool", "logical_not", "invert", "squeeze", "view", "reshape"),
        *("detach", "cpu", "radd", "rmul", "clone"),
    )
)


@dataclass(frozen=True, eq=False)
class _Operation:
    """An operation on rows, or on numbers that were computed from them.

    Attributes:
        function: The function.
        args: Its arguments. Operations stand for what they have returned.
        kwargs: Its arguments by name.
        index: Which of several results is meant, or None.
        is_between: Whether the result for a batch lies between those for its micro-batches.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None
    is_between: bool


class _CannotJoinError(Exception):
    """The rows of the micro-batches cannot be joined."""


def _cannot_join() -> None:
    raise _CannotJoinError


_UNKNOWN = _Operation(_cannot_join, (), {}, None, is_between=False)
_unknown_count = itertools.count()


class StatisticRead(NamedTuple):
    """A number of several rows that Python has read.

    Attributes:
        outcome: What was read. A tensor: it met rows.
        operation: The operation that computed it.
        versions: The versions of the tensors that it was computed from.
    """

    outcome: Any
    operation: _Operation
    versions: tuple[int, ...]


class RowStatistics:
    """Follows the operations of a forward from rows to numbers that Python reads.

    Attributes:
        reads: The numbers that were read, if that of the batch need not lie between those of its
            micro-batches, and those that met rows.
        meets_rows: Whether one met rows.
    """

    def __init__(self) -> None:
        self._operations: dict[int, tuple[Tensor, _Operation]] = {}  # by id of the result
        self._constants: dict[int, Tensor] = {}  # computed from parameters alone, by id
        self.reads: list[StatisticRead] = []
        self.meets_rows = False
        self._column_levels: set[int] = set()  # of each `vmap` that does not take rows apart

    def follow(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Note an operation that has returned numbers of several rows."""
        tensors = list_operands((*args, *kwargs.values()) if kwargs else args)
        if is_functorch_active() and self._is_vmapped(tensors):
            if self._column_levels and _reduces_rows(name, args, kwargs, out):
                self.meets_rows = True
                self.reads.append(StatisticRead(None, _UNKNOWN, ()))
            return
        if tensors and all(map(self._is_constant, tensors)):
            self._constants.update((id(tensor), tensor) for tensor in iter_tensors(out))
            return
        sources: Mapping[int, _Operation] = {}
        if self._operations:
            sources_by_id = [(id(t), self._find(t)) for t in tensors]
            sources = {key: source for key, source in sources_by_id if source is not None}
        if sources:
            others = (t for t in tensors if id(t) not in sources and t.dim())
            if not all(map(self._is_constant, others)):
                self._note_meeting(t for t in tensors if id(t) in sources)
                return
            is_single = len(sources) == 1 and name.strip("_") in _MONOTONE
            is_between = is_single and next(iter(sources.values())).is_between
        elif _reduces_rows(name, args, kwargs, out):
            is_between = name in _BETWEEN
        else:
            return
        # Not detached here: another watch may look for calls of `detach` in the forward.
        new_args, new_kwargs = map_tensors(
            (args, dict(kwargs)), lambda t: self._find(t) or unwrap_transformed(t)[0]
        )
        for index, tensor in enumerate([out] if isinstance(out, Tensor) else iter_tensors(out)):
            self._operations[id(tensor)] = (
                tensor,
                _Operation(
                    function,
                    new_args,
                    new_kwargs,
                    None if isinstance(out, Tensor) else index,
                    is_between,
                ),
            )

    def note_read(self, args: tuple[Any, ...], outcome: Any) -> None:
        """Note that Python has read a number, if it is one of several rows."""
        operation = self._find(args[0]) if args and isinstance(args[0], Tensor) else None
        if operation is not None and not operation.is_between:
            self._add_read(outcome, operation)

    def _note_meeting(self, tensors: Iterable[Tensor]) -> None:
        """Note that an operation takes numbers of several rows together with rows."""
        self.meets_rows = True
        for tensor in tensors:
            operation = self._find(tensor)
            assert operation is not None
            self._add_read(tensor, operation)

    def _add_read(self, outcome: Any, operation: _Operation) -> None:
        versions = tuple([_get_version(leaf) for leaf in _list_leaves(operation)])
        if isinstance(outcome, Tensor):
            outcome, _ = unwrap_transformed(outcome)
        self.reads.append(StatisticRead(outcome, operation, versions))

    def _is_vmapped(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether `torch.func.vmap` has taken one of these tensors apart, mostly by rows.

        What it computes for each row by itself does not mix them. Of columns, each has all rows.
        """
        batch_dims = [pair for tensor in tensors for pair in unwrap_transformed(tensor)[1]]
        self._column_levels.update(level for level, dim in batch_dims if dim)
        return bool(batch_dims)

    def _is_constant(self, tensor: Tensor) -> bool:
        # PyTorch asks Python whether a tensor is a parameter, which takes longer than its type.
        is_parameter = type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)
        return is_parameter or self._constants.get(id(tensor)) is tensor

    def take_reads(self) -> list[StatisticRead]:
        """Return the numbers that were read, without the graphs of what they were computed from."""
        return [
            read._replace(outcome=_detach(read.outcome), operation=_detach(read.operation))
            for read in self.reads
        ]

    def _find(self, tensor: Tensor) -> _Operation | None:
        followed, operation = self._operations.get(id(tensor), (None, None))
        return operation if followed is tensor else None


def _reduces_rows(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Return whether a function has computed a number of several rows, or one for each column."""
    if not args or not isinstance(args[0], Tensor) or not args[0].dim():
        return False
    if isinstance(out, Tensor) and not out.dim():
        return name not in _ENTRIES and not name.startswith("new_")
    position = _DIM_POSITIONS.get(name)
    if position is None:
        return False
    dims = kwargs.get("dim", args[position] if position < len(args) else None)
    dims = dims if isinstance(dims, tuple | list) else [dims]
    count = args[0].dim()
    return not dims or any(dim is None or (type(dim) is int and not dim % count) for dim in dims)


def _detach(value: Any) -> Any:
    """Return a value, or the arguments of an operation, with tensors that have no graph."""
    if isinstance(value, _Operation):
        args, kwargs = _detach(value.args), _detach(dict(value.kwargs))
        return replace(value, args=args, kwargs=kwargs)
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach()
    if type(value) in (tuple, list):
        return type(value)([_detach(item) for item in value])
    return {k: _detach(v) for k, v in value.items()} if type(value) is dict else value


def _get_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _list_leaves(operation: _Operation) -> list[Tensor]:
    leaves: list[Tensor] = []
    for value in (*operation.args, *operation.kwargs.values()):
        if isinstance(value, _Operation):
            leaves += _list_leaves(value)
        else:
            leaves += iter_tensors(value)
    return leaves


@torch.no_grad()
def find_whole_outcomes(reads: Sequence[Sequence[StatisticRead]]) -> tuple[Any, ...] | None:
    """Return the numbers that the batch would read, if a branch may go by the difference.

    Args:
        reads: The numbers that each micro-batch has read. All of them went the same way.

    Returns:
        None if all whole numbers and truth values are the same, and all other numbers lie between
        those of the micro-batches.
    """
    outcomes = []
    are_same = True
    for column in zip(*reads, strict=False):
        values = [read.outcome for read in column]
        try:
            with _preserve_generators(column):
                whole = _read_whole(column)
        except Exception:  # a function may not take so many rows
            return "unknown", next(_unknown_count)  # which was not compared before
        if isinstance(whole, Tensor):
            outcomes.append(whole.tolist())
            are_same &= all(torch.equal(value, whole) for value in values)
            continue
        outcomes.append(whole)
        if all(type(value) is float for value in values):
            # What Python does with it is not known. It is another one in each call.
            are_same &= min(values) <= whole <= max(values)
        else:
            are_same &= whole in values
    return None if are_same else tuple(map(repr, outcomes))


def _preserve_generators(column: Sequence[StatisticRead]) -> AbstractContextManager[None]:
    """Restore the default generators: an operation that is repeated may be one that draws."""
    leaves = [leaf for read in column for leaf in _list_leaves(read.operation)]
    devices = {leaf.device for leaf in leaves if leaf.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices}
    return torch.random.fork_rng(devices, **({"device_type": kinds.pop()} if kinds else {}))


def _read_whole(column: Sequence[StatisticRead]) -> Any:
    for read in column:
        # A detached tensor has the version of the one that it was made from.
        if read.versions != tuple(map(_get_version, _list_leaves(read.operation))):
            raise _CannotJoinError  # an operation in place has changed it since
    number = _compute_whole([read.operation for read in column])
    outcome = column[0].outcome
    if isinstance(outcome, Tensor):
        return number
    return bool(number) if isinstance(outcome, bool) else number.tolist()


def _compute_whole(operations: Sequence[_Operation]) -> Any:
    """Return what an operation of the micro-batches returns for all rows together."""
    function, index = operations[0].function, operations[0].index
    args = _join([operation.args for operation in operations])
    kwargs = _join([dict(operation.kwargs) for operation in operations])
    result = function(*args, **kwargs)
    return result if index is None else list(iter_tensors(result))[index]


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, _Operation):
        return _compute_whole(values)
    if isinstance(first, Tensor):
        has_rows = first.dim() and not isinstance(first, nn.Parameter)
        return torch.cat(list(values)) if has_rows else first
    if isinstance(first, tuple | list):
        return type(first)([_join(items) for items in zip(*values, strict=True)])
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values]) for key in first}
    return first
