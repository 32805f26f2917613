"""Tests of `stage_fn`, which wraps or replaces the module of a stage, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import ArgumentError, PenstockTypeError, Pipe, PipeSequential
from tests.support import (
    CUTS,
    SCHEDULES,
    Pop,
    Stash,
    batch,
    bitwise,
    differences,
    each_door,
    each_runtime,
    each_schedule,
    network,
    order_of_backwards,
    plain,
    same_gradients,
    trained,
    unsplit,
)

mse = nn.functional.mse_loss


class CountingWrapper(nn.Module):
    """A wrapper that calls its inner module and counts the calls."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.calls = 0

    def forward(self, *values: Any, **side: Any) -> Any:
        self.calls += 1
        return self.inside(*values, **side)


class RecordingStageFn:
    """A stage_fn that records its arguments and its results."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = CountingWrapper) -> None:
        self.wrap = wrap
        self.given: dict[int, nn.Module] = {}
        self.made: dict[int, nn.Module] = {}

    def __call__(self, module: nn.Module, index: int) -> nn.Module:
        assert index not in self.given
        self.given[index] = module
        self.made[index] = self.wrap(module)
        return self.made[index]


@each_schedule
@each_runtime
@each_door
def test_wrapped_stages_train_as_the_unsplit_model(schedule: str, runtime: str, door: str) -> None:
    """The model has a skip connection, BatchNorm, dropout, and a stage that begins in place."""
    stages, chunks = 2 * SCHEDULES[schedule], 4
    wraps = RecordingStageFn()
    layers, expected = network(), network()
    pipe = Pipe(
        layers,
        chunks=chunks,
        stages=CUTS[stages],
        devices=["cpu"] * 2,
        schedule=schedule,
        runtime=runtime,
        loss_fn=mse,
        stage_fn=wraps,
    )
    x, y = batch(12)
    torch.manual_seed(5)
    found = trained(pipe, x.clone().requires_grad_(), y, door)
    torch.manual_seed(5)
    known = unsplit(
        expected,
        x.clone().requires_grad_(),
        y,
        mse,
        chunks=chunks,
        counts=CUTS[stages],
        order=order_of_backwards(pipe, len(x.chunk(chunks))),
        door=door,
    )
    assert differences(found, known, bitwise) == []
    assert sorted(wraps.made) == list(range(stages))
    assert all(made.calls for made in wraps.made.values())


def test_stage_fn_receives_the_layers_under_their_names() -> None:
    wraps = RecordingStageFn(lambda module: module)
    pipe = Pipe(plain(), chunks=2, stages=[3, 1], devices=["cpu"] * 2, stage_fn=wraps)
    first, second = wraps.given[0], wraps.given[1]
    assert [name for name, _ in first.named_children()] == ["0", "1", "2"]
    assert [name for name, _ in second.named_parameters()] == ["3.weight", "3.bias"]
    assert second.get_submodule("3") is pipe[3]
    x = torch.randn(2, 6).double()
    assert bitwise(second(first(x)), plain()(x))


def test_state_dict_names_are_unchanged_by_stage_fn() -> None:
    pipe = Pipe(network(), stages=2, devices=["cpu"] * 2, stage_fn=RecordingStageFn())
    assert list(pipe.state_dict()) == list(network().state_dict())
    pipe.load_state_dict(network().state_dict())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_wrapped_stages_with_side_inputs_and_tuples(checkpoint: str) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4).double()

        def forward(self, a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(a) * mask, b + a

    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor, *, factor: float = 1.0) -> Tensor:
            return (a + b) * factor

    torch.manual_seed(0)
    layers = PipeSequential(Both(), Both(), Sum())
    expected = copy.deepcopy(layers)
    pipe = Pipe(
        layers,
        chunks=3,
        checkpoint=checkpoint,
        stages=[1, 1, 1],
        devices=["cpu"] * 3,
        schedule="zb-h1",
        loss_fn=mse,
        stage_fn=RecordingStageFn(),
    )
    a, b, mask, y = (torch.randn(6, 4).double() for _ in range(4))
    loss = mse(expected(a, b, mask=mask, factor=0.5), y)
    loss.backward()
    result = pipe.step(a, b, target=y, mask=mask, factor=0.5)
    assert torch.allclose(result.loss, loss, rtol=1e-12)
    assert same_gradients(pipe, expected)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stage_fn_that_compiles_each_stage(schedule: str) -> None:
    """There are more stages than the compiler's limit of recompilations per function.

    Compiled stages compute their weight gradients in I.
    """
    runs: list[str] = []
    compilations: list[int] = []
    torch._dynamo.reset()

    def backend(graph: Any, example: Any) -> Any:
        compilations.append(len(example))

        def run(*values: Any) -> Any:
            runs.append("run")
            return graph(*values)

        return run

    def compiled(module: nn.Module, index: int) -> nn.Module:
        made: Any = torch.compile(module, backend=backend)
        assert isinstance(made, nn.Module)
        return made

    torch.manual_seed(0)
    sizes = [6, *range(8, 17), 3]
    layers = nn.Sequential(*(nn.Linear(a, b).double() for a, b in pairwise(sizes)))
    expected = copy.deepcopy(layers)
    pipe = Pipe(
        layers,
        chunks=2,
        checkpoint="never",
        stages=[1] * 10,
        devices=["cpu"] * 10,
        schedule=schedule,
        loss_fn=mse,
        stage_fn=compiled,
    )
    x, y = batch(8)
    for _ in range(2):
        mse(expected(x), y).backward()
        pipe.step(x, target=y)
    assert len(runs) == 2 * 2 * 10
    assert len(compilations) <= 12  # one per stage, and more for the first one's input offsets
    assert same_gradients(pipe, expected)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_stage_fn_that_compiles_stages_with_skip_connections() -> None:
    """The compiler skips the layers that stash and pop, and compiles those between."""

    def compiled(module: nn.Module, index: int) -> nn.Module:
        made: Any = torch.compile(module, backend="eager")
        assert isinstance(made, nn.Module)
        return made

    layers = nn.Sequential(Stash(), nn.Linear(6, 6), nn.Tanh(), Pop(), nn.Linear(6, 3)).double()
    expected = copy.deepcopy(layers)
    pipe = Pipe(
        layers, chunks=2, stages=[2, 3], devices=["cpu"] * 2, loss_fn=mse, stage_fn=compiled
    )
    x, y = batch(8)
    mse(expected(x), y).backward()
    pipe.step(x, target=y)
    assert same_gradients(pipe, expected)


def test_tied_parameters_stay_tied_with_stage_fn() -> None:
    layers = plain()
    last = nn.Linear(8, 8).double()
    layers[3], last.weight = last, layers[2].weight  # type: ignore[assignment]
    expected = copy.deepcopy(layers)
    pipe = Pipe(
        layers,
        chunks=2,
        stages=[3, 1],
        devices=["cpu"] * 2,
        loss_fn=mse,
        stage_fn=RecordingStageFn(),
    )
    x, _ = batch(8)
    y = torch.zeros(8, 8).double()
    mse(expected(x), y).backward()
    pipe.step(x, target=y)
    assert last.weight.grad is not None
    assert torch.allclose(last.weight.grad, expected[2].weight.grad, rtol=1e-10)  # type: ignore[arg-type]


def test_train_and_eval_reach_wrapper_modules() -> None:
    wraps = RecordingStageFn()
    pipe = Pipe(plain(), stages=2, devices=["cpu"] * 2, stage_fn=wraps)
    pipe.eval()
    assert not any(m.training for made in wraps.made.values() for m in made.modules())
    pipe.train()
    assert all(m.training for made in wraps.made.values() for m in made.modules())


def test_deepcopy_of_a_pipe_with_wrapped_stages() -> None:
    pipe = Pipe(
        plain(), chunks=2, stages=2, devices=["cpu"] * 2, loss_fn=mse, stage_fn=RecordingStageFn()
    )
    copied = copy.deepcopy(pipe)
    x, y = batch(4)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied.step(x, target=y).loss != pipe.step(x, target=y).loss


def _untie(module: nn.Module, index: int) -> nn.Module:
    if index:
        module.get_submodule("3").weight = nn.Parameter(torch.ones(8, 8).double())
    return module


def _rename(module: nn.Module, _: int) -> nn.Module:
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            layer.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return module


def _more(module: nn.Module, _: int) -> nn.Module:
    return nn.Sequential(module, nn.Linear(8, 8))


def _less(module: nn.Module, _: int) -> nn.Module:
    return nn.Sequential(*list(module.children())[1:])


@pytest.mark.parametrize(
    ("stage_fn", "kind", "message"),
    [
        (
            lambda module, index: None,
            PenstockTypeError,
            "stage_fn returned NoneType for stage 0 (layers 0 to",
        ),
        (_rename, ArgumentError, "changed the names of parameters or buffers of stage 0"),
        (_more, ArgumentError, "adds parameters or buffers of the shapes (8, 8), (8,)"),
        (_less, ArgumentError, "lacks parameters or buffers of the shapes (8, 6), (8,)"),
        (_untie, ArgumentError, "replaced the parameter 'weight' in one layer but not in another"),
    ],
)
def test_stage_fn_results_that_are_refused(stage_fn: Any, kind: type, message: str) -> None:
    layers = plain()
    layers[3] = nn.Linear(8, 8).double()
    layers[3].weight = layers[2].weight
    with pytest.raises(kind) as error:
        Pipe(layers, stages=[3, 1], devices=["cpu"] * 2, stage_fn=stage_fn)
    assert message in str(error.value)
