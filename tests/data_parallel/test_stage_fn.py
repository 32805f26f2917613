"""`Pipe(stage_fn=...)`: stages in DistributedDataParallel, replicate, fully_shard or a plan.

Each replica is a process, or a pipe over two processes with `mesh=mesh["pp"]`. Gradients equal
those of the unsplit model on the whole batch, and each one is reduced once per step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import PenstockError, Pipe, RemoteError, Weighted
from tests.data_parallel.replicas import (
    COMPILED,
    FAMILIES,
    LEARNING,
    ROUNDED,
    SHARDED,
    TENSOR_PARALLEL,
    WRAPS,
    check_on_ranks,
    count_reductions,
    differing,
    half,
    is_local,
    mean_over_ranks,
    mesh,
    model,
    pipe_of,
    replica_here,
    split_blocks,
    wrong_loss,
    wrong_norms,
)
from tests.distributed.ranks import ranks
from tests.support import SCHEDULES, Fails, batch, closely

NORMS = (2.0, 1.0, 3.5, inf, 0.0, -inf)

# ---- gradients, losses and norms ----------------------------------------------------------


def expected_scatters(pipe: Pipe, wrap: str) -> int:
    """Return how often fully_shard reduces a gradient on this rank in one step."""
    if wrap != "fsdp":
        return LEARNING if wrap in SHARDED else 0
    placement = pipe.forecast().program.schedule.placement
    return len(placement) if is_local() else placement.count(mesh().get_local_rank("pp"))


def two_steps(wrap: str, schedules: Sequence[str]) -> list[str]:
    wrong = []
    part = half if wrap != TENSOR_PARALLEL else lambda tensor: tensor
    for at, schedule in enumerate(schedules):
        expected = model()
        pipe = pipe_of(model(), wrap, schedule, checkpoint=("never", "always")[at % 2])
        said = []
        for rows in (16, 12):  # the second step accumulates gradients
            x, y = batch(rows)
            loss = nn.functional.mse_loss(expected(x), y)
            loss.backward()
            with count_reductions() as found:
                result = pipe.step(part(x), target=part(y))
            said += differing(pipe, expected) + wrong_loss(mean_over_ranks(result.loss), loss)
            if found.scattered != expected_scatters(pipe, wrap):
                said.append(f"{found.scattered} scattered")
            if wrap not in (*SHARDED, TENSOR_PARALLEL) and found.of_group != 1:
                said.append(f"{found.of_group} reductions")
            said += ["the pipe has reduced"] * found.own
        said += wrong_norms(pipe, expected, NORMS if is_local() else (2.0,))
        wrong += [f"{schedule}: {each}" for each in said]
    return wrong


def every_third(names: Sequence[str], start: int) -> list[str]:
    """Return a third of the names, and another third for each start."""
    return list(names)[start % 3 :: 3]


@pytest.mark.parametrize(("row", "wrap"), [*enumerate([*WRAPS, TENSOR_PARALLEL])])
def test_stage_fn_in_one_process_per_replica(row: int, wrap: str) -> None:
    check_on_ranks(2, two_steps, wrap, every_third([*SCHEDULES], row))


@pytest.mark.parametrize(
    ("row", "wrap"), [*enumerate(["ddp", "replicate", "fsdp", TENSOR_PARALLEL])]
)
def test_stage_fn_in_two_processes_per_replica(row: int, wrap: str) -> None:
    check_on_ranks(4, two_steps, wrap, every_third(FAMILIES, row))


def compiled() -> list[str]:
    with warnings.catch_warnings(action="ignore"):  # warnings of the compiler itself
        return two_steps(COMPILED, ["zb-v"])


def test_stage_fn_with_compiled_stages() -> None:
    check_on_ranks(4, compiled)


def tensor_parallel_shards() -> list[str]:
    """Split each block over two processes, and shard each stage over the two others."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def plan(module: nn.Module, _: int) -> nn.Module:
        fully_shard(split_blocks(module, grid["tp"]), mesh=grid["dp"])
        return module

    expected = model()
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "zb-h1", "runtime": "inline"}
    pipe = Pipe(model(), 4, stages=[4, 4], loss_fn=nn.functional.mse_loss, stage_fn=plan, **options)
    wrong = []
    for rows in (16, 12):
        x, y = batch(rows)
        nn.functional.mse_loss(expected(x), y).backward()
        replica = grid.get_local_rank("dp")
        pipe.step(x.chunk(2)[replica], target=y.chunk(2)[replica])
        wrong += differing(pipe, expected)
    return wrong + wrong_norms(pipe, expected)


def test_tensor_parallel_stages_with_fully_shard() -> None:
    check_on_ranks(4, tensor_parallel_shards)


# ---- no_sync, tied weights ----------------------------------------------------------------


