"""Tests of changes to a pipe that could give wrong numbers: each is exact or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import NoChunk, Op, Pipe, RunError, pop, skippable, stash
from penstock.device.device import Device, InFlightPayload
from penstock.runtime import transport
from penstock.stage.payload import Payload
from tests.support import Do, each_checkpoint


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).double()


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@each_checkpoint
def test_gradient_of_an_outside_tensor_in_a_stage_without_parameters(checkpoint: str) -> None:
    """Under recomputation, the outputs of the stage were taken for constants."""
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    layers = nn.Sequential(Do(lambda x: x * weight), linear())
    Pipe(layers, 2, checkpoint, stages=2, loss_fn=torch.sum, reduction="sum").step(rows())
    expected = torch.ones(4, dtype=torch.float64, requires_grad=True)
    linear()(rows() * expected).sum().backward()
    assert weight.grad is not None
    assert expected.grad is not None
    assert torch.allclose(weight.grad, expected.grad, atol=1e-12)


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


@each_checkpoint
def test_in_place_change_of_an_input_bumps_its_version_for_autograd(checkpoint: str) -> None:
    x, weight = rows(), torch.ones(4, dtype=torch.float64, requires_grad=True)
    before = x * weight
    pipe = Pipe(nn.Sequential(nn.ReLU(inplace=True), linear()), 2, checkpoint, stages=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (before.sum() + pipe(x).sum()).backward()


def test_changed_checkpoint_mode_applies_from_the_next_step() -> None:
    pipe = Pipe(nn.Sequential(linear(), linear()), 2, "never", stages=2, loss_fn=torch.mean)
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


def test_no_chunk_batch_with_a_split_target() -> None:
    pipe = Pipe(
        nn.Sequential(linear(), linear()), 2, stages=2, loss_fn=lambda y, t: t.mean() + 0 * y.sum()
    )
    assert float(pipe.step(NoChunk(rows()), target=torch.arange(4.0)).loss) == 1.5
