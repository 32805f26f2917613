"""The action W: how long the gradients that it computes stay alive."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from penstock.stage.weight_grad import (
    PendingWeightGrad,
    WeightGradRecorder,
    accumulate_weight_grads,
)


@pytest.mark.parametrize(("width", "alive"), [(300, 1), (8, 4)])
def test_large_gradients_on_the_cpu_are_added_one_by_one(width: int, alive: int) -> None:
    computed: list[weakref.ref[Tensor]] = []
    most_alive = 0

    def formula(output_grad: Tensor, op_input: Tensor) -> Tensor:
        nonlocal most_alive
        gradient = output_grad.t().mm(op_input)
        computed.append(weakref.ref(gradient))
        most_alive = max(most_alive, sum(reference() is not None for reference in computed))
        return gradient

    weights = [nn.Parameter(torch.zeros(width, width)) for _ in range(4)]
    x, output_grad = torch.ones(2, width), torch.ones(2, width)
    pending = []
    for weight in weights:
        weight.grad = torch.ones_like(weight)
        pending.append(PendingWeightGrad(weight, weight, x, formula, WeightGradRecorder()))
        pending[-1].receive_output_grad((), (output_grad,))
    accumulate_weight_grads(pending)
    assert most_alive == alive
    for weight in weights:
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
