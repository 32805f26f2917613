"""Bugs of pipes, each with its story."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpointed

from penstock import NoChunk, Op, Pipe, PipeSequential, lower, pop, schedules, skippable, stash
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
    trained,
    whole,
    without_gc,
)

IN_PLACE = r"in.?place"


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


# ---- wrong numbers ------------------------------------------------------------------------


@each_door
@each_checkpoint
def test_weights_tied_within_a_stage(checkpoint: str, door: str) -> None:
    """The parameter stood twice among the stage's, so its gradient came twice."""
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]
    layers[2].weight = layers[0].weight
    model = nn.Sequential(*layers).double()
    x, target = batch(7)
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=[3, 1], loss_fn=functional.mse_loss)
    expected = whole(model, x, target, functional.mse_loss)
    assert differences(trained(pipe, x, target, door), expected, closely) == []


@each_runtime
@each_checkpoint
def test_a_hook_of_a_parameter_sees_its_gradient_once(checkpoint: str, runtime: str) -> None:
    """It saw each micro-batch's besides, and what it made of them it was given again."""
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
    assert all(map(closely, gradients(pipe), gradients(model)))


@each_runtime
def test_a_backward_leaves_the_callers_random_numbers_alone(runtime: str) -> None:
    """It set the generator back to where its forward had left it: what was drawn came again."""
    pipe = Pipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), 2, stages=2, runtime=runtime)
    y = pipe(torch.randn(4, 6))
    torch.rand(3)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_two_forwards_with_dropout_then_two_backwards_then_another() -> None:
    """The third forward drew the second one's numbers."""
    pipe = Pipe(nn.Sequential(nn.Linear(6, 64), nn.Dropout()), 2, stages=2)
    x = torch.randn(4, 6)
    first, second = pipe(x), pipe(x)
    second.sum().backward()
    first.sum().backward()
    third = pipe(x)
    assert not torch.equal(second == 0, third == 0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, scale: Tensor, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * scale
        return scaled


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.ones(3), torch.ones(1, 3)])
def test_the_rows_of_a_micro_batch_are_those_of_what_was_cut(scale: Tensor) -> None:
    """The first tensor was asked, also one that every micro-batch gets whole."""
    x, target = batch(5)
    model = nn.Sequential(Scaled(), nn.Tanh()).double()
    pipe = Pipe(copy.deepcopy(model), 2, stages=2, loss_fn=functional.mse_loss)
    result = pipe.step(NoChunk(scale.double()), x, target=target)
    loss = functional.mse_loss(model[1](model[0](scale.double(), x)), target)
    loss.backward()
    assert closely(result.loss, loss.detach())
    assert all(map(closely, gradients(pipe), gradients(model)))


