"""Pairs: whatever the axes, every two values of different ones meet, in few rows."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.pairs import pairs
from tests.support import CHECKPOINTS, DOORS, RUNTIMES, SCHEDULES


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_every_two_values_meet(lengths: list[int]) -> None:
    axes = {f"axis{at}": list(range(length)) for at, length in enumerate(lengths)}
    rows = pairs(axes)
    assert len(set(rows)) == len(rows)
    for a, b in combinations(range(len(lengths)), 2):
        assert {(row[a], row[b]) for row in rows} == {
            (one, other) for one in range(lengths[a]) for other in range(lengths[b])
        }


def test_one_axis_is_taken_as_it_is() -> None:
    assert pairs({"axis": [1, 2]}) == [(1,), (2,)]


def test_as_many_rows_as_the_two_longest_axes_have_pairs() -> None:
    """For the axes that most tests have."""
    axes = {"schedule": list(SCHEDULES), "runtime": RUNTIMES, "checkpoint": CHECKPOINTS}
    assert len(pairs({**axes, "door": DOORS, "kind": "ab"})) == len(SCHEDULES) * len(CHECKPOINTS)
