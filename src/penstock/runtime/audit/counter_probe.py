"""The numbers with which a forward compares its counters, and after how many calls that matters.

A layer may act in its seventh call only (`n == 7`), within a few calls (`5 < n < 12`), or at the
third of every seven (`n % 7 == 3`). No counter that is far ahead shows that. So a forward runs once
with numbers in place of its counters that remember how they are compared:

    self.n += 1                n     ->  lambda counters: counters[0] + 1
    if self.n % 7 == 3: ...    test  ->  lambda counters: (counters[0] + 1) % 7 == 3

What a counter holds after the forward says how it goes on, so the counters of later calls are
known, and in which of them a test has another result. The rows then run with those counters.

The results of a forward with such numbers are not used: a layer may ask for `type(n) is int`.
Each is a `float`, as Python asks the number on the right of `0.5 * n` only if it is not an `int`.
Where a layer needs an `int`, as for a dim, the forward raises, and runs again with those.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

Counters = Sequence[Any]  # the values of all counters before a forward
Formula = Callable[[Counters], Any]

_MAX_TESTS = 64
_MAX_CALLS = 2_000  # that are looked at one by one
_FAR_CALLS = 20_000_000  # to which a counter is moved that goes on in equal steps
_MAX_SIZE = 1e15  # of a number that is followed
_MAX_EXPONENT = 8
_MAX_DEPTH = 100  # of operations that are followed, as in a loop that adds up


class CounterProbe:
    """Finds after how many calls a forward would compare its counters with another result.

    Args:
        values: The counters before the forward: numbers of the types int and float.
        keeps_types: Whether the number in place of an `int` is one.
    """

    def __init__(self, values: Sequence[Any], keeps_types: bool = False) -> None:
        self._values, self._keeps_types = values, keeps_types
        self._tests: list[Formula] = []
        self._is_recording = True
        # Counters before each call, and where they go on in equal steps.
        self._orbit: list[Counters] = []

    def build_numbers(self) -> list[Any]:
        """Return a number for each counter that the forward should have in its place."""
        return [
            self.track(value, operator.itemgetter(index))
            for index, value in enumerate(self._values)
        ]

    def track(self, value: Any, formula: Formula, *operands: Any) -> Any:
        """Return a number that remembers its formula, unless the value is not one of Python."""
        depth = 1 + max((operand.depth for operand in operands if _is_tracked(operand)), default=0)
        if type(value) not in (int, float) or depth > _MAX_DEPTH:
            return value
        kind = _TrackedInt if self._keeps_types and type(value) is int else _TrackedFloat
        number: Any = kind(value)
        number.probe, number.value, number.formula, number.depth = self, value, formula, depth
        return number

    def note_test(self, formula: Formula) -> None:
        """Note that the forward has compared a number."""
        if self._is_recording and len(self._tests) < _MAX_TESTS:
            self._tests.append(formula)

    def stop(self) -> None:
        """Note no more comparisons: the forward has ended."""
        self._is_recording = False

    def find_calls(self, counters_after: Sequence[Any]) -> list[Counters]:
        """Return the counters of later calls in which a test has another result.

        Args:
            counters_after: What the places of the counters hold after the forward.
        """
        formulas = [getattr(value, "formula", None) for value in counters_after]
        self._orbit = self._follow(counters_after, formulas) if self._tests else []
        calls = {count for test in self._tests for count in self._find_other_results(test)}
        return [self._compute_counters(count) for count in sorted(calls)]

    def _follow(
        self, counters_after: Sequence[Any], formulas: Sequence[Formula | None]
    ) -> list[Counters]:
        """Return the counters before each of the next calls.

        A counter that was computed in another way, as by `int(n) + 1`, goes on in equal steps.
        """
        steps = [
            unwrap_number(new) - old for new, old in zip(counters_after, self._values, strict=True)
        ]
        orbit: list[Counters] = [self._values]
        while len(orbit) < _MAX_CALLS:
            now = orbit[-1]
            try:
                following = [
                    value + step if formula is None else formula(now)
                    for value, step, formula in zip(now, steps, formulas, strict=True)
                ]
                is_small = all(abs(value) <= _MAX_SIZE for value in following)
            except (ArithmeticError, TypeError, ValueError):
                break
            if not is_small:  # or not a number
                break
            orbit.append(following)
        return orbit

    def _find_other_results(self, test: Formula) -> list[int]:
        """Return after how many calls the result of a test changes, at first and far ahead."""
        try:
            usual = test(self._values)
            near = next((i for i, c in enumerate(self._orbit) if test(c) != usual), None)
            if near is not None:
                return [near]
            far = self._estimate_call(test)
            # A test of floats may change a call before or after.
            counts = [] if far is None else [far + offset for offset in (-1, 0, 1)]
            return [c for c in counts if test(self._compute_counters(c)) != usual][:1]
        except (ArithmeticError, TypeError, ValueError, LookupError):
            return []

    def _estimate_call(self, test: Formula) -> int | None:
        """Return in which far call both sides of a comparison are equal, or None."""
        get_difference = getattr(test, "get_difference", None)
        if get_difference is None or not self._goes_in_equal_steps:
            return None
        differences = [get_difference(counters) for counters in self._orbit[:3]]
        first, second = (new - old for old, new in pairwise(differences))
        if not first or not math.isclose(first, second, rel_tol=1e-9):
            return None
        count = round(-differences[0] / first)
        return count if 1 < count < _FAR_CALLS else None

    @property
    def _goes_in_equal_steps(self) -> bool:
        if len(self._orbit) < 3:
            return False
        columns = zip(*self._orbit[:3], strict=True)
        return all(math.isclose(c - b, b - a, rel_tol=1e-9) for a, b, c in columns)

    def _compute_counters(self, count: int) -> Counters:
        """Return the counters after so many calls."""
        if count < len(self._orbit):
            return self._orbit[count]
        first, second = self._orbit[:2]
        return [a + (b - a) * count for a, b in zip(first, second, strict=True)]


class Comparison:
    """A comparison of two numbers that are computed from counters."""

    def __init__(self, compare: Callable[[Any, Any], Any], left: Formula, right: Formula) -> None:
        self._compare, self._left, self._right = compare, left, right

    def __call__(self, counters: Counters) -> bool:
        """Return the result of the comparison for these counters."""
        return bool(self._compare(self._left(counters), self._right(counters)))

    def get_difference(self, counters: Counters) -> Any:
        """Return the difference of the two numbers for these counters."""
        return self._left(counters) - self._right(counters)


# ---- numbers that remember how they were computed ------------------------------------------------


def _define_operation(function: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Return the two methods of an operation: for a number on the left, and on the right."""

    def compute(left: Any, right: Any) -> Any:
        if not (_is_plain(left) and _is_plain(right)):
            return NotImplemented  # a tensor, or a number of a library
        value = function(unwrap_number(left), unwrap_number(right))
        if not _is_small_power(function, left, right):
            return value
        probe = left.probe if _is_tracked(left) else right.probe
        get_left, get_right = _get_formula(left), _get_formula(right)
        return probe.track(
            value, lambda counters: function(get_left(counters), get_right(counters)), left, right
        )

    return compute, lambda self, other: compute(other, self)


