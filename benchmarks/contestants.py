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
from penstock.schedules.ir import Compute, Op, Program

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
    """The computations of this rank in plain PyTorch, without messages.

    They run in the order of the rank's lane, so that as many micro-batches are alive as in the
    schedule, and each finds in the caches what it would find there. A lane with W splits its
    backwards: I computes the gradients of inputs and biases, and W the products that it has left.
    """

    def __init__(self, sizes: Sizes, program: Program) -> None:
        placement = program.schedule.placement
        lane = program.lanes[dist.get_rank()]
        self.actions = [action for action in lane if isinstance(action, Compute)]
        self.splits = any(action.op is Op.W for action in self.actions)
        self.layers = stages_of(model_of(sizes), len(placement))
        self.x, self.y = (part.split(sizes.rows) for part in data_of(sizes))
        self.clock = Clock(len(placement), sizes.chunks)

    def step(self) -> None:
        times, last = self.clock.times, len(self.layers) - 1
        times.clear()
        for stage in {action.stage for action in self.actions}:
            self.layers[stage].zero_grad()
        outputs: dict[tuple[int, int], Tensor] = {}
        pending: dict[tuple[int, int], list[PlainUse]] = defaultdict(list)
        for op, stage, microbatch in self.actions:
            cell, y = (stage, microbatch), self.y[microbatch]
            start = time.perf_counter()
            if op is Op.F:
                stage_input = self.x[microbatch].detach().requires_grad_(stage > 0)
                if self.splits:
                    output = split_forward(self.layers[stage], stage_input, pending[cell])
                else:
                    output = self.layers[stage](stage_input)
                if stage == last:
                    output = loss_of(output, y) / len(self.x)
                outputs[cell] = output
            elif op is Op.W:
                add_weight_gradients(pending.pop(cell))
            else:
                outputs.pop(cell).backward(None if stage == last else y)
                if op is Op.B and self.splits:
                    add_weight_gradients(pending.pop(cell))
            times[op.name, stage] += time.perf_counter() - start

    def cost(self) -> Cost:
        """Return the durations of the actions of the last step."""
        return self.clock.cost()


class PlainUse:
    """The use of a weight in a forward whose weight gradients are computed later."""

    def __init__(self, weight: Tensor, op_input: Tensor) -> None:
        self.weight, self.op_input = weight, op_input
        self.output_gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        self.output_gradient = gradient


def split_forward(blocks: nn.Sequential, x: Tensor, uses: list[PlainUse]) -> Tensor:
    """Run blocks without their weights in the graph, and note each use of a weight."""

    def linear(layer: nn.Linear, op_input: Tensor) -> Tensor:
        output = nn.functional.linear(op_input, layer.weight.detach(), layer.bias)
        uses.append(PlainUse(layer.weight, op_input.detach()))
        output.register_hook(uses[-1].keep)
        return output

    for block in blocks:
        assert isinstance(block, Block)
        x = linear(block.two, torch.relu(linear(block.one, x)))
    return x


def add_weight_gradients(uses: list[PlainUse]) -> None:
    """Add the gradients of the weights that a backward has left."""
    with torch.no_grad():
        for use in uses:
            assert use.output_gradient is not None
            gradient = use.output_gradient.t().mm(use.op_input)
            if use.weight.grad is None:
                use.weight.grad = gradient
            else:
                use.weight.grad.add_(gradient)
            del gradient


class HotLoop:
    """The stages of this rank in a plain loop: forward and backward of a micro-batch in turn.

    Only one micro-batch is alive, so a backward finds its activations in the cache, and every
    forward writes to the memory of the one before.
    """

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


def check(ours: Ours, theirs: Theirs | None, sizes: Sizes) -> None:
    """Check that all compute the loss and the gradients of the unsplit model."""
    model, (x, y) = model_of(sizes), data_of(sizes)
    loss = loss_of(model(x), y)
    loss.backward()
    stages = stages_of(model, len(ours.program.schedule.placement))
    own = own_of(ours.program.schedule.placement)
    expected_gradients = [p.grad for index in own for p in stages[index].parameters()]
    for way in (ours, theirs):
        if way is None:
            continue
        step_loss = way.step()
        if step_loss is not None:
            torch.testing.assert_close(step_loss, loss.detach())
        for gradient, expected in zip(way.gradients(), expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
