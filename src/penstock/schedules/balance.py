"""The best cut of a model into stages: neighbouring units, the values between them, devices.

    find_best_cut    the best cut under the memory of each rank
    balance_costs    the best cut by cost alone, for equal devices
    even_out_ranks   from there, a cut in which ranks with several stages have equal work

Stages that share a rank share its memory, so the limit of one depends on the others. The first
search gives each stage the whole memory of its rank. If its best cut needs too much on a rank, then
in every cut that fits, at least one stage of that rank needs no more than its proportional share.
Each of these cases is searched with that tighter limit, always continuing with the best cut so far,
until a cut fits (best-first branch and bound).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import ceil, floor, gcd, inf, isinf

from penstock.errors import ArgumentError
from penstock.schedules.ir import Schedule, lifetimes
from penstock.text_format import format_binary_bytes

# ---- the problem ----------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitLoad:
    """The cost of one unit, the smallest piece of a model that a stage can take.

    seconds           of F, I and W of one micro-batch together, on a device of speed 1
    static_bytes      memory that is always needed: parameters, gradients, optimizer state
    activation_bytes  memory for each micro-batch whose backward is still to come
    """

    seconds: float
    static_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class UnitOutput:
    """A value that one unit makes and later units use. A skip connection is one more of these.

    The value is sent directly to each other stage that uses it, once. `size` counts the bytes of
    the value and of its gradient on the way back.
    """

    src: int
    dsts: tuple[int, ...]
    size: float


@dataclass(frozen=True)
class DeviceCapacity:
    """The device of a rank: its speed, by which the units' seconds are divided, and its memory."""

    speed: float = 1.0
    memory: float = inf


