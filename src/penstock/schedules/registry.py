"""The schedule that was asked for: a name, a value or a file, made for the sizes at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path

from penstock.errors import ArgumentError
from penstock.schedules.families.common import check_sizes, loop, schedule_from_lanes, vee
from penstock.schedules.families.dualpipe import dualpipe_v
from penstock.schedules.families.gpipe import clocked, forward_only, gpipe, looped_bfs, naive
from penstock.schedules.families.one_f_one_b import eager_one_f_one_b, interleaved, one_f_one_b
from penstock.schedules.families.v_shape import v_half, v_min, zb_v
from penstock.schedules.families.zero_bubble import interleaved_zb, zb_h1, zb_h2
from penstock.schedules.fit import fit
from penstock.schedules.ir import Op, Program, Schedule, StageGraph, schedule_of
from penstock.schedules.notation import loads

# -------------------------------------------------------------------------------------------------
# The list of all families.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A named schedule: how to make it from sizes, and what to know about it.

    A family without a `free` number of stages a rank has the one number that is given.
    `peak(p, m, v)` bounds the live activations of the worst rank, in micro-batches of a rank's
    whole share; the bound is met once there are enough micro-batches.
    """

    build: Callable[..., Schedule]
    peak: Callable[[int, int, int], float]
    use: str
    source: str
    stages_per_rank: int = 1
    free: bool = False
    trains: bool = True


FAMILIES = {
    "naive": Family(
        naive,
        lambda p, m, v: 1,
        "One rank works at a time. The baseline that pipelines are measured against.",
        "model parallelism without a pipeline",
        free=True,
    ),
    "gpipe": Family(
        gpipe,
        lambda p, m, v: m,
        "The simplest pipeline, and what runs behind `loss.backward()`. Keeps every micro-batch "
        "alive, so use it with recomputation.",
        "GPipe, arXiv 1811.06965",
    ),
    "1f1b": Family(
        one_f_one_b,
        lambda p, m, v: min(m, p),
        "The default for training: GPipe's bubble with far less memory.",
        "PipeDream-flush, DAPPLE",
    ),
    "eager-1f1b": Family(
        eager_one_f_one_b,
        lambda p, m, v: min(m, 2 * p - 1),
        "When messages are slow and memory is plenty: they travel while other work is done.",
        "JaxPP, Alpa",
    ),
    "interleaved": Family(
        interleaved,
        lambda p, m, v: min(m, p + (p - 1) / v if v > 1 else p),
        "Several stages a rank shorten the fill. For fast links, and chunks that are a multiple "
        "of the ranks.",
        "Megatron-LM, arXiv 2104.04473",
        stages_per_rank=2,
        free=True,
    ),
    "looped-bfs": Family(
        looped_bfs,
        lambda p, m, v: m,
        "GPipe with several stages a rank: interleaved's bubble, messages well hidden, and few "
        "gathers when weights are sharded. Keeps every micro-batch alive.",
        "Breadth-first pipelines, arXiv 2211.05953",
        stages_per_rank=2,
        free=True,
    ),
    "interleaved-zb": Family(
        interleaved_zb,
        lambda p, m, v: min(m, p),
        "Interleaved with split backwards: less bubble and less memory. The best loop where the "
        "chunks are a multiple of the ranks.",
        "Zero bubble, arXiv 2401.10241",
        stages_per_rank=2,
        free=True,
    ),
    "zb-h1": Family(
        zb_h1,
        lambda p, m, v: min(m, p),
        "1F1B's memory and a third of its bubble, with one stage a rank.",
        "Zero bubble, arXiv 2401.10241",
    ),
    "zb-h2": Family(
        zb_h2,
        lambda p, m, v: min(m, 2 * p - 1),
        "No bubble but the skew between ranks, for nearly twice the memory; hides messages.",
        "Zero bubble, arXiv 2401.10241",
    ),
    "zb-v": Family(
        zb_v,
        lambda p, m, v: min(m, p),
        "1F1B's memory and no bubble but the skew. The first rank also has the last stage, which "
        "suits tied embeddings.",
        "Zero bubble, arXiv 2401.10241",
        stages_per_rank=2,
    ),
    "v-half": Family(
        v_half,
        lambda p, m, v: min(m, (p + 2) // 2),
        "Half of 1F1B's memory and less than half of its bubble, from as many chunks as ranks on. "
        "Needs fast links.",
        "Controllable memory, arXiv 2405.15362",
        stages_per_rank=2,
    ),
    "v-min": Family(
        v_min,
        lambda p, m, v: min(m, (p + 4) // 3),
        "A third of 1F1B's memory and two thirds of its bubble. Needs fast links.",
        "Controllable memory, arXiv 2405.15362",
        stages_per_rank=2,
    ),
    "dualpipe-v": Family(
        dualpipe_v,
        lambda p, m, v: min(m, p + 0.5),
        "Pairs a forward with a backward, so that one's messages travel while the other computes "
        "(experts' all-to-all, say). From two micro-batches a rank on.",
        "DualPipe, DeepSeek-V3, arXiv 2412.19437",
        stages_per_rank=2,
    ),
    "forward-only": Family(
        forward_only,
        lambda p, m, v: 1 / v,
        "Inference.",
        "the forward half of GPipe",
        free=True,
        trains=False,
    ),
}


def make(name: str, ranks: int, chunks: int, stages_per_rank: int | None = None) -> Schedule:
    """The named schedule of these sizes.

    >>> for lane in make("1f1b", ranks=2, chunks=2).lanes:
    ...     print(*lane)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    family = family_of(name)
    per_rank = family.stages_per_rank if stages_per_rank is None else stages_per_rank
    check_sizes(ranks, chunks, per_rank)
    if family.free:
        return family.build(ranks, chunks, per_rank)
    if per_rank != family.stages_per_rank:
        needed = family.stages_per_rank
        raise ArgumentError(
            f"{name} has {needed} stage{'s' * (needed > 1)} a rank, not {per_rank}: "
            f"use stages_per_rank={needed}"
        )
    return family.build(ranks, chunks)


def family_of(name: str) -> Family:
    """The family of that name."""
    if name in FAMILIES:
        return FAMILIES[name]
    close = get_close_matches(name.lower().replace("_", "-"), FAMILIES, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    names = ", ".join([*FAMILIES, "fit"])
    raise ArgumentError(f"there is no schedule '{name}'{hint} There are: {names}")


# -------------------------------------------------------------------------------------------------

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
