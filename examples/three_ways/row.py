"""Shared parts of the scripts: the base class of a row, a small network, and its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from penstock import Pipe

CHUNKS = 4

Found = dict[str, Tensor]  # the compared tensors, by name
Script = Callable[[], Found]
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row(ABC):
    """A script in three ways. With several processes, each returns the tensors that it holds."""

    schedule: str = "1f1b"  # schedule of Penstock's `step`

    title: ClassVar[str]
    compared: ClassVar[str]
    ranks: ClassVar[int] = 2  # processes of the pipelining script
    replicas: ClassVar[int] = 1  # processes of the Penstock script; 1 means the calling process

    @abstractmethod
    def unsplit(self) -> Found: ...

    @abstractmethod
    def pipelining(self) -> Found: ...

    @abstractmethod
    def penstock(self) -> Found: ...


def network() -> nn.Sequential:
    """Build four layers with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).double()


def batch(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets for the network."""
    torch.manual_seed(seed)
    return torch.randn(rows, 6).double(), torch.randn(rows, 3).double()


def gradients(module: nn.Module) -> Found:
    """Return the gradients by name; a parameter with two names has two entries."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def two_ranks(model: nn.Sequential, loss_fn: LossFn, schedule: str) -> Pipe:
    """Return a pipe over two CPU ranks with half of the layers each."""
    return Pipe(model, CHUNKS, stages=2, devices=["cpu", "cpu"], schedule=schedule, loss_fn=loss_fn)


def my_stage(model: nn.Sequential) -> PipelineStage:
    """Return a stage of this rank's layers and drop the rest, as in PyTorch's tutorial."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = len(model) // ranks
    share = model[rank * each : (rank + 1) * each]  # slicing keeps the names of the layers
    return PipelineStage(share, rank, ranks, torch.device("cpu"))


def train(schedule: PipelineScheduleSingle, x: Tensor, target: Tensor) -> None:
    """Run one step as in PyTorch's tutorial: inputs on the first rank, targets on the last."""
    if dist.get_rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
