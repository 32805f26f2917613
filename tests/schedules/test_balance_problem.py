from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError
from penstock.schedules.balance import balance_costs
from penstock.schedules.balance_problem import check_cut


def every_cut(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, units), stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *inner, units)))


def worth(costs: Sequence[float], counts: tuple[int, ...]) -> tuple[object, ...]:
    """Return the objective that `balance_costs` minimises."""
    left = [Fraction(cost) for cost in costs]
    shares = []
    for count in counts:
        shares.append(sum(left[:count], Fraction(0)))
        del left[:count]
    return (
        max(shares),
        sum(share**2 for share in shares),
        sum(count**2 for count in counts),
        counts[::-1],
    )


any_costs = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1e-12, 1e9]), min_size=1, max_size=9),
    st.lists(st.floats(0, 1e308), min_size=1, max_size=9),
)


@settings(deadline=None)
@given(any_costs, st.data())
def test_balance_costs_equals_exhaustive_search(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    best = min(every_cut(len(costs), stages), key=lambda counts: worth(costs, counts))
    assert balance_costs(costs, stages) == best


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=30, max_size=60), st.integers(1, 30))
def test_balance_costs_of_many_units_equals_dynamic_programming(
    costs: list[int], stages: int
) -> None:
    least = [max(sum(costs), 1)] * len(costs) + [0]
    for _ in range(stages):
        least = [
            min(max(sum(costs[a:b]), least[b]) for b in range(a + 1, len(costs) + 1))
            for a in range(len(costs))
        ] + [0]
    counts = balance_costs(costs, stages)
    check_cut(counts, len(costs))
    assert worth(costs, counts)[0] == least[0]


@pytest.mark.parametrize(
    ("costs", "stages", "counts"),
    [
        ([1] * 10, 4, (3, 3, 2, 2)),
        ([0] * 10, 4, (3, 3, 2, 2)),
        ([0.1] * 10, 4, (3, 3, 2, 2)),
        ([1] * 5, 5, (1, 1, 1, 1, 1)),
        ([1, 2, 3], 1, (3,)),
        (
            [9, 1, 1, 1, 1, 1, 1],
            3,
            (1, 3, 3),
        ),  # not (1, 5, 1), whose most expensive stage costs the same
        ([1, 1, 1, 1, 1, 1, 9], 3, (3, 3, 1)),
        ([1e20, 1, 1, 1, 1], 3, (1, 2, 2)),  # floats would lose the ones
    ],
)
def test_balance_costs_examples(costs: list[float], stages: int, counts: tuple[int, ...]) -> None:
    assert balance_costs(costs, stages) == counts


@pytest.mark.parametrize(("units", "stages"), [(3, 4), (3, 0), (3, -1), (0, 1)])
def test_balance_costs_refuses_more_stages_than_units(units: int, stages: int) -> None:
    with pytest.raises(ArgumentError) as error:
        balance_costs([1.0] * units, stages)
    assert str(error.value) == (
        f"{units} units cannot be cut into {stages} stages: each stage takes at least one unit, "
        "and there is at least one stage"
    )


def test_balance_costs_names_every_invalid_cost() -> None:
    with pytest.raises(ArgumentError) as error:
        balance_costs([1.0, -2.0, float("nan"), 0.0, float("inf")], 2)
    assert str(error.value) == (
        "unit 1 costs -2.0, unit 2 costs nan, unit 4 costs inf: a cost is a number from 0 up"
    )


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ([3, 2], "the stages take 5 together"),
        ([], "the stages take 0 together"),
        ([7, -1], "stage 1 takes -1, and each takes at least one"),
        (
            [0, 5, 0],
            "stage 0 takes 0, and each takes at least one; "
            "stage 2 takes 0, and each takes at least one; the stages take 5 together",
        ),
    ],
)
def test_check_cut_refuses_an_invalid_cut(counts: list[int], problem: str) -> None:
    with pytest.raises(ArgumentError) as error:
        check_cut(counts, units=6)
    assert str(error.value) == f"{counts} is not a cut of 6 units: {problem}"


def test_check_cut_accepts_a_valid_cut() -> None:
    check_cut((1, 4, 1), units=6)