@dataclass(frozen=True)
class CutProblem:
    """The units in order, the values between them, and a device for each rank.

    placement         the rank of each stage; by default one stage per rank. The stages of a rank
                      share its memory.
    in_flight         how many micro-batches each stage keeps at once; by default as many as 1F1B
                      keeps if there are enough of them
    seconds_per_byte  the time that one byte of a message takes
    """

    units: tuple[UnitLoad, ...]
    devices: tuple[DeviceCapacity, ...]
    values: tuple[UnitOutput, ...] = ()
    placement: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("units", "devices", "values", "placement", "in_flight"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.devices))))
        stages = len(self.placement)
        if not self.in_flight:
            object.__setattr__(self, "in_flight", tuple(range(stages, 0, -1)))
        problems = [*self._find_invalid_numbers(), *self._find_invalid_indices()]
        if problems:
            raise ArgumentError("; ".join(problems))
        check_stage_count(len(self.units), stages)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @cached_property
    def memory_sums(self) -> list[list[int]]:
        """The whole bytes that all units before each unit need, by stage."""
        loads = [(unit.static_bytes, unit.activation_bytes) for unit in self.units]
        sums = []
        for number in self.in_flight:
            needs = (ceil(static + number * activation) for static, activation in loads)
            sums.append(list(accumulate(needs, initial=0)))
        return sums

    def memory_by_stage(self, counts: Sequence[int]) -> list[int]:
        """Return what each stage of a cut needs: static bytes, and activations in flight."""
        ends = pairwise(accumulate(counts, initial=0))
        sums = zip(self.memory_sums, ends, strict=True)
        return [needs[end] - needs[start] for needs, (start, end) in sums]

    def _find_invalid_numbers(self) -> Iterator[str]:
        numbers = [(f"unit {index} costs", unit.seconds) for index, unit in enumerate(self.units)]
        for index, unit in enumerate(self.units):
            numbers += [
                (f"unit {index} holds", unit.static_bytes),
                (f"unit {index} keeps", unit.activation_bytes),
            ]
        numbers += [(f"the value of unit {v.src} has a size of", v.size) for v in self.values]
        numbers.append(("a byte takes", self.seconds_per_byte))
        wrong = [f"{label} {number}" for label, number in numbers if not 0 <= number < inf]
        if wrong:
            yield f"{', '.join(wrong)}: a cost is a number from 0 up"
        for rank, device in enumerate(self.devices):
            if not 0 < device.speed < inf or not device.memory >= 0:
                yield (
                    f"rank {rank} has speed {device.speed} and memory {device.memory}: a speed is "
                    "more than 0, and memory a number from 0 up"
                )

    def _find_invalid_indices(self) -> Iterator[str]:
        for value in self.values:
            if not all(0 <= value.src < dst < len(self.units) for dst in value.dsts):
                yield (
                    f"a value goes from unit {value.src} to {list(value.dsts)} of "
                    f"{len(self.units)} units: a value only goes to later units"
                )
        unknown = sorted({rank for rank in self.placement if not 0 <= rank < len(self.devices)})
        if unknown:
            yield f"placement names ranks {unknown}, but there are {len(self.devices)} devices"
        if len(self.in_flight) != len(self.placement) or min(self.in_flight, default=1) < 1:
            yield (
                f"in_flight is {list(self.in_flight)} for {len(self.placement)} stages: give each "
                "the number of micro-batches that it keeps at once, 1 or more"
            )


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the most micro-batches whose activations each stage keeps at once.

    A micro-batch that is recomputed counts from its R.

    >>> from penstock.schedules.families import make
    >>> count_in_flight(make("1f1b", 3, 8)), count_in_flight(make("gpipe", 3, 8))
    ((3, 2, 1), (8, 8, 8))
    """
    most = [0] * schedule.stages
    for lane in schedule.lanes:
        events = [
            event
            for (stage, _), (born, last) in lifetimes(lane).items()
            for event in ((born, 1, stage), (last + 1, -1, stage))
        ]
        alive = [0] * schedule.stages
        for _, change, stage in sorted(events):
            alive[stage] += change
            most[stage] = max(most[stage], alive[stage])
    return tuple(max(count, 1) for count in most)


def check_cut(counts: Sequence[int], units: int) -> None:
    """Raise if the counts are not a cut of this number of units.

    >>> check_cut([3, 1, 2], units=6)
    >>> check_cut([3, 2], units=6)
    Traceback (most recent call last):
    penstock.errors.ArgumentError: [3, 2] is not a cut of 6 units: the stages take 5 together
    """
    problems = [
        f"stage {stage} takes {count}, and each takes at least one"
        for stage, count in enumerate(counts)
        if count < 1
    ]
    if sum(counts) != units:
        problems.append(f"the stages take {sum(counts)} together")
    if problems:
        raise ArgumentError(f"{list(counts)} is not a cut of {units} units: {'; '.join(problems)}")


def check_stage_count(units: int, stages: int) -> None:
    """Raise if the units cannot be cut into this number of stages."""
    if not 1 <= stages <= units:
        hint = f". Use 1 to {units} stages." if units else ""
        raise ArgumentError(
            f"{units} units cannot be cut into {stages} stages: each stage takes at least one "
            f"unit, and there is at least one stage{hint}"
        )


# ---- the search -----------------------------------------------------------------------------

# Whole numbers make sums exact, so rounding errors do not choose between equal cuts. Costs are
# counted in parts of about 2**-100 of the whole model, speeds in parts of 2**-40.
_COST_BITS = 100
_SPEED_SCALE = 1 << 40
_SQUARE_SCALE = 1 << 128  # for the squares of speeds, in whole numbers
_QUICK_WIDTH = 8  # the number of ends that the quick run keeps for each stage
_BLOCK_SIZE = 16  # the number of starts that are skipped together
# After this many cases, each stage of a rank gets an equal share of its memory.
_MAX_CASES = 256

# The cost of the slowest stage, the unevenness, and the counts from the last stage to the first.
# The smallest is the best. Comparing counts from the last prefers larger stages first.
_Candidate = tuple[int, int, tuple[int, ...]]


def find_best_cut(problem: CutProblem) -> tuple[int, ...]:
    """Return the number of units of each stage, such that the slowest stage is as fast as possible.

    The stages of each rank fit in its memory. Among equal cuts the seconds of the stages are as
    even as possible (the least sum of squares), then their numbers of units, and then the larger
    stages come first. If ranks with several stages are so short of memory that hundreds of searches
    find no cut, each of their stages gets an equal share of the memory.

    >>> units = (UnitLoad(seconds=1.0, static_bytes=10),) * 6
    >>> slow, fast = DeviceCapacity(), DeviceCapacity(speed=2.0)
    >>> find_best_cut(CutProblem(units, (fast, slow)))
    (4, 2)
    >>> small = DeviceCapacity(speed=2.0, memory=30)
    >>> find_best_cut(CutProblem(units, (small, slow)))
    (3, 3)
    """
    search = _CutSearch(problem)
    limits = tuple(_whole_bytes(problem.devices[rank].memory) for rank in problem.placement)
    visited = {limits}
    cases: list[tuple[_Candidate, tuple[float, ...]]] = []

    def push(limits: tuple[float, ...]) -> None:
        candidate = search.find_best(limits)
        if candidate is not None:
            heappush(cases, (candidate, limits))

    # A case is one limit per stage. The heap yields the case with the best cut first. A cut that
    # fits is therefore the best of all: tighter limits never lead to better cuts.
    push(limits)
    while cases:
        (_, _, reversed_counts), limits = heappop(cases)
        counts = reversed_counts[::-1]
        tighter = _find_tighter_limits(problem, counts)
        if not tighter:
            return counts
        if len(visited) > _MAX_CASES:
            candidate = search.find_best(_equal_memory_shares(problem))
            if candidate is None:
                break
            return candidate[2][::-1]
        for stage, limit in tighter:
            case = (*limits[:stage], limit, *limits[stage + 1 :])
            if case not in visited:
                visited.add(case)
                push(case)
    raise ArgumentError(_explain_infeasible(problem))


class _CutSearch:
    """The search for the best cut under a memory limit for each stage.

    A stage that takes the units from `start` up to `end` costs

        work[stage][end] - work[stage][start] + messages[end][end - 1 - start]

    The search has three steps, and each one narrows down the next:

    1. `_lower_bound` ignores messages and finds a cost that the slowest stage of every cut
       reaches: a binary search, in which each stage takes as many units as it can.
    2. `_minimize_max_cost` is a dynamic program from the last stage to the first. It finds the
       least cost of the slowest stage, and the starts from which the remaining stages keep to it.
    3. `_minimize_unevenness` is a dynamic program from the first stage to the last, which visits
       only these starts. It finds the most even of the cuts with that cost. It runs twice: a quick
       run that keeps a few ends per stage finds a good cut, and the exact run leaves out all ends
       for which a lower bound shows that no better cut goes through them.
    """

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self.count = count = len(problem.units)
        fastest = Fraction(max(device.speed for device in problem.devices))
        slowness = [round(fastest / Fraction(d.speed) * _SPEED_SCALE) for d in problem.devices]
        shrink = gcd(_SPEED_SCALE, *slowness)
        self.slowness = [slowness[rank] // shrink for rank in problem.placement]
        # Messages do not depend on the device, but the costs of units are multiplied by its
        # slowness relative to the fastest device.
        seconds = [Fraction(unit.seconds) for unit in problem.units]
        byte = Fraction(problem.seconds_per_byte) * fastest * (_SPEED_SCALE // shrink)
        sizes = [Fraction(value.size) for value in problem.values]
        total = sum(seconds) + byte * sum(sizes)
        bits = _COST_BITS - total.numerator.bit_length() + total.denominator.bit_length()
        scale = Fraction(2) ** bits
        units = [round(second * scale) for second in seconds]
        # One rounded cost per byte keeps the costs of values in the exact ratio of their sizes.
        byte_cost = round(byte * scale)
        values = [round(size * byte_cost) for size in sizes]
        # Small numbers are fast. With the factor count + 1, the least difference between squared
        # costs outweighs the squared numbers of units.
        divisor = gcd(*units, *values) or 1
        units = [unit // divisor * (count + 1) for unit in units]
        values = [value // divisor * (count + 1) for value in values]
        self.cost_sums = list(accumulate(units, initial=0))
        scaled = {slow: [slow * cost for cost in self.cost_sums] for slow in set(self.slowness)}
        self.work = [scaled[slow] for slow in self.slowness]
        # By unit: (first use, last use, cost) of each value that it makes, and (next use, cost) of
        # each value that it uses.
        self._made: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        self._used: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for value, cost in zip(problem.values, values, strict=True):
            dsts = sorted(set(value.dsts))
            if cost and dsts:
                self._made[value.src].append((dsts[0], dsts[-1], cost))
                for dst, later in pairwise((*dsts, count)):
                    self._used[dst].append((later, cost))
        self.total_messages = sum(
            cost for values_of_unit in self._made for _, _, cost in values_of_unit
        )
        # `_extend_messages` fills these lists as far as they are needed.
        self.messages: list[list[int]] = [[] for _ in range(count + 1)]
        if not self.total_messages:
            self.messages = [[0] * count] * (count + 1)

    def find_best(self, limits: Sequence[float]) -> _Candidate | None:
        """Return the best cut in which no stage needs more than its memory, or None."""
        if not self.is_feasible(limits):
            return None
        low = cap = self._lower_bound(limits)
        # A low cap makes a pass quick, but it may find nothing. The steps double, so that few
        # passes are needed even if messages make the best cut much slower than the bound.
        step = (low + self.total_messages // self.problem.stages) // 16 + 1
        while (later_costs := self._minimize_max_cost(limits, low, cap)) is None:
            cap, step = cap + step, 2 * step
        slowest = later_costs[0][0]
        ends = self._bound_unevenness(later_costs, slowest)
        most = self.problem.stages * slowest**2 + self.count**2
        most, _ = self._minimize_unevenness(limits, slowest, ends, most, _QUICK_WIDTH)
        return slowest, *self._minimize_unevenness(limits, slowest, ends, most, self.count)

    def _lower_bound(self, limits: Sequence[float]) -> int:
        """Return a cost that the slowest stage of every cut reaches, even without messages."""
        low, high = 0, max(sums[-1] for sums in self.work)
        while low < high:
            cap = (low + high) // 2
            if self._furthest_ends(limits, cap)[-1] == self.count:
                high = cap
            else:
                low = cap + 1
        return low

    def _furthest_ends(self, limits: Sequence[float], cap: int) -> list[int]:
        """Return 0 and the end of each stage, if it takes all that its memory and the cap allow.

        Messages cost nothing here, and a stage may be empty, so no cut gets further.
        """
        ends = [0]
        for work, memory, limit in zip(self.work, self.problem.memory_sums, limits, strict=True):
            by_cost = bisect_right(work, work[ends[-1]] + cap)
            ends.append(min(by_cost, bisect_right(memory, memory[ends[-1]] + limit)) - 1)
        return ends

    def _first_start(self, stage: int, end: int, limit: float, cap: int) -> int:
        """Return the first start from which a stage may reach that end, without its messages."""
        work, memory = self.work[stage], self.problem.memory_sums[stage]
        by_cost = bisect_left(work, work[end] - cap, lo=stage, hi=end)
        return max(by_cost, bisect_left(memory, memory[end] - limit, lo=stage, hi=end))

    def _extend_messages(self, end: int, first: int) -> None:
        """Complete the message costs of the stages that end there, down to the start `first`.

        Each step back adds one unit at the front of the stage and updates the cost.
        """
        costs = self.messages[end]
        cost = costs[-1] if costs else 0
        for start in range(end - 1 - len(costs), first - 1, -1):
            for first_use, last_use, size in self._made[start]:
                if first_use < end:
                    cost -= size  # it was received, and now the stage makes it itself
                if last_use >= end:
                    cost += size  # a later stage uses it, so it is sent
            for later, size in self._used[start]:
                if later >= end:
                    cost += size  # the last use in the stage counts, so each value counts once
            costs.append(cost)

    def _minimize_max_cost(
        self, limits: Sequence[float], low: int, cap: int
    ) -> list[list[int]] | None:
        """Return the least cost of the slowest of the remaining stages, by stage and its start.

        Where they cannot keep to the cap, it is above the cap. Return None if that holds for the
        whole cut. Costs below the lower bound `low` count as that.
        """
        count, stages, messages, never = self.count, self.problem.stages, self.messages, cap + 1
        furthest = self._furthest_ends(limits, cap)
        later_costs = [never] * count + [low]
        rows = [later_costs]
        first_end = last = (
            count  # the first and the last end at which the later stages keep to the cap
        )
        for stage in reversed(range(stages)):
            work, memory, limit = self.work[stage], self.problem.memory_sums[stage], limits[stage]
            for end in range(first_end, last + 1):
                self._extend_messages(end, self._first_start(stage, end, limit, cap))
            least, row = min(later_costs), [never] * (count + 1)
            top = min(furthest[stage], count - stages + stage)
            for start in range(self._first_start(stage, first_end, limit, cap), top + 1):
                best, start_work = never, work[start]
                far = min(last, bisect_right(memory, memory[start] + limit) - 1)
                for end in range(max(start + 1, first_end), far + 1):
                    cost = work[end] - start_work
                    if cost >= best or best == least:
                        break  # later ends cost even more, or no end costs less
                    best = min(best, max(cost + messages[end][end - 1 - start], later_costs[end]))
                row[start] = best
            later_costs = row
            rows.append(later_costs)
            reached = [start for start, cost in enumerate(later_costs) if cost <= cap]
            if not reached:
                return None
            first_end, last = reached[0], reached[-1]
        return rows[::-1]

    def _bound_unevenness(
        self, rest: Sequence[Sequence[int]], cap: int
    ) -> list[list[tuple[int, int]]]:
        """Return, by stage, the ends from which the later stages keep to the cap.

        With each end comes a lower bound on the unevenness of the later stages. They are most even
        if each takes units in proportion to its speed. If the largest unit is more than such a
        share, the stage with that unit costs at least as much as the unit.
        """
        sums, count, stages = self.cost_sums, self.count, self.problem.stages
        units = [after - before for before, after in pairwise(sums)]
        largest_from = list(accumulate(reversed(units), max, initial=0))[::-1]
        fastest, squared_speeds = min(self.slowness), 0
        result = [[(count, 0)]]
        for stage in range(stages - 1, 0, -1):
            # Rounding the speeds up makes the bound a little lower: it stays a lower bound.
            squared_speeds -= -_SQUARE_SCALE // self.slowness[stage] ** 2
            ends = []
            for end, cost in enumerate(rest[stage]):
                if cost <= cap:
                    left, largest = sums[-1] - sums[end], largest_from[end]
                    even = left**2 * _SQUARE_SCALE // squared_speeds
                    others = (left - largest) ** 2 * _SQUARE_SCALE // squared_speeds
                    bound = max(even, (largest * fastest) ** 2 + others)
                    ends.append((end, bound + (count - end) ** 2 // (stages - stage)))
            result.append(ends)
        return result[::-1]

    def _minimize_unevenness(
        self,
        limits: Sequence[float],
        cap: int,
        ends: Sequence[Sequence[tuple[int, int]]],
        most: int,
        width: int,
    ) -> tuple[int, tuple[int, ...]]:
        """Return the unevenness and the counts, from the last, of the most even cut up to `most`.

        The unevenness is the sum of the squared costs and, with so little weight that it decides
        only between equal ones, the sum of the squared counts. Of equal cuts, the latest starts
        win. After each stage only the `width` most promising ends are kept. The result is exact if
        that is all of them.
        """
        never, last, size = most + 1, 0, _BLOCK_SIZE
        before = [0] + [never] * self.count
        starts: list[dict[int, int]] = []
        for stage, limit in enumerate(limits):
            work, after = self.work[stage], [never] * (self.count + 1)
            best_starts: dict[int, int] = {}
            reached = []
            floors = list(accumulate(before, min))  # the least value up to each start
            minima = [min(before[i : i + size]) for i in range(0, last + 1, size)]
            for end, bound in ends[stage]:
                first_start, top = self._first_start(stage, end, limit, cap), min(last, end - 1)
                best, end_work, messages = never - bound, work[end], self.messages[end]
                # Blocks of starts are skipped if even their shortest stage, with the smallest
                # unevenness before it, is too much.
                for block in range(top // size, first_start // size - 1, -1):
                    late = min(top, block * size + size - 1)
                    least = (end_work - work[late]) ** 2
                    if least + floors[late] >= best:
                        break  # earlier starts cost even more
                    if least + minima[block] >= best:
                        continue
                    for start in range(late, max(first_start, block * size) - 1, -1):
                        cost = end_work - work[start] + messages[end - 1 - start]
                        total = before[start] + cost * cost + (end - start) ** 2
                        if total < best and cost <= cap:
                            best, best_starts[end] = total, start
                if end in best_starts:
                    after[end] = best
                    reached.append((best + bound, end))
            reached.sort()
            for _, end in reached[width:]:
                after[end] = never
            last = max(end for _, end in reached[:width])
            before = after
            starts.append(best_starts)
        counts, end = [], self.count
        for best_starts in reversed(starts):
            counts.append(end - best_starts[end])
            end = best_starts[end]
        return before[-1], tuple(counts)

    def is_feasible(self, limits: Sequence[float]) -> bool:
        """Return True if there is a cut in which no stage needs more than its memory.

        This finds, stage by stage, all ends that the stages so far can reach. A stage that starts
        later reaches as far or further, so each end is visited once, from left to right.
        """
        starts = [0]
        for sums, limit in zip(self.problem.memory_sums, limits, strict=True):
            ends: list[int] = []
            for start in starts:
                far = bisect_right(sums, sums[start] + limit)
                ends += range(max(start, ends[-1] if ends else 0) + 1, far)
            starts = ends
        return bool(starts) and starts[-1] == len(self.problem.units)


def _find_tighter_limits(problem: CutProblem, counts: Sequence[int]) -> list[tuple[int, float]]:
    """Return (stage, tighter limit) for each stage of the first rank whose memory is exceeded.

    If all stages of the rank needed more than their proportional shares, the rank would be over its
    memory. So in a cut that fits, at least one of them stays within its share. Return an empty list
    if the cut fits.
    """
    needs = problem.memory_by_stage(counts)
    for _, device, stages, total in _iter_overfull_ranks(problem, needs):
        room = int(device.memory)
        return [(stage, needs[stage] * room // total) for stage in stages if needs[stage]]
    return []


def _iter_overfull_ranks(
    problem: CutProblem, needs: Sequence[int]
) -> Iterator[tuple[int, DeviceCapacity, list[int], int]]:
    """Yield each rank that needs more than its memory: rank, device, stages and bytes."""
    for rank, device in enumerate(problem.devices):
        stages = [stage for stage, owner in enumerate(problem.placement) if owner == rank]
        total = sum(needs[stage] for stage in stages)
        if total > device.memory:
            yield rank, device, stages, total


def _equal_memory_shares(problem: CutProblem, more: float = 0) -> list[float]:
    """Return an equal share of its rank's memory for each stage, if each rank had `more`."""
    return [
        _whole_bytes((problem.devices[rank].memory + more) / problem.placement.count(rank))
        for rank in problem.placement
    ]


