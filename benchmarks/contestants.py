"""Run the same stages on the same ranks with Penstock, with PyTorch, and in a plain loop.

Each variant reports the durations of its actions, so that a step can be compared with a simulation.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torchs

from penstock import Cost, Pipe
from penstock.schedules.ir import Program

SCHEDULES: Mapping[str, Any] = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "interleaved-zb": torchs.ScheduleInterleavedZeroBubble,
    "zb-v": torchs.ScheduleZBVZeroBubble,
}
loss_of = nn.functional.mse_loss


class Sizes(NamedTuple):
    """The sizes of a model and its batch."""

    width: int
    blocks: int
    rows: int  # rows of a micro-batch
    chunks: int

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks of two Linear({self.width}, {self.width}), "
            f"{self.chunks} micro-batches of {self.rows}"
        )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.relu(self.one(x)))
        return out


def model_of(sizes: Sizes) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(sizes.width) for _ in range(sizes.blocks)])


def data_of(sizes: Sizes) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    shape = sizes.rows * sizes.chunks, sizes.width
    return torch.randn(shape), torch.randn(shape)


def stages_of(model: nn.Sequential, count: int) -> list[nn.Sequential]:
    """Split the model into stages with equally many layers."""
    layers, size = list(model), len(model) // count
    return [nn.Sequential(*layers[stage * size : (stage + 1) * size]) for stage in range(count)]


class Ours:
    """A training step with Penstock."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        self.data = data_of(sizes)
        self.pipe = Pipe(
            model_of(sizes),
            sizes.chunks,
            "never",
            schedule=name,
            loss_fn=loss_of,
            group=dist.group.WORLD,
        )
        self.program: Program = self.pipe.forecast().program
        engine: Any = self.pipe._engine
        self.links = type(engine.groups.links).__name__

    def step(self) -> Tensor:
        self.pipe.zero_grad()
        x, y = self.data
        self.last = self.pipe.step(x, target=y)
        return self.last.loss

    def cost(self) -> Cost:
        """Return the durations of the actions of the last step."""
        return self.last.timeline.cost

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.pipe.parameters()]


class Theirs:
    """A training step with torch.distributed.pipelining."""

    def __init__(self, name: str, sizes: Sizes, placement: Sequence[int]) -> None:
        (x, y), count = data_of(sizes), len(placement)
        layers, local_stages = stages_of(model_of(sizes), count), own_of(placement)
        device = torch.device("cpu")
        self.stages = [
            torchs.PipelineStage(layers[index], index, count, device) for index in local_stages
        ]
        schedule_stages: Any = self.stages[0] if len(local_stages) == 1 else self.stages
        self.schedule: Any = SCHEDULES[name](schedule_stages, sizes.chunks, loss_fn=loss_of)
        self.losses: list[Tensor] = []
        self.inputs = (x,) if 0 in local_stages else ()
        has_last = count - 1 in local_stages
        self.options: dict[str, Any] = {"target": y, "losses": self.losses} if has_last else {}
        self.clock = Clock(count, sizes.chunks)
        for stage in self.stages:
            index = stage.stage_index
            self.clock.watch(stage, "forward_one_chunk", index, lambda _: "F")
            self.clock.watch(stage, "backward_one_chunk", index, _kind_of_backward)
            self.clock.watch(stage, "backward_weight_one_chunk", index, lambda _: "W")
        if has_last:
            self.clock.watch(self.schedule, "_compute_loss", count - 1, lambda _: "F")

    def step(self) -> Tensor | None:
        for stage in self.stages:
            stage.submod.zero_grad()
        self.clock.times.clear()
        self.schedule.step(*self.inputs, return_outputs=False, **self.options)
        return torch.stack(self.losses).mean() if self.losses else None

    def cost(self) -> Cost:
        """Return the durations of the actions of the last step."""
        return self.clock.cost()

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for stage in self.stages for p in stage.submod.parameters()]


def _kind_of_backward(options: Mapping[str, Any]) -> str:
    return "B" if options.get("full_backward", True) else "I"


def own_of(placement: Sequence[int]) -> list[int]:
    """Return the stages of this rank."""
    return [stage for stage, rank in enumerate(placement) if rank == dist.get_rank()]


class Alone:
    """The stages of this rank in a plain loop, one after another, without messages."""

    def __init__(self, sizes: Sizes, placement: Sequence[int]) -> None:
        self.layers = stages_of(model_of(sizes), len(placement))
        self.own = own_of(placement)
        self.x, self.y = (part.split(sizes.rows) for part in data_of(sizes))
        self.clock = Clock(len(placement), sizes.chunks)

    def step(self) -> None:
        times, last = self.clock.times, len(self.layers) - 1
        times.clear()
        for index in self.own:
            self.layers[index].zero_grad()
            for x, y in zip(self.x, self.y, strict=True):
                stage_input = x.detach().requires_grad_(index > 0)
                start = time.perf_counter()
                out = self.layers[index](stage_input)
                if index == last:
                    out = loss_of(out, y) / len(self.x)
                middle = time.perf_counter()
                out.backward(None if index == last else y)
                times["F", index] += middle - start
                times["B", index] += time.perf_counter() - middle

    def cost(self) -> Cost:
        """Return the durations of the actions of the last step."""
        return self.clock.cost()


class Clock:
    """The total durations of actions, by kind and stage."""

    def __init__(self, stages: int, chunks: int) -> None:
        self.times: dict[tuple[str, int], float] = defaultdict(float)
        self._stages, self._chunks = stages, chunks

    def watch(
        self, owner: Any, name: str, stage: int, kind: Callable[[Mapping[str, Any]], str]
    ) -> None:
        """Add the duration of each call of the method `name` of `owner`."""
        call = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.times[kind(options), stage] += time.perf_counter() - start

        setattr(owner, name, counted)

    def cost(self) -> Cost:
        """Return means over micro-batches of all ranks; a full backward is half I, half W."""
        local = [[self.times[op, stage] for stage in range(self._stages)] for op in "FBIW"]
        means = torch.tensor(local, dtype=torch.float64) / self._chunks
        dist.all_reduce(means)
        F, B, I, W = means
        columns = [tuple(column.tolist()) for column in (F, I + B / 2, W + B / 2)]
        return Cost(columns[0], columns[1], columns[2], (1.0,) * self._stages)


def check(ours: Ours, theirs: Theirs, sizes: Sizes) -> None:
    """Check that both compute the loss and the gradients of the unsplit model."""
    model, (x, y) = model_of(sizes), data_of(sizes)
    loss = loss_of(model(x), y)
    loss.backward()
    stages = stages_of(model, len(ours.program.schedule.placement))
    expected_gradients = [
        p.grad for stage in theirs.stages for p in stages[stage.stage_index].parameters()
    ]
    for way in (ours, theirs):
        step_loss = way.step()
        if step_loss is not None:
            torch.testing.assert_close(step_loss, loss.detach())
        for gradient, expected in zip(way.gradients(), expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
