"""Helpers that compare a backward split into I and W with an ordinary backward.

I computes the gradients of the inputs of a stage, and W those of its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.stage.weight_grad import PendingWeightGrad, accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral
from tests.support import bitwise, closely

Compute = Callable[..., Any]


def called(model: nn.Module, *inputs: Any) -> Any:
    return model(*inputs)


def learning(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value that require a gradient."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def backward(output: Any) -> None:
    """Run a backward from all tensors of an output, with a different gradient for each element."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in learning(output):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        factors = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64).view(real.shape)
        total = total + (real.double() * factors).sum()
    if total.requires_grad:
        total.backward()


def forward(
    model: nn.Module, *inputs: Any, compute: Compute = called
) -> tuple[Any, list[PendingWeightGrad]]:
    """Run a forward with weight-gradient deferral; return its output and the pending gradients."""
    with WeightGradDeferral(list(model.modules())).activate() as pending:
        output = compute(model, *inputs)
    return output, pending


def names_of(model: nn.Module, deferred: Sequence[PendingWeightGrad]) -> list[str]:
    """Return the names of the parameters whose gradients are pending for W."""
    pending_ids = {id(pending.parameter) for pending in deferred}
    return [name for name, p in model.named_parameters() if id(p) in pending_ids]


def same_gradient(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.layout is not expected.layout or found.dtype is not expected.dtype:
        return False
    if found.is_sparse:
        found, expected = found.to_dense(), expected.to_dense()
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    return closely(found, expected)


def check_deferred_grads(
    model: nn.Module,
    *inputs: Any,
    compute: Compute = called,
    make_copy: Callable[[nn.Module], nn.Module] = copy.deepcopy,
) -> list[str]:
    """Return the parameters whose gradients W computed.

    Outputs, gradients and buffers are first compared with those of an ordinary backward.
    """

    def fresh_leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    model.zero_grad()
    reference, reference_inputs = make_copy(model), pytree.tree_map_only(Tensor, fresh_leaf, inputs)
    inputs = pytree.tree_map_only(Tensor, fresh_leaf, inputs)
    torch.manual_seed(7)
    expected = compute(reference, *reference_inputs)
    backward(expected)
    torch.manual_seed(7)
    output, pending = forward(model, *inputs, compute=compute)
    names = names_of(model, pending)
    for mine, other in zip(learning(output), learning(expected), strict=True):
        assert bitwise(mine.detach(), other.detach()), "an output"
    backward(output)
    accumulate_weight_grads(pending)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(p) is type(q), name
        assert same_gradient(p.grad, q.grad), name
    for mine, other in zip(learning(inputs), learning(reference_inputs), strict=True):
        assert same_gradient(mine.grad, other.grad), "the gradient of an input"
    for (name, mine), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert bitwise(mine, other), name
    return names
