"""`pairs`: every two values of different axes occur together, in few rows."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairs import pairs
from tests.support import CHECKPOINTS, DOORS, RUNTIMES, SCHEDULES


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_pairs_cover_every_two_values(lengths: list[int]) -> None:
    axes = {f"axis{at}": list(range(length)) for at, length in enumerate(lengths)}
    rows = pairs(axes)
    assert len(set(rows)) == len(rows)
    for a, b in combinations(range(len(lengths)), 2):
        assert {(row[a], row[b]) for row in rows} == {
            (one, other) for one in range(lengths[a]) for other in range(lengths[b])
        }


def test_pairs_of_one_axis() -> None:
    assert pairs({"axis": [1, 2]}) == [(1,), (2,)]


def test_pairs_need_only_the_product_of_the_two_longest_axes() -> None:
    """This holds for the axes that most tests use."""
    axes = {"schedule": list(SCHEDULES), "runtime": RUNTIMES, "checkpoint": CHECKPOINTS}
    assert len(pairs({**axes, "door": DOORS, "kind": "ab"})) == len(SCHEDULES) * len(CHECKPOINTS)