class Both(nn.Module):
    """Passes its input on, beside what it computes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


@skippable(stash=["far"])
class StashSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", x)
        y: Tensor = self.linear(x)
        return y


@skippable(pop=["far"])
class PopAndChange(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        far: Tensor = yield pop("far")
        return x + far.add_(1)


def changed(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0].add_(1) + pair[1]


@each_runtime
@each_door
@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Linear(6, 6), Both(), Do(changed)),
        lambda: (Both(), Do(changed), nn.Identity()),
        lambda: (nn.Linear(6, 6), StashSame(), PopAndChange()),
    ],
    ids=["tuple", "input", "skip"],
)
def test_an_input_that_a_later_stage_changes_is_not_recomputed_from(
    layers: Callable[[], tuple[nn.Module, ...]], door: str, runtime: str
) -> None:
    """It went through as it was, a later stage changed it, and the recomputation read that.

    Plain PyTorch refuses such a model, as the pipe does without checkpointing.
    """
    pipe = Pipe(
        nn.Sequential(*layers()), 2, "always", stages=3, runtime=runtime, loss_fn=lambda y: y.sum()
    )

    def train() -> None:
        if door == "step":
            pipe.step(torch.randn(4, 6))
        else:
            pipe(torch.randn(4, 6)).sum().backward()

    for _ in range(2):
        with pytest.raises(RuntimeError, match=IN_PLACE):
            train()


@each_runtime
@pytest.mark.parametrize("stages", [1, 4])
def test_a_target_that_learns(stages: int, runtime: str) -> None:
    """Its gradient was computed, and dropped."""
    x, target = batch(7)
    model = plain()
    pipe = Pipe(
        copy.deepcopy(model), 3, stages=stages, runtime=runtime, loss_fn=functional.mse_loss
    )
    mine, theirs = (target.clone().requires_grad_() for _ in range(2))
    functional.mse_loss(model(x), mine).backward()
    pipe.step(x, target=theirs)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert closely(theirs.grad, mine.grad)


@each_runtime
def test_a_backward_under_autocast_after_a_forward_without(runtime: str) -> None:
    """Inline, the recomputation took the mode of the backward."""
    seen = set()
    pipe = Pipe(plain(torch.float32), 2, "always", stages=4, runtime=runtime)
    pipe[2].register_forward_hook(lambda module, given, found: seen.add(found.dtype))
    x, _ = batch(4, torch.float32)
    loss = pipe(x).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert seen == {torch.float32}


@each_runtime
def test_parameters_that_change_between_forward_and_backward(runtime: str) -> None:
    """The recomputation took the new ones. Without it, PyTorch refuses that, and so must we."""
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
def test_a_buffer_that_changes_between_forward_and_backward(replaced: bool, runtime: str) -> None:
    """Like a parameter: not recomputed from, or refused."""
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
def test_eval_between_forward_and_backward(runtime: str) -> None:
    """The recomputation ran without dropout; whether it will is decided in the forward."""

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
    """After a loss that is linear, the gradients came without a graph, and without a word."""
    pipe = Pipe(plain(), 2, stages=4, runtime=runtime)
    x, _ = batch(4)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss(pipe(x)), list(pipe.parameters()), create_graph=True)


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.queries


@each_runtime
@each_checkpoint
def test_a_parameter_that_is_passed_on_and_changed(checkpoint: str, runtime: str) -> None:
    """The next stage changed the parameter itself; plain PyTorch refuses that."""
    model = nn.Sequential(Queries(), Do(lambda x: x.add_(1)))
    pipe = Pipe(model, 1, checkpoint, stages=2, runtime=runtime)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        pipe(torch.randn(2, 6)).sum().backward()
    assert torch.equal(pipe[0].queries, torch.zeros(2, 6))


@each_door
@each_checkpoint
def test_a_parameter_that_is_not_registered_with_its_layer(checkpoint: str, door: str) -> None:
    """Behind the call, only registered ones got their gradients, without a word."""
    hidden = nn.Linear(6, 6).double()
    model = nn.Sequential(nn.Linear(6, 6).double(), Do(lambda x: hidden(x)))
    pipe = Pipe(model, 2, checkpoint, stages=2, loss_fn=lambda y, target: (y - target[:, :1]).sum())
    if door == "step":
        trained(pipe, *batch(4), door)
        assert hidden.weight.grad is not None
    else:
        with pytest.raises(RuntimeError, match="is not a registered parameter"):
            trained(pipe, *batch(4), door)


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return once * 2


def test_a_sequential_with_a_forward_of_its_own_runs_that() -> None:
    """Its layers were run one after the other, and what else it does was left out."""
    model, x = Twice(*plain()), torch.randn(4, 6).double()
    pipe = Pipe(copy.deepcopy(model), 2, stages=3, example=x)
    assert torch.allclose(pipe(x), model(x), rtol=0, atol=1e-12)
    PipeSequential(*plain())


def test_hooks_of_the_sequential_are_not_lost() -> None:
    """They were: a pipe is another module. They are refused, and taken on the pipe."""
    model = plain()
    hook = model.register_forward_hook(lambda module, given, found: found * 2)
    with pytest.raises(ValueError, match="the Sequential itself has hooks"):
        Pipe(model, 2, stages=4)
    hook.remove()
    pipe = Pipe(model, 2, stages=4)
    pipe.register_forward_hook(lambda module, given, found: found * 2)
    x, _ = batch(4)
    assert closely(pipe(x), model(x) * 2)


@each_door
def test_a_layer_that_changes_its_own_parameter(door: str) -> None:
    """An embedding with a largest norm does, in its forward; others may not, before a backward."""
    layers = [nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 3)]
    pipe = Pipe(nn.Sequential(*layers).double(), 3, "always", stages=2, loss_fn=squared)
    other = Pipe(copy.deepcopy(nn.Sequential(*layers)), 3, "never", stages=2, loss_fn=squared)
    x, target = torch.arange(6), batch(6)[1]
    found, expected = (trained(one, x, target, door) for one in (pipe, other))
    assert differences(found, expected, closely) == []


def squared(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


# ---- hangs --------------------------------------------------------------------------------


def test_a_backward_after_the_pipe_has_gone() -> None:
    """Its threads had ended with it, and nobody did the work."""
    x, target = batch(7)
    model = plain()

    def train() -> None:
        functional.mse_loss(Pipe(model, 3, stages=4)(x), target).backward()

    assert ends(train)
    expected = copy.deepcopy(model)
    expected.zero_grad()
    functional.mse_loss(expected(x), target).backward()
    assert all(map(closely, gradients(model), gradients(expected)))


@each_checkpoint
def test_a_pipe_inside_pytorchs_own_checkpoint(checkpoint: str) -> None:
    """Its hooks went to the workers, and one of them called the pipe that it worked for."""
    x, target = batch(7)
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4)

    def train() -> None:
        functional.mse_loss(checkpointed(pipe, x, use_reentrant=False), target).backward()

    assert ends(train)
    functional.mse_loss(model(x), target).backward()
    assert all(map(closely, gradients(pipe), gradients(model)))


def test_two_threads_use_one_pipe() -> None:
    """One rank did the first call's work first, another the second's, and each waited."""
    pipe = Pipe(plain(), 2, stages=4, loss_fn=functional.mse_loss)
    x, target = batch(4)
    losses = []

    def train() -> None:
        for _ in range(100):
            losses.append(pipe.step(x, target=target).loss)

    def both() -> None:
        threads = [threading.Thread(target=train, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert ends(both, within=40)
    finally:
        sys.setswitchinterval(before)
    assert len({float(loss) for loss in losses}) == 1


def test_a_pipe_called_by_one_of_its_own_workers() -> None:
    """It waited for itself."""
    pipe = Pipe(plain(), 2, stages=4, loss_fn=functional.mse_loss)
    x, target = batch(4)

    def look(parameter: Tensor) -> None:
        with torch.no_grad():
            pipe(x)

    hook = pipe.get_parameter("2.weight").register_post_accumulate_grad_hook(look)
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
def test_a_graph_of_the_parent_process() -> None:
    """In a fork there are no threads to do its backward; a new forward makes new ones."""
    pipe = Pipe(plain(), 2, stages=4)
    x, _ = batch(4)
    loss = pipe(x).sum()

    def child() -> None:
        pipe(x).sum().backward()
        with pytest.raises(RuntimeError, match="process"):
            loss.backward()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(10)
    process.kill()
    assert process.exitcode == 0


# ---- the module ---------------------------------------------------------------------------


def test_a_loss_that_is_a_module_is_no_layer() -> None:
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
@pytest.mark.parametrize(
    "name",
    [
        "step",
        "chunks",
        "loss_fn",
        "_split",
        "_last",
        "_crew",
    ],
)
def test_layers_may_be_called_what_they_like(name: str, door: str) -> None:
    """A layer called like something that the pipe sets later was lost."""
    one, *others = plain()
    model = nn.Sequential(OrderedDict([(name, one), *((str(i), l) for i, l in enumerate(others))]))
    x, target = batch(4)
    pipe = Pipe(copy.deepcopy(model), 2, stages=4, loss_fn=functional.mse_loss)
    expected = whole(model, x, target, functional.mse_loss)
    assert differences(trained(pipe, x, target, door), expected, closely) == []
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_deferred_batch_norm_leaves_the_given_model_alone() -> None:
    """The copy of the Sequential had the Sequential's own table of children."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6)))
    Pipe(model, deferred_batch_norm=True)
    assert [type(module) for module in model.modules() if "Norm" in type(module).__name__] == [
        nn.BatchNorm1d,
        nn.BatchNorm1d,
    ]


