"""Pairwise test parameters: every two values of different axes occur together in some case.

tests/properties/test_exactness.py compares a pipe bit by bit under every schedule, in every runtime
and checkpoint mode. Other tests of these axes use pairs:

    @each_pair(schedule=SCHEDULES, runtime=RUNTIMES, checkpoint=CHECKPOINTS, door=DOORS)
    def test_...(schedule, runtime, checkpoint, door): ...       # 42 cases instead of 168
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]


def each_pair(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with pairwise combinations of its named parameters."""
    return pytest.mark.parametrize(tuple(axes), pairs({n: list(v) for n, v in axes.items()}))


def pairs(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return rows, with one value per axis, that cover each pair of values of different axes.

    The algorithm is greedy. First, the product of the two longest axes gives one row each, in which
    every other axis takes the value that is paired least so far with the values of the row. Then
    each pair that is still missing gets a row of its own.
    """
    values = list(axes.values())
    met: Counter[Pair] = Counter()
    longest = sorted(range(len(values)), key=lambda at: -len(values[at]))[:2]
    rows = []
    for chosen in product(*(values[at] for at in longest)):
        rows.append(_filled(values, dict(zip(longest, chosen, strict=True)), met))
    for a, b in combinations(range(len(values)), 2):
        for one, other in product(values[a], values[b]):
            if not met[a, one, b, other]:
                rows.append(_filled(values, {a: one, b: other}, met))
    return rows


def _filled(values: Sequence[Sequence[Any]], chosen: dict[int, Any], met: Counter[Pair]) -> Row:
    """Complete the chosen values to a row, and count the pairs of the row in `met`."""
    for at in set(range(len(values))) - chosen.keys():
        chosen[at] = min(values[at], key=lambda value: _often(chosen, at, value, met))
    row = tuple(chosen[at] for at in range(len(values)))
    met.update((a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2))
    return row


def _often(chosen: Mapping[int, Any], at: int, value: Any, met: Counter[Pair]) -> tuple[int, int]:
    """Return how many of the chosen values were paired with this value, and how often in total."""
    counts = [
        met[(a, one, at, value) if a < at else (at, value, a, one)] for a, one in chosen.items()
    ]
    return sum(count > 0 for count in counts), sum(counts)
