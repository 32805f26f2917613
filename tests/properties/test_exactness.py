"""A pipe equals its model: bitwise, if the model also runs micro-batch by micro-batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Pipe
from tests.pairs import each_pair
from tests.properties.models import Layer, Model, Skip
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
    each_schedule,
    network,
    order_of_backwards,
    trained,
    unsplit,
)

# A V placement: some forwards first, then backwards of two micro-batches in each direction.
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
    """Return the outcomes of the pipe and of the model for each step, without zeroing gradients."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    loss_fn = functional.mse_loss
    pipe = Pipe(theirs, stages=counts, loss_fn=loss_fn, deferred_batch_norm=deferred, **options)
    order = order_of_backwards(pipe, len(x.chunk(pipe.chunks)))
    pairs = []
    for step in range(steps):
        given, mine = (x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2))
        torch.manual_seed(step)
        found = trained(pipe, given, target, door)
        state = torch.get_rng_state()
        torch.manual_seed(step)
        expected = unsplit(
            ours,
            mine,
            target,
            loss_fn,
            chunks=pipe.chunks,
            counts=counts,
            order=order,
            door=door,
            deferred=deferred,
        )
        assert torch.equal(state, torch.get_rng_state())
        pairs.append((found, expected))
    return pairs


# ---- every schedule, runtime, checkpoint mode, and both `pipe(x)` and `pipe.step` ---------


WAYS = [  # every schedule, runtime and checkpoint mode, by `pipe(x)` and `pipe.step` in turn
    (*way, DOORS[(at + at // 6) % 2])
    for at, way in enumerate(itertools.product(SCHEDULES, RUNTIMES, CHECKPOINTS))
]


@pytest.mark.parametrize(("schedule", "runtime", "checkpoint", "door"), WAYS)
def test_every_schedule_equals_the_model_bitwise(
    schedule: str, runtime: str, checkpoint: str, door: str
) -> None:
    """Loss, output, gradients and running statistics are equal, over two accumulated steps."""
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


@each_pair(schedule=SCHEDULES, runtime=RUNTIMES, door=DOORS, form=["words", "function"])
def test_every_schedule_with_recomputation_by_stage(
    schedule: str, runtime: str, door: str, form: str
) -> None:
    """Neighbouring stages, and in the second form micro-batches, differ in what they keep."""
    x, target = batch(11, torch.float32)
    counts = CUTS[2 * SCHEDULES[schedule]]
    modes = ["always", False, "except_last", True]
    pairs = both(
        network(torch.float32),
        x,
        target,
        door,
        counts,
        steps=2,
        chunks=4,
        schedule=schedule,
        runtime=runtime,
        checkpoint=modes[: len(counts)] if form == "words" else lambda s, i: (s + i) % 2 == 0,
    )
    for found, expected in pairs:
        assert differences(found, expected, bitwise) == []


@each_schedule
@each_door
def test_every_schedule_with_four_ranks_and_input_gradients(schedule: str, door: str) -> None:
    x, target = batch(11)
    counts = CUTS[4] if SCHEDULES[schedule] == 1 else [1, 2, 1, 1, 1, 1, 1, 2]
    [(found, expected)] = both(
        network(), x.requires_grad_(), target, door, counts, chunks=4, schedule=schedule
    )
    assert differences(found, expected) == []
    assert found.gradients["input 0"] is not None


@each_pair(runtime=RUNTIMES, checkpoint=CHECKPOINTS, door=DOORS)
def test_schedule_written_by_hand_equals_the_model(
    runtime: str, checkpoint: str, door: str, tmp_path: Path
) -> None:
    """The schedule is given as a value, as a path, and as the name of a file."""
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


@each_pair(
    schedule=["gpipe", "1f1b", "zb-v"], door=DOORS, size=[(2, 1), (4, 3), (8, 3), (11, 4), (12, 5)]
)
def test_deferred_batch_norm_equals_the_model(
    schedule: str, door: str, size: tuple[int, int]
) -> None:
    """This includes batches with fewer micro-batches than chunks."""
    rows, chunks = size
    x, target = batch(rows)
    counts = CUTS[2 * SCHEDULES[schedule]]
    pairs = both(network(), x, target, door, counts, 2, True, chunks=chunks, schedule=schedule)
    for step, (found, expected) in enumerate(pairs, start=1):
        assert differences(found, expected, closely) == []
        assert found.buffers["4.num_batches_tracked"] == step


@each_checkpoint
@each_door
def test_gradients_of_a_shared_skip_are_summed_in_the_order_of_the_model(
    checkpoint: str, door: str
) -> None:
    """Three stages pop one skip. The order in which three floats are summed changes the bits."""
    layers = [Layer("linear"), Layer("skip"), *[Layer("linear"), Layer("skip")] * 3]
    model = Model(tuple(layers), skips=(Skip("used", 1, (3, 5, 7)),)).build().float()
    torch.manual_seed(0)
    x, target = torch.randn(2, 40, 4)
    pairs = both(model, x, target, door, [2, 2, 2, 2], chunks=2, checkpoint=checkpoint)
    assert differences(*pairs[0]) == []
