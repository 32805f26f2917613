from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from math import inf, isclose
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError
from penstock.schedules import balance
from penstock.schedules.balance import (
    CutProblem,
    DeviceCapacity,
    UnitLoad,
    UnitOutput,
    balance_costs,
    check_cut,
    even_out_ranks,
    find_best_cut,
)

# ---- the oracle: every cut, evaluated by the definitions ------------------------------------


def every_cut(task: CutProblem) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, len(task.units)), task.stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *inner, len(task.units))))


def shares(task: CutProblem, counts: Sequence[int]) -> list[Fraction]:
    """Return the seconds of each stage."""
    home = [stage for stage, count in enumerate(counts) for _ in range(count)]
    seconds = [Fraction(0)] * len(counts)
    for unit, stage in zip(task.units, home, strict=True):
        speed = task.devices[task.placement[stage]].speed
        seconds[stage] += Fraction(unit.seconds) / Fraction(speed)
    for value in task.values:
        cost = Fraction(value.size) * Fraction(task.seconds_per_byte)
        users = {home[dst] for dst in value.dsts} - {home[value.src]}
        for stage in users:
            seconds[stage] += cost
        if users:
            seconds[home[value.src]] += cost
    return seconds


def fits(task: CutProblem, counts: Sequence[int]) -> bool:
    kept = [Fraction(0)] * len(task.devices)
    units = iter(task.units)
    for stage, count in enumerate(counts):
        for _ in range(count):
            unit = next(units)
            kept[task.placement[stage]] += Fraction(unit.static_bytes)
            kept[task.placement[stage]] += task.in_flight[stage] * Fraction(unit.activation_bytes)
    return all(size <= device.memory for size, device in zip(kept, task.devices, strict=True))


def worth(task: CutProblem, counts: tuple[int, ...]) -> tuple[Any, ...]:
    seconds = shares(task, counts)
    return (
        max(seconds),
        sum(share**2 for share in seconds),
        sum(count**2 for count in counts),
        counts[::-1],
    )


# ---- random problems ------------------------------------------------------------------------

few = st.integers(0, 5)
exact_speeds = st.sampled_from([0.25, 0.5, 1.0, 2.0])
any_speeds = st.floats(0.1, 10)
memories = st.one_of(st.just(inf), st.integers(3, 40), st.floats(3, 40))


@st.composite
def tasks(draw: st.DrawFn, speeds: st.SearchStrategy[float], most_ranks: int = 5) -> CutProblem:
    numbers = draw(st.sampled_from([few, st.floats(0, 5).map(lambda x: round(x, 9))]))
    units = draw(st.lists(st.builds(UnitLoad, numbers, few, few), min_size=1, max_size=9))
    apart = len(units)
    ranks = draw(st.integers(1, min(apart, most_ranks)))
    values = []
    for src in range(len(units) - 1):
        for _ in range(draw(st.integers(0, 2))):
            dsts = draw(st.lists(st.integers(src + 1, len(units) - 1), max_size=3))
            values.append(UnitOutput(src, tuple(dsts), draw(few)))
    devices = [DeviceCapacity(draw(speeds), draw(memories)) for _ in range(ranks)]
    several = draw(st.booleans()) and apart > ranks
    stages = draw(st.integers(ranks, apart)) if several else ranks
    return CutProblem(
        tuple(units),
        tuple(devices),
        tuple(values),
        placement=tuple(stage % ranks for stage in range(stages)) if several else (),
        in_flight=tuple(draw(st.integers(1, 3)) for _ in range(stages)),
        seconds_per_byte=draw(st.sampled_from([0, 0.5, 1, 3])),
    )


@settings(max_examples=300, deadline=None)
@given(tasks(exact_speeds))
def test_find_best_cut_equals_exhaustive_search(task: CutProblem) -> None:
    among = [counts for counts in every_cut(task) if fits(task, counts)]
    if not among:
        with pytest.raises(ArgumentError, match=r"fits the memory\. The nearest is"):
            find_best_cut(task)
        return
    assert find_best_cut(task) == min(among, key=lambda counts: worth(task, counts))


