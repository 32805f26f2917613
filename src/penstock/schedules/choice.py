"""The schedule that was asked for: a name, a value or a file, made for the sizes at hand."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from penstock.errors import ArgumentError
from penstock.ir import Op, Program, Schedule, StageGraph, schedule_of
from penstock.notation import loads
from penstock.schedules.fit import fit
from penstock.schedules.gpipe import clocked
from penstock.schedules.parts import loop, schedule_from_lanes, vee
from penstock.schedules.registry import FAMILIES, family_of, make

ScheduleLike = str | PathLike[str] | Schedule | Program | None


@dataclass(frozen=True)
class ScheduleFactory:
    """Makes the schedule for any number of micro-batches.

    `None`, gpipe and fit run over any placement; the others have placements of their own.
    """

    requested: str | Schedule | None
    placement: tuple[int, ...]
    graph: StageGraph | None = None

    @property
    def name(self) -> str:
        """What it is called in print."""
        return "your own" if isinstance(self.requested, Schedule) else self.requested or "gpipe"

    def __call__(self, chunks: int) -> Schedule:
        """For so many micro-batches."""
        if isinstance(self.requested, Schedule):
            return schedule_from_lanes(self.requested.placement, chunks, self.requested.lanes)
        if self.requested is None or self.requested == "gpipe":
            return clocked(self.placement, chunks)
        if self.requested == "fit":
            return fit(self.placement, chunks, graph=self.graph)
        ranks = len(set(self.placement))
        return make(self.requested, ranks, chunks, len(self.placement) // ranks)


def resolve_schedule(requested: ScheduleLike) -> str | Schedule | None:
    """A name or a schedule; a file is read, and a program's messages are left out."""
    if requested is None:
        return None
    if isinstance(requested, Schedule | Program):
        return schedule_of(requested)
    if not isinstance(requested, str | PathLike):
        raise ArgumentError(
            f"schedule is a name, a Schedule or the path of a file, not {requested!r}"
        )
    if isinstance(requested, str) and (requested in FAMILIES or not Path(requested).suffix):
        return requested
    if not Path(requested).is_file():
        raise ArgumentError(f"there is no file '{Path(requested)}' to read a schedule from")
    return schedule_of(loads(Path(requested).read_text()))


def default_stages_per_rank(requested: str | Schedule | None) -> int:
    """How many stages a rank gets if nobody says; a schedule of one's own may give one fewer."""
    if isinstance(requested, Schedule):
        return -(-requested.stages // requested.ranks)
    return 1 if requested is None or requested == "fit" else family_of(requested).stages_per_rank


def choose_placement(requested: str | Schedule | None, ranks: int, stages: int) -> tuple[int, ...]:
    """Which rank gets which stage, where the schedule may decide."""
    if isinstance(requested, Schedule):
        if (requested.ranks, requested.stages) != (ranks, stages):
            raise ArgumentError(
                f"the schedule is for {requested.stages} stages on {requested.ranks} ranks, but there are "
                f"{stages} on {ranks}: set stages={requested.stages} and as many devices as ranks"
            )
        return requested.placement
    if stages % ranks:
        raise ArgumentError(
            f"{stages} stages do not divide among {ranks} devices: use a multiple of {ranks}"
        )
    if requested is None or requested == "gpipe":
        return loop(ranks, stages // ranks)
    if requested == "fit":
        return vee(ranks) if stages == 2 * ranks else loop(ranks, stages // ranks)
    family = family_of(requested)
    if not family.free and family.stages_per_rank * ranks != stages:
        raise ArgumentError(
            f"{requested} needs stages={family.stages_per_rank * ranks} on {ranks} devices, "
            f"{family.stages_per_rank} for each, not {stages}"
        )
    return make(requested, ranks, 1, stages // ranks).placement


def build_schedule_factory(
    requested: str | Schedule | None,
    placement: tuple[int, ...],
    chunks: int,
    graph: StageGraph | None = None,
) -> ScheduleFactory:
    """Check that the schedule suits the placement and the number of micro-batches.

    `graph` says who feeds whom, for a schedule that is made to measure; without it, a chain.
    """
    choice = ScheduleFactory(requested, placement, graph)
    made = choice(chunks)
    if made.placement != placement:
        raise ArgumentError(
            f"the layers stand on ranks {_format_placement(placement)}, stage by stage, but the schedule is "
            f"for {_format_placement(made.placement)}: place them so, or give stages= and devices= and let "
            "the schedule place them"
        )
    if isinstance(requested, Schedule) and requested.chunks != chunks:
        raise ArgumentError(
            f"the schedule is for {requested.chunks} micro-batches, not {chunks}: "
            f"set chunks={requested.chunks}"
        )
    return choice


def _format_placement(placement: tuple[int, ...]) -> str:
    return " ".join(map(str, placement))


def check_has_backward(schedule: Schedule, name: str) -> None:
    """It has backwards."""
    if not any(action.op in (Op.B, Op.I) for lane in schedule.lanes for action in lane):
        raise ArgumentError(
            f"{name} has no backwards: a pipe trains, and runs forwards alone under no_grad"
        )
