"""A pipe computes what its model computes: bit by bit, if that goes by micro-batches too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Namespace, Pipe, pop, skippable, stash
from penstock.stage.batchnorm import DeferredBatchNorm
from tests.support import (
    CHECKPOINTS,
    CUTS,
    DOORS,
    RUNTIMES,
    SCHEDULES,
    Outcome,
    batch,
    bitwise,
    closely,
    differences,
    each_checkpoint,
    each_door,
    each_runtime,
    each_schedule,
    network,
    order_of_backwards,
    plain,
    trained,
    unsplit,
    whole,
)

# A V, with some forwards first, then the backwards of two micro-batches in each direction.
BY_HAND = """
    placement: 0 1 1 0
    chunks: 4
    0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 0F3 0B1 3F2 3F3 3B3 3B2 0B3 0B2
    1F0 2F0 1F1 2F1 2B0 2B1 1B0 1B1 1F2 2F2 1F3 2F3 2B3 2B2 1B3 1B2
"""


def both(
    model: nn.Sequential,
    x: Tensor,
    target: Tensor,
    door: str,
    counts: Sequence[int],
    steps: int = 1,
    deferred: bool = False,
    **options: Any,
) -> list[tuple[Outcome, Outcome]]:
    """What the pipe gives and what the model gives, step by step, without zeroing gradients."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    loss_fn = functional.mse_loss
    pipe = Pipe(theirs, stages=counts, loss_fn=loss_fn, deferred_batch_norm=deferred, **options)
    if deferred:
        ours = cast(nn.Sequential, DeferredBatchNorm.convert_deferred_batch_norm(ours))
    order = order_of_backwards(pipe, len(x.chunk(pipe.chunks)))
    pairs = []
    for step in range(steps):
        given, mine = (x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2))
        torch.manual_seed(step)
        found = trained(pipe, given, target, door)
        state = torch.get_rng_state()
        torch.manual_seed(step)
        expected = unsplit(
            ours, mine, target, loss_fn, chunks=pipe.chunks, counts=counts, order=order, door=door
        )
        assert torch.equal(state, torch.get_rng_state())
        pairs.append((copy.deepcopy(found), copy.deepcopy(expected)))
    return pairs


# ---- every schedule, runtime, mode and door -----------------------------------------------


@each_schedule
@each_runtime
@each_checkpoint
@each_door
def test_every_schedule_gives_the_models_own_bits(
    schedule: str, runtime: str, checkpoint: str, door: str
) -> None:
    """Loss, output, gradients and running statistics, over two steps that add up."""
    x, target = batch(11, torch.float32)
    pairs = both(
        network(torch.float32),
        x,
        target,
        door,
        CUTS[2 * SCHEDULES[schedule]],
        steps=2,
        chunks=4,
        schedule=schedule,
        runtime=runtime,
        checkpoint=checkpoint,
    )
    for found, expected in pairs:
        assert differences(found, expected, bitwise) == []


@each_schedule
@each_door
def test_with_four_ranks_and_an_input_that_learns(schedule: str, door: str) -> None:
    x, target = batch(11)
    counts = CUTS[4] if SCHEDULES[schedule] == 1 else [1, 2, 1, 1, 1, 1, 1, 2]
    [(found, expected)] = both(
        network(), x.requires_grad_(), target, door, counts, chunks=4, schedule=schedule
    )
    assert differences(found, expected) == []
    assert found.gradients[""] is not None


@each_runtime
@each_checkpoint
@each_door
def test_a_schedule_written_by_hand(
    runtime: str, checkpoint: str, door: str, tmp_path: Path
) -> None:
    """As a value, as a file, and as a file's name."""
    x, target = batch(11)
    file = tmp_path / "mine.txt"
    file.write_text(BY_HAND)
    for schedule in (penstock.loads(BY_HAND), file, str(file)):
        [(found, expected)] = both(
            network(),
            x,
            target,
            door,
            CUTS[4],
            chunks=4,
            devices=["cpu"] * 2,
            schedule=schedule,
            runtime=runtime,
            checkpoint=checkpoint,
        )
        assert differences(found, expected) == []


@each_schedule
@each_door
@pytest.mark.parametrize(("rows", "chunks"), [(2, 1), (4, 3), (8, 3), (11, 4), (12, 5)])
def test_deferred_batch_norm(schedule: str, door: str, rows: int, chunks: int) -> None:
    """Also where there are fewer micro-batches than chunks."""
    x, target = batch(rows)
    counts = CUTS[2 * SCHEDULES[schedule]]
    pairs = both(network(), x, target, door, counts, 2, True, chunks=chunks, schedule=schedule)
    for step, (found, expected) in enumerate(pairs, start=1):
        assert differences(found, expected) == []
        assert found.buffers["4.num_batches_tracked"] == step


