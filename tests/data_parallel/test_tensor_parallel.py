"""Tests of stages with a tensor-parallel plan, alone and together with fully_shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from penstock import Pipe
from tests.data_parallel.replicated import differing
from tests.distributed.ranks import ranks
from tests.support import batch, closely


class Block(nn.Module):
    """A residual block of two linear layers, which tensor parallelism can shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(6, 3)).double()


def trained(data: int, schedule: str, checkpoint: str) -> list[str]:
    """Train over `data` replicas, with each layer sharded over the remaining processes."""
    mesh = init_device_mesh(
        "cpu", (data, dist.get_world_size() // data), mesh_dim_names=("dp", "tp")
    )

    def plan(module: nn.Module, _: int) -> nn.Module:
        for block in module.children():
            if isinstance(block, Block):
                ways: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], ways)
        if data > 1:
            fully_shard(module, mesh=mesh["dp"])
        return module

    expected = model()
    pipe = Pipe(
        model(),
        chunks=4,
        checkpoint=checkpoint,
        stages=[2, 2],
        devices=["cpu"] * 2,
        schedule=schedule,
        runtime="inline",
        loss_fn=nn.functional.mse_loss,
        stage_fn=plan,
    )
    wrong = []
    for rows in (16, 12):
        x, y = batch(rows)
        nn.functional.mse_loss(expected(x), y).backward()
        at = mesh["dp"].get_local_rank()
        pipe.step(x.chunk(data)[at], target=y.chunk(data)[at])
        wrong += differing(pipe, expected)
    known = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    found = pipe.clip_grad_norm_(0.1)
    return wrong + differing(pipe, expected) + ([] if closely(found, known) else ["the norm"])


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_tensor_parallel_stages_train_as_the_unsplit_model(schedule: str, checkpoint: str) -> None:
    assert ranks(2).run(trained, 1, schedule, checkpoint) == [[], []]


def test_tensor_parallel_stages_with_fully_shard() -> None:
    assert ranks(4).run(trained, 2, "zb-h1", "except_last") == [[]] * 4
