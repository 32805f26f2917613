"""A case: a random model, batches for it, and a way to run it as a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from penstock import StageGraph, dumps, loads
from penstock.schedules.ir import schedule_of
from penstock.schedules.lowering import RecomputeTable
from tests.properties.layers import EXACT, FRESH, LAYERS, MIXING, TIED
from tests.properties.losses import LOSSES, MEANS, PLAIN
from tests.properties.models import FORMS, SIDED, SKIPS, Layer, Model, Skip, Tie
from tests.properties.random_schedules import orders
from tests.support import CHECKPOINTS, DOORS, RUNTIMES, SCHEDULES

FREE = (
    "gpipe",
    "naive",
    "interleaved",
    "looped-bfs",
    "interleaved-zb",
)  # schedules with any number of stages per rank


@dataclass(frozen=True)
class Case:
    """Everything that a run depends on; `eval(repr(case))` gives an equal case."""

    model: Model
    counts: tuple[int, ...]  # layers of each stage
    ranks: int
    rows: tuple[int, ...]  # of the batch of each step
    chunks: int
    schedule: str  # a name, or a schedule in text form
    loss: str = "mean"
    door: str = "step"
    runtime: str = "inline"
    checkpoint: RecomputeTable = "never"
    learns: bool = False  # whether the inputs require gradients, too
    updates: bool = False  # update parameters after each step; otherwise gradients accumulate
    training: bool = True
    deferred: bool = False
    backwards: int = 1  # backwards per forward; `pipe(x)` allows several
    # options for ranks that are processes
    data: str = "all"
    outputs: str = "last"
    shapes: str = "learned"

    @property
    def by_name(self) -> bool:
        return "\n" not in self.schedule

    @property
    def first_rank(self) -> int:
        """Return the rank of the first stage."""
        return 0 if self.by_name else schedule_of(loads(self.schedule)).placement[0]

    @property
    def mixes(self) -> bool:
        """Return whether the results depend on how the batch is cut."""
        scaled = "added" in self.model.kinds and LOSSES[self.loss].returned
        return scaled or (self.training and not self.model.kinds.isdisjoint(MIXING))

    @property
    def home(self) -> list[int]:
        """Return the stage of each layer."""
        return [stage for stage, count in enumerate(self.counts) for _ in range(count)]

    @property
    def bitwise(self) -> bool:
        """Return whether all gradients are summed in the order of the unsplit model."""
        home = self.home
        popped = [[home[t] for t in skip.targets] for skip in self.model.skips]
        for skip, stages in zip(self.model.skips, popped, strict=True):
            if skip.kind == "itself":  # the next stage also receives it as its input
                uses = 2 if self.model.layers[skip.source].form == "twice" else 1
                stages.extend([home[skip.source] + 1] * uses)
        return (
            self.by_name
            and not self.model.ties
            and not self.model.takes
            and self.loss in (*MEANS, "sum")
            and not (self.deferred and "batch norm" in self.model.kinds)
            and self.model.kinds.issubset(EXACT)
            and all(len(set(stages)) == len(stages) for stages in popped)
        )


# ---- strategies ---------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, processes: int | None = None) -> Case:
    """Draw a case in one process, or over that many processes."""
    rows = tuple(draw(st.lists(st.integers(1, 17), min_size=1, max_size=3)))
    chunks, ranks = draw(st.integers(1, 6)), processes or draw(st.integers(1, 4))
    named = draw(st.sampled_from([*SCHEDULES, *["random"] * 4]))
    stages = _stages(draw, named, ranks)
    size = stages + draw(st.integers(0, 5))
    edges = sorted(draw(st.permutations(range(1, size)))[: stages - 1])
    counts = tuple(b - a for a, b in zip([0, *edges], [*edges, size], strict=True))
    door = "step" if processes else draw(st.sampled_from(DOORS))
    loss = draw(st.sampled_from(["mean", *LOSSES]))
    learns = draw(st.booleans())
    banned = {"added"} if door == "call" else set()
    if min(_smallest(count, chunks) for count in rows) == 1:
        banned.add("batch norm")
    model = draw(models(size, banned, loss in PLAIN, learns))
    schedule = draw(_written(model, counts, ranks, chunks)) if named == "random" else named
    case = Case(
        model,
        counts,
        ranks,
        rows,
        chunks,
        schedule,
        loss,
        door,
        "processes" if processes else draw(st.sampled_from(RUNTIMES)),
        draw(_recomputations(stages, chunks)),
        learns,
        draw(st.booleans()),
        draw(st.sampled_from([True, True, True, False])),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])) if door == "call" else 1,
    )
    return draw(_carried(case)) if processes else case


def _recomputations(stages: int, chunks: int) -> st.SearchStrategy[RecomputeTable]:
    """Draw a mode for all stages, or for each stage a mode or the micro-batches."""
    modes = st.sampled_from(CHECKPOINTS)
    cells = st.tuples(*[st.booleans()] * chunks)
    return st.one_of(modes, modes, st.tuples(*[st.one_of(modes, cells)] * stages))


@st.composite
def _carried(draw: st.DrawFn, case: Case) -> Case:
    """Draw how inputs and outputs travel between ranks that are processes."""
    sides_learn = case.learns and case.model.takes  # the first rank gets no gradient for them
    return replace(
        case,
        data=draw(st.sampled_from(["all"] if sides_learn else ["all", "all", "first"])),
        outputs=draw(st.sampled_from(["last", "last", "all"])),
        shapes=draw(st.sampled_from(["learned", "learned", "sent"])),
    )


def _stages(draw: st.DrawFn, named: str, ranks: int) -> int:
    if named == "random":
        return draw(st.integers(1, 6))
    if named in FREE:
        return ranks * draw(st.integers(1, 2))
    return ranks * (draw(st.integers(1, 2)) if named == "fit" else SCHEDULES[named])


def _smallest(rows: int, chunks: int) -> int:
    return min(len(piece) for piece in torch.empty(rows).chunk(chunks))


@st.composite
def _written(draw: st.DrawFn, model: Model, counts: Sequence[int], ranks: int, chunks: int) -> str:
    """Draw a random valid schedule for the stage graph of the model, in text form."""
    home = [stage for stage, count in enumerate(counts) for _ in range(count)]
    skips = {(home[s.source], home[t]) for s in model.skips for t in s.targets}
    graph = StageGraph.chain(len(counts), sorted((a, b) for a, b in skips if a != b))
    return dumps(draw(orders(graph, len(counts), ranks, chunks)))


ALL = (*LAYERS, *SIDED, *["skip"] * 6, *["in place", "added"] * 3)
# With few kinds of layers, each pair of them occurs more often. The kinds in EXACT also promise
# bitwise equal gradients.
PALETTES = st.one_of(
    st.just(ALL),
    st.lists(st.sampled_from(ALL), min_size=1, max_size=5).map(tuple),
    st.just((*EXACT, *["skip"] * 10)),
)


@st.composite
def models(draw: st.DrawFn, size: int, banned: set[str], plain: bool, learns: bool) -> Model:
    """Draw a model of `size` layers; one of them is an ordinary linear layer that is trained."""
    palette = [kind for kind in draw(PALETTES) if kind not in banned] or ["linear"]
    kinds = [draw(st.sampled_from(palette)) for _ in range(size - 1)]
    head = draw(st.integers(0, size - 1))
    kinds.insert(head, "linear")
    forms = [draw(st.sampled_from(["plain"] * len(FORMS) + list(FORMS))) for _ in range(size)]
    given = draw(st.sampled_from(["plain", "plain", *FORMS]))
    if plain:
        forms[-1] = "plain"
    skips = draw(_skips([at for at, kind in enumerate(kinds) if kind == "skip"]))
    ends = {end for skip in skips for end in (skip.source, *skip.targets)}
    for at, kind in enumerate(kinds):
        if kind == "skip" and at not in ends:
            kinds[at] = "nothing"
        if kind == "in place" and at and at - 1 not in ends:
            kinds[at - 1] = kinds[at - 1] if kinds[at - 1] in FRESH else "linear"
            forms[at - 1] = "plain"
        elif kind == "in place" and (at or learns or given != "plain"):
            kinds[at] = "tanh"
    frozen = [draw(st.integers(0, 3)) == 3 and at != head for at in range(size)]
    layers = map(Layer, kinds, forms, frozen)
    ties = draw(_ties(kinds))
    return Model(tuple(layers), given, tuple(skips), tuple(ties), draw(st.booleans()))


@st.composite
def _skips(draw: st.DrawFn, places: Sequence[int]) -> list[Skip]:
    """Draw skips: the leftmost free layer stashes, and some of the later free layers pop."""
    found = []
    left = list(places)
    while len(left) > 1:
        source = left.pop(0)
        several = min(draw(st.sampled_from([1, 2, 3, 3])), len(left))
        targets = sorted(draw(st.permutations(left))[:several])
        left = [place for place in left if place not in targets]
        found.append(Skip(draw(st.sampled_from(list(SKIPS))), source, tuple(targets)))
    return found


@st.composite
def _ties(draw: st.DrawFn, kinds: Sequence[str]) -> list[Tie]:
    """Draw tied weights; each layer takes over at most one weight."""
    found: list[Tie] = []
    able = (
        [at for at, kind in enumerate(kinds) if kind in TIED]
        if draw(st.integers(0, 2)) == 2
        else []
    )
    for at, other in enumerate(able):
        if not at or not draw(st.booleans()):
            continue
        owner = draw(st.sampled_from(able[:at]))
        ways = ["weight", "module"] if kinds[owner] == kinds[other] else ["weight"]
        found.append(Tie(draw(st.sampled_from(ways)), owner, other))
    return found
