"""Tests of `add_loss`: losses that layers add are part of the loss of the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from penstock import Pipe, RunError, Weighted, add_loss, added_losses, is_recomputing
from tests.support import (
    Do,
    Pop,
    Stash,
    batch,
    both,
    closely,
    each_checkpoint,
    each_runtime,
    same_gradients,
    whole,
)


class Penalised(nn.Linear):
    """A linear layer that adds losses of its input, its output and its weight."""

    def __init__(self, inputs: int, outputs: int, times: int = 1) -> None:
        super().__init__(inputs, outputs)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for time in range(self.times):
            add_loss(0.1 * y.square().mean() + 0.3 * x.abs().mean())
            add_loss(self.weight.square().sum().reshape(1, 1) * 0.2**time)
        return y


def balanced() -> nn.Sequential:
    """Return five layers, of which the first, the third and the last add losses."""
    torch.manual_seed(0)
    return nn.Sequential(
        Penalised(6, 8), nn.Tanh(), Penalised(8, 8, times=2), nn.Linear(8, 8), Penalised(8, 3)
    ).double()


def agrees(model: nn.Module, pipe: Pipe, rows: int = 7) -> bool:
    x, target = batch(rows)
    loss = pipe.step(x, target=target).loss
    expected = whole(model, x, target, functional.mse_loss).loss
    if not torch.is_grad_enabled():
        return closely(loss, expected)
    return closely(loss, expected) and same_gradients(pipe, model)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, [1, 3, 1]])
def test_added_losses_with_any_number_of_stages(stages: Any) -> None:
    model, pipe = both(balanced(), stages=stages)
    assert agrees(model, pipe)


@each_checkpoint
@pytest.mark.parametrize("layer", range(5))
def test_added_loss_from_a_single_stage(layer: int, checkpoint: str) -> None:
    torch.manual_seed(0)
    layers = [*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)]
    layers[layer] = Penalised(6, 3 if layer == 4 else 6)
    model, pipe = both(nn.Sequential(*layers).double(), stages=5, checkpoint=checkpoint)
    assert agrees(model, pipe)


@each_checkpoint
def test_added_losses_beside_skip_connections_and_in_place_layers(checkpoint: str) -> None:
    """Added losses travel to the last stage as skips do, also where an in-place layer follows."""
    torch.manual_seed(0)
    model = nn.Sequential(
        Penalised(6, 8), Stash(), nn.Linear(8, 8), nn.ReLU(inplace=True), Penalised(8, 8), Pop(),
        nn.Linear(8, 3),
    ).double()  # fmt: skip
    model, pipe = both(model, stages=[2, 1, 2, 1, 1], checkpoint=checkpoint)
    assert agrees(model, pipe)
    assert agrees(model, pipe)


def test_added_losses_of_frozen_layers_have_no_gradient() -> None:
    model, pipe = both(balanced(), checkpoint="always")
    for module in (model, pipe):
        module.requires_grad_(False)
        module[3].requires_grad_(True)
    assert agrees(model, pipe)
    assert pipe[0].weight.grad is None


@each_checkpoint
def test_added_loss_is_a_mean_over_rows_beside_a_loss_that_is_a_sum(checkpoint: str) -> None:
    model, pipe = both(balanced(), checkpoint=checkpoint, stages=3, reduction="sum")
    x, target = batch(7)

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(y, target, reduction="sum")

    loss = pipe.step(x, target=target, loss_fn=loss_fn).loss
    assert closely(loss, whole(model, x, target, loss_fn).loss)
    assert same_gradients(pipe, model)


def test_layer_used_only_for_its_added_loss_gets_a_gradient() -> None:
    """The layer gets a gradient from its added loss although all later layers are frozen."""

    class Aside(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            add_loss(super().forward(x).square().mean())
            return x

    torch.manual_seed(0)
    model, pipe = both(nn.Sequential(Aside(6, 6), nn.Tanh(), nn.Linear(6, 3)).double(), stages=3)
    for module in (model, pipe):
        module[2].requires_grad_(False)
    assert agrees(model, pipe)


def test_add_loss_inside_the_loss_function() -> None:
    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        add_loss(y.mean())
        return functional.mse_loss(y, target)

    _, pipe = both(nn.Sequential(nn.Linear(6, 3)).double(), stages=1, loss_fn=loss_fn)
    x, target = batch(7)
    y = pipe[0](x)
    assert closely(
        pipe.step(x, target=target).loss, (functional.mse_loss(y, target) + y.mean()).detach()
    )


@pytest.mark.parametrize("first", [False, True], ids=["last stage", "first stage"])
@pytest.mark.parametrize("repeated", [False, True])
def test_recomputation_that_adds_other_losses_is_refused(repeated: bool, first: bool) -> None:
    """A recomputation must add the same losses, or their gradients would be missing."""

    def add(x: Tensor) -> Tensor:
        add_loss(x.mean())
        if is_recomputing() == repeated:
            add_loss(x.mean())
        return x

    layers: list[nn.Module] = [nn.Linear(6, 3).double(), Do(add)]
    if first:
        layers.append(nn.Tanh())
    pipe = Pipe(
        nn.Sequential(*layers), 3, "always", stages=[2, 1] if first else 2, loss_fn=torch.sum
    )
    message = (
        f"these layers added {1 + repeated} losses in their recomputation, but {2 - repeated} in"
    )
    with pytest.raises(RuntimeError, match=message):
        pipe.step(batch(7)[0])


# ---- outside of a training step -------------------------------------------------------------


@each_runtime
def test_added_losses_are_reported_by_a_step_under_no_grad(runtime: str) -> None:
    model, pipe = both(balanced(), runtime=runtime)
    with torch.no_grad():
        assert agrees(model, pipe)


@each_runtime
@each_checkpoint
def test_add_loss_behind_a_pipe_call_is_refused(checkpoint: str, runtime: str) -> None:
    model, pipe = both(balanced(), checkpoint=checkpoint, runtime=runtime)
    x, _ = batch(7)
    message = r"a layer added a loss inside pipe\(x\)"
    with pytest.raises(RuntimeError, match=message):
        pipe(x)
    with torch.no_grad():
        assert closely(pipe(x), model(x))
        with pytest.raises(RuntimeError, match=message), added_losses():
            pipe(x)


def test_step_inside_added_losses_keeps_its_own_losses() -> None:
    for runtime in ("threads", "inline"):
        _, pipe = both(balanced(), runtime=runtime)
        x, target = batch(7)
        with added_losses() as extra:
            pipe.step(x, target=target)
        assert extra == []


def test_add_loss_outside_added_losses_is_refused() -> None:
    model = balanced()
    x, _ = batch(7)
    with pytest.raises(RuntimeError, match="a layer added a loss that nothing collects"):
        model(x)
    with torch.no_grad():
        model(x)
    add_loss(torch.ones(1))
    with added_losses() as outer:
        add_loss(torch.ones(1))
        with added_losses() as inner:
            add_loss(torch.zeros(1, 1))
        add_loss(torch.ones(()))
    assert [e.shape for e in outer + inner] == [()] * 3
    assert len(inner) == 1


@pytest.mark.parametrize(
    ("value", "found"), [(1.0, "<class 'float'>"), (torch.zeros(2), r"shape \(2,\)")]
)
def test_added_loss_must_be_a_scalar_tensor(value: Any, found: str) -> None:
    message = f"penstock.add_loss takes a tensor with one element, not {found}"
    with pytest.raises(TypeError, match=message):
        add_loss(value)


def test_add_loss_while_a_pipe_profiles_its_example() -> None:
    x, _ = batch(7)
    Pipe(balanced(), 3, stages=2, devices=["cpu"] * 2, balance="memory", example=x)
    Pipe(balanced(), 3, stages=2, devices=["cpu"] * 2, example=x)


# ---- inside torch.utils.checkpoint ----------------------------------------------------------


def inside(reentrant: bool) -> Callable[[nn.Module], nn.Module]:
    def wrapped(layer: nn.Module) -> nn.Module:
        def run(x: Tensor) -> Tensor:
            y: Tensor = torch_checkpoint(layer, x, use_reentrant=reentrant)
            return y

        module = Do(run)
        module.layer = layer
        return module

    return wrapped


class AnyModel(nn.Module):
    """A model that is no Sequential. Its second layer adds losses, or its own forward does."""

    def __init__(self, adds_between: bool) -> None:
        super().__init__()
        second = nn.Linear(8, 8) if adds_between else Penalised(8, 8)
        self.layers = nn.ModuleList([nn.Linear(6, 8), second, nn.Linear(8, 3)]).double()
        self.adds_between = adds_between

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x).tanh())
        if self.adds_between:
            add_loss(x.square().mean())
        output: Tensor = self.layers[2](x)
        return output


@pytest.mark.parametrize("balance", ["time", "parameters"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_unit_of_any_model_adds_losses(schedule: str, balance: str) -> None:
    """Making the pipe runs the units, with nothing to collect their losses."""
    model = AnyModel(adds_between=False)
    options: dict[str, Any] = {"stages": 3, "devices": ["cpu"] * 3, "schedule": schedule}
    options |= {"balance": balance, "loss_fn": functional.mse_loss, "example": batch(7)[0]}
    pipe = Pipe(copy.deepcopy(model), 3, **options)
    for rows in (7, 5):
        pipe.zero_grad()
        model.zero_grad()
        assert agrees(model, pipe, rows)
    between = Pipe(AnyModel(adds_between=True), 3, **options)
    with pytest.raises(RunError, match="Put that code into one unit"):
        between.step(batch(7)[0], target=batch(7)[1])


@each_runtime
@each_checkpoint
def test_add_loss_inside_non_reentrant_torch_checkpoint(checkpoint: str, runtime: str) -> None:
    """The recomputation by torch.utils.checkpoint adds nothing."""
    model = balanced()
    pipe = Pipe(
        nn.Sequential(*map(inside(reentrant=False), copy.deepcopy(model))), 3, checkpoint,
        stages=4, loss_fn=functional.mse_loss, runtime=runtime,
    )  # fmt: skip
    assert agrees(model, pipe)
    with added_losses() as extra:
        assert agrees(model, pipe)
    assert extra == []


def test_add_loss_inside_reentrant_torch_checkpoint_is_refused() -> None:
    """A reentrant checkpoint has no graph, so the gradient of the added loss would be missing."""
    pipe = Pipe(
        nn.Sequential(*map(inside(reentrant=True), balanced())), 3, "never", stages=2,
        loss_fn=functional.mse_loss,
    )  # fmt: skip
    x, target = batch(7)
    with pytest.raises(RuntimeError, match=r"nothing collects.* use_reentrant=False"):
        pipe.step(x.requires_grad_(), target=target)


class KeepsLoss(nn.Module):
    """A layer that keeps a balance loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.kept = x.square().mean()
        return x


