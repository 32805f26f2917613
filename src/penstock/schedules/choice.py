"""The schedule that was asked for: a name, a value or a file, made for the sizes at hand."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from penstock.errors import ArgumentError
from penstock.ir import Op, Program, Schedule, schedule_of
from penstock.notation import loads
from penstock.schedules.gpipe import clocked
from penstock.schedules.parts import assemble, loop
from penstock.schedules.registry import FAMILIES, family_of, make

Asked = str | PathLike[str] | Schedule | Program | None


@dataclass(frozen=True)
class Choice:
    """Makes the schedule for any number of micro-batches.

    `None` and gpipe run over any placement; the others have placements of their own.
    """

    asked: str | Schedule | None
    placement: tuple[int, ...]

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
        ranks = len(set(self.placement))
        return make(self.asked, ranks, chunks, len(self.placement) // ranks)


def read(asked: Asked) -> str | Schedule | None:
    """A name or a schedule; a file is read, and a program's messages are left out."""
    if asked is None:
        return None
    if isinstance(asked, Schedule | Program):
        return schedule_of(asked)
    if asked == "fit":
        raise ArgumentError(
            "fit needs costs: make the schedule with penstock.schedules.fit, and give that"
        )
    if isinstance(asked, str) and (asked in FAMILIES or not Path(asked).suffix):
        return asked
    if not Path(asked).is_file():
        raise ArgumentError(f"there is no file '{Path(asked)}' to read a schedule from")
    return schedule_of(loads(Path(asked).read_text()))


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
    family = family_of(asked)
    if not family.free and family.stages_per_rank * ranks != stages:
        raise ArgumentError(
            f"{asked} needs stages={family.stages_per_rank * ranks} on {ranks} devices, "
            f"{family.stages_per_rank} for each, not {stages}"
        )
    return make(asked, ranks, 1, stages // ranks).placement


def choose(asked: str | Schedule | None, placement: tuple[int, ...], chunks: int) -> Choice:
    """Check that the schedule suits the placement and the number of micro-batches."""
    choice = Choice(asked, placement)
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


def _whole_backwards() -> list[str]:
    """The named schedules that a pipe runs."""
    trains = [name for name, family in FAMILIES.items() if family.trains]
    return [name for name in trains if _ops(make(name, ranks=2, chunks=2)) == {Op.F, Op.B}]


def _ops(schedule: Schedule) -> set[Op]:
    return {action.op for lane in schedule.lanes for action in lane}


def check_runs(schedule: Schedule, name: str) -> None:
    """Only whole backwards, and every one of them."""
    ops = _ops(schedule)
    if ops & {Op.I, Op.W}:
        raise ArgumentError(
            f"a pipe runs schedules of whole backwards ({', '.join(_whole_backwards())}, and your "
            f"own), but {name} splits them into I and W"
        )
    if Op.B not in ops:
        raise ArgumentError(
            f"{name} has no backwards: a pipe trains, and runs forwards alone under no_grad"
        )
