"""Branches of a forward that may depend on all rows of its batch.

A layer may read a number of a tensor in Python and go by it: `if x.mean() > 0`. The unsplit model
decides once for all rows, and a pipe once for each micro-batch. Rows that are tried together and
apart show a difference only if they happen to go different ways. So the stages of such a model are
watched in each call (`BranchStageFunction`), and where micro-batches go different ways, the whole
batch is compared with them (`runtime/audit/`). So it is where the batch goes another way than all
of its micro-batches, by a sum or a deviation, say (row_statistics.py). Often the way makes no
difference: a mask that is skipped because it masks nothing, an expert without tokens.

The way of a micro-batch is a digest of the operations that follow the first number that was read,
with their plain arguments, and of the truth values and whole numbers that were read.

What NumPy or Python compute with many numbers does not show: `np.median(x.numpy())` and tensors
that are made of it. If micro-batches have read different ones, the whole batch is compared in each
call. Many whole numbers, such as lengths, are part of the way.

An operation that raises, and whose error the forward catches, decides like a number that is read:
`try: torch.linalg.cholesky(x)`. Those that raise for some numbers are tried in the audit, whether
the forward survives their error (`RowWatch.fail_at`). If so, their calls count as reads.

Operations that select among rows, such as `losses.topk(min(4, n))`, or add up the rows of a group,
such as `index_add`, depend on all rows in a way that few rows do not show. They are noted, too, and
so are comparisons of the number of rows itself (row_counts.py).

Many numbers that are read, and most dims that are selected from, have nothing to do with the rows:
a mask of `arange` tells whether sequences are packed, `unbind` takes query, key and value apart.
`RowWatch` helps to tell these apart: such a number is not computed from the rows, and is the same
for the whole batch; such a dim has the same size for other numbers of rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.nested_values import iter_tensors
from penstock.stage.compile_support import has_compiled_module
from penstock.stage.payload import find_memory_address
from penstock.stage.recompute import compute_product, in_recomputation
from penstock.stage.row_counts import RowCounts, may_have_numbers, unwrap_numbers
from penstock.stage.row_statistics import RowStatistics, StatisticRead, find_whole_outcomes
from penstock.stage.stage import Stage, StageFunction
from penstock.torch_compat import unwrap_transformed, without_dispatch_modes

# The names of functions that return a number of a tensor to Python.
_READS = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__index__", "__array__", "__dlpack__"),
        *("__contains__", "__format__", "__repr__", "item", "tolist", "numpy", "equal", "allclose"),
    )
)
# Those that may return many of them.
_ARRAY_READS = frozenset(("__array__", "__dlpack__", "numpy", "tolist"))
# The names of functions that return a tensor whose shape is a number of another one.
_SHAPE_READS = frozenset(
    ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
)
# Those whose sizes or plain numbers may be given as tensors, which the code of C reads: of those
# that have no tensor to begin with (`torch.arange(n)`), and of others (`x.expand(n, 4)`).
_SIZED_FACTORIES = frozenset(
    ("arange", "linspace", "zeros", "ones", "empty", "full", "eye", "rand", "randn", "randint")
)
_TENSOR_SIZES = _SIZED_FACTORIES.union(
    ("new_zeros", "new_ones", "new_empty", "new_full", "expand", "repeat", "tile", "view"),
    ("reshape", "narrow", "roll", "unflatten", "split", "topk"),
)
# Those whose result has a size that is a number of a tensor if an argument is left out, or is one.
_MAYBE_SHAPE_READS = frozenset(("where", "one_hot", "repeat_interleave"))
# The names of functions that select among the entries of a dim, with the position of their `dim`
# and its default.
_SELECTIONS: dict[str, tuple[int, int | None]] = {
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
    "msort": (1, 0),
    "median": (1, None),
    "nanmedian": (1, None),
    "quantile": (2, None),
    "nanquantile": (2, None),
    "narrow": (1, None),
    "index_select": (1, None),
    "split": (2, 0),
    "tensor_split": (2, 0),
    "chunk": (2, 0),
    "unbind": (1, 0),
    "select": (1, None),
    "__iter__": (1, 0),
}
_INDEXING = frozenset(("__getitem__", "__setitem__"))
# The names of functions that add up the entries of a dim by an index, such as rows of one group.
_GROUPINGS = frozenset(("index_add", "index_reduce", "scatter_add", "scatter_reduce"))
_PLAIN_TYPES = (bool, float, str)
# Functions whose whole numbers are not sizes.
_ARITHMETIC = frozenset(
    (
        *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "clamp", "clip"),
        *("radd", "rsub", "rmul", "rtruediv", "rpow", "gt", "lt", "ge", "le", "eq", "ne"),
    )
)


_LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
# The names of functions that raise for some numbers: a matrix that has no inverse.
RAISING_FUNCTIONS = frozenset(
    (
        *("cholesky", "inverse", "svd", "pinverse", "lobpcg"),
        *("linalg_cholesky", "linalg_inv", "linalg_pinv", "linalg_tensorinv", "linalg_cond"),
        *("linalg_solve", "linalg_lstsq", "linalg_tensorsolve", "linalg_matrix_power"),
        *("linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh"),
        *("linalg_svd", "linalg_svdvals", "linalg_lu_factor", "linalg_ldl_factor"),
    )
)
# The names of functions whose result depends on their plain arguments alone.
_CONSTANT_FUNCTIONS = frozenset(("arange", "zeros", "ones", "full", "tensor", "eye", "linspace"))
# Those that take the sizes, and no numbers, of a tensor.
_LIKE_FUNCTIONS = frozenset(
    ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor")
)
# In the names of functions whose result is random, or not initialised.
_DRAWS = re.compile("rand|drop|bernoulli|binomial|multinomial|normal|poisson|gumbel|empty")
# The names of functions that write to tensors, or let others do so, without raising their versions.
_HIDDEN_WRITES = frozenset(("batch_norm", "instance_norm", "__get__"))
# The names of the functions that a `RowWatch` looks at, whatever their arguments are.
_WATCHED = frozenset(
    (
        *(*_READS, *_SHAPE_READS, *_SELECTIONS, *_INDEXING, *_GROUPINGS),
        *(f"{name}_" for name in _GROUPINGS),
        *(*_CONSTANT_FUNCTIONS, *_LIKE_FUNCTIONS, *_MAYBE_SHAPE_READS, *_TENSOR_SIZES),
    )
)
# The types of most arguments. They contain no tensors.
_LEAF_TYPES = frozenset(
    (
        *(Tensor, nn.Parameter, bool, int, float, str, type(None), type(Ellipsis), torch.Size),
        *(torch.dtype, torch.device),
    )
)
_PLAIN_ARGUMENTS = (
    *(bool, int, float, str, type(None), slice, type(Ellipsis), torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class BranchWatch(TorchFunctionMode):
    """Notes whether a forward reads numbers of tensors, and which way it goes after that.

    Args:
        statistics: Follows the numbers that are computed from several rows, if it should.

    Attributes:
        has_read: Whether it has read a number.
        way: A digest of what followed the first number.
        arrays: Digests of the arrays and lists of numbers that it has read, but for whole numbers.
    """

    def __init__(self, statistics: RowStatistics | None = None) -> None:
        super().__init__()
        self._statistics = statistics
        self.has_read = False
        self.way = 0
        self.arrays: list[Hashable] = []
        self._entries: dict[int, list[float]] = {}  # by the memory that they are in

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and look at its name."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.has_read = True
            self.way = hash((self.way, name, "raises"))
            raise
        if self._statistics is not None:
            _note_operation(self._statistics, func, args, kwargs, result)
        if name in _READS:
            self.has_read = True
            self.way = hash((self.way, result if type(result) in (bool, int) else name))
            if name in _ARRAY_READS:
                self._note_array(args[0])
            elif type(result) is float:
                self._note_entry(args[0], result)
        elif name == "__getitem__" and (bounds := _list_tensor_bounds(args[1])):
            self.has_read = True
            self.way = hash((self.way, *map(int, bounds)))
        elif self.has_read:
            self._follow(name, args, kwargs)
        elif name in RAISING_FUNCTIONS or _reads_shape(name, args, kwargs):
            self.has_read = True  # the sizes themselves are mostly different
        return result

    def _note_array(self, tensor: Tensor) -> None:
        """Note the numbers of an array or a list."""
        if tensor.numel() < 2 or tensor.is_meta:
            return
        product = compute_product(tensor.detach())
        # Numbers of an unknown kind of tensor count as different each time, as nan is.
        digest: Hashable = math.nan if product is None else product
        if isinstance(product, Tensor):  # on a device
            digest = product.item()
        if tensor.is_floating_point() or tensor.is_complex():
            self.arrays.append(digest)
        else:
            self.way = hash((self.way, digest))

    def _note_entry(self, tensor: Tensor, number: float) -> None:
        """Note a number that is one of several in memory: `[norm.item() for norm in norms]`."""
        tensor = unwrap_transformed(tensor)[0]
        address = find_memory_address(tensor)
        if address is None:  # a wrapper, of which it may be one of several
            self.arrays.append(number)
        elif tensor.untyped_storage().nbytes() > tensor.element_size():
            entries = self._entries.setdefault(address, [])
            entries.append(number)
            # The first entry counts once there is a second one: a single number is part of the way.
            self.arrays += entries if len(entries) == 2 else entries[2:][-1:]

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name.startswith("_") and not name.startswith("__"):
            return  # a switch of PyTorch: a forward that will be recomputed has no graph
        has_numbers = name.strip("_") in _ARITHMETIC
        plain = [
            value
            for value in (*args, *kwargs.values())
            if type(value) in _PLAIN_TYPES or (has_numbers and type(value) is int)
        ]
        self.way = hash((self.way, name, *plain))


def _note_operation(
    statistics: RowStatistics,
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
) -> None:
    name = getattr(func, "__name__", "")
    if name in _READS:
        statistics.note_read(args, result)
    else:
        statistics.follow(func, name, args, kwargs, result)


def _reads_shape(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the shape of what a function returns is a number of a tensor."""
    if name in _SHAPE_READS:
        return True
    if name == "__getitem__":
        return _is_mask(args[1])
    if name in _MAYBE_SHAPE_READS:
        if name == "where":  # `torch.where(mask)` is `nonzero`
            return len(args) + len(kwargs) == 1
        second = args[1] if len(args) > 1 else None
        if name == "one_hot":
            return bool(kwargs.get("num_classes", -1 if second is None else second) == -1)
        repeats = kwargs.get("repeats", args[0] if len(args) < 2 else second)
        return isinstance(repeats, Tensor)
    if name in _TENSOR_SIZES:
        return _has_tensor(_list_sizes(name, args, kwargs))
    return False


