"""Two replicas of a pipe of two ranks in four processes, and the unsplit model on both batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipe
from penstock.data_parallel.all_reduce import _Bucket
from tests.data_parallel.replicated import whole
from tests.support import SCHEDULES, Pop, Same, Stash, closely

LAYERS = 8
FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v")

StageFn = Callable[[nn.Module, int], nn.Module]


class Block(nn.Module):
    """A layer pair, up and down, that tensor parallelism can split over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)
        self.down = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Head(nn.Module):
    """An output layer that shares its weight with the first layer."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.first.weight
        return y[:, :3]


def model(tied: bool = False) -> nn.Sequential:
    """Return a model with a skip connection and an in-place operation.

    Its ends may share a weight.
    """
    torch.manual_seed(0)
    first = nn.Linear(6, 8)
    return nn.Sequential(
        first,
        nn.ReLU(inplace=True),
        Stash(),
        Block(),
        nn.Tanh(),
        Block(),
        Pop(),
        Head(first) if tied else nn.Linear(8, 3),
    ).double()


@cache
def mesh(other: str = "dp", replicas: int = 2) -> DeviceMesh:
    size = replicas, dist.get_world_size() // replicas
    return init_device_mesh("cpu", size, mesh_dim_names=(other, "pp"))


def replica_here() -> int:
    return mesh().get_local_rank("dp")


def _ddp(module: nn.Module, _: int) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh()["dp"].get_group())


def _replicate(module: nn.Module, _: int) -> nn.Module:
    found: nn.Module = replicate(module, process_group=mesh()["dp"].get_group())
    return found


def _fsdp(module: nn.Module, _: int) -> nn.Module:
    fully_shard(module, mesh=mesh()["dp"])
    return module


def _plan(module: nn.Module, _: int) -> nn.Module:
    """Split each block over two processes."""
    for block in module.children():
        if isinstance(block, Block):
            ways: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh("tp")["tp"], ways)
    return module


def _compiled(module: nn.Module, _: int) -> nn.Module:
    compiled: Any = torch.compile(module, backend="eager")
    return DistributedDataParallel(compiled, process_group=mesh()["dp"].get_group())


WRAPS: dict[str, StageFn] = {
    "ddp": _ddp,
    "replicate": _replicate,
    "fsdp": _fsdp,
    "tensor parallel": _plan,
}
COMPILED = "compiled"


def pipe_of(
    layers: nn.Sequential, wrap: str | None, schedule: str = "1f1b", **options: Any
) -> Pipe:
    """Return a pipe over both dims of the mesh, or over `pp` only with wrapped stages."""
    stages = SCHEDULES[schedule] * dist.get_world_size() // 2
    if wrap is None:
        given: dict[str, Any] = {"mesh": mesh()}
    else:
        around = _compiled if wrap == COMPILED else WRAPS[wrap]
        given = {"mesh": mesh("tp" if around is _plan else "dp")["pp"], "stage_fn": around}
    given |= {"chunks": 4, "loss_fn": nn.functional.mse_loss, **options}
    return Pipe(layers, schedule=schedule, stages=[LAYERS // stages] * stages, **given)


def differing(pipe: nn.Module, expected: nn.Module, same: Same = closely) -> list[str]:
    """Return the names of this rank's parameters whose gradients differ."""
    theirs = dict(expected.named_parameters(remove_duplicate=False))
    found = []
    mine = dict(pipe.named_parameters())
    assert mine
    for name, parameter in mine.items():
        a, b = whole(parameter.grad), theirs[name].grad
        if (a is None) != (b is None) or (a is not None and b is not None and not same(a, b)):
            found.append(name)
    return found


class Reductions:
    """Counts of reductions: over the user's group, by fully_shard, and by the pipe itself."""

    of_group = scattered = own = 0


@contextmanager
def counted() -> Iterator[Reductions]:
    group: Any = mesh()["dp"].get_group()
    found = Reductions()
    scatter, send = DefaultReduceScatter.__call__, _Bucket.start_all_reduce

    def scattering(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.scattered += 1
        return scatter(self, *args, **kwargs)

    def sending(self: Any, over: Any) -> None:
        found.own += over is not group
        send(self, over)

    before = group._get_sequence_number_for_group()
    with (
        patch.object(DefaultReduceScatter, "__call__", scattering),
        patch.object(_Bucket, "start_all_reduce", sending),
    ):
        yield found
    found.of_group = group._get_sequence_number_for_group() - before
