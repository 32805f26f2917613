"""Tests that captured steps equal other steps bit by bit, on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe
from penstock.errors import RunError
from penstock.runtime.cuda_graph import graph_cache
from tests.gpu.support import (
    GPU,
    MODES,
    SCHEDULES,
    WORDS,
    Language,
    batch,
    batches,
    check_same,
    check_same_steps,
    deterministic,
    four,
    layers,
    needs_gpu,
    pipe_of,
    pipes_per_runtime,
    replays_of,
    same,
    zero,
)
from tests.pairs import each_pair

pytestmark = needs_gpu

DTYPES = [torch.float64, torch.float32]


@each_pair(schedule=SCHEDULES, mode=MODES, dtype=DTYPES)
def test_captured_steps_under_every_schedule(schedule: str, mode: str, dtype: torch.dtype) -> None:
    pipes = pipes_per_runtime(partial(layers, dtype), schedule=schedule, checkpoint=mode)
    check_same_steps(pipes, batches(5, dtype=dtype))


# ---- random numbers ------------------------------------------------------------------------


class Attends(nn.Module):
    """A layer that views each row as a sentence of four words, with attention dropout."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words = x.view(len(x), 4, 8)
        out: Tensor = self.attention(words, words, words, need_weights=False)[0]
        return x + out.flatten(1)