def _list_sizes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the sizes and plain numbers among the arguments of a function."""
    return [*(args if name in _SIZED_FACTORIES else args[1:]), *kwargs.values()]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool


def _list_tensor_bounds(index: Any) -> list[Tensor]:
    """Return the tensors at which the slices of an index begin or end, as in `x[:, :n.max()]`."""
    slices = [s for s in (index if isinstance(index, tuple) else (index,)) if isinstance(s, slice)]
    bounds = (bound for s in slices for bound in (s.start, s.stop, s.step))
    return [bound for bound in bounds if isinstance(bound, Tensor)]


class Selection(NamedTuple):
    """A call of a function that treats the entries of a first dim differently.

    It selects some of them, or computes with numbers of their positions, such as `arange`.

    Attributes:
        name: The name of the function.
        size: The size of the dim. It is not that of the rows if it is the same for other numbers of
            rows.
        is_table: Whether it is an input or a table of positions.
        taken: How many entries were taken from a parameter or buffer. It is not a table with an
            entry for each row if it is the same for other numbers of rows.
    """

    name: str
    size: int
    is_table: bool
    taken: int = 0


class RowWatch(TorchFunctionMode):
    """Notes what a forward does that may depend on all rows of its batch.

    Args:
        max_reads: The number of reads after which the forward is left with `LastNumberRead`.
        row_counts: Watches what it does with the number of its rows, if it should be watched.
        statistics: Follows the numbers that are computed from several rows, if it should.
        buffer_ids: The ids of the model's buffers.

    Attributes:
        fail_at: Which call of a function that may raise shall do so, counted from 0. None: none.
        raising_count: How many calls there were of functions that may raise.
        has_failed: Whether that call has raised.
        reads: The names of the functions that have read numbers, and the numbers. None: not one
            truth value or whole number.
        reads_rows: Whether one of them may have been computed from the rows, and not from plain
            numbers alone, as a mask of `arange` is.
        selections: The selections among the entries of a first dim, or by their positions.
        uses_float32: Whether an operation returned a tensor of float32.
        replaces_sizes: Whether sizes that depend on the rows are replaced (row_counts.py).
    """

    replaces_sizes = True

    def __init__(
        self,
        max_reads: int | None = None,
        row_counts: RowCounts | None = None,
        statistics: RowStatistics | None = None,
        buffer_ids: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._row_counts, self._statistics = row_counts, statistics
        self._buffer_ids = buffer_ids
        self._positions: dict[int, bool] = {}  # by id of a constant, whether its entries differ
        self._sources: dict[int, list[Tensor]] = {}  # by id, the constants it was computed from
        self.reads: list[tuple[str, int | None]] = []
        self.reads_rows = self.uses_float32 = False
        self.selections: list[Selection] = []
        self._max_reads = max_reads
        self.fail_at: int | None = None
        self.raising_count = 0
        self.has_failed = False
        # Tensors that are computed from plain numbers alone, by id, and their versions. Writes in
        # place raise the version of a tensor and of all its views.
        self._constants: dict[int, tuple[Tensor, int]] = {}

    @property
    def compares_row_counts(self) -> bool:
        """Return whether it compared the number of rows with another number."""
        return self._row_counts is not None and self._row_counts.is_compared

    @property
    def goes_by_row_count(self) -> bool:
        """Return whether it may go another way for another number of rows."""
        return self._row_counts is not None and self._row_counts.is_decisive

    @property
    def runs_same_operations(self) -> bool:
        """Return whether it runs the same operations for other rows, and other numbers of them."""
        return not (self.reads or self.compares_row_counts)

    @property
    def meets_rows(self) -> bool:
        """Return whether numbers of several rows were taken together with rows."""
        return self._statistics is not None and self._statistics.meets_rows

    @property
    def may_select_rows(self) -> bool:
        """Return whether a selection may be one among rows, or by their positions."""
        return not all(selection.is_table and not selection.taken for selection in self.selections)

    def selects_the_same(self, other: RowWatch) -> bool:
        """Return whether a forward of another number of rows selects from dims of the same sizes.

        Then they are not the dims of rows. Tables may have other sizes.
        """
        return len(self.selections) == len(other.selections) and all(
            mine.name == others.name
            and mine.taken == others.taken
            and (mine.is_table or mine.size == others.size)
            for mine, others in zip(self.selections, other.selections, strict=True)
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and look at its name and at what it is computed from."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.replaces_sizes and (kwargs or may_have_numbers(args)):
            if self._row_counts is not None:
                self._row_counts.note_operands(name, args, kwargs)
            args = unwrap_numbers(args)
            kwargs = unwrap_numbers(kwargs) if kwargs else kwargs
        if name in RAISING_FUNCTIONS:
            self._count_raising(name)
        try:
            result = func(*args, **kwargs)
        except Exception:
            # Perhaps the forward catches the error, and does something else.
            self.reads.append((name, None))
            self.reads_rows = True
            raise
        if self._statistics is not None:
            _note_operation(self._statistics, func, args, kwargs, result)
        if name in _WATCHED or (self._constants and self._may_take_constants(args, kwargs)):
            self._note_call(name, args, kwargs, result)
        if not self.uses_float32 and isinstance(result, Tensor):
            self.uses_float32 = result.dtype is torch.float32
        if self._row_counts is None:
            return result
        if self.replaces_sizes:
            return self._row_counts.replace_sizes(name, args, result)
        self._row_counts.note_sizes(name, args, result)
        return result

    def _count_raising(self, name: str) -> None:
        """Count the calls of functions that may raise, and let one of them raise."""
        self.raising_count += 1
        if self.raising_count - 1 == self.fail_at:
            self.has_failed = True
            raise _LinAlgError(f"{name} fails, to see whether the forward goes on")

    def _may_take_constants(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an argument is a constant, or may contain one. Most are not."""
        for value in (*args, *kwargs.values()) if kwargs else args:
            if id(value) in self._constants or type(value) not in _LEAF_TYPES:
                return True
        return False

    def _note_call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note what a function has read or selected, or computed from constants."""
        if (
            name in _READS
            or self._reads_shape(name, args, kwargs)
            or (name == "__getitem__" and _list_tensor_bounds(args[1]))
        ):
            self.reads.append((name, result if type(result) in (bool, int) else None))
            self.reads_rows = self.reads_rows or not self._are_constant((args, kwargs))
            if len(self.reads) == self._max_reads:
                raise LastNumberRead
        elif (selection := self._find_selection(name, args, kwargs, result)) is not None:
            self.selections.append(selection)
        elif self._constants and isinstance(result, Tensor):
            self._note_positions(name, args, kwargs)
        if isinstance(result, Tensor):
            self._note_result(name, args, kwargs, result)

    def _reads_shape(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if not _reads_shape(name, args, kwargs):
            return False
        # `torch.full(size, torch.tensor(-1e9))`
        is_sized = name in _TENSOR_SIZES
        return not (is_sized and self._are_constant(_list_sizes(name, args, kwargs)))

    def _note_result(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor
    ) -> None:
        if name in _HIDDEN_WRITES:
            for value in (*args, *kwargs.values()):
                self._constants.pop(id(value), None)
            return
        is_constant_function = name in _CONSTANT_FUNCTIONS
        if name in _LIKE_FUNCTIONS:
            args, is_constant_function = args[1:], True
        elif not is_constant_function and not self._constants:
            return
        # Most operations have an operand that is not constant.
        if self._are_constant((args, kwargs)) and (
            is_constant_function or (_has_tensor((args, kwargs)) and not _DRAWS.search(name))
        ):
            sources = [t for t in iter_tensors((args, kwargs)) if t.dim()]
            if not any(source is result for source in sources):  # unlike `x.to(x.dtype)`
                self._constants[id(result)] = result, result._version
                self._sources[id(result)] = sources

    def _find_selection(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Selection | None:
        selection = _find_selection(name, args, kwargs)
        if selection is None or not selection.is_table:
            return selection
        table: Tensor = args[0]
        if isinstance(table, nn.Parameter) or id(table) in self._buffer_ids:
            taken = len(result) if isinstance(result, Tensor) and result.dim() else 1
            return selection._replace(taken=taken)
        # Masks and ids are cut in many ways. Rows of numbers are not.
        return selection._replace(is_table=not table.is_floating_point())

    def _note_positions(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note if a function computes with numbers of positions, such as `arange`, and with others.

        They are not positions of rows if there are as many for other numbers of rows.
        """
        tensors = list(iter_tensors((args, kwargs)))
        constants = [t for t in tensors if self._are_constant(t) and t.dim() and len(t) > 1]
        if not constants or all(map(self._are_constant, tensors)):
            return
        for constant in constants:
            if self._has_positions(constant) and not _takes_each_row(name, args, constant):
                self.selections.append(Selection(f"positions of {name}", len(constant), False))

    def _has_positions(self, constant: Tensor) -> bool:
        """Return whether the entries of a constant differ, or may for more: `arange(n) > 5`."""
        if id(constant) not in self._positions:  # it is kept, so its id is not used again
            numbers, _ = unwrap_transformed(constant)
            with without_dispatch_modes():  # they look at the operations of the forward
                differ = bool((numbers[1:] != numbers[:1]).any())
            self._positions[id(constant)] = differ or any(
                map(self._has_positions, self._sources.get(id(constant), ()))
            )
        return self._positions[id(constant)]

    def _are_constant(self, values: Any) -> bool:
        """Return whether arguments are plain values and constants."""
        if isinstance(values, Tensor):
            tensor, version = self._constants.get(id(values), (None, 0))
            return tensor is not None and tensor._version == version
        if isinstance(values, dict):
            return all(map(self._are_constant, values.values()))
        if isinstance(values, tuple | list):
            return all(map(self._are_constant, values))
        return isinstance(values, _PLAIN_ARGUMENTS)


