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
from penstock.schedules.parts import assemble, loop, vee
from penstock.schedules.registry import FAMILIES, family_of, make

Asked = str | PathLike[str] | Schedule | Program | None


@dataclass(frozen=True)
class Choice:
    """Makes the schedule for any number of micro-batches.

    `None`, gpipe and fit run over any placement; the others have placements of their own.
    """

    asked: str | Schedule | None
    placement: tuple[int, ...]
    graph: StageGraph | None = None

    @property
    def name(self) -> str:
        """What it is called in print."""
        return "your own" if isinstance(self.asked, Schedule) else self.asked or "gpipe"

    def __call__(self, chunks: int) -> Schedule:
        """For so many micro-batches."""
        if isinstance(self.asked, Schedule):
            return assemble(self.asked.placement, chunks, self.asked.lanes)
        if self.asked is None or self.asked == "gpipe":
            return clocked(self.placement, chunks)
        if self.asked == "fit":
            return fit(self.placement, chunks, graph=self.graph)
        ranks = len(set(self.placement))
        return make(self.asked, ranks, chunks, len(self.placement) // ranks)


def read(asked: Asked) -> str | Schedule | None:
    """A name or a schedule; a file is read, and a program's messages are left out."""
    if asked is None:
        return None
    if isinstance(asked, Schedule | Program):
        return schedule_of(asked)
    if not isinstance(asked, str | PathLike):
        raise ArgumentError(f"schedule is a name, a Schedule or the path of a file, not {asked!r}")
    if isinstance(asked, str) and (asked in FAMILIES or not Path(asked).suffix):
        return asked
    if not Path(asked).is_file():
        raise ArgumentError(f"there is no file '{Path(asked)}' to read a schedule from")
    return schedule_of(loads(Path(asked).read_text()))


def stages_per_rank(asked: str | Schedule | None) -> int:
    """How many stages a rank gets if nobody says; a schedule of one's own may give one fewer."""
    if isinstance(asked, Schedule):
        return -(-asked.stages // asked.ranks)
    return 1 if asked is None or asked == "fit" else family_of(asked).stages_per_rank


def placement_of(asked: str | Schedule | None, ranks: int, stages: int) -> tuple[int, ...]:
    """Which rank gets which stage, where the schedule may decide."""
    if isinstance(asked, Schedule):
        if (asked.ranks, asked.stages) != (ranks, stages):
            raise ArgumentError(
                f"the schedule is for {asked.stages} stages on {asked.ranks} ranks, but there are "
                f"{stages} on {ranks}: set stages={asked.stages} and as many devices as ranks"
            )
        return asked.placement
    if stages % ranks:
        raise ArgumentError(
            f"{stages} stages do not divide among {ranks} devices: use a multiple of {ranks}"
        )
    if asked is None or asked == "gpipe":
        return loop(ranks, stages // ranks)
    if asked == "fit":
        return vee(ranks) if stages == 2 * ranks else loop(ranks, stages // ranks)
    family = family_of(asked)
    if not family.free and family.stages_per_rank * ranks != stages:
        raise ArgumentError(
            f"{asked} needs stages={family.stages_per_rank * ranks} on {ranks} devices, "
            f"{family.stages_per_rank} for each, not {stages}"
        )
    return make(asked, ranks, 1, stages // ranks).placement


def choose(
    asked: str | Schedule | None,
    placement: tuple[int, ...],
    chunks: int,
    graph: StageGraph | None = None,
) -> Choice:
    """Check that the schedule suits the placement and the number of micro-batches.

    `graph` says who feeds whom, for a schedule that is made to measure; without it, a chain.
    """
    choice = Choice(asked, placement, graph)
    made = choice(chunks)
    if made.placement != placement:
        raise ArgumentError(
            f"the layers stand on ranks {_listed(placement)}, stage by stage, but the schedule is "
            f"for {_listed(made.placement)}: place them so, or give stages= and devices= and let "
            "the schedule place them"
        )
    if isinstance(asked, Schedule) and asked.chunks != chunks:
        raise ArgumentError(
            f"the schedule is for {asked.chunks} micro-batches, not {chunks}: "
            f"set chunks={asked.chunks}"
        )
    return choice


def _listed(placement: tuple[int, ...]) -> str:
    return " ".join(map(str, placement))


def check_trains(schedule: Schedule, name: str) -> None:
    """It has backwards."""
    if not any(action.op in (Op.B, Op.I) for lane in schedule.lanes for action in lane):
        raise ArgumentError(
            f"{name} has no backwards: a pipe trains, and runs forwards alone under no_grad"
        )