def test_a_pipe_may_be_a_layer_of_another() -> None:
    """Placing its layers moved it, which it denies, even to where it is."""
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


# ---- refusals and surprises ---------------------------------------------------------------


@each_runtime
def test_another_default_device(runtime: str) -> None:
    """The seed of a call was drawn on the default device, with a generator of the CPU."""
    pipe = Pipe(plain(), 2, stages=4, runtime=runtime, loss_fn=functional.mse_loss)
    x, target = batch(4)
    with torch.device("meta"):
        pipe(x).sum().backward()
        result = pipe.step(x, target=target)
    assert result.loss.device == torch.device("cpu")


@each_runtime
@pytest.mark.parametrize("stages", [1, 4])
def test_a_target_without_tensors(stages: int, runtime: str) -> None:
    """It was left out, and the last stage failed with KeyError: -1."""
    pipe = Pipe(
        plain(), 2, stages=stages, runtime=runtime, loss_fn=lambda y, power: (y**power).mean()
    )
    x, _ = batch(4)
    assert closely(pipe.step(x, target=2).loss, (plain()(x) ** 2).mean().detach())


@pytest.mark.parametrize("stages", [1, 4])
def test_a_forecast_under_no_grad_is_not_kept_for_training(stages: int) -> None:
    """The program without recomputation was kept, and the next steps recomputed nothing."""
    pipe = Pipe(plain(), 2, "always", stages=stages, loss_fn=functional.mse_loss)
    with torch.no_grad():
        pipe.forecast()
    x, target = batch(4)
    spans = pipe.step(x, target=target).timeline.computes
    assert Op.R in {span.action.op for lane in spans for span in lane}  # type: ignore[union-attr]


