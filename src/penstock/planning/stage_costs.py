"""From units to stages: the seconds, bytes and messages of a cut, on the devices of its ranks.

`CostTable` holds running sums over the units, so that the costs of a stage are differences of two
of them. A search looks at thousands of cuts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.planning.profile import PerRows, Profile
from penstock.schedules.balance import check_cut
from penstock.schedules.cost import Cost
from penstock.schedules.ir import StageGraph

_OPS = ("F", "I", "W", "R")


@dataclass(frozen=True)
class StageCosts:
    """The costs of a cut on its ranks.

    cost      seconds and activation bytes by stage, seconds of the messages
    graph     which stage feeds which
    resident  by rank: parameters, gradients, optimizer state and workspace, which are there
              whatever the schedule is
    """

    cost: Cost
    graph: StageGraph
    resident: tuple[float, ...]

    def free_bytes(self, memory: Sequence[float]) -> tuple[float, ...]:
        """Return what is left for activations on each rank. It may be negative."""
        return tuple(cap - size for cap, size in zip(memory, self.resident, strict=True))


class CostTable:
    """The costs of all stages that neighbouring units can form, for one micro-batch size."""

    def __init__(self, profile: Profile, chunks: int, runtime: str) -> None:
        self.profile, self.chunks = profile, chunks
        self.rows = rows = -(-profile.rows // chunks)
        overhead = profile.runtimes[runtime]
        units = profile.units
        # By kind and speed of device, and by op: the seconds of all units before each unit.
        equal: dict[tuple[str, float], dict[str, list[float]]] = {}
        for device in profile.devices:
            key = device.kind, device.speed
            if key not in equal:
                timed = [unit.seconds[device.kind] for unit in units]
                columns = {op: [getattr(s, op) or s.F for s in timed] for op in _OPS}
                sums = {op: _sums(columns[op], rows) for op in _OPS}
                sums["FIW"] = [sum(n) for n in zip(*(sums[op] for op in "FIW"), strict=True)]
                equal[key] = {op: [n / device.speed for n in sums[op]] for op in sums}
        # The same by rank. Equal devices share theirs, as there may be a thousand of them.
        self.seconds = [equal[device.kind, device.speed] for device in profile.devices]
        self.distinct_seconds = list(equal.values())
        self.overhead = overhead
        state = 1 + profile.optimizer_factor
        self.resident = list(
            accumulate(
                (unit.parameter_bytes + unit.gradient_bytes * state for unit in units), initial=0.0
            )
        )
        self.activation = _sums([unit.activation for unit in units], rows)
        self.kept = [
            None if unit.weight_activation is None else unit.weight_activation.at(rows)
            for unit in units
        ]
        self.workspace = [unit.workspace.at(rows) for unit in units]
        self.values = [
            (
                value,
                value.size.at(rows),
                value.dsts if value.saved_by is None else value.saved_by,
            )
            for value in profile.values
        ]

    def stage_seconds(self, rank: int, start: int, end: int) -> tuple[float, float, float, float]:
        """Return the seconds of F, I, W and R of the units from `start` up to `end` on a rank."""
        sums = self.seconds[rank]
        f, i, w, r = (sums[op][end] - sums[op][start] + self.overhead for op in _OPS)
        return f, i, w, r

    def stage_costs(self, cut: Sequence[int], placement: Sequence[int]) -> StageCosts:
        """Return the costs of a cut whose stages are placed on these ranks."""
        check_cut(cut, len(self.profile.units))
        stages = len(cut)
        bounds = list(pairwise(accumulate(cut, initial=0)))
        stage_of = [stage for stage, count in enumerate(cut) for _ in range(count)]
        columns = zip(
            *(
                self.stage_seconds(rank, start, end)
                for rank, (start, end) in zip(placement, bounds, strict=True)
            ),
            strict=True,
        )
        F, I, W, R = columns
        messages: dict[tuple[int, int], float] = defaultdict(float)
        # What a stage keeps of the values between stages, even if it is recomputed, and of others.
        passed, saved = [0.0] * stages, [0.0] * stages
        for value, size, saved_by in self.values:
            src = stage_of[value.src]
            targets = {stage_of[dst] for dst in value.dsts} - {src}
            # Each stage that receives a copy keeps it. The stage that made a shared value keeps it.
            keepers = {
                src if self._shares_memory(placement[src], placement[dst]) else dst
                for dst in targets
            }
            for stage in keepers:
                passed[stage] += size
            for dst in targets:
                messages[src, dst] += size
                if value.has_grad:
                    messages[dst, src] += size
                else:
                    messages[dst, src] += 0.0
            for stage in {stage_of[unit] for unit in saved_by} - targets - keepers:
                saved[stage] += size
        activation = [
            self.activation[end] - self.activation[start] + passed[stage] + saved[stage]
            for stage, (start, end) in enumerate(bounds)
        ]
        return StageCosts(
            Cost(
                F,
                I,
                W,
                tuple(activation),
                weight_activation=self._kept_after_input_grad(bounds, activation),
                stage_input=tuple(passed),
                R=R,
                links=self._link_seconds(messages, placement),
            ),
            StageGraph(
                (
                    *((stage, stage + 1) for stage in range(stages - 1)),
                    *(pair for pair in messages if pair[0] < pair[1]),
                )
            ),
            self._resident_bytes(bounds, placement),
        )

    def _shares_memory(self, rank: int, other: int) -> bool:
        return rank == other or self.profile.link_between(rank, other).shares_memory

    def _kept_after_input_grad(
        self, bounds: Sequence[tuple[int, int]], activation: Sequence[float]
    ) -> tuple[float, ...]:
        kept_sizes = []
        for (start, end), whole in zip(bounds, activation, strict=True):
            sizes = [self.kept[unit] for unit in range(start, end)]
            known_sizes = [size for size in sizes if size is not None]
            kept_sizes.append(
                whole if len(known_sizes) < len(sizes) else min(whole, sum(known_sizes))
            )
        return tuple(kept_sizes)

    def _link_seconds(
        self, messages: dict[tuple[int, int], float], placement: Sequence[int]
    ) -> dict[tuple[int, int], float]:
        """Return the seconds of each message between stages on different ranks.

        Stages that follow each other are always linked, because they run one after the other.
        """
        pairs = {(stage, stage + 1) for stage in range(len(placement) - 1)}
        pairs |= {(dst, src) for src, dst in pairs} | set(messages)
        return {
            (src, dst): self.profile.link_between(placement[src], placement[dst]).seconds(
                messages.get((src, dst), 0.0)
            )
            for src, dst in pairs
            if placement[src] != placement[dst]
        }

    def _resident_bytes(
        self, bounds: Sequence[tuple[int, int]], placement: Sequence[int]
    ) -> tuple[float, ...]:
        ranks = len(self.profile.devices)
        resident, workspace = [0.0] * ranks, [0.0] * ranks
        for rank, (start, end) in zip(placement, bounds, strict=True):
            resident[rank] += self.resident[end] - self.resident[start]
            workspace[rank] = max([workspace[rank], *self.workspace[start:end]])
        return tuple(map(sum, zip(resident, workspace, strict=True)))


def count_chunks(rows: int, chunks: int) -> int:
    """Return how many micro-batches a batch yields, if they have the rows of `chunks` of them.

    >>> count_chunks(rows=10, chunks=4), count_chunks(rows=10, chunks=6)
    (4, 5)
    """
    return -(-rows // -(-rows // chunks))


def _sums(numbers: Sequence[PerRows], rows: int) -> list[float]:
    return list(accumulate((number.at(rows) for number in numbers), initial=0.0))
