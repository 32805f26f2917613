"""A pipe over processes computes what the single-process pipe and the unsplit model compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss

from penstock import NoChunk, Pipe, Weighted
from tests.distributed.ranks import SIZES, SOAK, ranks
from tests.oracle import Batch, Outcome, bitwise, closely, differences, merged, plus
from tests.support import SCHEDULES, batch, network, plain


def cut(layers: int, stages: int) -> list[int]:
    """Divide the layers as evenly as possible, with the larger stages first."""
    return [layers // stages + (at < layers % stages) for at in range(stages)]


def outcome(pipe: nn.Module, loss: Tensor, output: Any = None, metrics: Any = None) -> Outcome:
    return Outcome.of(pipe, Batch(()), loss, output, metrics)


# ---- every schedule, bit for bit ----------------------------------------------------------

ROWS = (11, 8, 11, 6)  # the third is as large as the first, so its message sizes are already known


def several_steps(pipe: Pipe) -> Iterator[Outcome]:
    """Train on batches of several sizes, accumulating gradients, and evaluate after each step."""
    for step, rows in enumerate(ROWS):
        x, target = batch(rows)
        torch.manual_seed(step)
        if pipe_rank() > 0:  # seeds of other ranks must not matter
            torch.manual_seed(1000 + pipe_rank())
        result = pipe.step(x, target=target, outputs=True)
        yield outcome(pipe, result.loss, result.outputs)
        pipe.eval()
        with torch.no_grad():
            yield outcome(pipe, torch.zeros(()), pipe(x[:3]))
        pipe.train()


def pipe_rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def trained(size: int, schedule: str, **where: Any) -> list[Outcome]:
    stages = size * SCHEDULES[schedule]
    counts = cut(10, stages)
    pipe = Pipe(network(), 4, stages=counts, schedule=schedule, loss_fn=mse_loss, **where)
    return list(several_steps(pipe))


# each schedule with one number of processes, or with all of them in a soak run
CELLS = [
    (size, schedule)
    for row, schedule in enumerate(SCHEDULES)
    for at, size in enumerate(SIZES)
    if SOAK or (row + at) % len(SIZES) == 0
]


def trained_here(size: int, schedule: str) -> list[Outcome]:
    return trained(size, schedule, group=distributed.group.WORLD)


@pytest.mark.parametrize(("size", "schedule"), CELLS)
def test_training_over_processes_equals_the_inline_runtime(size: int, schedule: str) -> None:
    """The model has dropout, running statistics, skips and in-place operations; batches vary."""
    of_ranks = ranks(size).run(trained_here, size, schedule)
    expected = trained(size, schedule, devices=["cpu"] * size, runtime="inline")
    for found, wanted in zip(zip(*of_ranks, strict=True), expected, strict=True):
        assert differences(merged(found, network()), wanted) == []


# ---- parameters held by each rank ---------------------------------------------------------


def holdings() -> tuple[list[str], list[str], int]:
    pipe = Pipe(network(), 2, stages=cut(10, distributed.get_world_size()), loss_fn=mse_loss,
                group=distributed.group.WORLD)  # fmt: skip
    return [name for name, _ in pipe.named_parameters()], list(pipe.state_dict()), len(pipe)


def test_each_rank_holds_only_its_own_layers_under_the_model_names() -> None:
    found = ranks(3).run(holdings)
    names = [name for name, _ in network().named_parameters()]
    assert [name for mine, _, _ in found for name in mine] == names
    assert [name for _, state, _ in found for name in state] == list(network().state_dict())
    assert [layers for _, _, layers in found] == cut(10, 3)


# ---- tied weights, optimizers, clipping ---------------------------------------------------


def tied() -> nn.Sequential:
    """Return a model whose first and last layer share a weight."""
    torch.manual_seed(0)
    first, second, third, last = (nn.Linear(6, 6) for _ in range(4))
    last.weight = first.weight
    return nn.Sequential(first, nn.Sequential(nn.Tanh(), second), third, last).double()


def optimized(model: nn.Module, step: Any, clip: Any, norm_type: float) -> Iterator[Outcome]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for at in range(3):
        x, target = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(at)).double()
        loss = step(x, target)
        norm = clip(0.05, norm_type)
        optimizer.step()
        yield outcome(model, loss, metrics={"norm": norm})
        optimizer.zero_grad()


def optimized_here(norm_type: float) -> list[Outcome]:
    size = distributed.get_world_size()
    pipe = Pipe(tied(), 3, stages=cut(4, size), schedule="1f1b", loss_fn=mse_loss,
                group=distributed.group.WORLD)  # fmt: skip

    def step(x: Tensor, target: Tensor) -> Tensor:
        return pipe.step(x, target=target).loss

    return list(optimized(pipe, step, pipe.clip_grad_norm_, norm_type))


@pytest.mark.parametrize(("size", "norm_type"), [(2, 2.0), (3, 1.0), (4, float("inf"))])
def test_clipping_and_optimizers_with_tied_weights(size: int, norm_type: float) -> None:
    """The norm is that of the whole model, and a tied weight counts once and stays equal."""
    model = tied()

    def step(x: Tensor, target: Tensor) -> Tensor:
        loss = mse_loss(model(x), target)
        loss.backward()
        return loss

    def clip(most: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), most, norm_type)

    expected = list(optimized(model, step, clip, norm_type))
    of_ranks = ranks(size).run(optimized_here, norm_type)
    for found, wanted in zip(zip(*of_ranks, strict=True), expected, strict=True):
        assert differences(merged(found, tied()), wanted, closely) == []


# ---- hooks of parameters ------------------------------------------------------------------


def weigh(output: Tensor, target: Tensor) -> Weighted:
    return Weighted(mse_loss(output, target), (target[:, 0] > 0).sum() + 1.0)


def clip_in_hooks(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-2e-3, 2e-3))


def hooked_here(schedule: str) -> list[Outcome]:
    pipe = Pipe(tied(), 3, stages=cut(4, 2), schedule=schedule, loss_fn=weigh,
                group=distributed.group.WORLD)  # fmt: skip
    clip_in_hooks(pipe)
    steps = (batch_of(at) for at in range(2))
    return [outcome(pipe, pipe.step(x, target=target).loss) for x, target in steps]


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(seed)).double()
    return x, target


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_hooks_of_parameters_see_the_gradient_of_the_batch(schedule: str) -> None:
    """The scale of a loss with weights is known after the last micro-batch, by one rank."""
    model = tied()
    clip_in_hooks(model)
    of_ranks = ranks(2).run(hooked_here, schedule)
    for at, found in enumerate(zip(*of_ranks, strict=True)):
        parts = zip(*(part.chunk(3) for part in batch_of(at)), strict=True)
        losses = [weigh(model(x), target) for x, target in parts]
        total = sum(loss.weight for loss in losses)
        loss = torch.stack([loss.loss * loss.weight for loss in losses]).sum() / total
        loss.backward()
        assert differences(merged(found, tied()), outcome(model, loss), closely) == []


# ---- data on one rank, results on all -----------------------------------------------------


class Gated(nn.Linear):
    """A linear layer that takes keyword inputs."""

    def forward(self, x: Tensor, gate: Tensor, table: Tensor, times: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate * times + table


def gated() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Gated(6, 6), nn.Tanh(), nn.Linear(6, 6), Gated(6, 6), nn.Linear(6, 3)
    ).double()


def given(rows: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    x, target = batch(rows)
    side = {"gate": x[:, :1].sigmoid(), "table": x.mean(0)}
    return x, target, side


def with_metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    counts = (target[:, 0] > 0).sum() + 1
    loss = mse_loss(output, target)
    return {"loss": loss, "weight": counts, "twice": 2 * loss, "rows": output.sum(1)}


def from_one_rank(outputs: str, shapes: str) -> list[tuple[Outcome, Any]]:
    size = distributed.get_world_size()
    where = {"group": distributed.group.WORLD, "data": "first"}
    pipe = Pipe(gated(), 4, stages=cut(5, size), schedule="1f1b", loss_fn=with_metrics,
                outputs=outputs, shapes=shapes, **where)  # type: ignore[arg-type] # fmt: skip
    told = []
    for rows in (8, 5, 8):
        if distributed.get_rank() == 0:
            x, target, side = given(rows)
            side["table"] = NoChunk(side["table"])
            result = pipe.step(x, target=target, outputs=True, times=0.5, **side)
        else:
            result = pipe.step(outputs=True)
        told.append((outcome(pipe, result.loss, result.outputs), result.metrics))
    return told


@pytest.mark.parametrize(
    ("size", "outputs", "shapes"),
    [(2, "last", "learned"), (3, "all", "sent"), (4, "all", "learned")],
)
def test_batch_on_the_first_rank_only(size: int, outputs: str, shapes: str) -> None:
    of_ranks = ranks(size).run(from_one_rank, outputs, shapes)
    model = gated()
    pipe = Pipe(model, 4, stages=cut(5, size), devices=["cpu"] * size, schedule="1f1b",
                loss_fn=with_metrics, runtime="inline")  # fmt: skip
    for rows, of_step in zip((8, 5, 8), zip(*of_ranks, strict=True), strict=True):
        x, target, side = given(rows)
        side["table"] = NoChunk(side["table"])
        result = pipe.step(x, target=target, outputs=True, times=0.5, **side)
        expected = outcome(pipe, result.loss, result.outputs)
        assert differences(merged([one for one, _ in of_step], gated()), expected) == []
        have = [
            one.output is not None and bitwise(one.output, result.outputs) for one, _ in of_step
        ]
        assert have == [outputs == "all"] * (size - 1) + [True]
        for _, metrics in of_step:
            assert torch.equal(metrics["twice"], result.metrics["twice"])
        assert torch.equal(of_step[-1][1]["rows"], result.metrics["rows"])


def measured() -> tuple[list[str], float, str]:
    size = distributed.get_world_size()
    pipe = Pipe(plain(), 4, stages=cut(4, size), schedule="1f1b", loss_fn=mse_loss,
                group=distributed.group.WORLD)  # fmt: skip
    x, target = batch(8)
    with torch.no_grad():
        evaluated = pipe.step(x, target=target)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    result = pipe.step(x, target=target)
    assert torch.equal(evaluated.loss, result.loss)
    spans = [
        f"{span.rank} {span.action} {span.start:.9f} {span.end:.9f}"
        for span in result.timeline.spans
    ]
    return spans, result.timeline.makespan, repr(result)


def test_every_rank_returns_the_loss_and_the_timeline_of_all_ranks() -> None:
    found = ranks(3).run(measured)
    assert found == [found[0]] * 3
    spans, makespan, shown = found[0]
    assert {span.split()[0] for span in spans} == {"0", "1", "2"}
    assert makespan > 0
    model = plain()
    x, target = batch(8)
    assert shown == f"StepResult(loss={mse_loss(model(x), target).item():.6g})"


def gradients_of_inputs() -> tuple[Tensor | None, Tensor | None]:
    size = distributed.get_world_size()
    pipe = Pipe(gated(), 4, stages=cut(5, size), schedule="1f1b", loss_fn=mse_loss,
                group=distributed.group.WORLD)  # fmt: skip
    x, target, side = given(8)
    x.requires_grad_()
    gate = side["gate"].detach().requires_grad_()
    pipe.step(x, target=target, gate=gate, table=NoChunk(side["table"]), times=0.5)
    return x.grad, gate.grad


def test_input_gradients_are_on_the_ranks_that_use_the_input() -> None:
    """The first rank has the gradient of the batch.

    Each rank that uses a keyword input has its part.
    """
    found = ranks(3).run(gradients_of_inputs)
    model = gated()
    x, target, side = given(8)
    x.requires_grad_()
    gate = side["gate"].detach().requires_grad_()
    value = x
    for layer in model:
        more = (gate, side["table"], 0.5) if isinstance(layer, Gated) else ()
        value = layer(value, *more)
    mse_loss(value, target).backward()
    assert [x_grad is not None for x_grad, _ in found] == [True, False, False]
    total = None
    for _, part in found:
        total = plus(total, part)
    torch.testing.assert_close((found[0][0], total), (x.grad, gate.grad), rtol=1e-10, atol=1e-10)