@each_runtime
def test_loss_that_a_layer_of_another_stage_keeps_is_refused(runtime: str) -> None:
    keeper = KeepsLoss()
    layers = nn.Sequential(keeper, nn.Linear(4, 4))
    pipe = Pipe(layers, 2, "never", stages=2, devices=["cpu"] * 2, runtime=runtime)
    with pytest.raises(
        RunError, match=r"uses a parameter of stage 0 \(layer 0: KeepsLoss\), directly"
    ):
        pipe.step(torch.ones(4, 4), loss_fn=lambda y: y.sum() + keeper.kept)
    pipe = Pipe(layers, 2, "never", stages=1, devices=["cpu"], runtime=runtime)
    pipe.step(torch.ones(4, 4), loss_fn=lambda y: y.sum() + keeper.kept)


# ---- means that do not count rows --------------------------------------------------------------


class MaskedMean(nn.Linear):
    """Adds the mean over the rows that are marked."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        is_marked = (x[:, 0] > 0).double()
        add_loss((y.square().mean(1) * is_marked).sum() / is_marked.sum().clamp(min=1))
        return torch.tanh(y)


def marked(*rows: int) -> Tensor:
    x = torch.rand(8, 6, dtype=torch.float64) + 0.1
    x[list(rows), 0] *= -1
    return x


@each_runtime
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("stage", [0, 1])
def test_masked_mean_that_counts_other_rows_in_a_later_step_is_refused(
    stage: int, checkpoint: str, runtime: str
) -> None:
    """In the first steps the mask has as many rows of each micro-batch."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6)]
    layers.insert(stage, MaskedMean(6, 6))
    if stage:
        layers[0] = nn.Identity()  # the mask is that of x
    model = nn.Sequential(*layers).double()
    pipe = Pipe(
        copy.deepcopy(model), 4, checkpoint, stages=[1, 2], devices=["cpu"] * 2, runtime=runtime,
        loss_fn=functional.mse_loss,
    )  # fmt: skip
    target = torch.randn(8, 6, dtype=torch.float64)
    for rows in ((), (0, 2, 4, 6)):
        x = marked(*rows)
        loss = pipe.step(x, target=target).loss
        with added_losses() as added:
            output = model(x)
        assert closely(loss, functional.mse_loss(output, target).detach() + added[0].detach())
    text = f"the losses that stage {stage} adds with penstock.add_loss are not means over the rows"
    with pytest.raises(RunError, match=text):
        pipe.step(marked(0), target=target)


def test_added_losses_share_the_weights_of_the_loss() -> None:
    """So a mean by the same weights is that of the batch."""

    def weigh(output: Tensor, target: Tensor) -> Weighted:
        is_marked = (target[:, 0] > 0).double()
        losses = (output - target).square().mean(1)
        return Weighted((losses * is_marked).sum() / is_marked.sum(), is_marked.sum())

    torch.manual_seed(0)
    model = nn.Sequential(MaskedMean(6, 6), nn.Linear(6, 6)).double()
    pipe = Pipe(copy.deepcopy(model), 4, stages=2, devices=["cpu"] * 2, loss_fn=weigh)
    for rows in ((), (0, 4)):
        x = marked(*rows)
        loss = pipe.step(x, target=x).loss
        with added_losses() as added:
            expected, _ = weigh(model(x), x)
        assert closely(loss, (expected + added[0]).detach())
