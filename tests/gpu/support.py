"""Shared parts of the GPU tests: devices, models, hidden host waits, and captured steps.

Captured steps must be equal to others bit by bit, so kernels have to be deterministic, and cuBLAS
has to be configured for that before it is first used.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Pipe, pop, skippable, stash
from penstock.schedules import FAMILIES

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCHEDULES = [*(name for name, family in FAMILIES.items() if family.trains), "fit"]
MODES = ["never", "except_last", "always"]
GPU = torch.device("cuda", 0)
BUSY = 20_000_000  # cycles: about 10 ms


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    """Make any operation that makes the host wait for the device an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def virtual_gpus(count: int) -> list[Any]:
    return list(penstock.virtual_devices("cuda:0", count))


def four() -> list[Any]:
    return virtual_gpus(4)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Forget what was compiled, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@skippable(stash=["long"])
class Top(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Any:
        yield stash("long", x)
        return self.linear(x)


@skippable(pop=["long"])
class Bottom(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("long"))


class Sleep(nn.Module):
    """A layer that keeps its device busy."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(BUSY)
        return x * 1


WIDTH, WORDS = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + torch.tanh(self.inner(x))


class Language(nn.Module):
    """A language model with a tied head.

    Positions and masks are created between units, on the device of the input.
    """

    frequencies: Tensor

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("frequencies", torch.rand(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        places = torch.arange(ids.shape[1], device=x.device)
        x = x + torch.sin(places[:, None] * self.frequencies)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=self.words.weight.device).triu(1)
        first = x
        for block in self.blocks:
            x = block(x, mask) * self.scale
        x = x + first
        logits = functional.linear(x, self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


# ---- captured steps, compared with other runtimes -----------------------------------------

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


def layers(
    dtype: torch.dtype = torch.float64, dropout: float = 0.0, norm: bool = True
) -> nn.Sequential:
    """Return layers with in-place operations, a skip connection and perhaps a BatchNorm.

    The BatchNorm needs two rows in a micro-batch.
    """
    torch.manual_seed(0)
    drop: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    norms: list[nn.Module] = [nn.BatchNorm1d(32)] if norm else []
    parts = [Top(), nn.ReLU(inplace=True), *drop, nn.Linear(32, 32), *norms]
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