ALMOST_40_BYTES = CutProblem(
    tuple(
        UnitLoad(0, *sizes)
        for sizes in [(0, 0), (0, 3), (1, 5), (0, 0), (0, 0), (0, 2), (0, 5), (4, 5), (0, 0)]
    ),
    tuple(DeviceCapacity(memory=memory) for memory in (inf, inf, inf, 39.99999999999999, inf)),
    (UnitOutput(2, (3,), 1), UnitOutput(2, (), 0)),
    in_flight=(1, 1, 1, 3, 1),
    seconds_per_byte=0.5,
)


@settings(deadline=None)
@given(tasks(any_speeds))
@example(ALMOST_40_BYTES)
def test_find_best_cut_on_devices_of_any_speed_equals_exhaustive_search(task: CutProblem) -> None:
    among = [counts for counts in every_cut(task) if fits(task, counts)]
    assume(among)
    least = min(max(shares(task, counts)) for counts in among)
    found = find_best_cut(task)
    assert fits(task, found)
    assert isclose(max(shares(task, found)), least, rel_tol=1e-11, abs_tol=1e-300)


# ---- examples -------------------------------------------------------------------------------

EVEN = (UnitLoad(1.0, static_bytes=10, activation_bytes=2),) * 8
CHAIN = tuple(UnitOutput(at, (at + 1,), 1) for at in range(7))


@pytest.mark.parametrize(
    ("task", "counts"),
    [
        (CutProblem(EVEN, (DeviceCapacity(),) * 4), (2, 2, 2, 2)),
        (CutProblem(EVEN, (DeviceCapacity(), DeviceCapacity(3.0))), (2, 6)),
        (CutProblem(EVEN, (DeviceCapacity(memory=30), DeviceCapacity())), (2, 6)),
        (CutProblem(EVEN, (DeviceCapacity(memory=30), DeviceCapacity()), in_flight=(1, 1)), (2, 6)),
        (CutProblem(EVEN, (DeviceCapacity(memory=36), DeviceCapacity()), in_flight=(1, 1)), (3, 5)),
        (CutProblem(EVEN, (DeviceCapacity(),) * 2, in_flight=(8, 1)), (4, 4)),
        (
            CutProblem(
                EVEN, (DeviceCapacity(memory=48),) * 2, placement=(0, 1, 0, 1), in_flight=(1,) * 4
            ),
            (2, 2, 2, 2),
        ),
    ],
)
def test_find_best_cut_examples(task: CutProblem, counts: tuple[int, ...]) -> None:
    assert find_best_cut(task) == counts


def test_find_best_cut_avoids_sending_a_large_value() -> None:
    values = (*CHAIN[:3], UnitOutput(3, (4,), 100), *CHAIN[4:])
    assert find_best_cut(
        CutProblem(EVEN, (DeviceCapacity(),) * 2, CHAIN, seconds_per_byte=0.1)
    ) == (4, 4)
    assert find_best_cut(
        CutProblem(EVEN, (DeviceCapacity(),) * 2, values, seconds_per_byte=0.1)
    ) == (5, 3)


def test_rounding_of_message_costs_does_not_choose_between_equal_bottlenecks() -> None:
    """Sending 9 bytes costs as much as sending 6 and 3, although 0.1 * 9 < 0.1 * 6 + 0.1 * 3."""
    values = tuple(UnitOutput(unit, (unit + 1,), size) for unit, size in enumerate((6, 9, 3)))
    task = CutProblem(EVEN[:4], (DeviceCapacity(),) * 3, values, seconds_per_byte=0.1)
    assert find_best_cut(task) == (1, 2, 1)  # more even than (2, 1, 1)


