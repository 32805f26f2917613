"""A backward in two halves, I and W, beside a whole one of the same model."""

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
    """The tensors in it that are part of a graph."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def backward(output: Any) -> None:
    """From all tensors of an output, each number with a gradient of its own."""
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
    """The forward of a cell that has a W: its output, and what was put off."""
    with WeightGradDeferral(list(model.modules())).activate() as later:
        output = compute(model, *inputs)
    return output, later


def names_of(model: nn.Module, later: Sequence[PendingWeightGrad]) -> list[str]:
    """The parameters that W is left."""
    waiting = {id(pair.parameter) for pair in later}
    return [name for name, p in model.named_parameters() if id(p) in waiting]


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


def put_off(
    model: nn.Module,
    *inputs: Any,
    compute: Compute = called,
    copied: Callable[[nn.Module], nn.Module] = copy.deepcopy,
) -> list[str]:
    """The parameters that W was left, after outputs and gradients were seen to be the model's."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    model.zero_grad()
    twin, others = copied(model), pytree.tree_map_only(Tensor, own, inputs)
    inputs = pytree.tree_map_only(Tensor, own, inputs)
    torch.manual_seed(7)
    expected = compute(twin, *others)
    backward(expected)
    torch.manual_seed(7)
    output, later = forward(model, *inputs, compute=compute)
    names = names_of(model, later)
    for mine, other in zip(learning(output), learning(expected), strict=True):
        assert bitwise(mine.detach(), other.detach()), "an output"
    backward(output)
    accumulate_weight_grads(later)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert type(p) is type(q), name
        assert same_gradient(p.grad, q.grad), name
    for mine, other in zip(learning(inputs), learning(others), strict=True):
        assert same_gradient(mine.grad, other.grad), "the gradient of an input"
    for (name, mine), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert bitwise(mine, other), name
    return names