def weighted(output: Tensor, target: Tensor) -> Weighted:
    """Return a mean over the rows with a positive first target, and the number of these rows."""
    counts = (target[:, 0] > 0).double()
    per_row = (output - target).square().mean(dim=1)
    return Weighted((per_row * counts).sum() / counts.sum().clamp(min=1), counts.sum())


def roughly(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def train_with_no_sync(wrap: str, tied: bool) -> list[str]:
    """Run two steps under no_sync and one that reduces; then one more."""
    expected, pipe = model(tied), pipe_of(model(tied), wrap, "zb-h1", loss_fn=weighted)
    wrong = []
    for at in range(4):
        x, y = batch(16)
        y = y.roll(at, dims=0)
        # Each replica computes its own mean.
        for mine, theirs in zip(x.chunk(2), y.chunk(2), strict=True):
            (weighted(expected(mine), theirs)[0] / 2).backward()
        with pipe.no_sync() if at < 2 else nullcontext(), count_reductions() as found:
            pipe.step(half(x), target=half(y))
        if at >= 2:
            same = roughly if wrap == ROUNDED else closely
            wrong += [f"after step {at}: {name}" for name in differing(pipe, expected, same)]
        elif found.scattered or ("fsdp" not in wrap and found.of_group):
            wrong.append(f"step {at} has reduced")
    return wrong + ([] if wrap == ROUNDED else wrong_norms(pipe, expected))


@pytest.mark.parametrize("wrap", [*WRAPS, ROUNDED])
def test_stage_fn_with_weighted_loss_and_no_sync(wrap: str) -> None:
    check_on_ranks(2, train_with_no_sync, wrap, False)


@pytest.mark.parametrize("wrap", ["ddp", "replicate"])
def test_stage_fn_with_tied_weight_weighted_loss_and_no_sync(wrap: str) -> None:
    check_on_ranks(4, train_with_no_sync, wrap, True)


def tied_in_parts() -> str:
    with pytest.raises(RemoteError) as error:
        pipe_of(model(tied=True), "fsdp")
    return str(error.value)


def test_tied_weight_sharded_by_fsdp_is_refused() -> None:
    for message in ranks(4).run(tied_in_parts):
        assert "'0.weight' is shared by ranks 0, 1 of the pipe, and stage_fn sharded it" in message


def clip_in_hooks(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-2e-3, 2e-3))


def hooked(wrap: str | None) -> list[str]:
    expected, pipe = model(), pipe_of(model(), wrap)
    clip_in_hooks(expected)
    clip_in_hooks(pipe)
    wrong = []
    for rows in (16, 8):
        x, y = batch(rows)
        nn.functional.mse_loss(expected(half(x)), half(y)).backward()
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.grad = mean_over_ranks(parameter.grad)
        pipe.step(half(x), target=half(y))
        wrong += differing(pipe, expected)
    return wrong


@pytest.mark.parametrize("wrap", ["ddp", "replicate"])
def test_hooks_of_parameters_see_the_gradient_of_their_replica(wrap: str) -> None:
    check_on_ranks(2, hooked, wrap)


# ---- unused parameters, buffers, evaluation -----------------------------------------------