def test_a_forecast_after_an_evaluation_knows_that_backwards_take_time() -> None:
    """It took the costs of the last step, in which there were none."""
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
    [
        [0.1, 0.2],
        {"a": 1},
        torch.ones(2),
        nn.Parameter(torch.ones(2)),
        None,
    ],
    ids=["list", "dict", "tensor", "parameter", "none"],
)
def test_a_layer_with_an_attribute_p_of_any_kind(p: Any) -> None:
    """It was taken for a probability, and looked up in a dictionary."""
    layer = nn.Linear(6, 6)
    layer.p = p
    pipe = Pipe(nn.Sequential(layer, nn.Linear(6, 3)), 2, stages=2)
    assert pipe(torch.randn(4, 6)).shape == (4, 3)
    assert copy.deepcopy(pipe)(torch.randn(4, 6)).shape == (4, 3)


@each_runtime
def test_a_tensor_made_in_inference_mode(runtime: str) -> None:
    """Without gradients the model takes it; the pipe asked for its version."""
    with torch.inference_mode():
        x = torch.randn(4, 6, dtype=torch.float64)
    pipe = Pipe(plain(), 2, stages=4, runtime=runtime, loss_fn=torch.sum, reduction="sum")
    with torch.no_grad():
        assert closely(pipe(x), plain()(x))
        assert closely(pipe.step(x).loss, plain()(x).sum())


@each_runtime
def test_a_failed_backward_cannot_be_done_again(runtime: str) -> None:
    """It ended in a KeyError, or in the exception that workers stop each other with."""
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


@each_door
def test_a_batch_without_rows(door: str) -> None:
    """The step divided by them."""
    x, target = batch(0)
    pipe = Pipe(plain(), 2, stages=4, loss_fn=functional.mse_loss)
    model = plain()
    expected = whole(model, x, target, functional.mse_loss)
    found = trained(pipe, x, target, door)
    assert found.loss.isnan() == expected.loss.isnan()
    assert found.output.shape == expected.output.shape


def test_a_program_is_a_schedule_with_messages() -> None:
    """It was taken for the name of a file. Its messages are written anew, so it may be given."""
    program = lower(schedules.one_f_one_b(4, 2))
    pipe = Pipe(plain(), 2, stages=4, schedule=program)
    assert pipe.forecast().program.schedule.placement == (0, 1, 2, 3)


def test_the_result_of_a_step_is_the_callers() -> None:
    """The pipe kept the last one, with its outputs."""
    pipe = Pipe(plain(), 2, stages=4, loss_fn=functional.mse_loss)
    x, target = batch(4)
    result = pipe.step(x, target=target, outputs=True)
    outputs = weakref.ref(result.outputs)
    with without_gc():
        del result
        assert outputs() is None
    assert pipe.forecast().cost.F != (1, 1, 1, 1)


def test_an_input_that_is_passed_on_is_protected_from_the_first_call_on() -> None:
    """In the first call, a stage's inputs enter its graph by another way, and were not known again.

    So the next stage could change the caller's tensor in place once, and was refused after that.
    """
    layers = Do(lambda x: (x, 2 * x)), Do(lambda x, y: x.mul_(2) + y), nn.Linear(3, 3)
    pipe = Pipe(PipeSequential(*layers), 1, "never", stages=[1, 2], loss_fn=functional.mse_loss)
    for _ in range(2):
        x = torch.ones(4, 3, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"changed a shared tensor of shape .* in place"):
            pipe.step(x, target=torch.zeros(4, 3))
