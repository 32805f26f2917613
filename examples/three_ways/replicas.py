"""A script with two replicas of a pipeline, each of which gets half of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from three_ways.row import CHUNKS, Found, Row, batch, gradients, network, two_ranks

ZERO_BUBBLE = "zb-h1"


@dataclass(frozen=True)
class Replicas(Row):
    """Data parallelism: DDP wraps each stage, over the processes that hold the same stage."""

    schedule: str = ZERO_BUBBLE

    title = "two replicas, zero-bubble"
    compared = "gradients"
    ranks = 4
    replicas = 2

    def half(self, replica: int) -> tuple[Tensor, Tensor]:
        x, target = batch(16)
        return x.chunk(self.replicas)[replica], target.chunk(self.replicas)[replica]

    def named(self, replica: int, tensors: Found) -> Found:
        return {f"replica {replica}: {name}": value for name, value in tensors.items()}

    def unsplit(self) -> Found:
        model = network()
        x, target = batch(16)
        mse_loss(model(x), target).backward()
        return {**self.named(0, gradients(model)), **self.named(1, gradients(model))}

    def pipelining(self) -> Found:
        mesh = init_device_mesh("cpu", (self.replicas, 2), mesh_dim_names=("replica", "stage"))
        replica, rank = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
        share = network()[2 * rank : 2 * rank + 2]
        wrapped = DistributedDataParallel(share, process_group=mesh.get_group("replica"))
        stages = mesh.get_group("stage")
        stage = PipelineStage(wrapped, rank, 2, torch.device("cpu"), group=stages)
        schedule = ScheduleInterleavedZeroBubble([stage], CHUNKS, loss_fn=mse_loss)
        x, target = self.half(replica)
        if stage.is_first:
            schedule.step(x)
        else:
            schedule.step(target=target)
        return self.named(replica, gradients(share))

    def penstock(self) -> Found:
        """Average the gradients by hand, because `step` leaves those of this replica in `.grad`."""
        replica = dist.get_rank()
        pipe = two_ranks(network(), mse_loss, self.schedule)
        x, target = self.half(replica)
        pipe.step(x, target=target)
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.replicas)
        return self.named(replica, gradients(pipe))

    def penstock_called(self) -> Found:
        """Wrap the pipe itself in DDP, which works like any other module when it is called."""
        replica = dist.get_rank()
        pipe = two_ranks(network(), mse_loss, "gpipe")
        wrapped = DistributedDataParallel(pipe)
        x, target = self.half(replica)
        mse_loss(wrapped(x), target).backward()
        return self.named(replica, gradients(pipe))