def test_skip_costs_nothing_on_the_stages_in_between() -> None:
    skip = UnitOutput(0, (7,), 5)
    task = CutProblem(EVEN, (DeviceCapacity(),) * 4, (*CHAIN, skip), seconds_per_byte=0.1)
    assert find_best_cut(task) == (2, 2, 2, 2)


def test_in_flight_defaults_to_1f1b() -> None:
    task = CutProblem(EVEN, (DeviceCapacity(),) * 4)
    assert task.memory_by_stage((2, 2, 2, 2)) == [36, 32, 28, 24]


def test_memory_limit_covers_all_stages_of_a_rank() -> None:
    """The best cut without a limit is (1, 3, 1, 3): rank 1 would have six units."""
    units = tuple(UnitLoad(seconds, static_bytes=1) for seconds in (3, 1, 1, 1, 3, 1, 1, 1))
    for memory, counts in ((6, (1, 3, 1, 3)), (5, (1, 3, 2, 2)), (4, (2, 2, 2, 2))):
        task = CutProblem(
            units, (DeviceCapacity(memory=memory),) * 2, placement=(0, 1, 0, 1), in_flight=(1,) * 4
        )
        assert find_best_cut(task) == counts


def test_memory_of_a_rank_is_split_evenly_if_there_are_too_many_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balance, "_MAX_CASES", 0)
    units = tuple(UnitLoad(seconds, static_bytes=1) for seconds in (3, 1, 1, 1, 3, 1, 1, 1))
    task = CutProblem(
        units, (DeviceCapacity(memory=5),) * 2, placement=(0, 1, 0, 1), in_flight=(1,) * 4
    )
    assert find_best_cut(task) == (2, 2, 2, 2)


# ---- errors ---------------------------------------------------------------------------------


def test_error_if_no_cut_fits_names_the_rank_and_its_missing_memory() -> None:
    gib = 2.0**30
    units = (
        UnitLoad(1.0, static_bytes=gib),
        UnitLoad(1.0, static_bytes=6 * gib),
        UnitLoad(1.0, static_bytes=gib),
    )
    with pytest.raises(ArgumentError) as error:
        find_best_cut(CutProblem(units, (DeviceCapacity(memory=4 * gib),) * 2))
    assert str(error.value) == (
        "no cut of 3 units into 2 stages fits the memory. The nearest is [2, 1], and there stage 0 "
        "would need 7.00 GiB on rank 0, which has 4.00 GiB: 3.00 GiB too much. This is for "
        "parameters, gradients and the state of an optimizer alone: use more devices, or devices "
        "with more memory."
    )


def test_error_if_no_cut_fits_names_all_stages_of_the_rank() -> None:
    task = CutProblem(
        EVEN,
        (DeviceCapacity(memory=30), DeviceCapacity()),
        placement=(0, 1, 0, 1),
        in_flight=(1,) * 4,
    )
    assert find_best_cut(task) == (1, 3, 1, 3)
    task = CutProblem(
        EVEN,
        (DeviceCapacity(memory=3), DeviceCapacity()),
        placement=(0, 1, 0, 1),
        in_flight=(1,) * 4,
    )
    with pytest.raises(ArgumentError, match="stages 0 and 2 would need 24 bytes on rank 0"):
        find_best_cut(task)


def test_cut_problem_reports_every_invalid_value() -> None:
    with pytest.raises(ArgumentError) as error:
        CutProblem(
            (UnitLoad(-1.0, activation_bytes=inf), UnitLoad(1.0)),
            (DeviceCapacity(0.0), DeviceCapacity(memory=-1)),
            (UnitOutput(1, (0,), 1),),
            placement=(0, 2),
            in_flight=(1, 0),
        )
    assert str(error.value) == (
        "unit 0 costs -1.0, unit 0 keeps inf: a cost is a number from 0 up; "
        "rank 0 has speed 0.0 and memory inf: a speed is more than 0, and memory a number from 0 "
        "up; rank 1 has speed 1.0 and memory -1: a speed is more than 0, and memory a number from "
        "0 up; a value goes from unit 1 to [0] of 2 units: a value only goes to later units; "
        "placement names ranks [2], but there are 2 devices; "
        "in_flight is [1, 0] for 2 stages: give each the number of micro-batches that it keeps at "
        "once, 1 or more"
    )


