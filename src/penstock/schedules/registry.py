"""The schedule of a pipe: a name, a value or a file.

A pipe may see batches of any size, so it keeps a `ScheduleFactory`, which makes the requested
schedule for any number of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from penstock.errors import ArgumentError
from penstock.schedules.families import FAMILIES, family_of, make
from penstock.schedules.families.common import loop, schedule_from_lanes, vee
from penstock.schedules.families.gpipe import clocked
from penstock.schedules.fit import fit
from penstock.schedules.ir import OP_RULES, Program, Schedule, StageGraph, schedule_of
from penstock.schedules.notation import loads

#     resolve_schedule         what the user passed -> a name, a Schedule or None (GPipe)
#     default_stages_per_rank  how many stages to cut the model into
#     choose_placement         which rank gets which stage
#     build_schedule_factory   check that it all fits, and return the factory

# The names of torch.distributed.pipelining that differ from ours by more than case, hyphens and the
# word "Schedule" in front.
_PYTORCH_NAMES = {
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
}

ScheduleLike = str | PathLike[str] | Schedule | Program | type | None


@dataclass(frozen=True)
class ScheduleFactory:
    """A factory that makes the requested schedule for any number of micro-batches.

    `None` (which means GPipe), "gpipe" and "fit" run over any placement. The other families have
    placements of their own. A schedule that the user passed runs as it is, cut to the micro-batches
    that the batch yields.
    """

    requested: str | Schedule | None
    placement: tuple[int, ...]
    graph: StageGraph | None = None
    _built: dict[int, Schedule] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the schedule in reports."""
        return "your own" if isinstance(self.requested, Schedule) else self.requested or "gpipe"

    def __call__(self, chunks: int) -> Schedule:
        """Return the schedule for this number of micro-batches. It is built once."""
        if chunks not in self._built:
            self._built[chunks] = self._build(chunks)
        return self._built[chunks]

    def _build(self, chunks: int) -> Schedule:
        if isinstance(self.requested, Schedule):
            return schedule_from_lanes(self.requested.placement, chunks, self.requested.lanes)
        if self.requested is None or self.requested == "gpipe":
            return clocked(self.placement, chunks)
        if self.requested == "fit":
            return fit(self.placement, chunks, graph=self.graph)
        ranks = len(set(self.placement))
        return make(self.requested, ranks, chunks, len(self.placement) // ranks)


def find_schedule_name(name: str) -> str:
    """Return our name for a schedule, however it is written. An unknown name stays as it is.

    >>> [find_schedule_name(name) for name in ("1F1B", "zb_v", "ScheduleInterleaved1F1B")]
    ['1f1b', 'zb-v', 'interleaved']
    """
    key = name.lower().removeprefix("schedule").replace("-", "").replace("_", "").replace(" ", "")
    names = {family.replace("-", ""): family for family in (*FAMILIES, "fit")}
    return {**names, **_PYTORCH_NAMES}.get(key, name)


def resolve_schedule(requested: ScheduleLike) -> str | Schedule | None:
    """Return the requested schedule as a name, a `Schedule` or None.

    A path is read. A program loses its messages, because the pipe lowers the schedule itself. A
    schedule class of torch.distributed.pipelining stands for its name.
    """
    if requested is None:
        return None
    if isinstance(requested, type):
        requested = requested.__name__
    if isinstance(requested, Schedule | Program):
        return schedule_of(requested)
    if not isinstance(requested, str | PathLike):
        kind = type(requested).__name__
        if find_schedule_name(kind) != kind:  # of torch.distributed.pipelining
            raise ArgumentError(
                f"schedule is a {kind} object of another library, which runs stages of its own. "
                f"Pass its name: schedule='{find_schedule_name(kind)}'."
            )
        raise ArgumentError(
            f"schedule must be a name, a Schedule or the path of a file, not {requested!r}. Write "
            "schedule='1f1b', for example."
        )
    # A string with a suffix, such as "mine.txt", is a path. Any other string is a name, so that a
    # misspelt name gets the error that lists the names.
    if isinstance(requested, str) and not Path(requested).suffix:
        return find_schedule_name(requested)
    if not Path(requested).is_file():
        raise ArgumentError(f"there is no file '{Path(requested)}' to read a schedule from")
    return schedule_of(loads(Path(requested).read_text()))


def default_stages_per_rank(requested: str | Schedule | None) -> int:
    """Return the number of stages per rank if the user does not choose it.

    A user's schedule may have a number of stages that is not a multiple of its ranks. Then this is
    the larger number.
    """
    if isinstance(requested, Schedule):
        return -(-requested.stages // requested.ranks)
    return 1 if requested is None or requested == "fit" else family_of(requested).stages_per_rank


def choose_placement(requested: str | Schedule | None, ranks: int, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage, as the schedule needs it."""
    if isinstance(requested, Schedule):
        if (requested.ranks, requested.stages) != (ranks, stages):
            raise ArgumentError(
                f"the schedule is for {requested.stages} stages on {requested.ranks} ranks, but "
                f"there are {stages} on {ranks}: set stages={requested.stages} and give one device "
                "per rank"
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
    return family.placement(ranks, stages // ranks)


def build_schedule_factory(
    requested: str | Schedule | None,
    placement: tuple[int, ...],
    chunks: int,
    graph: StageGraph | None = None,
) -> ScheduleFactory:
    """Return the factory, after a check that it suits the placement and number of micro-batches.

    `graph` is the stage graph that schedule="fit" plans for; a chain if it is left out.
    """
    factory = ScheduleFactory(requested, placement, graph)
    schedule = factory(chunks)
    if schedule.placement != placement:
        raise ArgumentError(
            f"the stages are on ranks {_format_placement(placement)}, but the schedule needs them "
            f"on ranks {_format_placement(schedule.placement)}. Place them so, or give stages= and "
            "devices= and let the schedule place them."
        )
    if isinstance(requested, Schedule) and requested.chunks != chunks:
        raise ArgumentError(
            f"the schedule is for {requested.chunks} micro-batches, not {chunks}: "
            f"set chunks={requested.chunks}"
        )
    return factory


def _format_placement(placement: tuple[int, ...]) -> str:
    return " ".join(map(str, placement))


def check_has_backward(schedule: Schedule, name: str) -> None:
    """Raise if the schedule has no backward actions."""
    ops = {action.op for lane in schedule.lanes for action in lane}
    if not any(OP_RULES[op].carries == "gradients" for op in ops):
        raise ArgumentError(
            f"{name} has no backwards, so a pipe cannot train with it. Choose another schedule. "
            "For inference, call the pipe under torch.no_grad(): it then runs only the forwards."
        )
