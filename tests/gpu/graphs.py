"""Helpers that compare pipes with captured steps to other runtimes.

Results must be equal bit by bit, so kernels have to be deterministic, and cuBLAS has to be
configured for that before it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipe
from penstock.schedules import FAMILIES
from tests.gpu.parts import Bottom, Top, four

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

GPU = torch.device("cuda", 0)
Batch = tuple[Tensor, Tensor]


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, which also fill uninitialized memory with nan."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def layers(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    """Return layers with in-place operations, a skip connection and a BatchNorm.

    The BatchNorm needs two rows in a micro-batch.
    """
    torch.manual_seed(0)
    drop: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    parts = [Top(), nn.ReLU(inplace=True), *drop, nn.Linear(32, 32), nn.BatchNorm1d(32)]
    more = [nn.Tanh(), nn.Linear(32, 32), nn.ReLU(inplace=True), Bottom()]
    return nn.Sequential(*parts, *more, nn.Linear(32, 8)).to(GPU, dtype)


def batch(seed: int, rows: int = 22, dtype: torch.dtype = torch.float64) -> Batch:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32, generator=made, dtype=torch.float64)
    y = torch.randn(rows, 8, generator=made, dtype=torch.float64)
    return x.to(GPU, dtype), y.to(GPU, dtype)


def pipe_of(model: nn.Sequential, runtime: str, **options: Any) -> Pipe:
    """Return a pipe of four stages, on as many virtual devices as its schedule has ranks."""
    given: dict[str, Any] = {
        "chunks": 6,
        "stages": 4,
        "schedule": "1f1b",
        "loss_fn": nn.functional.mse_loss,
    } | options
    family = FAMILIES.get(given["schedule"])
    ranks = 4 // (1 if family is None else family.stages_per_rank)
    return Pipe(model, runtime=runtime, **{"devices": four()[:ranks], **given})


def pipes_per_runtime(
    make: Callable[[], nn.Sequential],
    runtimes: Sequence[str] = ("inline", "threads"),
    **options: Any,
) -> list[Pipe]:
    """Return a captured pipe, and equal pipes with other runtimes."""
    return [pipe_of(make(), runtime, **options) for runtime in ("graph", *runtimes)]


def check_same(pipe: Pipe, other: Pipe) -> None:
    """Assert that gradients, parameters and buffers are equal bit by bit."""
    for (name, a), (_, b) in zip(pipe.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or same(a.grad, b.grad), f"gradient of {name}"
        assert same(a, b), name
    for (name, x), (_, y) in zip(pipe.named_buffers(), other.named_buffers(), strict=True):
        assert same(x, y), name


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors are equal bit by bit, including nan."""
    return torch.equal(torch.nan_to_num(a.detach()), torch.nan_to_num(b.detach()))


def zero(pipe: Pipe, number: int) -> None:
    """Zero the gradients before step 0, 1, 2, ...: to None, to zeros, and not at all."""
    if number % 3 < 2:
        pipe.zero_grad(set_to_none=number % 3 == 0)


def replays_of(pipe: Pipe) -> int:
    """Return how often the recorded graphs of a pipe were replayed."""
    runs: Any = pipe._engine
    kept = runs._lazy_state.graph_cache
    return 0 if kept is None else sum(one.replay_count for one in kept._history.graphs.values())


def check_same_steps(
    pipes: Sequence[Pipe],
    batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run the same steps with each pipe, and assert equal results after every step.

    With one or two kinds of steps, all but the first of each kind must be replayed.
    """
    kinds = len({tuple(x.shape for x in inputs) for inputs, _ in batches})
    before = replays_of(pipes[0])
    with deterministic():
        for number, (inputs, kwargs) in enumerate(batches):
            results = []
            for pipe in pipes:
                zero(pipe, number)
                torch.manual_seed(number)
                with context():
                    results.append(pipe.step(*inputs, **kwargs))
            first, *others = results
            assert first.ran.runtime == "graph"
            for pipe, result in zip(pipes[1:], others, strict=True):
                assert same(first.loss, result.loss), (number, first.loss, result.loss)
                check_same(pipes[0], pipe)
    if kinds <= 2:
        assert replays_of(pipes[0]) >= before + len(batches) - kinds


def batches(number: int = 6, **how: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return batches with different numbers."""
    found = [batch(seed, **how) for seed in range(number)]
    return [((x,), {"target": y}) for x, y in found]
