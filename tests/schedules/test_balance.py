from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from math import inf, isclose
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError
from penstock.schedules import balance as best
from penstock.schedules import balance as search
from penstock.schedules.balance import find_best_cut
from penstock.schedules.balance_problem import CutProblem, DeviceCapacity, UnitLoad, UnitOutput

# ---- the oracle: every cut, evaluated by the definitions ------------------------------------


def every_cut(task: CutProblem) -> Iterator[tuple[int, ...]]:
    places = [at for at in range(1, len(task.units)) if not task.units[at].joined_to_previous]
    for inner in combinations(places, task.stages - 1):
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
    numbers = draw(st.sampled_from([few, st.floats(0, 5)]))
    units = draw(
        st.lists(
            st.builds(UnitLoad, numbers, few, few, st.sampled_from([False, False, False, True])),
            min_size=1,
            max_size=9,
        )
    )
    apart = 1 + sum(not unit.joined_to_previous for unit in units[1:])
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
    assert find_best_cut(task).counts == min(among, key=lambda counts: worth(task, counts))


@settings(deadline=None)
@given(tasks(any_speeds))
def test_find_best_cut_on_devices_of_any_speed_equals_exhaustive_search(task: CutProblem) -> None:
    among = [counts for counts in every_cut(task) if fits(task, counts)]
    assume(among)
    least = min(max(shares(task, counts)) for counts in among)
    found = find_best_cut(task)
    assert fits(task, found.counts)
    assert isclose(max(shares(task, found.counts)), least, rel_tol=1e-11, abs_tol=1e-300)


@settings(max_examples=25, deadline=None)
@given(st.lists(few, min_size=40, max_size=70), st.lists(few, min_size=70, max_size=70))
def test_find_best_cut_of_many_units_equals_dynamic_programming(
    costs: list[int], sizes: list[int]
) -> None:
    values = [UnitOutput(at, (at + 1,), sizes[at]) for at in range(len(costs) - 1)]
    values += [UnitOutput(at, (at + 3, at + 9), 2) for at in range(0, len(costs) - 9, 4)]
    task = CutProblem(
        tuple(map(UnitLoad, costs)),
        (DeviceCapacity(),) * 6,
        tuple(values),
        seconds_per_byte=1 + sizes[0],
    )
    assert find_best_cut(task).bottleneck_seconds == simply(task)


def simply(task: CutProblem) -> float:
    """Return the best bottleneck by plain dynamic programming, for devices that are equal."""
    units = len(task.units)
    seconds = {
        (a, b): task._stage_load(0, range(a, b)).seconds
        for b in range(1, units + 1)
        for a in range(b)
    }
    least = [inf] * units + [0.0]
    for _ in range(task.stages):
        least = [
            min(
                (max(seconds[a, b], least[b]) for b in range(a + 1, units + 1) if least[b] < inf),
                default=inf,
            )
            for a in range(units)
        ] + [inf]
    return least[0]


@settings(deadline=None)
@given(tasks(any_speeds), st.data())
def test_evaluate_sums_the_loads_of_a_cut(task: CutProblem, data: st.DataObject) -> None:
    counts = data.draw(st.sampled_from(list(every_cut(task))))
    cut = task.evaluate(counts)
    assert [load.seconds for load in cut.loads] == pytest.approx(
        [float(share) for share in shares(task, counts)]
    )
    assert [len(load.units) for load in cut.loads] == list(counts)
    assert cut.bottleneck_seconds == max(load.seconds for load in cut.loads)
    assert cut.loads[cut.slowest_stage].seconds == cut.bottleneck_seconds


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
        (
            CutProblem(
                (*EVEN[:3], UnitLoad(1.0, joined_to_previous=True), *EVEN[4:]),
                (DeviceCapacity(),) * 4,
            ),
            (2, 2, 2, 2),
        ),
        (
            CutProblem(
                (*EVEN[:2], UnitLoad(1.0, joined_to_previous=True), *EVEN[3:]),
                (DeviceCapacity(),) * 4,
            ),
            (3, 2, 2, 1),
        ),
    ],
)
def test_find_best_cut_examples(task: CutProblem, counts: tuple[int, ...]) -> None:
    assert find_best_cut(task).counts == counts


def test_find_best_cut_avoids_sending_a_large_value() -> None:
    values = (*CHAIN[:3], UnitOutput(3, (4,), 100), *CHAIN[4:])
    assert find_best_cut(
        CutProblem(EVEN, (DeviceCapacity(),) * 2, CHAIN, seconds_per_byte=0.1)
    ).counts == (4, 4)
    assert find_best_cut(
        CutProblem(EVEN, (DeviceCapacity(),) * 2, values, seconds_per_byte=0.1)
    ).counts == (5, 3)


