"""Two replicas of a pipe of two ranks, and the unsplit model on the batches of both.

With two processes, each of them is a replica: a pipe over two ranks of one process. With four, a
replica is a pipe over two processes, and the mesh has the dims dp and pp.
"""

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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipe
from penstock.data_parallel.all_reduce import _Bucket
from tests.distributed.ranks import ranks
from tests.support import SCHEDULES, Pop, Same, Stash, closely

LAYERS = 8
LEARNING = 4  # layers of the model that have parameters
FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v")

StageFn = Callable[[nn.Module, int], nn.Module]


def check_on_ranks(size: int, function: Callable[..., list[str]], *given: Any) -> None:
    """Run a function that returns descriptions of errors on each rank, and check there are none."""
    assert ranks(size).run(function, *given) == [[]] * size


# ---- the model and its replicas -----------------------------------------------------------


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
    """Return a model with a skip connection and an in-place operation, and maybe tied ends."""
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


def is_local() -> bool:
    """Return whether each replica is a single process."""
    return dist.get_world_size() == 2


def replica_here() -> int:
    return mesh().get_local_rank("dp")


def half(tensor: Tensor) -> Tensor:
    """Return the part of a batch that belongs to this replica."""
    return tensor.chunk(2)[replica_here()]


def _ddp(module: nn.Module, _: int, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh()["dp"].get_group(), **options)


def _ddp_unused(module: nn.Module, index: int) -> nn.Module:
    return _ddp(module, index, find_unused_parameters=True, gradient_as_bucket_view=True)


def _compiled(module: nn.Module, index: int) -> nn.Module:
    compiled: Any = torch.compile(module, backend="eager")
    return _ddp(compiled, index)


def _replicate(module: nn.Module, _: int) -> nn.Module:
    replicated: nn.Module = replicate(module, process_group=mesh()["dp"].get_group())
    return replicated


def _fsdp(module: nn.Module, _: int, **options: Any) -> nn.Module:
    fully_shard(module, mesh=mesh()["dp"], **options)
    return module


def _fsdp_layers(module: nn.Module, _: int) -> nn.Module:
    for layer in module.children():
        if isinstance(layer, nn.Linear | nn.Sequential | Block):
            fully_shard(layer, mesh=mesh()["dp"], reshard_after_forward=True)
    return module


def _fsdp_nested(module: nn.Module, index: int) -> nn.Module:
    return _fsdp(_fsdp_layers(module, index), index)


def _fsdp_float32(module: nn.Module, index: int) -> nn.Module:
    """Shard with a policy that computes in float32 and keeps gradients in float64."""
    policy = MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)
    return _fsdp(module, index, mp_policy=policy)


def _tensor_parallel(module: nn.Module, _: int) -> nn.Module:
    return split_blocks(module, mesh("tp")["tp"])


def split_blocks(module: nn.Module, over: DeviceMesh) -> nn.Module:
    """Split each block over the processes of a mesh."""
    for block in module.children():
        if isinstance(block, Block):
            ways: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, over, ways)
    return module


TENSOR_PARALLEL, COMPILED, ROUNDED = "tensor parallel", "compiled", "fsdp, float32"
STAGE_FNS: dict[str, StageFn] = {
    "ddp": _ddp,
    "ddp, unused": _ddp_unused,
    "replicate": _replicate,
    "fsdp": _fsdp,
    "fsdp, nested": _fsdp_nested,
    "fsdp, layers": _fsdp_layers,
    TENSOR_PARALLEL: _tensor_parallel,
    COMPILED: _compiled,
    ROUNDED: _fsdp_float32,
}
WRAPS = list(STAGE_FNS)[:6]
SHARDED = [name for name in WRAPS if name.startswith("fsdp")]


def pipe_of(
    layers: nn.Sequential, wrap: str | None, schedule: str = "1f1b", **options: Any
) -> Pipe:
    """Return this replica's pipe. Its stages are wrapped, or the pipe knows the other replica.

    In one process, FSDP and tensor parallelism need one thread: all processes must communicate in
    the same order.
    """
    stages = 2 * SCHEDULES[schedule]
    given: dict[str, Any] = {"chunks": 4, "loss_fn": nn.functional.mse_loss}
    if wrap is None:
        given["mesh"] = mesh()
    else:
        given["stage_fn"] = STAGE_FNS[wrap]
        if is_local():
            ordered = wrap.startswith("fsdp") or wrap == TENSOR_PARALLEL
            given |= {"devices": ["cpu"] * 2, "runtime": "inline" if ordered else "threads"}
        else:
            given["mesh"] = mesh("tp" if wrap == TENSOR_PARALLEL else "dp")["pp"]
    return Pipe(layers, schedule=schedule, stages=[LAYERS // stages] * stages, **given | options)


# ---- comparing ----------------------------------------------------------------------------


def whole(tensor: Tensor | None) -> Tensor | None:
    """Return the full tensor of a DTensor, and any other tensor as it is."""
    return tensor.full_tensor() if tensor is not None and hasattr(tensor, "full_tensor") else tensor


def differing(pipe: nn.Module, expected: nn.Module, same: Same = closely) -> list[str]:
    """Return the names of this rank's parameters whose gradients differ."""
    theirs = dict(expected.named_parameters(remove_duplicate=False))
    mine = dict(pipe.named_parameters())
    assert mine
    found = []
    for name, parameter in mine.items():
        a, b = whole(parameter.grad), theirs[name].grad
        if (a is None) != (b is None) or (a is not None and b is not None and not same(a, b)):
            found.append(name)
    return found


def wrong_norms(pipe: Pipe, expected: nn.Module, orders: tuple[float, ...] = (2.0,)) -> list[str]:
    """Clip the gradients of both, and describe the norms and gradients that differ."""
    wrong = []
    for order in orders:
        known = nn.utils.clip_grad_norm_(expected.parameters(), 0.1, order)
        norm = pipe.clip_grad_norm_(0.1, order)
        wrong += [] if closely(norm, known) else [f"norm {order} is {norm}, not {known}"]
        wrong += [f"clipped by norm {order}: {name}" for name in differing(pipe, expected)]
    return wrong


def wrong_loss(found: Tensor, expected: Tensor) -> list[str]:
    return [] if closely(found, expected.detach()) else [f"loss {found}, not {expected}"]


def mean_over_ranks(loss: Tensor) -> Tensor:
    total = loss.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Everyone:
    """A process group of all ranks, in place of the ranks of a pipe."""

    def all_gather(self, tensor: Tensor, description: str) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(found, tensor)
        return found


class Reductions:
    """Counts of reductions: over the user's group, by fully_shard, and by the pipe itself."""

    of_group = scattered = own = 0


@contextmanager
def count_reductions() -> Iterator[Reductions]:
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
