"""Helpers that compare two replicas of a pipe, one per process, with the unsplit model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipe
from tests.support import SCHEDULES, Pop, Same, Stash, closely

LAYERS = 8
RANKS = 2


def model() -> nn.Sequential:
    """Return eight layers with a skip connection and an in-place layer, for any partition."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(inplace=True),
        Stash(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8, bias=False),
        Pop(),
        nn.Linear(8, 3),
    ).double()


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def _ddp(module: nn.Module, _: int) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh().get_group())


def _ddp_unused(module: nn.Module, _: int) -> nn.Module:
    return DistributedDataParallel(
        module,
        process_group=mesh().get_group(),
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )


def _replicate(module: nn.Module, _: int) -> nn.Module:
    replicated: nn.Module = replicate(module, process_group=mesh().get_group())
    return replicated


def _fsdp(module: nn.Module, _: int) -> nn.Module:
    fully_shard(module, mesh=mesh())
    return module


def _fsdp_nested(module: nn.Module, _: int) -> nn.Module:
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh())
    fully_shard(module, mesh=mesh())
    return module


def _fsdp_layers(module: nn.Module, _: int) -> nn.Module:
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh(), reshard_after_forward=True)
    return module


def _fsdp_float32(module: nn.Module, _: int) -> nn.Module:
    """Shard with a policy that computes in float32 and keeps gradients in float64."""
    policy = MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)
    fully_shard(module, mesh=mesh(), mp_policy=policy)
    return module


WRAPS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "ddp": _ddp,
    "ddp, unused": _ddp_unused,
    "replicate": _replicate,
    "fsdp": _fsdp,
    "fsdp, nested": _fsdp_nested,
    "fsdp, layers": _fsdp_layers,
}
SHARDED = [name for name in WRAPS if name.startswith("fsdp")]
ROUNDED = "fsdp, float32"


def pipe_of(layers: nn.Sequential, wrap: str, schedule: str = "1f1b", **options: Any) -> Pipe:
    """Return a pipe over two ranks of this process.

    FSDP shards are gathered by a single thread, so that all processes gather in the same order.
    """
    stages = RANKS * SCHEDULES[schedule]
    options.setdefault("runtime", "inline" if wrap.startswith("fsdp") else "threads")
    stage_fn = _fsdp_float32 if wrap == ROUNDED else WRAPS[wrap]
    return Pipe(
        layers,
        chunks=options.pop("chunks", 4),
        schedule=schedule,
        stages=[LAYERS // stages] * stages,
        devices=["cpu"] * RANKS,
        **{"loss_fn": nn.functional.mse_loss, "stage_fn": stage_fn, **options},
    )


def half(value: Tensor) -> Tensor:
    """Return the part of a batch that belongs to this replica."""
    return value.chunk(dist.get_world_size())[dist.get_rank()]


def whole(tensor: Tensor | None) -> Tensor | None:
    """Return the full tensor of a DTensor, and any other tensor as it is."""
    return tensor.full_tensor() if tensor is not None and hasattr(tensor, "full_tensor") else tensor


def differing(pipe: nn.Module, expected: nn.Module, same: Same = closely) -> list[str]:
    """Return the names of the parameters whose gradients differ."""
    theirs = dict(expected.named_parameters())
    mine = dict(pipe.named_parameters())
    assert list(mine) == list(theirs)
    found = []
    for name, parameter in mine.items():
        a, b = whole(parameter.grad), theirs[name].grad
        if (a is None) != (b is None) or (a is not None and b is not None and not same(a, b)):
            found.append(name)
    return found


def mean_over_replicas(loss: Tensor) -> Tensor:
    total = loss.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Everyone:
    """A process group of all ranks, in place of the ranks of a pipe."""

    def all_gather(self, tensor: Tensor, description: str) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(found, tensor)
        return found


class Counted:
    """The number of collectives of a step: all of them, and the reduce-scatters among them."""

    everything = 0
    scattered = 0


@contextmanager
def counted() -> Iterator[Counted]:
    group: Any = mesh().get_group()
    found = Counted()
    original = DefaultReduceScatter.__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.scattered += 1
        return original(self, *args, **kwargs)

    before = group._get_sequence_number_for_group()
    DefaultReduceScatter.__call__ = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DefaultReduceScatter.__call__ = original  # type: ignore[method-assign]
        found.everything = group._get_sequence_number_for_group() - before
