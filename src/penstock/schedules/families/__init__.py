"""The named families of schedules. Each is a function of sizes that returns a `Schedule`.

    common.py        placements and checks of sizes
    gpipe.py         naive, gpipe, looped-bfs, forward-only
    one_f_one_b.py   1f1b, eager-1f1b, interleaved; with the backwards split into I and W: zb-h1,
                     zb-h2, interleaved-zb
    v_shape.py       zb-v, v-half, v-min, dualpipe-v: two stages per rank, placed like a V

The docstring of each module shows its schedules as pictures. `FAMILIES`, below, is the table of
all of them: a new family is a function in one of these modules and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from penstock.errors import ArgumentError
from penstock.schedules.families.common import Placement, check_sizes, loop, vee
from penstock.schedules.families.gpipe import clocked, forward_only, gpipe, looped_bfs, naive
from penstock.schedules.families.one_f_one_b import (
    eager_one_f_one_b,
    interleaved,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from penstock.schedules.families.v_shape import dualpipe_v, v_half, v_min, zb_v
from penstock.schedules.ir import Schedule
from penstock.vocabulary import SCHEDULE_NAMES

__all__ = [
    "FAMILIES",
    "Family",
    "check_sizes",
    "clocked",
    "dualpipe_v",
    "eager_one_f_one_b",
    "family_of",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_zb",
    "loop",
    "looped_bfs",
    "make",
    "naive",
    "one_f_one_b",
    "v_half",
    "v_min",
    "vee",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


@dataclass(frozen=True)
class Family:
    """A named schedule: the function that makes it from sizes, and what to know about it.

    Attributes:
        build: The function of (ranks, chunks) or, if `free`, (ranks, chunks, stages_per_rank).
        peak: A function of (ranks, chunks, stages_per_rank): the largest amount of live activations
            on any rank, where 1 is one micro-batch of a rank's whole share. With enough
            micro-batches this bound is reached.
        use: When to use it, in one or two sentences.
        source: The paper or library that it comes from.
        stages_per_rank: The number of stages per rank: a default if `free`, else the only possible
            one.
        free: Whether the caller may choose the number of stages per rank.
        trains: Whether it has backwards.
        placement: A function of (ranks, stages_per_rank): the rank of each stage.
    """

    build: Callable[..., Schedule]
    peak: Callable[[int, int, int], float]
    use: str
    source: str
    stages_per_rank: int = 1
    free: bool = False
    trains: bool = True
    placement: Callable[[int, int], Placement] = loop


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
        placement=lambda p, v: vee(p),
    ),
    "v-half": Family(
        v_half,
        lambda p, m, v: min(m, (p + 2) // 2),
        "Half of 1F1B's memory and less than half of its bubble, from as many chunks as ranks on. "
        "Needs fast links.",
        "Controllable memory, arXiv 2405.15362",
        stages_per_rank=2,
        placement=lambda p, v: vee(p),
    ),
    "v-min": Family(
        v_min,
        lambda p, m, v: min(m, (p + 4) // 3),
        "A third of 1F1B's memory and two thirds of its bubble. Needs fast links.",
        "Controllable memory, arXiv 2405.15362",
        stages_per_rank=2,
        placement=lambda p, v: vee(p),
    ),
    "dualpipe-v": Family(
        dualpipe_v,
        lambda p, m, v: min(m, p + 0.5),
        "Pairs a forward with a backward, so that one's messages travel while the other computes "
        "(experts' all-to-all, say). From two micro-batches a rank on.",
        "DualPipe, DeepSeek-V3, arXiv 2412.19437",
        stages_per_rank=2,
        placement=lambda p, v: vee(p),
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


def training_families(placement: tuple[int, ...]) -> list[str]:
    """Return the names of the families that can train and place their stages like this.

    Args:
        placement: The rank of each stage.

    >>> training_families((0, 1, 1, 0))
    ['zb-v', 'v-half', 'v-min', 'dualpipe-v']
    """
    ranks = max(placement) + 1
    per_rank = len(placement) // ranks
    return [
        name
        for name, family in FAMILIES.items()
        if family.trains
        and (family.free or family.stages_per_rank == per_rank)
        and family.placement(ranks, per_rank) == placement
    ]


def family_of(name: str) -> Family:
    """Return the family of that name. The error for an unknown name suggests a similar one.

    Args:
        name: A name, such as "1f1b".
    """
    if name in FAMILIES:
        return FAMILIES[name]
    word = name.lower().replace("_", "-")
    other = SCHEDULE_NAMES.get(word.replace("-", ""))
    close = [other] if other else get_close_matches(word, FAMILIES, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    names = ", ".join([*FAMILIES, "fit"])
    raise ArgumentError(f"there is no schedule '{name}'{hint} The schedules are: {names}")