def _whole_bytes(memory: float) -> float:
    """Return memory without a fraction of a byte, so that sums and differences with it are exact.

    With a fraction, `start + limit >= end` and `start >= end - limit` could differ by rounding.
    """
    return memory if isinf(memory) else floor(memory)


def find_nearest_cut(problem: CutProblem) -> tuple[int, ...]:
    """Return the cut that needs the least additional memory, if every rank got the same.

    A binary search finds that amount. If a cut fits, it is the best one with equal shares.
    """
    search = _CutSearch(problem)
    low, high = 0, sum(sums[-1] for sums in problem.memory_sums) * problem.stages
    while low < high:
        more = (low + high) // 2
        if search.is_feasible(_equal_memory_shares(problem, more)):
            high = more
        else:
            low = more + 1
    candidate = search.find_best(_equal_memory_shares(problem, low))
    assert candidate is not None
    return candidate[2][::-1]


def _explain_infeasible(problem: CutProblem) -> str:
    """Return the message for a problem without a cut: the nearest cut, and what each rank lacks."""
    counts = find_nearest_cut(problem)
    lacks = []
    for rank, device, stages, need in _iter_overfull_ranks(
        problem, problem.memory_by_stage(counts)
    ):
        names = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
        lacks.append(
            f"{names} would need {format_binary_bytes(need)} on rank {rank}, which has "
            f"{format_binary_bytes(device.memory)}: "
            f"{format_binary_bytes(need - device.memory)} too much"
        )
    text = (
        f"no cut of {len(problem.units)} units into {problem.stages} stages fits the memory. The "
        f"nearest is {list(counts)}, and there {'; '.join(lacks)}. "
    )
    if not any(unit.activation_bytes for unit in problem.units):
        return (
            f"{text}This is for parameters, gradients and the state of an optimizer alone: use "
            "more devices, or devices with more memory."
        )
    return (
        f"{text}Use more stages or devices with more memory, cut the batch into more chunks, "
        "recompute (checkpoint='always'), or use a schedule with fewer micro-batches in flight."
    )


