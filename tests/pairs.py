"""Tests with many axes, thinned: every value, and every two values of different axes, meet.

The product of schedules, runtimes, modes and doors is taken in full where a pipe is compared bit by
bit, in tests/properties/test_exactness.py. What else is said of all of them takes pairs:

    @each_pair(schedule=SCHEDULES, runtime=RUNTIMES, checkpoint=CHECKPOINTS, door=DOORS)
    def test_...(schedule, runtime, checkpoint, door): ...       # 42 cases, and not 168
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
    """A test's cases, with its parameters by name."""
    return pytest.mark.parametrize(tuple(axes), pairs({n: list(v) for n, v in axes.items()}))


def pairs(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows, one value of each axis, in which each two values of different axes meet.

    Those of the two longest axes meet once each; every other axis takes the value that has met them
    least. What is then left, if anything, gets rows of its own.
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
    """A row with what was chosen, whose pairs have then met."""
    for at in set(range(len(values))) - chosen.keys():
        chosen[at] = min(values[at], key=lambda value: _often(chosen, at, value, met))
    row = tuple(chosen[at] for at in range(len(values)))
    met.update((a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2))
    return row


def _often(chosen: Mapping[int, Any], at: int, value: Any, met: Counter[Pair]) -> tuple[int, int]:
    """How many have met this value, and how often."""
    counts = [
        met[(a, one, at, value) if a < at else (at, value, a, one)] for a, one in chosen.items()
    ]
    return sum(count > 0 for count in counts), sum(counts)
