"""Regression tests of pipes, each with the story of its bug."""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpointed

from penstock import Op, Pipe, PipeSequential, lower, schedules
from tests.support import (
    Do,
    Fails,
    batch,
    closely,
    differences,
    each_checkpoint,
    each_door,
    each_runtime,
    ends,
    plain,
    same_gradients,
    trained,
    whole,
    without_gc,
)

IN_PLACE = r"in.?place"


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


# ---- wrong numbers ------------------------------------------------------------------------


@each_runtime
@each_checkpoint
def test_parameter_hook_sees_its_gradient_once(checkpoint: str, runtime: str) -> None:
    """The hook also saw the gradient of each micro-batch, and was given its own results again."""
    seen = []

    def halved(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient / 2

    model = plain()
    x, target = batch(7)
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4, runtime=runtime)
    for module in (model, pipe):
        module.get_parameter("2.weight").register_hook(halved)
        functional.mse_loss(module(x), target).backward()
    assert len(seen) == 2
    assert same_gradients(pipe, model)


@each_runtime
def test_backward_leaves_the_random_state_of_the_caller(runtime: str) -> None:
    """The backward reset the generator to its state after the forward, so draws were repeated."""
    pipe = Pipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), 2, stages=2, runtime=runtime)
    y = pipe(torch.randn(4, 6))
    torch.rand(3)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_after_interleaved_forwards_and_backwards() -> None:
    """The third forward drew the numbers of the second one."""
    pipe = Pipe(nn.Sequential(nn.Linear(6, 64), nn.Dropout()), 2, stages=2)
    x = torch.randn(4, 6)
    first, second = pipe(x), pipe(x)
    second.sum().backward()
    first.sum().backward()
    third = pipe(x)
    assert not torch.equal(second == 0, third == 0)


@each_runtime
def test_backward_under_autocast_recomputes_without_it(runtime: str) -> None:
    """With the inline runtime, the recomputation took the autocast mode of the backward."""
    seen = set()
    pipe = Pipe(plain(torch.float32), 2, "always", stages=4, runtime=runtime)
    pipe[2].register_forward_hook(lambda module, given, found: seen.add(found.dtype))
    x, _ = batch(4, torch.float32)
    loss = pipe(x).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert seen == {torch.float32}


@each_runtime
def test_parameters_changed_between_forward_and_backward_are_refused(runtime: str) -> None:
    """The recomputation used the new values. PyTorch refuses that without recomputation."""
    pipe = Pipe(plain(), 2, "always", stages=4, runtime=runtime)
    x, _ = batch(4)
    loss = pipe(x).sum()
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.shift: Tensor
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.shift)
        return y


@each_runtime
@pytest.mark.parametrize("replaced", [False, True])
def test_buffer_changed_between_forward_and_backward(replaced: bool, runtime: str) -> None:
    """As with a parameter, the recomputation uses the old values or is refused."""
    shifted = Shifted()
    pipe = Pipe(nn.Sequential(nn.Identity(), shifted), 2, "always", stages=2, runtime=runtime)
    loss = pipe(torch.zeros(4, 6)).sum()
    if replaced:
        shifted.shift = torch.zeros(6)
    else:
        shifted.shift.zero_()
    with suppress(RuntimeError):
        loss.backward()
        assert shifted.linear.weight.grad is not None
        assert torch.equal(shifted.linear.weight.grad, torch.full((6, 6), 4.0))


@each_runtime
def test_eval_between_forward_and_backward_keeps_dropout(runtime: str) -> None:
    """The recomputation ran without dropout. The mode of the forward decides."""

    def found(checkpoint: str) -> list[Tensor]:
        layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 3)).double()
        pipe = Pipe(layers, 2, checkpoint, stages=2, runtime=runtime)
        pipe.load_state_dict(state)
        torch.manual_seed(0)
        loss = pipe(x).sum()
        pipe.eval()
        loss.backward()
        return gradients(pipe)

    x, _ = batch(4)
    state = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 3)).double().state_dict()
    assert all(map(closely, found("always"), found("never")))


