"""Shared parts of the tests of pipes: parameters, layers and models. The oracle is in oracle.py."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, is_recomputing, pop, skippable, stash
from tests.oracle import Outcome as Outcome
from tests.oracle import Same as Same
from tests.oracle import bitwise as bitwise
from tests.oracle import closely as closely
from tests.oracle import differences as differences
from tests.oracle import order_of_backwards as order_of_backwards
from tests.oracle import trained as trained
from tests.oracle import unsplit as unsplit
from tests.oracle import whole as whole

torch.set_num_threads(1)  # tests run in parallel, on tiny tensors

SCHEDULES = {  # with the number of stages per rank in the tests
    "gpipe": 1,
    "naive": 1,
    "1f1b": 1,
    "eager-1f1b": 1,
    "interleaved": 2,
    "looped-bfs": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "interleaved-zb": 2,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
    "fit": 1,
}
RUNTIMES = ("inline", "threads")
CHECKPOINTS = ("always", "except_last", "never")
DOORS = ("call", "step")

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
each_runtime = pytest.mark.parametrize("runtime", RUNTIMES)
each_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS)
each_door = pytest.mark.parametrize("door", DOORS)

# ---- layers -------------------------------------------------------------------------------


@skippable(stash=["far"])
class Stash(nn.Module):
    """Stash twice the input, and pass the input on."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", 2 * x)
        return x


@skippable(pop=["far"])
class Pop(nn.Module):
    """Add the popped tensor to the input."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        far: Tensor = yield pop("far")
        return x + far


class Watch(nn.Module):
    """Call a function with the input, and pass the input on."""

    def __init__(self, see: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.see = see

    def forward(self, x: Tensor) -> Tensor:
        self.see(x)
        return x


class Do(nn.Module):
    """Compute the output with a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


class Marked(torch.autograd.Function):
    """Call `then` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.then()
        return gradient, None


class Fails(nn.Module):
    """Raise in the backward, as long as `broken` is true."""

    broken = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Marked.apply(x, self._fail)  # type: ignore[no-untyped-call]
        return y

    def _fail(self) -> None:
        if self.broken:
            raise ZeroDivisionError("in a backward")


class Traced(nn.Module):
    """Multiply the input by a weight of one, and report each action to `tell`, such as 2F0.

    The first number in each row of a micro-batch is the index of the micro-batch.
    """

    def __init__(self, tell: Callable[[str], None], stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.tell, self.stage = tell, stage

    def forward(self, x: Tensor) -> Tensor:
        microbatch = int(x[0, 0])
        self.tell(f"{self.stage}{'R' if is_recomputing() else 'F'}{microbatch}")
        marked: Tensor = Marked.apply(  # type: ignore[no-untyped-call]
            x * self.weight, lambda: self.tell(f"{self.stage}B{microbatch}")
        )
        return marked


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[weakref.ref[Any]]) -> Tensor:
        memory = array("d", bytes(8 * x.numel()))
        made.append(weakref.ref(memory))
        y = torch.frombuffer(memory, dtype=torch.float64).view(x.shape)
        return y.copy_(x * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2, None


class Doubled(nn.Module):
    """A layer that records the memory of its outputs, which lives as long as any tensor uses it."""

    def __init__(self) -> None:
        super().__init__()
        # In a closure: what a recomputation appends to a list of the layer is undone.
        made: list[weakref.ref[Any]] = []
        self._get_made: Callable[[], list[weakref.ref[Any]]] = lambda: made

    @property
    def made(self) -> list[weakref.ref[Any]]:
        return self._get_made()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Doubled.apply(x, self.made)  # type: ignore[no-untyped-call]
        return y

    @property
    def alive(self) -> int:
        return sum(memory() is not None for memory in self.made)


def numbered(microbatches: int, rows: int = 2) -> Tensor:
    """Return a batch for `Traced` layers."""
    return torch.arange(float(microbatches)).repeat_interleave(rows)[:, None].repeat(1, 3)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return ten layers with a skip connection, BatchNorm, Dropout, and an in-place operation."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        Stash(),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        Pop(),
        nn.Linear(8, 3),
    ).to(dtype)


CUTS = {
    1: [10],
    2: [5, 5],
    4: [3, 2, 2, 3],
}  # with two stages, the second begins with the in-place ReLU


def plain(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return four ordinary layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).to(dtype)


def batch(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return an input with 6 columns and a target with 3."""
    torch.manual_seed(1)
    return torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 3, dtype=dtype)


def both(model: nn.Sequential | None = None, **options: Any) -> tuple[nn.Sequential, Pipe]:
    """Return a model, by default `plain()`, and a pipe of its copy."""
    model = model or plain()
    given = {"chunks": 3, "stages": 4, "loss_fn": functional.mse_loss, **options}
    return model, Pipe(copy.deepcopy(model), **given)


def same_gradients(pipe: nn.Module, model: nn.Module, times: int = 1) -> bool:
    """Return whether gradients are those of the model, times a number, up to rounding."""
    pairs = [(p.grad, q.grad) for p, q in zip(pipe.parameters(), model.parameters(), strict=True)]
    assert any(gradient is not None for _, gradient in pairs)
    return all(p is q if p is None or q is None else closely(p, times * q) for p, q in pairs)


# ---- threads ------------------------------------------------------------------------------


def run_in_threads(function: Callable[[], object], count: int) -> None:
    """Run a function in several threads that are switched all the time, for at most a minute."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=function, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(before)


def crews() -> list[str]:
    """Return the names of the worker threads of all pipes."""
    return [t.name for t in threading.enumerate() if t.name.startswith("penstock-")]


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection, so that only unreferenced objects are freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ends(function: Callable[[], Any], within: float = 20.0) -> bool:
    """Return whether the function returns within the time limit."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(within)
    return not thread.is_alive()