def _define_comparison(compare: Callable[[Any, Any], bool]) -> Any:
    def test(self: Any, other: Any) -> Any:
        if not _is_plain(other):
            return NotImplemented
        self.probe.note_test(Comparison(compare, self.formula, _get_formula(other)))
        return compare(unwrap_number(self), unwrap_number(other))

    return test


def _define_conversion(function: Callable[..., Any]) -> Any:
    def convert(self: Any, *digits: Any) -> Any:
        value, formula = function(unwrap_number(self), *digits), self.formula
        return self.probe.track(value, lambda counters: function(formula(counters), *digits), self)

    return convert


class TrackedNumber:
    """A number that remembers how it was computed from counters.

    Attributes:
        probe: Learns how it is compared.
        value: The number itself.
        formula: Computes it from the counters.
        depth: How many operations the formula has on its longest way.
    """

    probe: CounterProbe
    value: Any
    formula: Formula
    depth: int

    __add__, __radd__ = _define_operation(operator.add)
    __sub__, __rsub__ = _define_operation(operator.sub)
    __mul__, __rmul__ = _define_operation(operator.mul)
    __truediv__, __rtruediv__ = _define_operation(operator.truediv)
    __floordiv__, __rfloordiv__ = _define_operation(operator.floordiv)
    __mod__, __rmod__ = _define_operation(operator.mod)
    __pow__, __rpow__ = _define_operation(operator.pow)
    __and__, __rand__ = _define_operation(operator.and_)
    __or__, __ror__ = _define_operation(operator.or_)
    __xor__, __rxor__ = _define_operation(operator.xor)
    __lshift__, __rlshift__ = _define_operation(operator.lshift)
    __rshift__, __rrshift__ = _define_operation(operator.rshift)
    __neg__ = _define_conversion(operator.neg)
    __abs__ = _define_conversion(abs)
    __round__ = _define_conversion(round)
    __floor__ = _define_conversion(math.floor)
    __ceil__ = _define_conversion(math.ceil)
    __eq__ = _define_comparison(operator.eq)
    __ne__ = _define_comparison(operator.ne)
    __lt__ = _define_comparison(operator.lt)
    __le__ = _define_comparison(operator.le)
    __gt__ = _define_comparison(operator.gt)
    __ge__ = _define_comparison(operator.ge)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, text: str) -> str:
        return format(self.value, text)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __bool__(self) -> bool:
        self.probe.note_test(Comparison(operator.ne, self.formula, lambda _: 0))
        return bool(self.value)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other


class _TrackedInt(TrackedNumber, int):
    """A number that remembers how it was computed, for layers that need a whole one."""


class _TrackedFloat(TrackedNumber, float):
    """A number that remembers how it was computed. It may stand for a whole one."""


def _is_tracked(value: Any) -> TypeGuard[TrackedNumber]:
    return isinstance(value, TrackedNumber)


def _is_plain(value: Any) -> bool:
    return _is_tracked(value) or type(value) in (int, float, bool)


def unwrap_number(value: Any) -> Any:
    """Return a number without its formula, or any other value as it is."""
    return value.value if _is_tracked(value) else value


def _get_formula(value: Any) -> Formula:
    return value.formula if _is_tracked(value) else lambda _: value


def _is_small_power(function: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    """Return whether an operation cannot give a number of millions of digits in a later call."""
    if function is operator.lshift:
        return not _is_tracked(right)
    if function is not operator.pow or isinstance(unwrap_number(left), float):
        return True
    return not _is_tracked(right) and abs(right) <= _MAX_EXPONENT