@each_runtime
@pytest.mark.parametrize("loss", [torch.sum, lambda y: (y**2).sum()], ids=["linear", "squares"])
def test_create_graph_is_refused(loss: Callable[[Tensor], Tensor], runtime: str) -> None:
    """After a linear loss, the gradients had no graph, without an error."""
    pipe = Pipe(plain(), 2, stages=4, runtime=runtime)
    x, _ = batch(4)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss(pipe(x)), list(pipe.parameters()), create_graph=True)


@each_door
@each_checkpoint
def test_unregistered_parameter_gets_its_gradient_or_is_refused(checkpoint: str, door: str) -> None:
    """Behind a call, only registered parameters got gradients, without an error."""
    hidden = nn.Linear(6, 6).double()
    model = nn.Sequential(nn.Linear(6, 6).double(), Do(lambda x: hidden(x)))
    pipe = Pipe(model, 2, checkpoint, stages=2, loss_fn=lambda y, target: (y - target[:, :1]).sum())
    if door == "step":
        trained(pipe, *batch(4), door)
        assert hidden.weight.grad is not None
    else:
        with pytest.raises(RuntimeError, match="is not a registered parameter"):
            trained(pipe, *batch(4), door)


def test_hooks_of_the_sequential_are_refused() -> None:
    """They were lost, because a pipe is another module. Hooks of the pipe itself work."""
    model = plain()
    hook = model.register_forward_hook(lambda module, given, found: found * 2)
    with pytest.raises(ValueError, match="the Sequential itself has hooks"):
        Pipe(model, 2, stages=4)
    hook.remove()
    pipe = Pipe(model, 2, stages=4)
    pipe.register_forward_hook(lambda module, given, found: found * 2)
    x, _ = batch(4)
    assert closely(pipe(x), model(x) * 2)


# ---- hangs --------------------------------------------------------------------------------


def test_backward_after_the_pipe_was_deleted() -> None:
    """The threads had ended with the pipe, so the backward waited forever."""
    x, target = batch(7)
    model = plain()

    def train() -> None:
        functional.mse_loss(Pipe(model, 3, stages=4)(x), target).backward()

    assert ends(train)
    expected = plain()
    functional.mse_loss(expected(x), target).backward()
    assert same_gradients(model, expected)


@each_checkpoint
def test_pipe_inside_torch_checkpoint(checkpoint: str) -> None:
    """The hooks of the checkpoint reached the workers, and one of them called its own pipe."""
    x, target = batch(7)
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4)

    def train() -> None:
        functional.mse_loss(checkpointed(pipe, x, use_reentrant=False), target).backward()

    assert ends(train)
    functional.mse_loss(model(x), target).backward()
    assert same_gradients(pipe, model)


def test_pipe_called_by_its_own_worker_is_refused() -> None:
    """The worker waited for itself."""
    pipe = Pipe(plain(), 2, stages=4, loss_fn=functional.mse_loss)
    x, target = batch(4)

    def look(module: nn.Module, inputs: object, output: object) -> None:
        with torch.no_grad():
            pipe(x)

    hook = pipe.get_submodule("2").register_forward_hook(look)
    errors: list[RuntimeError] = []

    def train() -> None:
        try:
            pipe.step(x, target=target)
        except RuntimeError as error:
            errors.append(error)

    assert ends(train)
    assert "a pipe was called by one of its own workers" in str(errors[0])
    hook.remove()
    pipe.step(x, target=target)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_backward_in_a_forked_process_is_refused() -> None:
    """A fork has no worker threads for the backward; a new forward starts new ones."""
    pipe = Pipe(plain(), 2, stages=4)
    x, _ = batch(4)
    loss = pipe(x).sum()

    def child() -> None:
        try:
            pipe(x).sum().backward()
        except RuntimeError as error:  # PyTorch has a thread for each GPU, and refuses by itself
            if "Autograd-and-Fork" not in str(error):
                raise
        with pytest.raises(RuntimeError, match="process"):
            loss.backward()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(10)
    process.kill()
    assert process.exitcode == 0


# ---- the pipe as a module -----------------------------------------------------------------


