"""Tests of models that could give wrong numbers without an error: each is exact or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import NoChunk, Op, Pipe, RunError, pop, skippable, stash
from penstock.device.device import Device, InFlightPayload
from penstock.runtime import transport
from penstock.stage.payload import Payload

MODES = ["never", "except_last", "always"]


class Do(nn.Module):
    """A layer that calls any function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function

    def forward(self, *given: Any) -> Any:
        function: Callable[..., Any] = self.__dict__["function"]
        return function(*given)


def double(value: Tensor) -> Tensor:
    return value.mul_(2)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).double()


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_an_outside_tensor_in_a_stage_without_parameters(mode: str) -> None:
    """Under recomputation, the outputs of the stage were taken for constants."""
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    layers = nn.Sequential(Do(lambda x: x * weight), linear())
    Pipe(layers, 2, mode, stages=2, loss_fn=torch.sum, reduction="sum").step(rows())
    expected = torch.ones(4, dtype=torch.float64, requires_grad=True)
    linear()(rows() * expected).sum().backward()
    assert weight.grad is not None
    assert expected.grad is not None
    assert torch.allclose(weight.grad, expected.grad, atol=1e-12)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 4).double())

    def forward(self, x: Tensor) -> Any:
        return self.table


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x * 1
    return found, found.view(-1, 2, 2)


def change_one(pair: tuple[Tensor, Tensor]) -> Tensor:
    return double(pair[0]) + pair[1].view(-1, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("layers", "given"),
    [
        ([linear(), Do(two_views), Do(change_one)], [rows()]),
        ([nn.Identity(), Do(double), linear()], [rows().requires_grad_() * 1]),
        (
            [Do(lambda x, table: (x, table)), Do(lambda pair: pair[0] + double(pair[1]))],
            [rows(), NoChunk(torch.ones(4).double())],
        ),
        ([Buffered(), Do(double)], [rows()]),
    ],
    ids=["two views", "an input passed on", "a table for all", "a buffer"],
)
def test_in_place_change_of_a_shared_tensor_is_refused(
    layers: list[nn.Module], given: list[Any], mode: str
) -> None:
    model = nn.Sequential(*copy.deepcopy(layers))
    pipe = Pipe(model, 2, mode, stages=[1] * len(layers))
    with pytest.raises(RunError, match=r"changed a shared tensor of shape .* in place"):
        pipe(*given)


@skippable(stash=["far"])
class Far(nn.Module):
    def forward(self, x: Tensor) -> Any:
        found = x * 1
        yield stash("far", found)
        return found


@skippable(pop=["far"])
class Near(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("far"))


def test_in_place_change_of_a_skip_is_refused_when_payloads_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Payloads are copied between GPUs, where sender and receiver do not share memory."""

    def copied(payload: Payload, sender: Device, receiver: Device) -> InFlightPayload:
        return InFlightPayload(payload.map_tensors(Tensor.clone))

    monkeypatch.setattr(transport, "transfer", copied)
    pipe = Pipe(nn.Sequential(Far(), nn.ReLU(inplace=True), Near()), 2, stages=3)
    with pytest.raises(RunError, match=r"changed a shared tensor of shape .* in place"):
        pipe(rows())


@pytest.mark.parametrize("mode", MODES)
def test_in_place_change_of_an_input_bumps_its_version_for_autograd(mode: str) -> None:
    x, weight = rows(), torch.ones(4, dtype=torch.float64, requires_grad=True)
    before = x * weight
    pipe = Pipe(nn.Sequential(nn.ReLU(inplace=True), linear()), 2, mode, stages=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (before.sum() + pipe(x).sum()).backward()


def test_layer_with_its_own_generator_is_refused_under_recomputation() -> None:
    own = torch.Generator()
    noisy = Do(lambda x: x * torch.rand(x.shape, generator=own, dtype=x.dtype))
    with pytest.raises(RunError, match="draws random numbers from its own generator"):
        Pipe(nn.Sequential(linear(), noisy), 2, "always", stages=2)(rows())
    assert Pipe(nn.Sequential(linear(), noisy), 2, "never", stages=2)(rows()).shape == (4, 4)


class Centred(nn.BatchNorm1d):
    """A norm that reads its running mean and then updates it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        found = (x - self.running_mean) ** 2
        with torch.no_grad():
            self.running_mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return found


def test_norm_that_reads_its_running_statistics_is_recomputed_exactly() -> None:
    found = []
    for mode in MODES:
        pipe = Pipe(nn.Sequential(linear(), Centred(4).double()), 2, mode, stages=2)
        pipe(rows()).sum().backward()
        found.append([p.grad for p in pipe[0].parameters()])
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))


def test_changed_checkpoint_mode_applies_from_the_next_step() -> None:
    pipe = Pipe(nn.Sequential(linear(), linear()), 2, "never", stages=2, loss_fn=torch.sum)
    pipe.step(rows())
    pipe.checkpoint = "always"
    actions = [span.action for lane in pipe.step(rows()).timeline.computes for span in lane]
    assert sum(action.op is Op.R for action in actions) == 4  # type: ignore[union-attr]


def test_parameter_data_replaced_before_backward_is_refused() -> None:
    layer = linear()
    loss = Pipe(nn.Sequential(layer, linear()), 2, "always", stages=2)(rows()).sum()
    layer.weight.data = layer.weight.data * 3
    with pytest.raises(RunError, match="a parameter or buffer of these layers was changed"):
        loss.backward()


def test_layer_added_after_the_pipe_was_made_is_refused() -> None:
    pipe = Pipe(nn.Sequential(linear(), linear()), 2, stages=2)
    pipe.add_module("2", linear())
    with pytest.raises(RunError, match="made from the layers 0, 1, but now has 0, 1, 2"):
        pipe(rows())


def test_reduction_of_a_partial_loss_function() -> None:
    loss_fn = partial(functional.mse_loss, reduction="sum")
    pipe = Pipe(nn.Sequential(linear(), linear()), 2, stages=2, loss_fn=loss_fn)
    target = torch.zeros(4, 4).double()
    expected = loss_fn(nn.Sequential(linear(), linear())(rows()), target)
    assert torch.allclose(pipe.step(rows(), target=target).loss, expected, atol=1e-12)


def test_no_chunk_batch_with_a_split_target() -> None:
    pipe = Pipe(
        nn.Sequential(linear(), linear()), 2, stages=2, loss_fn=lambda y, t: t.mean() + 0 * y.sum()
    )
    assert float(pipe.step(NoChunk(rows()), target=torch.arange(4.0)).loss) == 1.5


@pytest.mark.parametrize("runtime", ["inline", "threads"])
def test_nested_pipe_with_dropout_is_recomputed_exactly(runtime: str) -> None:
    """The seed of the inner pipe came from a generator that its own forward had advanced."""

    def found(mode: str) -> list[Tensor]:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
        inner = Pipe(layers, 1, mode, stages=2, runtime=runtime)
        outer = Pipe(nn.Sequential(inner, nn.Linear(4, 4).double()), 2, mode, stages=2)
        torch.manual_seed(4)
        for _ in range(2):
            outer(rows()).sum().backward()
        return [p.grad for p in outer.parameters() if p.grad is not None]

    assert all(map(torch.equal, found("always"), found("never")))