def attending(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(32, 32), Attends(), nn.Dropout(0.2), nn.Linear(32, 32), Attends()]
    return nn.Sequential(*parts, nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8)).to(GPU, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
def test_captured_steps_with_dropout(schedule: str, mode: str) -> None:
    check_same_steps(
        pipes_per_runtime(partial(layers, dropout=0.5), schedule=schedule, checkpoint=mode),
        batches(),
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_captured_steps_with_attention_dropout(mode: str, dtype: torch.dtype) -> None:
    """Except in float64, attention is one kernel that reads the global generator."""
    check_same_steps(
        pipes_per_runtime(partial(attending, dtype), checkpoint=mode), batches(5, dtype=dtype)
    )


def losses_of(pipe: Pipe, seeds: list[int]) -> list[float]:
    x, y = batch(0)
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        found += [float(pipe.step(x, target=y).loss) for _ in range(2)]
    return found


def test_replays_draw_new_random_numbers_that_depend_on_the_seed() -> None:
    pipe = pipe_of(attending(torch.float64), "graph", checkpoint="always")
    losses_of(pipe, [0])
    first = losses_of(pipe, [1, 2])
    assert len(set(first)) == 4
    assert losses_of(pipe, [1, 2]) == first


def test_recomputation_in_a_captured_step_repeats_random_numbers() -> None:
    pipes = [pipe_of(attending(torch.float64), "graph", checkpoint=mode) for mode in MODES]
    with deterministic():
        for number in range(4):
            x, y = batch(number)
            for pipe in pipes:
                pipe.zero_grad()
                torch.manual_seed(number)
                pipe.step(x, target=y)
            for other in pipes[1:]:
                for a, b in zip(pipes[0].parameters(), other.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_captured_steps_advance_generators_as_other_steps_do() -> None:
    pipes = pipes_per_runtime(partial(layers, dropout=0.5), ["inline"])
    x, y = batch(0)
    for number in range(4):
        states = []
        for pipe in pipes:
            torch.manual_seed(number)
            pipe.step(x, target=y)
            states.append((torch.get_rng_state(), torch.cuda.get_rng_state(GPU)))
        assert all(map(torch.equal, *states))


# ---- options of a step ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_captured_steps_with_deferred_batch_norm(mode: str) -> None:
    check_same_steps(
        pipes_per_runtime(layers, checkpoint=mode, deferred_batch_norm=True), batches()
    )


@pytest.mark.parametrize("mode", ["never", "always"])
def test_captured_steps_under_autocast(mode: str) -> None:
    pipes = pipes_per_runtime(partial(attending, torch.float32), checkpoint=mode)
    cast = partial(torch.autocast, "cuda", torch.bfloat16)
    check_same_steps(pipes, batches(5, dtype=torch.float32), cast)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_captured_steps_of_a_traced_model_with_several_lengths(schedule: str) -> None:
    ids = torch.randint(0, WORDS, (4, 6), device=GPU)
    options: dict[str, Any] = {"stages": 3, "devices": four()[:3], "example": ids}
    options |= {"balance": "parameters", "schedule": schedule}

    def made(runtime: str) -> Pipe:
        torch.manual_seed(3)
        return Pipe(Language().double(), 2, runtime=runtime, **options)

    torch.manual_seed(4)
    given = [torch.randint(0, WORDS, (4, 6 + number % 2), device=GPU) for number in range(8)]
    check_same_steps(
        [made(runtime) for runtime in ("graph", "inline")], [((each,), {}) for each in given]
    )


def with_metrics(out: Tensor, target: Tensor) -> dict[str, Any]:
    error = (out - target).abs()
    loss = error.square().mean()
    return {"loss": loss, "weight": target.gt(0).sum(), "worst": error.max(), "rows": error.sum(1)}


def test_outputs_and_metrics_of_a_replay_are_not_overwritten() -> None:
    pipes = pipes_per_runtime(layers, ["inline"], loss_fn=with_metrics)
    kept = []
    with deterministic():
        for number in range(5):
            x, y = batch(number)
            found, expected = (pipe.step(x, target=y, outputs=True) for pipe in pipes)
            kept.append((found, expected))
    for found, expected in kept:  # later replays must not write to them
        assert same(found.outputs, expected.outputs)
        assert found.metrics.keys() == expected.metrics.keys()
        assert all(same(found.metrics[name], expected.metrics[name]) for name in found.metrics)


def test_captured_steps_with_input_gradients() -> None:
    pipes = pipes_per_runtime(layers, ["inline"])
    with deterministic():
        for number in range(4):
            x, y = batch(number)
            leaves = [x.clone().requires_grad_() for _ in pipes]
            for pipe, leaf in zip(pipes, leaves, strict=True):
                pipe.step(leaf * 2, target=y)
            assert same(*(leaf.grad for leaf in leaves))


def test_captured_steps_under_no_grad_and_in_eval_mode() -> None:
    pipes = pipes_per_runtime(partial(layers, dropout=0.5), ["inline"])
    check_same_steps(pipes, batches(4), torch.no_grad)
    for pipe in pipes:
        pipe.eval()
    check_same_steps(pipes, batches(4))
    check_same_steps(pipes, batches(4), torch.no_grad)


# ---- optimizers ----------------------------------------------------------------------------


def optimizer_of(kind: str, pipe: Pipe) -> torch.optim.Optimizer:
    """Return an optimizer whose learning rate is a tensor if a recording can read it."""
    lr = torch.tensor(1e-2, device=GPU)
    if kind == "adam":
        return torch.optim.Adam(pipe.parameters(), lr, capturable=True)
    if kind == "fused sgd":
        return torch.optim.SGD(pipe.parameters(), lr, momentum=0.9, fused=True)
    return torch.optim.SGD(pipe.parameters(), 1e-2, momentum=0.9)


def slow_down(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Reduce the learning rate: a tensor in every step, a number once."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(1e-2 / (number + 1))
        elif number == 5:
            group["lr"] = 1e-3


def counted(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=0)


def test_replay_that_counts_targets_unevenly_is_refused() -> None:
    pipe = Pipe(layers(), 2, stages=2, devices=[GPU, GPU], loss_fn=counted, runtime="graph")
    x, y = batch(0)
    even, uneven = torch.ones(len(x), dtype=torch.int64, device=GPU), y.argmax(1) * 0
    uneven[0] = 1
    for _ in range(3):
        assert pipe.step(x, target=even).ran.runtime == "graph"
    with pytest.raises(RunError, match="averages over targets that count"):
        pipe.step(x, target=uneven)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=torch.tensor(0.1, device=GPU))
    pipe.step(x, target=even, optimizer=optimizer)
    with pytest.raises(RunError, match="its loss divides by a number that only the device knows"):
        pipe.step(x, target=even, optimizer=optimizer)


@pytest.mark.parametrize("kind", ["adam", "sgd", "fused sgd"])
def test_optimizer_inside_a_captured_step(kind: str) -> None:
    pipes = pipes_per_runtime(layers, ["graph", "inline"])
    optimizers = [optimizer_of(kind, pipe) for pipe in pipes]
    with deterministic():
        for number in range(9):
            x, y = batch(number)
            for at, (pipe, optimizer) in enumerate(zip(pipes, optimizers, strict=True)):
                zero(pipe, number)
                slow_down(optimizer, number)
                found = pipe.step(x, target=y, optimizer=None if at else optimizer)
                assert found.ran.runtime == ("graph", "graph", "inline")[at]
                if at:
                    optimizer.step()
            for other in pipes[1:]:
                check_same(pipes[0], other)
    assert (
        min(replays_of(pipe) for pipe in pipes[:2]) >= 4
    )  # each lr, and grad None, needs its own graph


def test_captured_steps_with_grad_scaler_overflow() -> None:
    pipes = pipes_per_runtime(partial(layers, torch.float32), ["inline"])
    optimizers = [optimizer_of("sgd", pipe) for pipe in pipes]
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**12) for _ in pipes]
    with deterministic():
        for number in range(6):
            x, y = batch(number, dtype=torch.float32)
            if number == 3:
                x[5, 5] = float("inf")
            for pipe, optimizer, scaler in zip(pipes, optimizers, scalers, strict=True):
                pipe.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    pipe.step(x, target=y, scaler=scaler)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            check_same(*pipes)
    assert replays_of(pipes[0]) == 5
    assert scalers[0].get_scale() < 2.0**12


# ---- several recorded graphs ---------------------------------------------------------------


def test_graph_cache_is_bounded_with_several_batch_sizes() -> None:
    pipes = pipes_per_runtime(layers, ["inline"])
    rows = [12 + 6 * number for number in range(graph_cache.MAX_GRAPHS + 2)]
    order = [each for each in rows for _ in range(2)] + rows[::-1]
    given = [batch(number, each) for number, each in enumerate(order)]
    check_same_steps(pipes, [((x,), {"target": y}) for x, y in given])
    runs: Any = pipes[0]._engine
    assert len(runs._lazy_state.graph_cache._history.graphs) == graph_cache.MAX_GRAPHS


def test_recorded_graphs_alternate_in_shared_memory() -> None:
    """The graphs share memory, so one must not read what another has left there."""
    pipes = pipes_per_runtime(partial(layers, dropout=0.5), ["inline"])
    for turn in range(4):
        for rows in (22, 12):
            for mode in ("never", "always"):
                for pipe in pipes:
                    pipe.checkpoint = mode
                x, y = batch(turn, rows)
                check_same_steps(pipes, [((x,), {"target": y})])
                with torch.no_grad():
                    outputs = []
                    for pipe in pipes:
                        torch.manual_seed(turn)
                        outputs.append(pipe.step(x, target=y, outputs=True).outputs)
                assert same(*outputs)


def test_cast_of_a_captured_pipe_records_a_new_graph() -> None:
    pipes = pipes_per_runtime(layers, ["inline"])
    check_same_steps(pipes, batches(3))
    for pipe in pipes:
        pipe.to(torch.float32)
    check_same_steps(pipes, batches(4, dtype=torch.float32))


def test_auto_runtime_captures_on_gpu_and_reports_it() -> None:
    pipe = pipe_of(layers(), "auto")
    x, y = batch(0)
    assert [str(pipe.step(x, target=y).ran) for _ in range(3)] == ["graph"] * 3
    mixed = Pipe(layers(), 2, stages=2, devices=["cpu", GPU], loss_fn=nn.MSELoss(), runtime="auto")
    ran = mixed.step(x.cpu(), target=y).ran
    assert ran.runtime == "threads"
    assert "cpu" in ran.why
