"""Tests that layers compiled with `torch.compile` stay compiled inside a pipe."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch as dispatching
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.nn.functional import mse_loss

from penstock import Pipe
from penstock.model.stage_wrapping import StageFn
from penstock.stage.compile_support import find_compiled_modules, make_forward_lock
from tests.pairs import each_pair
from tests.support import RUNTIMES, batch, closely, each_runtime, same_gradients

pytestmark = [  # warnings that the compiler itself causes
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.a = nn.Linear(size, size, dtype=torch.float64)
        self.b = nn.Linear(size, size, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.b(torch.tanh(self.a(x))))


class Backend:
    """A compiler backend that runs graphs as they are and counts the runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, example: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            self.runs += 1
            return graph(*values)

        return run


def in_place(block: nn.Module, backend: Backend) -> nn.Module:
    block.compile(backend=backend)
    return block


def wrapped(block: nn.Module, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(block, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def by_its_forward(block: nn.Module, backend: Backend) -> nn.Module:
    block.forward = torch.compile(block.forward, backend=backend)
    return block


WAYS: list[Callable[[nn.Module, Backend], nn.Module]] = [in_place, wrapped, by_its_forward]
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@each_runtime
def test_compiled_layers_run_compiled_in_every_forward(
    runtime: str, schedule: str, checkpoint: str
) -> None:
    torch.manual_seed(0)
    blocks = [Block() for _ in WAYS]
    model = nn.Sequential(*copy.deepcopy(blocks))
    backend = Backend()
    pipe = Pipe(
        nn.Sequential(*(way(block, backend) for way, block in zip(WAYS, blocks, strict=True))),
        2, checkpoint, stages=3, devices=["cpu"] * 3,
        schedule=schedule, loss_fn=mse_loss, runtime=runtime,
    )  # fmt: skip
    x = batch(8)[0]
    for step in (1, 2):
        pipe.step(x, target=-x)
        mse_loss(model(x), -x).backward()
        assert backend.runs == step * 3 * 2 * (1 + (checkpoint == "always"))
    assert same_gradients(pipe, model)


@each_way
def test_find_compiled_modules_includes_submodules(way: Callable[..., nn.Module]) -> None:
    plain, block = Block(), Block()
    compiled = way(block, Backend())
    inside = {*compiled.modules()}
    assert find_compiled_modules([*plain.modules(), *compiled.modules()]) == inside
    assert {block.a, block.b} <= inside


def test_code_compiled_before_the_pipe_stays_compiled() -> None:
    """A call under a dispatch mode once kept the compiler from compiling the same code again."""
    x, backend = batch(4)[0], Backend()
    in_place(Block(), backend)(x)
    block = in_place(Block(), backend)
    pipe = Pipe(nn.Sequential(block, nn.Linear(6, 6).double()), 2, stages=2, devices=["cpu"] * 2)
    pipe(x).sum().backward()
    before = backend.runs
    in_place(Block(), backend)(x)
    assert backend.runs == before + 1


class Drops(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


def test_dropout_in_compiled_layers_is_independent_of_schedule_and_runtime() -> None:
    """Compiled graphs draw from the RNG of the cell, and a recomputation repeats the draws."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Drops(), Drops()), batch(8)[0]
    found: list[list[Tensor]] = []
    for schedule, runtime, checkpoint in itertools.product(
        ("1f1b", "zb-h1"), RUNTIMES, ("never", "always")
    ):
        layers = copy.deepcopy(model)
        for layer in layers:
            layer.compile(backend="aot_eager")
        pipe = Pipe(
            layers, 2, checkpoint, stages=2, devices=["cpu"] * 2,
            schedule=schedule, loss_fn=mse_loss, runtime=runtime,
        )  # fmt: skip
        torch.manual_seed(5)
        outputs = [pipe.step(x, target=-x, outputs=True).outputs for _ in range(2)]
        assert not torch.equal(*outputs)
        found.append([*outputs, *(p.grad for p in pipe.parameters() if p.grad is not None)])
    assert all(all(map(closely, one, found[0])) for one in found)


WHOLE: dict[str, Callable[[Pipe, Tensor], object]] = {
    "in place": lambda pipe, x: pipe.compile(backend="eager"),
    "wrapped": lambda pipe, x: torch.compile(pipe, backend="eager")(x),
    "in a function": lambda pipe, x: torch.compile(
        lambda: pipe.step(x, target=-x).loss, backend="eager"
    )(),
}


@each_runtime
@pytest.mark.parametrize("how", WHOLE)
def test_torch_compile_of_the_whole_pipe_leaves_results_unchanged(how: str, runtime: str) -> None:
    """The compiler failed with its own errors, deep inside the library."""
    model = nn.Sequential(Block(), Block())
    pipe = Pipe(
        copy.deepcopy(model), 2, stages=2, devices=["cpu"] * 2, loss_fn=mse_loss, runtime=runtime
    )
    x = batch(8)[0]
    WHOLE[how](pipe, x)
    pipe.zero_grad()
    mse_loss(pipe(x), -x).backward()
    mse_loss(model(x), -x).backward()
    assert same_gradients(pipe, model)


def test_threads_leave_no_dispatch_mode_flag_set() -> None:
    """A stage that draws sets a flag of PyTorch that all threads share, and it stayed set."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)) for _ in range(4)]
    pipe = Pipe(nn.Sequential(*layers), 8, stages=4, devices=["cpu"] * 4, schedule="1f1b")
    x = torch.randn(16, 6)
    for _ in range(10):
        pipe.step(x, target=x, loss_fn=mse_loss)
    assert not dispatching.is_in_torch_dispatch_mode()


# ---- number of compilations ---------------------------------------------------------------


class Counting:
    """A backend that counts compilations and passes each graph to one of PyTorch's backends."""

    def __init__(self, backend: str = "eager") -> None:
        self._backend = lookup_backend(backend)
        self.compiled = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.compiled += 1
        return self._backend(graph, example)


def compilations(steps: int, rows: int, backend: str = "eager", **options: Any) -> list[int]:
    """Return the number of compilations in each step of a pipe with compiled blocks or stages."""
    torch._dynamo.reset()
    counting = Counting(backend)
    blocks = [Block() for _ in range(3)]
    fn: StageFn | None = None
    if options.pop("by") == "stage":
        fn = lambda module, index: wrapped(module, counting)  # noqa: E731
    else:
        for block in blocks:
            block.compile(backend=counting)
    checkpoint = options.pop("checkpoint", "always")
    pipe = Pipe(
        nn.Sequential(*blocks), 4, checkpoint, stages=3, devices=["cpu"] * 3, loss_fn=mse_loss,
        stage_fn=fn, **options,
    )  # fmt: skip
    found = []
    for _ in range(steps):
        before, x = counting.compiled, batch(rows)[0]
        pipe.step(x, target=-x)
        found.append(counting.compiled - before)
    return found


# Expected number of compilations. The three blocks share one code object. It is compiled once for
# inputs that require a gradient and once for inputs that do not, and with recomputation once more
# for a forward without gradients. Stages are compiled separately. Where the sizes of micro-batches
# differ, each of these is compiled once more, for dynamic sizes.
KINDS = {
    ("block", "never", 16): 2,
    ("block", "always", 16): 3,
    ("stage", "never", 16): 3,
    ("stage", "always", 16): 6,
    ("block", "never", 14): 4,
    ("block", "always", 14): 7,
    ("stage", "never", 14): 6,
    ("stage", "always", 14): 12,
}


@each_pair(by=["block", "stage"], checkpoint=["never", "always"], rows=[16, 14])
def test_no_recompilation_after_the_first_step(by: str, checkpoint: str, rows: int) -> None:
    """Each of `by`, `checkpoint` and `rows` runs in both runtimes."""
    alike = (by == "block") ^ (checkpoint == "never") ^ (rows == 16)
    runtime, schedule = ("inline", "zb-h1") if alike else ("threads", "1f1b")
    found = compilations(4, rows, by=by, checkpoint=checkpoint, runtime=runtime, schedule=schedule)
    assert found == [KINDS[by, checkpoint, rows], 0, 0, 0]


def test_no_recompilation_under_threads_and_zero_bubble() -> None:
    found = compilations(4, 14, by="block", runtime="threads", schedule="zb-h1")
    assert found == [KINDS["block", "always", 14], 0, 0, 0]


def test_no_recompilation_with_an_aot_autograd_backend() -> None:
    found = compilations(3, 14, "aot_eager", by="block", runtime="threads", schedule="1f1b")
    assert found == [KINDS["block", "always", 14], 0, 0]


def test_no_recompilation_over_many_steps_under_threads() -> None:
    """Several threads reading the compiler's cache at once sometimes lost entries of it."""
    found = compilations(40, 16, by="block", runtime="threads", schedule="1f1b")
    assert found == [3] + [0] * 39


def test_compiled_forwards_are_serialized_across_threads() -> None:
    inside: list[int] = []
    most: list[int] = []

    def backend(graph: Any, example: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            inside.append(1)
            time.sleep(0.002)
            most.append(len(inside))
            found = graph(*values)
            inside.pop()
            return found

        return run

    pipe = Pipe(nn.Sequential(Block(), Block()), 4, stages=2, devices=["cpu"] * 2, loss_fn=mse_loss)
    x = batch(8)[0]
    for layer in pipe:
        layer.compile(backend=backend)
    pipe.step(x, target=-x)
    assert set(most) == {1}


def test_forward_lock_only_for_compiled_modules() -> None:
    plain, compiled = Block(), in_place(Block(), Backend())
    assert make_forward_lock(plain.modules()) is None
    assert make_forward_lock([*plain.modules(), compiled]) is not None


def test_cell_rng_mode_is_not_traced_by_the_compiler() -> None:
    """The RNG mode runs below every compiled layer.

    The compiler once tried to compile each of its functions, in vain.
    """
    layers = [nn.Sequential(Block(), nn.Dropout(0.1)) for _ in range(2)]
    counting = Counting()
    for layer in layers:
        layer.compile(backend=counting)
    pipe = Pipe(nn.Sequential(*layers), 2, stages=2, devices=["cpu"] * 2, loss_fn=mse_loss)
    counters.clear()
    x = batch(8)[0]
    pipe.step(x, target=-x)
    assert counting.compiled > 0
    assert counters["frames"]["total"] == counting.compiled
    assert not counters["graph_break"]
    counters.clear()
