"""`Pipe(mesh=mesh["pp"], stage_fn=...)`: stage_fn wraps the stages over the other dim."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from penstock import RemoteError
from tests.data_parallel.test_sync import weighted
from tests.distributed.ranks import ranks
from tests.meshes.meshed import (
    COMPILED,
    FAMILIES,
    WRAPS,
    counted,
    differing,
    model,
    pipe_of,
    replica_here,
)
from tests.support import Fails, batch, closely

FINE: list[list[str]] = [[], [], [], []]


def parts(wrap: str, *tensors: Tensor) -> list[Tensor]:
    """Return this replica's part of the batch, or all of it under tensor parallelism."""
    if wrap == "tensor parallel":
        return list(tensors)
    return [tensor.chunk(2)[replica_here()] for tensor in tensors]


def two_steps(wrap: str, families: tuple[str, ...]) -> list[str]:
    wrong = []
    for at, schedule in enumerate(families):
        expected = model()
        checkpoint = ("never", "always")[at % 2]
        pipe = pipe_of(model(), wrap, schedule, checkpoint=checkpoint)
        for rows in (16, 12):  # the second step accumulates gradients
            x, y = batch(rows)
            loss = nn.functional.mse_loss(expected(x), y)
            loss.backward()
            with counted() as found:
                x, y = parts(wrap, x, y)
                result = pipe.step(x, target=y)
            wrong += [f"{schedule}: {name}" for name in differing(pipe, expected)]
            total = result.loss.clone()
            dist.all_reduce(total)
            wrong += [] if closely(total / 4, loss.detach()) else [f"{schedule}: the loss"]
            here = len(pipe._placed_partition.local_stages)
            count = {"ddp": (1, 0), "replicate": (1, 0), COMPILED: (1, 0)}.get(wrap)
            if count is not None and (found.of_group, found.scattered) != count:
                wrong.append(f"{schedule}: {found.of_group} reductions")
            if wrap == "fsdp" and found.scattered != here:
                wrong.append(f"{schedule}: {found.scattered} scattered, {here} stages")
            wrong += [f"{schedule}: the pipe has reduced"] * found.own
        known = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        norm = pipe.clip_grad_norm_(0.1)
        wrong += [] if closely(norm, known) else [f"{schedule}: norm {norm}, not {known}"]
        wrong += [f"{schedule}, clipped: {name}" for name in differing(pipe, expected)]
    return wrong


@pytest.mark.parametrize("wrap", WRAPS)
def test_stage_fn_gradients_match_the_whole_batch_and_are_reduced_once(wrap: str) -> None:
    assert ranks(4).run(two_steps, wrap, FAMILIES) == FINE


def compiled() -> list[str]:
    with warnings.catch_warnings(action="ignore"):  # warnings of the compiler itself
        return two_steps(COMPILED, ("zb-v",))


def test_stage_fn_with_compiled_stages() -> None:
    assert ranks(4).run(compiled) == FINE


def ties_and_weights(wrap: str) -> list[str]:
    """Train a weight tied across ranks: two steps under no_sync, one that reduces, and one more."""
    expected, pipe = model(tied=True), pipe_of(model(tied=True), wrap, "zb-h1", loss_fn=weighted)
    wrong = []
    for at in range(4):
        x, y = batch(16)
        y = y.roll(at, dims=0)
        # each replica takes its own mean
        for mine, theirs in zip(x.chunk(2), y.chunk(2), strict=True):
            (weighted(expected(mine), theirs)[0] / 2).backward()
        with pipe.no_sync() if at < 2 else nullcontext(), counted() as found:
            x, y = parts(wrap, x, y)
            pipe.step(x, target=y)
        wrong += [f"step {at} has reduced"] if at < 2 and found.of_group else []
        if at >= 2:
            wrong += [f"after step {at}: {name}" for name in differing(pipe, expected)]
    known = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    wrong += [] if closely(pipe.clip_grad_norm_(0.1), known) else ["the norm"]
    return wrong + differing(pipe, expected)


@pytest.mark.parametrize("wrap", ["ddp", "replicate"])
def test_stage_fn_with_tied_weight_weighted_loss_and_no_sync(wrap: str) -> None:
    assert ranks(4).run(ties_and_weights, wrap) == FINE


def tied_in_parts() -> str:
    with pytest.raises(RemoteError) as error:
        pipe_of(model(tied=True), "fsdp")
    return str(error.value)


def test_tied_weight_sharded_by_fsdp_is_refused() -> None:
    for message in ranks(4).run(tied_in_parts):
        assert "'0.weight' is shared by ranks 0, 1 of the pipe, and stage_fn sharded it" in message


def a_step_that_fails(wrap: str) -> list[str]:
    """Fail on one rank of one replica. All ranks raise, and the next step works."""
    expected, layers = model(), model()
    expected[4], layers[4] = nn.Identity(), Fails()
    pipe = pipe_of(layers, wrap)
    broken = layers[4]
    assert isinstance(broken, Fails)
    x, y = parts(wrap, *batch(16))
    broken.broken = False
    pipe.step(x, target=y)
    broken.broken = replica_here() == 1
    with pytest.raises(RemoteError, match=r"rank 3 failed, in step \(call 3\) of replica 1, in st"):
        pipe.step(x, target=y)
    broken.broken = False
    pipe.zero_grad()
    pipe.step(x, target=y)
    x, y = batch(16)
    nn.functional.mse_loss(expected(x), y).backward()
    return differing(pipe, expected)


@pytest.mark.parametrize("wrap", ["ddp", "replicate"])
def test_stage_fn_step_after_a_failed_step(wrap: str) -> None:
    assert ranks(4).run(a_step_that_fails, wrap) == FINE