# A high power of the ranks' work weighs the slowest rank most, and still tells apart two cuts with
# the same slowest rank.
_EVENNESS_POWER = 8
_LARGEST_MOVE = 4  # units that move over one cut at once


def even_out_ranks(problem: CutProblem, counts: Sequence[int]) -> tuple[int, ...]:
    """Move units between neighbouring stages until the work of the ranks is as even as it gets.

    `find_best_cut` looks at the slowest stage. If ranks have several stages, and one of these has a
    unit that is longer than the others, such as the head of a language model, its rank should have
    less in its other stages. Messages are not counted. The result fits the memory of the ranks.

    >>> units = tuple(map(UnitLoad, [1, 1, 1, 1, 1, 1, 1, 3]))
    >>> v_shape = CutProblem(units, (DeviceCapacity(),) * 2, placement=(0, 1, 1, 0))
    >>> find_best_cut(v_shape), even_out_ranks(v_shape, find_best_cut(v_shape))
    ((3, 2, 2, 1), (2, 3, 2, 1))
    """
    cut, placement = list(counts), problem.placement
    sums = list(accumulate((unit.seconds for unit in problem.units), initial=0.0))
    starts = list(accumulate(cut, initial=0))
    mean = sums[-1] / len(problem.devices) or 1.0
    work = [0.0] * len(problem.devices)
    for stage, rank in enumerate(placement):
        seconds = sums[starts[stage + 1]] - sums[starts[stage]]
        work[rank] += seconds / problem.devices[rank].speed / mean

    def find_gain(stage: int, count: int) -> float:
        """Return how much more even the work is if a stage takes so many units of the next."""
        rank, next_rank = placement[stage], placement[stage + 1]
        cut_at = starts[stage + 1]
        seconds = (sums[cut_at + count] - sums[cut_at]) / mean
        before = work[rank] ** _EVENNESS_POWER + work[next_rank] ** _EVENNESS_POWER
        more = work[rank] + seconds / problem.devices[rank].speed
        less = work[next_rank] - seconds / problem.devices[next_rank].speed
        return before - more**_EVENNESS_POWER - less**_EVENNESS_POWER

    while True:
        moves = [
            (find_gain(stage, count), stage, count)
            for stage in range(len(cut) - 1)
            if placement[stage] != placement[stage + 1]
            for count in range(-min(_LARGEST_MOVE, cut[stage] - 1), _LARGEST_MOVE + 1)
            if count < cut[stage + 1]
        ]
        gain, stage, count = max(moves, default=(0.0, 0, 0))
        if gain <= 1e-9:
            return tuple(cut) if _fits(problem, cut) else tuple(counts)
        seconds = (sums[starts[stage + 1] + count] - sums[starts[stage + 1]]) / mean
        for changed, sign in ((stage, 1), (stage + 1, -1)):
            cut[changed] += sign * count
            rank = placement[changed]
            work[rank] += sign * seconds / problem.devices[rank].speed
        starts[stage + 1] += count


def _fits(problem: CutProblem, counts: Sequence[int]) -> bool:
    """Return whether the stages of each rank fit in its memory."""
    needs = [0] * len(problem.devices)
    for rank, size in zip(problem.placement, problem.memory_by_stage(counts), strict=True):
        needs[rank] += size
    return all(need <= device.memory for need, device in zip(needs, problem.devices, strict=True))


def balance_costs(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return how many neighbouring units each of `stages` equal devices takes, by cost alone.

    >>> balance_costs([1] * 10, 4)
    (3, 3, 2, 2)
    >>> balance_costs([1, 1, 1, 6, 1, 1], 3)
    (3, 1, 2)
    """
    units = tuple(map(UnitLoad, costs))
    check_stage_count(len(units), stages)
    return find_best_cut(CutProblem(units, (DeviceCapacity(),) * stages))
