"""`Pipe(mesh=mesh["pp"], stage_fn=...)`: the other dim of the mesh is the user's."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipe, RemoteError
from tests.gradients.test_replicas import weighted
from tests.meshes.meshed import (
    COMPILED,
    FAMILIES,
    WRAPS,
    copy_here,
    counted,
    differing,
    mesh,
    model,
    pipe_of,
)
from tests.processes.ranks import ranks
from tests.support import Fails, batch, closely

FINE = [[], [], [], []]


def parts(wrap: str, *tensors: Tensor) -> list[Tensor]:
    """What this process is given: all of it, if the other dim splits layers."""
    if wrap == "tensor parallel":
        return list(tensors)
    return [tensor.chunk(2)[copy_here()] for tensor in tensors]


def two_steps(wrap: str, families: tuple[str, ...]) -> list[str]:
    wrong = []
    for at, schedule in enumerate(families):
        expected = model()
        checkpoint = ("never", "always")[at % 2]
        pipe = pipe_of(model(), wrap, schedule, checkpoint=checkpoint)
        for rows in (16, 12):  # the second step adds to the first
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
            here = len(pipe._split.stages_here)
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
def test_gradients_are_those_of_the_whole_batch_reduced_once(wrap: str) -> None:
    assert ranks(4).run(two_steps, wrap, FAMILIES) == FINE


def test_compiled_stages() -> None:
    assert ranks(4).run(two_steps, COMPILED, ("zb-v",)) == FINE