def test_loss_module_is_not_registered_as_a_layer() -> None:
    """As an attribute, it was registered as the first child."""
    model = plain()
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(3).double())
    pipe = Pipe(model, 2, stages=4, loss_fn=loss_fn)
    assert len(pipe) == 4
    assert list(pipe) == list(model)
    assert pipe[0] is model[0]
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert pipe.loss_fn is loss_fn


@each_door
@pytest.mark.parametrize("name", ["step", "chunks", "loss_fn", "_split", "_last", "_crew"])
def test_layers_named_like_attributes_of_the_pipe(name: str, door: str) -> None:
    """A layer with the name of an attribute that the pipe sets later was lost."""
    one, *others = plain()
    model = nn.Sequential(OrderedDict([(name, one), *((str(i), l) for i, l in enumerate(others))]))
    x, target = batch(4)
    pipe = Pipe(copy.deepcopy(model), 2, stages=4, loss_fn=functional.mse_loss)
    expected = whole(model, x, target, functional.mse_loss)
    assert differences(trained(pipe, x, target, door), expected, closely) == []
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_deferred_batch_norm_leaves_the_original_model_unchanged() -> None:
    """The copy of the Sequential shared the dict of children of the original."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6)))
    Pipe(model, deferred_batch_norm=True)
    assert [type(module) for module in model.modules() if "Norm" in type(module).__name__] == [
        nn.BatchNorm1d,
        nn.BatchNorm1d,
    ]


def test_pipe_as_a_layer_of_another_pipe() -> None:
    """Placing the layers moved the inner pipe, which a pipe refuses even to its own device."""
    model = nn.Sequential(plain(), nn.Linear(3, 3).double())
    inner = Pipe(copy.deepcopy(model[0]), 1, stages=2)
    x, target = batch(7)
    pipe = Pipe(
        nn.Sequential(inner, copy.deepcopy(model[1])), 3, stages=2, loss_fn=functional.mse_loss
    )
    expected = whole(model, x, target, functional.mse_loss)
    for door in ("step", "call"):
        pipe.zero_grad()
        assert differences(trained(pipe, x, target, door), expected, closely) == []


# ---- errors and other surprises -----------------------------------------------------------


@each_runtime
def test_pipe_under_another_default_device(runtime: str) -> None:
    """The seed of a call was drawn on the default device, with a CPU generator."""
    pipe = Pipe(plain(), 2, stages=4, runtime=runtime, loss_fn=functional.mse_loss)
    x, target = batch(4)
    with torch.device("meta"):
        pipe(x).sum().backward()
        result = pipe.step(x, target=target)
    assert result.loss.device == torch.device("cpu")


@pytest.mark.parametrize("stages", [1, 4])
def test_forecast_under_no_grad_does_not_disable_recomputation(stages: int) -> None:
    """The program without recomputation was cached, and later steps recomputed nothing."""
    pipe = Pipe(plain(), 2, "always", stages=stages, loss_fn=functional.mse_loss)
    with torch.no_grad():
        pipe.forecast()
    x, target = batch(4)
    spans = pipe.step(x, target=target).timeline.computes
    assert Op.R in {span.action.op for lane in spans for span in lane}  # type: ignore[union-attr]


def test_forecast_after_an_evaluation_step_includes_backwards() -> None:
    """The forecast used the costs of the last step, which had no backwards."""
    pipe = Pipe(plain(), 2, stages=4, loss_fn=functional.mse_loss)
    x, target = batch(4)
    pipe.step(x, target=target)
    with torch.no_grad():
        pipe.step(x, target=target)
    cost = pipe.forecast().cost
    assert min(cost.I) > 0
    assert min(cost.W) > 0


@pytest.mark.parametrize(
    "p",
    [[0.1, 0.2], {"a": 1}, torch.ones(2), nn.Parameter(torch.ones(2)), None],
    ids=["list", "dict", "tensor", "parameter", "none"],
)
def test_layer_with_an_attribute_p_of_any_type(p: Any) -> None:
    """The attribute was taken for a dropout probability, and used as a dict key."""
    layer = nn.Linear(6, 6)
    layer.p = p
    pipe = Pipe(nn.Sequential(layer, nn.Linear(6, 3)), 2, stages=2)
    assert pipe(torch.randn(4, 6)).shape == (4, 3)
    assert copy.deepcopy(pipe)(torch.randn(4, 6)).shape == (4, 3)


@each_runtime
def test_inference_mode_tensor_as_input(runtime: str) -> None:
    """The model accepts it without gradients, but the pipe read its version, which raises."""
    with torch.inference_mode():
        x = torch.randn(4, 6, dtype=torch.float64)
    pipe = Pipe(plain(), 2, stages=4, runtime=runtime, loss_fn=torch.sum, reduction="sum")
    with torch.no_grad():
        assert closely(pipe(x), plain()(x))
        assert closely(pipe.step(x).loss, plain()(x).sum())


@each_runtime
def test_second_backward_after_a_failed_one_is_refused(runtime: str) -> None:
    """It raised a KeyError, or the exception by which workers stop each other."""
    layers = list(plain())
    fails = Fails()
    pipe = Pipe(nn.Sequential(*layers[:2], fails, *layers[2:]), 2, stages=5, runtime=runtime)
    x, _ = batch(4)
    loss = pipe(x).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fails.broken = False
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_program_as_the_schedule_argument() -> None:
    """The program was taken for a file name. It is accepted, and its messages are rebuilt."""
    program = lower(schedules.one_f_one_b(4, 2))
    pipe = Pipe(plain(), 2, stages=4, schedule=program)
    assert pipe.forecast().program.schedule.placement == (0, 1, 2, 3)


def test_pipe_does_not_keep_the_result_of_a_step() -> None:
    """The pipe kept the last result alive, with its outputs."""
    pipe = Pipe(plain(), 2, stages=4, loss_fn=functional.mse_loss)
    x, target = batch(4)
    result = pipe.step(x, target=target, outputs=True)
    outputs = weakref.ref(result.outputs)
    with without_gc():
        del result
        assert outputs() is None
    assert pipe.forecast().cost.F != (1, 1, 1, 1)


def test_in_place_change_of_a_passed_on_input_is_refused_in_the_first_call() -> None:
    """The first call did not recognize an input that a stage passes on.

    So the next stage could change the tensor of the caller in place once, and was refused later.
    """
    layers = Do(lambda x: (x, 2 * x)), Do(lambda x, y: x.mul_(2) + y), nn.Linear(3, 3)
    pipe = Pipe(PipeSequential(*layers), 1, "never", stages=[1, 2], loss_fn=functional.mse_loss)
    for _ in range(2):
        x = torch.ones(4, 3, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"changed a shared tensor of shape .* in place"):
            pipe.step(x, target=torch.zeros(4, 3))


class Reentrant(nn.Module):
    """A layer inside a `torch.utils.checkpoint` that is reentrant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpointed(self.linear, x, use_reentrant=True)
        return y.tanh()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in a first forward
