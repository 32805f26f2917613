"""The best cut under the memory of each rank, and what to say if none fits.

Stages that share a rank share its memory, so what one may keep depends on the others. The search
is first let loose as if each had all of it. If the best cut is too much for a rank, then in every
cut that fits one of its stages keeps no more than in proportion to what is there: each such case
is searched, and the best of all is gone on with, until one fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from penstock.balance.search import Found, search
from penstock.balance.task import Cut, Task
from penstock.balance.whole import Whole
from penstock.errors import ArgumentError

_CASES = 256  # after so many, the stages of a rank get equal shares of its memory


def best_cut(task: Task) -> Cut:
    """The cut whose slowest stage, its messages included, is as fast as it can be.

    Every rank has memory enough for its stages. Among equals the stages' seconds are as even as
    they can be (the least sum of squares), then their numbers of units, and then the larger stages
    come first. It is exact; only where ranks with several stages are so short of memory that
    hundreds of searches find no cut does each of their stages get an equal share of it.

    >>> from penstock.balance import Device, Unit
    >>> units = (Unit(seconds=1.0, holds=10),) * 6
    >>> best_cut(Task(units, (Device(speed=2.0), Device()))).counts
    (4, 2)
    >>> best_cut(Task(units, (Device(speed=2.0, memory=30), Device()))).counts
    (3, 3)
    """
    whole = Whole.of(task)
    found = _search(whole)
    if found is None:
        raise ArgumentError(_why_none_fits(task, whole))
    return task.weigh(found.counts)


def _search(whole: Whole) -> Found | None:
    rooms = tuple(whole.room[rank] for rank in whole.ranks)
    seen = {rooms}
    cases: list[tuple[Found, tuple[int, ...]]] = []
    _add(cases, whole, rooms)
    while cases:
        found, rooms = heappop(cases)
        tight = list(_proportions(whole, found.counts))
        if not tight:
            return found
        if len(seen) > _CASES:
            return search(whole, _shares(whole, whole.room))
        for stage, most in tight:
            case = (*rooms[:stage], most, *rooms[stage + 1 :])
            if case not in seen:
                seen.add(case)
                _add(cases, whole, case)
    return None


def _add(cases: list[tuple[Found, tuple[int, ...]]], whole: Whole, room: tuple[int, ...]) -> None:
    found = search(whole, room)
    if found is not None:
        heappush(cases, (found, room))


def _proportions(whole: Whole, counts: Sequence[int]) -> list[tuple[int, int]]:
    """For the first rank that is given too much: its stages, and what one of them may keep."""
    kept = _kept(whole, counts)
    for rank, room in enumerate(whole.room):
        own = [stage for stage, at in enumerate(whole.ranks) if at == rank]
        wanted = sum(kept[stage] for stage in own)
        if wanted > room:
            return [(stage, kept[stage] * room // wanted) for stage in own if kept[stage]]
    return []


def _kept(whole: Whole, counts: Sequence[int]) -> list[int]:
    found, start = [], 0
    for sums, count in zip(whole.kept, counts, strict=True):
        found.append(sums[start + count] - sums[start])
        start += count
    return found


def _shares(whole: Whole, room: Sequence[int]) -> list[int]:
    return [room[rank] // whole.ranks.count(rank) for rank in whole.ranks]


def _why_none_fits(task: Task, whole: Whole) -> str:
    """What every rank would need more, if all got as much more, and who needs it."""
    low, high = 0, sum(sums[-1] for sums in whole.kept) * whole.stages
    while low < high:
        more = (low + high) // 2
        if whole.fits(_shares(whole, [room + more for room in whole.room])):
            high = more
        else:
            low = more + 1
    found = search(whole, _shares(whole, [room + low for room in whole.room]))
    assert found is not None
    cut = task.weigh(found.counts)
    lacks = []
    for rank, device in enumerate(task.devices):
        own = [stage for stage, at in enumerate(task.placement) if at == rank]
        wanted = sum(cut.loads[stage].memory for stage in own)
        if wanted > device.memory:
            stages = f"stage{'s' * (len(own) > 1)} {' and '.join(map(str, own))}"
            lacks.append(
                f"{stages} would need {_bytes(wanted)} on rank {rank}, which has "
                f"{_bytes(device.memory)}: {_bytes(wanted - device.memory)} too much"
            )
    return (
        f"no cut of {len(task.units)} units into {task.stages} stages fits the memory. The nearest "
        f"is {list(cut.counts)}, and there {'; '.join(lacks)}. Take more stages or devices with "
        "more memory, cut the batch into more chunks, recompute (checkpoint='always'), or take a "
        "schedule with fewer micro-batches in flight"
    )


def _bytes(number: float) -> str:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {name}"
    return f"{number:g} bytes"