@each_schedule
@each_checkpoint
@each_door
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_the_whole_batch_at_once_gives_the_same_numbers(
    schedule: str, checkpoint: str, door: str, rows: int
) -> None:
    """Where layers look at each row alone, micro-batches do not show."""
    x, target = batch(rows)
    model = plain()
    pipe = Pipe(
        copy.deepcopy(model),
        chunks=4,
        stages=4,
        devices=["cpu"] * (4 // SCHEDULES[schedule]),
        loss_fn=functional.mse_loss,
        schedule=schedule,
        checkpoint=checkpoint,
    )
    mine = x.clone().requires_grad_()
    expected = whole(model, mine, target, functional.mse_loss)
    found = trained(pipe, x.requires_grad_(), target, door)
    assert differences(found, expected, closely) == []


# ---- any Sequential -----------------------------------------------------------------------


def stashed(kind: str, x: Tensor) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "integers":
        return (x > 0).long()
    return x.detach() + 1 if kind == "detached" else 2 * x


class _Stash(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("skip", stashed(self.kind, x))
        return x


@skippable(stash=["skip"])
class StashOnce(_Stash): ...


@skippable(stash=["skip"], shared=["skip"])
class StashForAll(_Stash): ...


@skippable(pop=["skip"])
class Use(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        found: Tensor | None = yield pop("skip")
        if self.kind == "unused" or found is None:
            return x
        return x * found if self.kind == "integers" else x + found


@dataclass(frozen=True)
class Case:
    """A model by the kinds of its layers, and how it is piped."""

    kinds: tuple[str, ...]
    skips: tuple[tuple[str, int, tuple[int, ...]], ...]  # kind, where stashed, where popped
    counts: tuple[int, ...]
    rows: int
    chunks: int
    ranks: int
    schedule: str
    runtime: str
    checkpoint: str
    door: str
    learns: bool  # the input, too
    training: bool
    deferred: bool

    def model(self) -> nn.Sequential:
        torch.manual_seed(len(self.kinds))
        layers = [LAYERS[kind]() for kind in self.kinds]
        for kind, source, targets in self.skips:
            space = Namespace()
            one = StashOnce if len(targets) == 1 else StashForAll
            layers[source] = one(kind).isolate(space)  # type: ignore[operator]
            for target in targets:
                layers[target] = Use(kind).isolate(space)  # type: ignore[operator]
        return nn.Sequential(*layers).double().train(self.training)

    @property
    def sums_differ(self) -> bool:
        """A stage that pops a skip twice sums its two gradients before it sends them on."""
        homes = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        popped = [[homes[target] for target in targets] for _, _, targets in self.skips]
        return any(len(set(stages)) < len(stages) for stages in popped)


WIDTH = 4
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "in place": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": nn.Dropout,
    "skip": nn.Identity,  # to be replaced
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, chunks = draw(st.integers(1, 17)), draw(st.integers(1, 6))
    schedule, ranks = draw(st.sampled_from(list(SCHEDULES))), draw(st.integers(1, 4))
    stages = ranks * SCHEDULES[schedule]
    size = stages + draw(st.integers(1, 6))
    alone = min(len(piece) for piece in torch.empty(rows).chunk(chunks)) == 1
    drawn = draw(
        st.lists(
            st.sampled_from([k for k in LAYERS if k != "norm" or not alone]),
            min_size=size - 1,
            max_size=size - 1,
        )
    )
    kinds = list(drawn)
    kinds.insert(draw(st.integers(0, size - 1)), "linear")
    for at, kind in enumerate(kinds):  # others keep what an in-place layer would change
        if kind == "in place" and (at == 0 or kinds[at - 1] != "linear"):
            kinds[at] = "tanh"
    edges = sorted(draw(st.permutations(range(1, size)))[: stages - 1])
    return Case(
        tuple(kinds),
        tuple(draw(skips([at for at, kind in enumerate(kinds) if kind == "skip"]))),
        tuple(b - a for a, b in zip([0, *edges], [*edges, size], strict=True)),
        rows,
        chunks,
        ranks,
        schedule,
        draw(st.sampled_from(RUNTIMES)),
        draw(st.sampled_from(CHECKPOINTS)),
        draw(st.sampled_from(DOORS)),
        draw(st.booleans()),
        draw(st.sampled_from([True, True, True, False])),
        draw(st.booleans()),
    )


@st.composite
def skips(draw: st.DrawFn, places: Sequence[int]) -> list[tuple[str, int, tuple[int, ...]]]:
    """Places taken from the left for a stash, and from what is behind it for its pops."""
    found = []
    left = list(places)
    while len(left) > 1:
        source = left.pop(0)
        several = draw(st.integers(1, min(3, len(left))))
        targets = sorted(draw(st.permutations(left))[:several])
        left = [place for place in left if place not in targets]
        kind = draw(st.sampled_from(["used", "unused", "integers", "none", "detached"]))
        found.append((kind, source, tuple(targets)))
    return found


@each_checkpoint
@each_door
def test_gradients_that_meet_are_added_in_the_models_order(checkpoint: str, door: str) -> None:
    """A skip that three stages pop: of three numbers, the order of the sum matters."""
    torch.manual_seed(0)
    space = Namespace()
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), StashForAll("used").isolate(space)]  # type: ignore[operator]
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), Use("used").isolate(space)]  # type: ignore[operator]
    x, target = torch.randn(2, 40, WIDTH)
    counts = [2, 2, 2, 2]
    pairs = both(nn.Sequential(*layers), x, target, door, counts, chunks=2, checkpoint=checkpoint)
    assert differences(*pairs[0]) == []


@settings(max_examples=4000, deadline=None)
@given(cases())
def test_any_sequential_gives_its_own_bits(case: Case) -> None:
    torch.manual_seed(case.rows)
    x, target = torch.randn(2, case.rows, WIDTH, dtype=torch.float64)
    pairs = both(
        case.model(),
        x.requires_grad_(case.learns),
        target,
        case.door,
        case.counts,
        steps=2,
        deferred=case.deferred,
        chunks=case.chunks,
        devices=["cpu"] * case.ranks,
        schedule=case.schedule,
        runtime=case.runtime,
        checkpoint=case.checkpoint,
    )
    for found, expected in pairs:
        assert differences(found, expected, closely if case.sums_differ else bitwise) == []