# ---- balance_costs: cost alone, on equal devices --------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(few, st.sampled_from([0.1, 0.2, 0.3, 1e-12, 1e9]), st.floats(0, 1e30)),
        min_size=1,
        max_size=9,
    ),
    st.data(),
)
def test_balance_costs_has_the_bottleneck_of_exhaustive_search(
    costs: list[float], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    task = CutProblem(tuple(map(UnitLoad, costs)), (DeviceCapacity(),) * stages)
    least = min(max(shares(task, counts)) for counts in every_cut(task))
    counts = balance_costs(costs, stages)
    assert isclose(max(shares(task, counts)), least, rel_tol=1e-11, abs_tol=1e-300)


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
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    assert max(sum(costs[end - n : end]) for end, n in zip(ends, counts, strict=True)) == least[0]


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
        "and there is at least one stage" + (f". Use 1 to {units} stages." if units else "")
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


# ---- ranks with several stages -------------------------------------------------------------------


@st.composite
def several_stages_a_rank(draw: st.DrawFn) -> CutProblem:
    ranks, shape = draw(st.integers(2, 4)), draw(st.sampled_from(["loop", "v"]))
    again = range(ranks) if shape == "loop" else reversed(range(ranks))
    seconds = draw(st.lists(st.floats(0.1, 9), min_size=2 * ranks, max_size=20))
    devices = [DeviceCapacity(draw(st.sampled_from([1.0, 2.0]))) for _ in range(ranks)]
    return CutProblem(
        tuple(map(UnitLoad, seconds)), tuple(devices), placement=(*range(ranks), *again)
    )


def find_rank_work(task: CutProblem, counts: Sequence[int]) -> list[float]:
    work = [0.0] * len(task.devices)
    for rank, (start, end) in zip(
        task.placement, pairwise(accumulate(counts, initial=0)), strict=True
    ):
        seconds = sum(unit.seconds for unit in task.units[start:end])
        work[rank] += seconds / task.devices[rank].speed
    return work


@settings(deadline=None)
@given(several_stages_a_rank())
def test_even_out_ranks_is_a_cut_that_is_not_less_even(task: CutProblem) -> None:
    best = find_best_cut(task)
    even = even_out_ranks(task, best)
    check_cut(even, len(task.units))
    before, after = (find_rank_work(task, counts) for counts in (best, even))
    assert sum(w**8 for w in after) <= sum(w**8 for w in before) * (1 + 1e-9)


def test_even_out_ranks_gives_the_rank_of_a_long_unit_less_in_its_other_stage() -> None:
    units = tuple(map(UnitLoad, [1.0] * 24 + [8.0]))
    v_shape = CutProblem(units, (DeviceCapacity(),) * 4, placement=(0, 1, 2, 3, 3, 2, 1, 0))
    even = even_out_ranks(v_shape, find_best_cut(v_shape))
    assert max(find_rank_work(v_shape, find_best_cut(v_shape))) >= 11
    assert max(find_rank_work(v_shape, even)) == 9


def test_even_out_ranks_keeps_to_the_memory_of_the_ranks() -> None:
    units = tuple(UnitLoad(seconds, static_bytes=10) for seconds in [1, 1, 1, 1, 1, 1, 1, 3])
    devices = DeviceCapacity(memory=40), DeviceCapacity(memory=40)
    tight = CutProblem(units, devices, placement=(0, 1, 1, 0))
    assert even_out_ranks(tight, (3, 2, 2, 1)) == (3, 2, 2, 1)