class Chosen(nn.Module):
    """A layer that uses one of three weights: another one on each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8).double() for _ in range(3))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = x * self.weights[self.at]
        return chosen


def model_with(layer: nn.Module) -> nn.Sequential:
    layers = model()
    layers[4] = layer
    return layers


def unused_parameters(wrap: str) -> list[str]:
    expected, layers = model_with(Chosen()), model_with(Chosen())
    pipe = pipe_of(layers, wrap, "zb-v")
    x, y = batch(16)
    for at, (mine, theirs) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        expected[4].at = at  # type: ignore[assignment]
        (nn.functional.mse_loss(expected(mine), theirs) / 2).backward()
    layers[4].at = dist.get_rank()  # type: ignore[assignment]
    pipe.step(half(x), target=half(y))
    return differing(pipe, expected)


@pytest.mark.parametrize("wrap", ["ddp", "ddp, unused", "replicate"])
def test_parameters_used_by_only_some_replicas(wrap: str) -> None:
    check_on_ranks(2, unused_parameters, wrap)


def buffers_of_the_first() -> list[str]:
    """Compare buffers with DistributedDataParallel, which broadcasts those of the first replica."""
    pipe = pipe_of(model_with(nn.BatchNorm1d(8).double()), "ddp", chunks=1)
    theirs = DistributedDataParallel(model_with(nn.BatchNorm1d(8).double()))
    for _ in range(2):
        x, y = batch(16)
        nn.functional.mse_loss(theirs(half(x)), half(y)).backward()
        pipe.step(half(x), target=half(y))
    expected = dict(theirs.module.named_buffers())
    assert len(expected) == 3
    return [name for name, b in pipe.named_buffers() if not closely(b, expected[name])]


def test_ddp_buffers_are_those_of_the_first_replica() -> None:
    check_on_ranks(2, buffers_of_the_first)


def evaluation(wrap: str) -> list[str]:
    expected, pipe = model(), pipe_of(model(), wrap)
    x, y = batch(16)
    wrong = []
    for _ in range(2):
        with torch.no_grad():
            found = pipe.eval()(half(x)), pipe.step(half(x), target=half(y)).loss
        pipe.train()
        output = expected(half(x))
        loss = nn.functional.mse_loss(output, half(y))
        wrong += [] if all(map(closely, found, (output, loss))) else ["the output or the loss"]
        kinds = {hasattr(p, "full_tensor") for p in pipe.parameters()}
        wrong += [] if kinds == {wrap in SHARDED} else [f"at rest: {kinds}"]
        nn.functional.mse_loss(expected(x), y).backward()
        pipe.step(half(x), target=half(y))
        wrong += differing(pipe, expected)
    return wrong


@pytest.mark.parametrize("wrap", WRAPS)
def test_evaluation_between_steps_of_replicas(wrap: str) -> None:
    check_on_ranks(2, evaluation, wrap)


def wrappers_without_sync() -> list[str]:
    pipe = pipe_of(model(), "ddp")
    x, y = batch(16)
    pipe.step(half(x), target=half(y))
    wrappers = pipe._placed_partition.partition.wrapper_modules
    ddp = [m for m in wrappers if isinstance(m, DistributedDataParallel)]
    return [str(m) for m in ddp if not m.require_backward_grad_sync] if ddp else ["no wrapper"]


def test_ddp_stages_synchronize_by_themselves_after_a_step() -> None:
    check_on_ranks(2, wrappers_without_sync)


# ---- errors -------------------------------------------------------------------------------


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ZeroDivisionError


def failed_steps(wrap: str) -> list[str]:
    """Fail in a backward and in the loss; all ranks raise, and the next step works."""
    broken = Fails()
    expected, pipe = model_with(nn.Identity()), pipe_of(model_with(broken), wrap)
    x, y = batch(16)
    broken.broken = False
    pipe.step(half(x), target=half(y))
    error = pytest.raises(ZeroDivisionError) if is_local() else pytest.raises(
        RemoteError, match=r"rank 3 failed, in step \(call 2\) of replica 1, in st"
    )  # fmt: skip
    broken.broken = is_local() or replica_here() == 1
    with error:
        pipe.step(half(x), target=half(y))
    broken.broken = False
    with pytest.raises(ZeroDivisionError if is_local() else RemoteError):
        pipe.step(half(x), target=half(y), loss_fn=failing_loss)
    pipe.zero_grad()
    pipe.step(half(x), target=half(y))
    nn.functional.mse_loss(expected(x), y).backward()
    return differing(pipe, expected)


@pytest.mark.parametrize(
    ("size", "wrap"), [*((2, wrap) for wrap in WRAPS), (4, "ddp"), (4, "replicate")]
)
def test_replicas_train_after_a_failed_step(size: int, wrap: str) -> None:
    check_on_ranks(size, failed_steps, wrap)


def refusals() -> list[str]:
    """Return the error messages of configurations that are refused."""
    messages = []

    def record_error(act: Callable[[], object]) -> None:
        with pytest.raises(PenstockError) as error:
            act()
        messages.append(str(error.value))

    def wrapped(**options: Any) -> Callable[[nn.Module, int], nn.Module]:
        return lambda module, _: DistributedDataParallel(module, **options)

    def hooked(module: nn.Module, _: int) -> nn.Module:
        found = DistributedDataParallel(module)
        found.register_comm_hook(None, lambda state, bucket: None)
        return found

    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    x, y = batch(8)
    record_error(lambda: pipe_of(model(), "ddp")(x))
    record_error(lambda: pipe_of(model(), "fsdp", runtime="threads").step(x, target=y))
    record_error(lambda: Pipe(model(), stages=2, stage_fn=wrapped(static_graph=True)))
    record_error(lambda: Pipe(model(), stages=2, stage_fn=hooked))
    record_error(lambda: Pipe(sparse, stages=2, stage_fn=wrapped()))
    return messages


def test_unsupported_ddp_and_fsdp_options_are_refused() -> None:
    for call, threads, *wrappers in ranks(2).run(refusals):
        assert "Train with pipe.step(x, target=y)" in call
        assert "ranks 0, 1 communicate in one process group" in threads
        assert "replicate with static_graph=True. A pipe" in wrappers[0]
        assert "with a communication hook or mixed_precision. A pipe" in wrappers[1]
        assert "with a layer with sparse=True. A pipe" in wrappers[2]
