"""Branches on the number of rows: `if len(losses) > 4`, `x.shape[0] // 8`, `min(4, n)`.

A micro-batch has fewer rows than the batch, so such a branch may go another way in a pipe than in
the unsplit model, and few rows that are tried together and apart do not show it. The sizes that a
forward reads from its tensors are therefore replaced by a `RowCount`: a number that also knows what
it would be for other numbers of rows, and computes with them. A micro-batch of 2 rows of a batch
of 8:

    n = x.shape[0]        2    or 8
    n * 3 + 1             7    or 25
    0.5 * n > 2           False, and for the whole batch True: noted
    y * (1 + n // 8)      y * 1, and for the whole batch y * 2: noted
    math.log(n), range(n) plain numbers, of which nothing is known: noted

Python sees the value of the micro-batch, and goes on with that. `isinstance(n, int)` is true, but a
`RowCount` is not a subclass of `int`: functions of C would take the value out of such a number
without a question, as `0.5 * n` does. So PyTorch's functions get plain numbers in its place
(`unwrap_numbers`). Where anything else fails on such a number, the forward runs once more with
plain sizes, and it is only noted that they were read (`RowCounts.note_sizes`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

# The names of functions that return the number of entries of a tensor.
_NUMEL = frozenset(("numel", "nelement"))
# The names of functions behind which there are sizes that are not replaced.
_MEMORY = frozenset(("untyped_storage", "storage", "storage_offset", "stride"))
# Functions that make a tensor of a number.
_FACTORIES = frozenset(
    ("tensor", "as_tensor", "scalar_tensor", "full", "full_like", "new_full", "new_tensor", "fill_")
)
# Those that make one of several: `torch.tensor(x.shape)`. For others a list of sizes is a shape.
_CONVERTERS = frozenset(("tensor", "as_tensor", "new_tensor", "Tensor"))


class RowCounts:
    """Replaces sizes that a function reads, and notes whether it goes by the number of rows.

    Args:
        rows: The rows of the micro-batch.
        others: Other numbers of rows: of the batch, and of micro-batches of another size.
        constant_ids: The ids of tensors without rows, such as buffers.

    Attributes:
        is_compared: Whether a size was compared with a number that does not depend on the rows, or
            became a plain number. For other numbers of rows, the result may be another one.
        is_decisive: Whether a comparison has another result for other numbers of rows, or may have,
            as with a plain number.
    """

    def __init__(
        self, rows: int, others: Collection[int], constant_ids: Collection[int] = ()
    ) -> None:
        self._rows, self._others = rows, sorted({*others} - {rows}) if rows else []
        self._constant_ids = constant_ids
        self.is_compared = self.is_decisive = False

    def replace_sizes(self, name: str, args: tuple[Any, ...], result: Any) -> Any:
        """Return what a function has returned, with sizes replaced that depend on the rows."""
        row_dim = self._find_size(name, args, result)
        if row_dim is None:
            return result
        if type(result) is torch.Size:
            sizes = list[Any](result)
            sizes[row_dim] = self._build(result[row_dim])
            return RowSizes(sizes)
        if type(result) is int and name != "__len__":
            return self._build(result)
        self.note_plain()  # Python must get a plain number
        return result

    def note_sizes(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note if a function has returned a size that depends on the rows."""
        if self._find_size(name, args, result) is not None:
            self.note_plain()

    def _find_size(self, name: str, args: tuple[Any, ...], result: Any) -> int | None:
        """Return the dim of the rows if a function has returned a size of it, or None."""
        kind = type(result)
        is_memory = name in _MEMORY
        if not (kind is torch.Size or kind is int or is_memory) or not self._others or not args:
            return None  # most functions return tensors
        row_dim = self._find_row_dim(args[0])
        if row_dim is None or kind is torch.Size or is_memory:
            return row_dim
        tensor: Tensor = args[0]
        if name == "__len__":
            is_size = not row_dim
        elif name == "size":
            is_size = len(args) > 1 and args[1] % tensor.dim() == row_dim
        else:
            is_bytes = name == "__get__" and result == tensor.numel() * tensor.element_size()
            is_size = name in _NUMEL or (is_bytes and result > tensor.dim())
        return row_dim if is_size else None

    def note_operands(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the numbers that a function of PyTorch computes with."""
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is RowCount or type(value) is RowFraction:
                self._note_operand(value, name)
            elif name in _CONVERTERS and _has_numbers(value):
                self.note_plain()

    def _note_operand(self, number: _RowNumber, name: str) -> None:
        """Note a number that a function computes with, unless it is a multiple of the rows.

        Two rows show what is multiplied by their number, and `1 + n // 16` is the same for them.
        """
        if name in _FACTORIES:
            self.note_plain()
        for rows, other in zip(self._others, number.others, strict=True):
            if other * self._rows != number.value * rows:
                self.note_plain()

    def note_plain(self) -> None:
        """Note that a size became a plain number, of which nothing is known any more."""
        self.is_compared = self.is_decisive = True

    def compare(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Compare two numbers, for the micro-batch and for other numbers of rows."""
        result = function(_to_plain(left), _to_plain(right))
        if not (isinstance(left, _RowNumber) and isinstance(right, _RowNumber)):
            self.is_compared = True
        for a, b in self.pair(left, right):
            self.is_decisive |= bool(function(a, b)) != bool(result)
        return result

    def pair(self, left: Any, right: Any) -> list[tuple[Any, Any]]:
        """Return the pairs of two numbers for the other numbers of rows."""
        return list(zip(self._list_others(left), self._list_others(right), strict=True))

    def _list_others(self, number: Any) -> Sequence[Any]:
        if isinstance(number, _RowNumber):
            return number.others
        return [number] * len(self._others)

    def _find_row_dim(self, tensor: Any) -> int | None:
        """Return the dim of a tensor that depends on the rows, or None.

        Rows and sequences may be one dim. A dim of the same size by chance only costs time.
        """
        if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter):
            return None
        if id(tensor) in self._constant_ids:
            return None
        sizes = Tensor.size(tensor)
        if sizes and sizes[0] and not sizes[0] % self._rows:
            return 0
        return sizes.index(self._rows) if self._rows in sizes else None

    def _build(self, size: int) -> RowCount:
        return RowCount(int(size), [size // self._rows * rows for rows in self._others], self)


# PyTorch's functions in C ask whether a number is symbolic, and look into it if not. So it is both
# for them: an int for code of users, and a symbol that a mode will replace.
class _SymbolicInt(int, torch.SymInt):  # type: ignore[misc]
    pass


class _SymbolicFloat(float, torch.SymFloat):  # type: ignore[misc]
    pass


class _RowNumber:
    """A number that knows what it would be for other numbers of rows."""

    def __init__(self, value: float, others: Sequence[Any], counts: RowCounts) -> None:
        self.value, self.others, self.counts = value, others, counts

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The type that the number is for code that asks with `isinstance`."""
        return _SymbolicInt if type(self.value) is int else _SymbolicFloat

    def __bool__(self) -> bool:
        return bool(self.counts.compare(operator.ne, self, 0))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.value, name)  # PyTorch asks for some that no number has
        self.counts.note_plain()
        return attribute

    def __reduce__(self) -> Any:
        return type(self.value), (self.value,)


class RowCount(_RowNumber):
    """A size that depends on the number of rows."""


class RowFraction(_RowNumber):
    """A number that was computed from a size, and is not whole."""


class RowSizes(tuple[Any, ...]):
    """The sizes of a tensor, in place of a `torch.Size`, which takes plain numbers only."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The type that the sizes are for code that asks with `isinstance`."""
        return torch.Size

    def numel(self) -> Any:
        """Return the number of entries."""
        product: Any = 1
        for size in self:
            product = product * size
        return product

    def __getitem__(self, index: Any) -> Any:
        entry = tuple.__getitem__(self, index)
        return RowSizes(entry) if isinstance(index, slice) else entry

    def __add__(self, other: Any) -> Any:
        return RowSizes((*self, *other))

    def __radd__(self, other: Any) -> Any:
        return RowSizes((*other, *self))

    def __mul__(self, count: SupportsIndex) -> Any:
        return RowSizes(tuple.__mul__(self, count))

    def __reduce__(self) -> Any:
        return torch.Size, (tuple(map(_to_plain, self)),)


def may_have_numbers(args: tuple[Any, ...]) -> bool:
    """Return whether a number of rows may be among arguments, or in them. Most have none."""
    return not _HOLDERS.isdisjoint(map(type, args))


def _has_numbers(values: Any) -> bool:
    """Return whether a list of numbers, or a list of lists, has a number of rows."""
    if type(values) in (tuple, list):
        return any(map(_has_numbers, values))
    return isinstance(values, _RowNumber | RowSizes)


def unwrap_numbers(values: Any) -> Any:
    """Return arguments of a function with plain numbers and sizes."""
    kind = type(values)
    if kind is RowCount or kind is RowFraction:
        return values.value
    if kind is RowSizes:
        return torch.Size(map(_to_plain, values))
    if kind is tuple or kind is list:
        # Most arguments have none, and stay the same objects.
        if _HOLDERS.isdisjoint(map(type, values)):
            return values
        items = [unwrap_numbers(value) for value in values]
        is_same = all(map(operator.is_, items, values))
        return values if is_same else kind(items)
    if kind is dict:
        return {key: unwrap_numbers(value) for key, value in values.items()}
    if kind is slice:
        bounds = values.start, values.stop, values.step
        return slice(*map(_to_plain, bounds))
    return values


# The types of numbers of rows, and of what may hold some.
_HOLDERS = frozenset((RowCount, RowFraction, RowSizes, tuple, list, dict, slice))


def _to_plain(number: Any) -> Any:
    return number.value if isinstance(number, _RowNumber) else number


def _build_comparison(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def compare(self: _RowNumber, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.counts.compare(function, self, other)

    return compare


def _build_arithmetic(name: str, is_reflected: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def compute(self: _RowNumber, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        left, right = (other, self) if is_reflected else (self, other)
        value = function(_to_plain(left), _to_plain(right))
        try:
            others = [function(a, b) for a, b in self.counts.pair(left, right)]
        except ArithmeticError:  # it is undefined for another number of rows
            self.counts.note_plain()
            return value
        if type(value) is int:
            return RowCount(value, others, self.counts)
        return RowFraction(value, others, self.counts) if type(value) is float else value

    return compute


def _build_conversion(name: str) -> Callable[..., Any]:
    def convert(self: _RowNumber, *args: Any) -> Any:
        self.counts.note_plain()
        return getattr(self.value, name)(*map(_to_plain, args))

    return convert


_CONVERSIONS = (
    *("__int__", "__float__", "__round__", "__trunc__", "__floor__", "__ceil__", "__hash__"),
    *("__divmod__", "__rdivmod__", "__neg__", "__pos__", "__abs__", "__str__", "__repr__"),
    "__format__",
)
for _class in (RowCount, RowFraction):
    for _name in _CONVERSIONS:
        setattr(_class, _name, _build_conversion(_name))
    for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_class, f"__{_name}__", _build_comparison(_name))
for _name in ("__index__", "__invert__"):
    setattr(RowCount, _name, _build_conversion(_name))
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BITWISE = ("and_", "or_", "xor", "lshift", "rshift")
for _class, _names in ((RowCount, (*_ARITHMETIC, *_BITWISE)), (RowFraction, _ARITHMETIC)):
    for _name in _names:
        _slot = _name.rstrip("_")
        setattr(_class, f"__{_slot}__", _build_arithmetic(_name, False))
        setattr(_class, f"__r{_slot}__", _build_arithmetic(_name, True))
