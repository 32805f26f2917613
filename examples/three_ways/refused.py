"""Scripts that fail with torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn.functional import mse_loss

from penstock import Pipe, pop, skippable, stash
from three_ways.row import CHUNKS, Found, Row, batch, gradients, my_stage, network, train, two_ranks


class Sum(nn.Linear):
    """A linear layer of the sum of two inputs."""

    def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + first)


class Residual(nn.Module):
    """Three layers; the last one gets the outputs of both the middle and the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), Sum(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        out: Tensor = self.last(self.middle(first), first)
        return out


@skippable(stash=["first"])
class First(nn.Linear):
    """The first layer, which stashes its output."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        yield stash("first", out)
        return out


@skippable(pop=["first"])
class Last(Sum):
    """The last layer, which pops its second input."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:  # type: ignore[override]
        first: Tensor = yield pop("first")
        return super().forward(x, first)


class Skip(Row):
    """A skip connection that the tracer of torch.distributed.pipelining discovers itself."""

    title = "a skip connection over a stage"
    compared = "gradients"
    ranks = 3

    def model(self) -> Residual:
        torch.manual_seed(0)
        return Residual().double()

    def unsplit(self) -> Found:
        model = self.model()
        x, target = batch(16)
        mse_loss(model(x), target).backward()
        return gradients(model)

    def pipelining(self) -> Found:
        x, target = batch(16)
        cuts = {"middle": SplitPoint.BEGINNING, "last": SplitPoint.BEGINNING}
        traced = pipeline(self.model(), mb_args=(x.chunk(CHUNKS)[0],), split_spec=cuts)
        stage = traced.build_stage(dist.get_rank(), torch.device("cpu"))
        schedule = Schedule1F1B(stage, CHUNKS, loss_fn=mse_loss)
        if stage.is_first:
            schedule.step(x)
        elif stage.is_last:
            schedule.step(target=target)
        else:
            schedule.step()
        return gradients(stage.submod)

    def penstock(self) -> Found:
        torch.manual_seed(0)
        layers = nn.Sequential()
        layers.add_module("first", First(6, 8))
        layers.add_module("middle", nn.Linear(8, 8))
        layers.add_module("last", Last(8, 3))
        cpus = ["cpu"] * 3
        pipe = Pipe(layers.double(), CHUNKS, stages=3, devices=cpus, schedule=self.schedule)
        x, target = batch(16)
        pipe.step(x, target=target, loss_fn=mse_loss)
        return gradients(pipe)


class Uneven(Row):
    """One training step per batch size; the gradients of the last step are compared."""

    title = "10 rows in 4 micro-batches"
    compared = "gradients"
    sizes: ClassVar[tuple[int, ...]] = (10,)

    def unsplit(self) -> Found:
        model = network()
        for rows in self.sizes:
            model.zero_grad()
            x, target = batch(rows)
            mse_loss(model(x), target).backward()
        return gradients(model)

    def pipelining(self) -> Found:
        stage = my_stage(network())
        schedule = Schedule1F1B(stage, CHUNKS, loss_fn=mse_loss)
        for rows in self.sizes:
            stage.submod.zero_grad()
            train(schedule, *batch(rows))
        return gradients(stage.submod)

    def penstock(self) -> Found:
        pipe = two_ranks(network(), mse_loss, self.schedule)
        for rows in self.sizes:
            pipe.zero_grad()
            x, target = batch(rows)
            pipe.step(x, target=target)
        return gradients(pipe)


class Smaller(Uneven):
    """A smaller second batch, as at the end of an epoch."""

    title = "a step of 16 rows, then one of 12"
    sizes = (16, 12)


class Larger(Uneven):
    """A larger second batch, as when batches are filled by tokens instead of rows."""

    title = "a step of 16 rows, then one of 20"
    sizes = (16, 20)
