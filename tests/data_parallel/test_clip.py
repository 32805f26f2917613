"""Tests that gradients are clipped by their norm over all ranks, as in the unsplit model.

test_stage_fn.py clips the gradients of replicas.
"""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from penstock import RunError
from penstock.data_parallel.clip import (
    ClipGradOptions,
    clip_grads_with_norm,
    compute_total_grad_norm,
)
from tests.data_parallel.replicas import Everyone, mesh, whole
from tests.distributed.ranks import ranks
from tests.support import closely

ORDERS = [2.0, 1.0, 3.5, inf, 0.0, -inf]


def gradients() -> list[Tensor | None]:
    """Return the gradients of the unsplit model: the first is tied, the last is missing."""
    torch.manual_seed(0)
    return [torch.randn(n, 2).double() for n in (4, 1, 5, 3)] + [None]


MINE = [(0, 1), (0, 2, 3), (0, 4)]  # gradients of each rank; the first rank owns the tied one


def over_ranks(order: float, spoiled: float | None, options: dict[str, Any]) -> Any:
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(4, 2).double()) for _ in MINE[rank]]
    for parameter, at in zip(parameters, MINE[rank], strict=True):
        gradient = gradients()[at]
        parameter.data = torch.zeros(1, 2).double() if gradient is None else gradient * 0
        parameter.grad = gradient
        if at == 2 and gradient is not None and spoiled is not None:
            gradient[0, 0] = spoiled
    owned = parameters[0 if rank == 0 else 1 :]
    try:
        how = ClipGradOptions(order, **options)
        total = compute_total_grad_norm(owned, Everyone(), how)
        clip_grads_with_norm(parameters, total, 0.7, how)
    except RunError as error:
        return str(error), [p.grad for p in parameters]
    return total, [p.grad for p in parameters]


@pytest.mark.parametrize(("order", "foreach"), [*zip(ORDERS, (None, True, False) * 2, strict=True)])
def test_clip_grad_norm_over_pipeline_ranks(order: float, foreach: bool | None) -> None:
    parameters = []
    for gradient in gradients():
        parameters.append(nn.Parameter(torch.zeros(1) if gradient is None else gradient * 0))
        parameters[-1].grad = gradient
    known = nn.utils.clip_grad_norm_(parameters, 0.7, order)
    for rank, (total, found) in enumerate(
        ranks(3).run(over_ranks, order, None, {"foreach": foreach})
    ):
        assert closely(total, known)
        for gradient, at in zip(found, MINE[rank], strict=True):
            expected = parameters[at].grad
            assert (gradient is None) == (expected is None)
            assert expected is None or closely(gradient, expected)


@pytest.mark.parametrize("order", [2.0, inf, -inf])
@pytest.mark.parametrize("spoiled", [inf, nan])
def test_clip_grad_norm_that_is_not_finite_is_so_on_all_ranks(order: float, spoiled: float) -> None:
    if order == -inf and spoiled == inf:
        return  # the smallest element is finite
    for total, _ in ranks(3).run(over_ranks, order, spoiled, {}):
        assert not total.isfinite()
        assert total.isnan() == (spoiled != spoiled)
    for rank, (error, found) in enumerate(
        ranks(3).run(over_ranks, order, spoiled, {"error_if_nonfinite": True})
    ):
        assert "the gradients over all stages is non-finite" in error
        for gradient, at in zip(found, MINE[rank], strict=True):  # no gradient was scaled
            expected = gradients()[at]
            assert at == 2 or expected is None or torch.equal(gradient, expected)


def in_parts(order: float) -> Any:
    """Clip gradients that are sharded, replicated, plain, missing or placed differently."""
    torch.manual_seed(0)
    full = [torch.randn(3, 2).double() for _ in range(4)]
    parameters = [
        nn.Parameter(distribute_tensor(torch.zeros(3, 2).double(), mesh()["dp"], [Shard(0)])),
        nn.Parameter(distribute_tensor(torch.zeros(3, 2).double(), mesh()["dp"], [Replicate()])),
        nn.Parameter(torch.zeros(3, 2).double()),
        nn.Parameter(distribute_tensor(torch.zeros(3, 2).double(), mesh()["dp"], [Shard(1)])),
        nn.Parameter(distribute_tensor(torch.zeros(3, 2).double(), mesh()["dp"], [Shard(1)])),
    ]
    parameters[0].grad = distribute_tensor(full[0].clone(), mesh()["dp"], [Shard(0)])
    parameters[1].grad = distribute_tensor(full[1].clone(), mesh()["dp"], [Replicate()])
    parameters[2].grad = full[2].clone()
    parameters[3].grad = distribute_tensor(full[3].clone(), mesh()["dp"], [Replicate()])
    total = compute_total_grad_norm(parameters, None, ClipGradOptions(order))
    clip_grads_with_norm(parameters, total, 0.3, ClipGradOptions(order))
    return total, [whole(p.grad) for p in parameters[:4]], full


@pytest.mark.parametrize("order", ORDERS)
def test_clip_grad_norm_of_dtensor_gradients(order: float) -> None:
    for total, found, full in ranks(2).run(in_parts, order):
        parameters = [nn.Parameter(torch.zeros(3, 2).double()) for _ in full]
        for parameter, gradient in zip(parameters, full, strict=True):
            parameter.grad = gradient
        assert closely(total, nn.utils.clip_grad_norm_(parameters, 0.3, order))
        for mine, parameter in zip(found, parameters, strict=True):
            assert parameter.grad is not None
            assert closely(mine, parameter.grad)