@each_runtime
@each_checkpoint
@each_door
def test_reentrant_checkpoint_inside_a_layer(door: str, checkpoint: str, runtime: str) -> None:
    """PyTorch refused it in the backward of `pipe(x)`, which asked for gradients of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Reentrant(), Reentrant(), nn.Linear(8, 3)).double()
    pipe = Pipe(
        copy.deepcopy(model), 2, checkpoint, stages=2, runtime=runtime, loss_fn=functional.mse_loss
    )
    x, target = batch(6)
    for _ in range(2):  # the second backward adds to the gradients of the first
        if door == "step":
            pipe.step(x, target=target)
        else:
            functional.mse_loss(pipe(x), target).backward()
        functional.mse_loss(model(x), target).backward()
    assert same_gradients(pipe, model)


@each_runtime
@pytest.mark.parametrize("is_traced", [False, True])
def test_first_calls_of_a_pipe_from_several_threads(is_traced: bool, runtime: str) -> None:
    """The audit of one call exchanged the parameters that the others computed with."""
    model = plain()
    x, _ = batch(6)
    options: dict[str, Any] = {"example": x} if is_traced else {}
    whole_model = Do(model) if is_traced else model
    pipe = Pipe(copy.deepcopy(whole_model), 2, stages=2, runtime=runtime, **options)
    expected, errors = model(x), []

    def call(index: int) -> None:
        try:
            with torch.set_grad_enabled(index % 2 == 0):
                assert closely(pipe(x), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
