"""The table of named schedules, and the schedule of a pipe: a name, a value or a file.

A pipe may see batches of any size, so it keeps a `ScheduleFactory`, which makes the requested
schedule for any number of micro-batches.
"""

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
from penstock.schedules.ir import OP_RULES, Program, Schedule, StageGraph, schedule_of
from penstock.schedules.notation import loads

# -------------------------------------------------------------------------------------------------
# The table of all families.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A named schedule: the function that makes it from sizes, and what to know about it.

    build            the function of (ranks, chunks) or, if `free`, (ranks, chunks, stages_per_rank)
    peak             a function of (ranks, chunks, stages_per_rank): the largest amount of live
                     activations on any rank, where 1 is one micro-batch of a rank's whole share;
                     with enough micro-batches this bound is reached
    use              when to use it, in one or two sentences
    source           the paper or library that it comes from
    stages_per_rank  the number of stages per rank: a default if `free`, else the only possible one
    free             whether the caller may choose the number of stages per rank
    trains           whether it has backwards
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
    """Return the named schedule of these sizes.

    Args:
        name: A key of `FAMILIES`, such as "1f1b".
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages per rank; by default that of the family.

    Returns:
        The schedule.

    Raises:
        ArgumentError: The name is unknown, or the family does not exist in these sizes.

    Example:
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
    """Return the family of that name. The error for an unknown name suggests a similar one."""
    if name in FAMILIES:
        return FAMILIES[name]
    close = get_close_matches(name.lower().replace("_", "-"), FAMILIES, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    names = ", ".join([*FAMILIES, "fit"])
    raise ArgumentError(f"there is no schedule '{name}'{hint} The schedules are: {names}")


# -------------------------------------------------------------------------------------------------
# The schedule of a pipe.
#
#     resolve_schedule         what the user passed -> a name, a Schedule or None (GPipe)
#     default_stages_per_rank  how many stages to cut the model into
#     choose_placement         which rank gets which stage
#     build_schedule_factory   check that it all fits, and return the factory
# -------------------------------------------------------------------------------------------------

ScheduleLike = str | PathLike[str] | Schedule | Program | None


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

    @property
    def name(self) -> str:
        """The name of the schedule in reports."""
        return "your own" if isinstance(self.requested, Schedule) else self.requested or "gpipe"

    def __call__(self, chunks: int) -> Schedule:
        """Return the schedule for this number of micro-batches."""
        if isinstance(self.requested, Schedule):
            return schedule_from_lanes(self.requested.placement, chunks, self.requested.lanes)
        if self.requested is None or self.requested == "gpipe":
            return clocked(self.placement, chunks)
        if self.requested == "fit":
            return fit(self.placement, chunks, graph=self.graph)
        ranks = len(set(self.placement))
        return make(self.requested, ranks, chunks, len(self.placement) // ranks)


def resolve_schedule(requested: ScheduleLike) -> str | Schedule | None:
    """Return the requested schedule as a name, a `Schedule` or None.

    A path is read. A program loses its messages, because the pipe lowers the schedule itself.
    """
    if requested is None:
        return None
    if isinstance(requested, Schedule | Program):
        return schedule_of(requested)
    if not isinstance(requested, str | PathLike):
        raise ArgumentError(
            f"schedule must be a name, a Schedule or the path of a file, not {requested!r}"
        )
    # A string with a suffix, such as "mine.txt", is a path. Any other string is a name, so that a
    # misspelt name gets the error that lists the names.
    if isinstance(requested, str) and (requested in FAMILIES or not Path(requested).suffix):
        return requested
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
    return make(requested, ranks, 1, stages // ranks).placement


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