class LastNumberRead(BaseException):
    """A forward has read as many numbers as it was asked to. No layer should catch this."""


def _takes_each_row(name: str, args: tuple[Any, ...], positions: Tensor) -> bool:
    """Return whether an index takes something of each row: `x[torch.arange(n), lengths]`."""
    if name != "__getitem__" or isinstance(args[0], nn.Parameter):
        return False
    index = args[1][0] if isinstance(args[1], tuple) else None
    if index is not positions or len(args[0]) != len(positions):
        return False
    positions, batch_dims = unwrap_transformed(positions)
    if batch_dims:
        return False
    with without_dispatch_modes():
        numbers = torch.arange(len(positions), device=positions.device)
        return bool((positions.reshape(len(positions), -1) == numbers[:, None]).all())


def _has_tensor(values: Any) -> bool:
    if isinstance(values, tuple | list):
        return any(map(_has_tensor, values))
    if isinstance(values, dict):
        return any(map(_has_tensor, values.values()))
    return isinstance(values, Tensor)


def _find_selection(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Selection | None:
    """Return what a function selects from the first dim of a tensor, or adds up by an index."""
    is_grouping = name.rstrip("_") in _GROUPINGS
    if not is_grouping and name not in _SELECTIONS and name not in _INDEXING:
        return None  # most functions
    if not args or not isinstance(args[0], Tensor) or not args[0].dim():
        return None
    if is_grouping:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
        if type(dim) is not int or dim % args[0].dim() or not isinstance(index, Tensor):
            return None
        return Selection(name, index.numel(), is_table=False)
    if not _selects_entries(name, args, kwargs):
        return None
    return Selection(name, len(args[0]), args[0].is_leaf and torch.is_grad_enabled())


def _selects_entries(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function selects some of the first dim of a tensor."""
    if name in _INDEXING:
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return type(index) is int or (isinstance(index, slice) and index != slice(None))
    if name not in _SELECTIONS:
        return False
    position, default = _SELECTIONS[name]
    dim = kwargs.get("dim", args[position] if position < len(args) else default)
    return dim is None or (type(dim) is int and dim % args[0].dim() == 0)


@dataclass(frozen=True, eq=False)
class BranchStageFunction:
    """The computation of a stage, and the ways that its micro-batches have gone.

    Attributes:
        compute: The computation of the stage.
        stage: The stage, for messages.
        follows_statistics: Whether numbers of several rows are followed.
        ways: The way of each micro-batch. None: it has read no number.
        reads: The numbers of several rows that each micro-batch has read.
        arrays: The digests of the arrays that each micro-batch has read.
    """

    compute: StageFunction
    stage: Stage
    follows_statistics: bool = False
    ways: list[int | None] = field(default_factory=list)
    reads: list[list[StatisticRead]] = field(default_factory=list)
    arrays: list[list[Hashable]] = field(default_factory=list)

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """Run the stage, and note the way of the micro-batch in its first forward."""
        if in_recomputation():
            return self.compute(inputs)
        statistics = RowStatistics() if self.follows_statistics else None
        with BranchWatch(statistics=statistics) as watch:
            outputs = self.compute(inputs)
        self.ways.append(watch.way if watch.has_read else None)
        self.arrays.append(watch.arrays)
        if statistics is not None and statistics.reads:
            self.reads.append(statistics.take_reads())
            # A number that meets rows is as if Python had read it.
            self.ways[-1] = watch.way
        return outputs

    @property
    def has_read_other_arrays(self) -> bool:
        """Whether micro-batches have read arrays of different numbers."""
        return any(arrays != self.arrays[0] for arrays in self.arrays)

    def find_ways(self) -> set[int | None]:
        """Return the ways of the micro-batches, and that of the batch if it is another one."""
        ways = set(self.ways)
        if len(ways) == 1 and len(self.reads) == len(self.ways):
            outcomes = find_whole_outcomes(self.reads)
            if outcomes is not None:
                ways.add(hash(("the batch", outcomes)))
        return ways


@dataclass
class BranchRecord:
    """The record of the branches in one kind of call.

    Attributes:
        stages: The indices of the stages that read numbers. None: no call has been watched yet.
        equal_ways: Ways, with their stage, that were found to lead to the same results.
        difference_count: In how many calls micro-batches have gone new ways.
        statistic_stages: The indices of the stages that read numbers of several rows.
        call_count: How many calls were watched.
    """

    stages: set[int] | None = None
    equal_ways: list[frozenset[tuple[int, int | None]]] = field(default_factory=list)
    difference_count: int = 0
    statistic_stages: set[int] = field(default_factory=set)
    call_count: int = 0

    def watch(self, stages: Sequence[Stage]) -> tuple[list[Stage], list[BranchStageFunction]]:
        """Return the stages with those that may read numbers watched, and the functions that do."""
        self.call_count += 1
        # Following them takes time in each operation, and most branches have none.
        looks_for_statistics = _is_power_of_two(self.call_count)
        functions = [
            BranchStageFunction(
                stage.compute, stage, looks_for_statistics or stage.index in self.statistic_stages
            )
            for stage in stages
            # The compiler would compile a layer under a mode once more.
            if (self.stages is None or stage.index in self.stages)
            and not has_compiled_module(stage.modules())
        ]
        by_index = {function.stage.index: function for function in functions}
        watched = [
            replace(stage, compute=by_index[stage.index]) if stage.index in by_index else stage
            for stage in stages
        ]
        return watched, functions

    def find_new_ways(
        self, functions: Sequence[BranchStageFunction]
    ) -> tuple[Collection[Stage], frozenset[tuple[int, int | None]]]:
        """Return the stages whose micro-batches went different ways that were not compared yet.

        So they do if the batch goes another way than all of them. Those that have read different
        arrays are compared each time, as their ways are not known. The comparison takes the time of
        a step. So where the micro-batches go new ways in many calls, it is made each time that the
        number of these calls has doubled.
        """
        self.stages = {f.stage.index for f in functions if any(way is not None for way in f.ways)}
        self.statistic_stages |= {f.stage.index for f in functions if f.reads}
        ways_by_function = [(function, function.find_ways()) for function in functions]
        different = [function for function, ways in ways_by_function if len(ways) > 1]
        ways = frozenset(
            (f.stage.index, way) for f, ways in ways_by_function if len(ways) > 1 for way in ways
        )
        arrays = [function for function in functions if function.has_read_other_arrays]
        if arrays:
            return [f.stage for f in functions if f in arrays or f in different], ways
        if not ways or any(ways <= equal for equal in self.equal_ways):
            return (), ways
        self.difference_count += 1
        is_compared = _is_power_of_two(self.difference_count)
        return [f.stage for f in different] if is_compared else (), ways

    def note_compared(self, ways: frozenset[tuple[int, int | None]], are_equal: bool) -> None:
        """Remember whether these ways lead to the same results. If not, look at the next call."""
        if not are_equal:
            self.difference_count = 0
            return
        self.equal_ways = [*self.equal_ways[-_MAX_WAYS:], ways]


_MAX_WAYS = 64


def _is_power_of_two(count: int) -> bool:
    return not count & (count - 1)
