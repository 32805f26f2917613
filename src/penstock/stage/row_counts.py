"""Branches on the number of rows: `if len(losses) > 4`, `x.shape[0] // 8`, `min(4, n)`.

A micro-batch has fewer rows than the batch, so such a branch may go another way in a pipe than in
the unsplit model, and few rows that are tried together and apart do not show it. The sizes that a
function reads from its tensors are therefore replaced by a `RowCount`: an int that also knows what
it would be for other numbers of rows, and computes with them. A micro-batch of 2 rows of a batch
of 8:

    n = x.shape[0]        2    or 8
    n * 3 + 1             7    or 25
    n > 4                 False, and for the whole batch True: noted
    y * (1 + n // 8)      y * 1, and for the whole batch y * 2: noted

Python itself sees an int with the value of the micro-batch, and goes on with that. `len(x)`, and
`int`, `float` and `hash` of a size, must return plain numbers, so it is only noted that they were
used. Some functions of C return plain numbers and ask nothing: `0.5 * n`, `math.log(n)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# The names of functions that return the number of entries of a tensor.
_NUMEL = frozenset(("numel", "nelement"))
# Functions that make a tensor of a number.
_FACTORIES = frozenset(
    ("tensor", "as_tensor", "scalar_tensor", "full", "full_like", "new_full", "new_tensor", "fill_")
)


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
        for value in args:
            if isinstance(value, _RowNumber):
                self._note_operand(value, name)
        kind = type(result)
        if (kind is not torch.Size and kind is not int) or not self._others or not args:
            return result  # most functions return tensors
        row_dim = self._find_row_dim(args[0])
        if row_dim is None:
            return result
        if kind is torch.Size:
            sizes = list(result)
            sizes[row_dim] = self._build(result[row_dim])
            return torch.Size(sizes)
        if name == "__len__":
            if not row_dim:
                self.note_plain()
            return result
        dims = args[0].dim()
        if name in _NUMEL or (name == "size" and len(args) > 1 and args[1] % dims == row_dim):
            return self._build(result)
        return result

    def _note_operand(self, number: _RowNumber, name: str) -> None:
        """Note a number that a function computes with, unless it is a multiple of the rows.

        Two rows show what is multiplied by their number, and `1 + n // 16` is the same for them.
        """
        if name in _FACTORIES:
            self.note_plain()
        for rows, other in zip(self._others, number.others, strict=True):
            if other * self._rows != _to_plain(number) * rows:
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


class _RowNumber:
    """A number that knows what it would be for other numbers of rows."""

    others: Sequence[Any]
    counts: RowCounts

    def __bool__(self) -> bool:
        return bool(self.counts.compare(operator.ne, self, 0))

    def __reduce__(self) -> Any:
        plain = _to_plain(self)
        return type(plain), (plain,)


class RowCount(_RowNumber, int):
    """A size that depends on the number of rows."""

    def __new__(cls, value: int, others: Sequence[int], counts: RowCounts) -> RowCount:
        """Return the size of a micro-batch, with those for other numbers of rows."""
        number = int.__new__(cls, value)
        number.others, number.counts = others, counts
        return number


class RowFraction(_RowNumber, float):
    """A number that was computed from a size, and is not whole."""

    def __new__(cls, value: float, others: Sequence[float], counts: RowCounts) -> RowFraction:
        """Return the number of a micro-batch, with those for other numbers of rows."""
        number = float.__new__(cls, value)
        number.others, number.counts = others, counts
        return number


def _to_plain(number: Any) -> Any:
    if isinstance(number, int) and not isinstance(number, bool):
        return int.__index__(number)
    return float.__float__(number) if isinstance(number, float) else number


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


def _build_conversion(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    def convert(self: _RowNumber, *args: Any) -> Any:
        self.counts.note_plain()
        return method(self, *args)

    return convert


_CONVERSIONS = (
    *("__int__", "__float__", "__round__", "__trunc__", "__floor__", "__ceil__", "__hash__"),
    *("__divmod__", "__rdivmod__", "__neg__", "__abs__"),
)
for _name in _CONVERSIONS:
    for _class, _base in ((RowCount, int), (RowFraction, float)):
        setattr(_class, _name, _build_conversion(_base, _name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _class in (RowCount, RowFraction):
        setattr(_class, f"__{_name}__", _build_comparison(_name))
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BITWISE = ("and_", "or_", "xor", "lshift", "rshift")
for _class, _names in ((RowCount, (*_ARITHMETIC, *_BITWISE)), (RowFraction, _ARITHMETIC)):
    for _name in _names:
        _slot = _name.rstrip("_")
        setattr(_class, f"__{_slot}__", _build_arithmetic(_name, False))
        setattr(_class, f"__r{_slot}__", _build_arithmetic(_name, True))