def test_skip_costs_nothing_on_the_stages_in_between() -> None:
    skip = UnitOutput(0, (7,), 5)
    task = CutProblem(EVEN, (DeviceCapacity(),) * 4, (*CHAIN, skip), seconds_per_byte=0.1)
    loads = task.evaluate((2, 2, 2, 2)).loads
    assert [(load.received_bytes, load.sent_bytes) for load in loads] == [
        (0, 6),
        (1, 1),
        (1, 1),
        (6, 0),
    ]
    assert find_best_cut(task).counts == (2, 2, 2, 2)


def test_value_is_sent_once_to_each_stage_that_uses_it() -> None:
    task = CutProblem(EVEN, (DeviceCapacity(),) * 3, (UnitOutput(1, (2, 3, 4, 6, 7), 10),))
    loads = task.evaluate((3, 3, 2)).loads
    assert [(load.received_bytes, load.sent_bytes) for load in loads] == [(0, 10), (10, 0), (10, 0)]


def test_in_flight_defaults_to_1f1b() -> None:
    loads = CutProblem(EVEN, (DeviceCapacity(),) * 4).evaluate((2, 2, 2, 2)).loads
    assert [load.memory for load in loads] == [36, 32, 28, 24]


def test_memory_limit_covers_all_stages_of_a_rank() -> None:
    """The best cut without a limit is (1, 3, 1, 3): rank 1 would have six units."""
    units = tuple(UnitLoad(seconds, static_bytes=1) for seconds in (3, 1, 1, 1, 3, 1, 1, 1))
    for memory, counts in ((6, (1, 3, 1, 3)), (5, (1, 3, 2, 2)), (4, (2, 2, 2, 2))):
        task = CutProblem(
            units, (DeviceCapacity(memory=memory),) * 2, placement=(0, 1, 0, 1), in_flight=(1,) * 4
        )
        assert find_best_cut(task).counts == counts


def test_memory_of_a_rank_is_split_evenly_if_there_are_too_many_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best, "_MAX_CASES", 0)
    units = tuple(UnitLoad(seconds, static_bytes=1) for seconds in (3, 1, 1, 1, 3, 1, 1, 1))
    task = CutProblem(
        units, (DeviceCapacity(memory=5),) * 2, placement=(0, 1, 0, 1), in_flight=(1,) * 4
    )
    assert find_best_cut(task).counts == (2, 2, 2, 2)


def test_find_best_cut_examines_few_candidates_if_costs_are_similar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are 200 x 200 / 2 x 50 candidates."""
    looked = 0
    plain = search._find_best_start

    def counting(bounded: Any, stage: int, end: int, *others: Any) -> tuple[int, int]:
        nonlocal looked
        looked += end - bounded.first_start(stage, end)
        return plain(bounded, stage, end, *others)

    monkeypatch.setattr(search, "_find_best_start", counting)
    units = tuple(UnitLoad(1.0 + at * 37 % 11) for at in range(200))
    assert sum(find_best_cut(CutProblem(units, (DeviceCapacity(),) * 50)).counts) == 200
    assert 0 < looked < 200 * 200


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
        "would need 7.00 GiB on rank 0, which has 4.00 GiB: 3.00 GiB too much. Use more stages "
        "or devices with more memory, cut the batch into more chunks, recompute "
        "(checkpoint='always'), or use a schedule with fewer micro-batches in flight."
    )


def test_error_if_no_cut_fits_names_all_stages_of_the_rank() -> None:
    task = CutProblem(
        EVEN,
        (DeviceCapacity(memory=30), DeviceCapacity()),
        placement=(0, 1, 0, 1),
        in_flight=(1,) * 4,
    )
    assert find_best_cut(task).counts == (1, 3, 1, 3)
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


def test_cut_problem_refuses_more_stages_than_separable_units() -> None:
    units = (UnitLoad(1.0), UnitLoad(1.0, joined_to_previous=True), UnitLoad(1.0))
    with pytest.raises(ArgumentError, match=r"^3 units \(1 of them joined to the one before\) can"):
        CutProblem(units, (DeviceCapacity(),) * 3)


def test_evaluate_refuses_a_cut_with_another_number_of_stages() -> None:
    with pytest.raises(ArgumentError, match=r"^\[3, 5\] makes 2 stages, not 4$"):
        CutProblem(EVEN, (DeviceCapacity(),) * 4).evaluate((3, 5))
