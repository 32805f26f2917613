"""What the scripts share: a row of the table, a small network, and what to compare."""

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

Found = dict[str, Tensor]  # what is compared, by name
Script = Callable[[], Found]
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row(ABC):
    """One script, three ways. Of several processes, each gives what it has."""

    schedule: str = "1f1b"  # of Penstock's `step`

    title: ClassVar[str]
    compared: ClassVar[str]
    ranks: ClassVar[int] = 2  # processes of pipelining's script
    replicas: ClassVar[int] = 1  # processes of Penstock's; 1 is the process that asks

    @abstractmethod
    def unsplit(self) -> Found: ...

    @abstractmethod
    def pipelining(self) -> Found: ...

    @abstractmethod
    def penstock(self) -> Found: ...


def network() -> nn.Sequential:
    """Four layers, the same ones on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).double()


def batch(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the network."""
    torch.manual_seed(seed)
    return torch.randn(rows, 6).double(), torch.randn(rows, 3).double()


def gradients(module: nn.Module) -> Found:
    """By name; a parameter with two names has two entries."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def two_ranks(model: nn.Sequential, loss_fn: LossFn, schedule: str) -> Pipe:
    """A pipe over two CPU ranks, half of the layers each."""
    return Pipe(model, CHUNKS, stages=2, devices=["cpu", "cpu"], schedule=schedule, loss_fn=loss_fn)


def my_stage(model: nn.Sequential) -> PipelineStage:
    """This rank's share of the layers: the others are left away, as in PyTorch's tutorial."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = len(model) // ranks
    share = model[rank * each : (rank + 1) * each]  # keeps the names of the layers
    return PipelineStage(share, rank, ranks, torch.device("cpu"))


def train(schedule: PipelineScheduleSingle, x: Tensor, target: Tensor) -> None:
    """A step as in PyTorch's tutorial: the first rank has the inputs, the last has the targets."""
    if dist.get_rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
