"""Tests of gradients averaged over the ranks of a group."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from penstock import RunError
from penstock.data_parallel import all_reduce as averaging
from penstock.data_parallel.all_reduce import average_gradients
from tests.data_parallel.replicas import mesh, whole
from tests.distributed.ranks import ranks


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


KINDS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((4, 3), torch.float64),
    ((5,), torch.float32),
    ((), torch.float64),
    ((2, 2), torch.complex128),
    ((0, 3), torch.float64),
    ((3, 2), torch.float64),
]


def averaged(bucket: int) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in KINDS]
    for parameter, (shape, dtype) in zip(parameters, KINDS, strict=True):
        parameter.grad = of_rank(rank, shape, dtype)
    kept = parameters[-1].grad = torch.empty(2, 3).double().t()
    kept.copy_(of_rank(rank, (3, 2), torch.float64))  # non-contiguous, and filled in place
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    with patch.object(averaging, "BUCKET_BYTES", bucket):
        for _ in range(2):  # the second call changes nothing
            average_gradients([*parameters, frozen, parameters[0]], dist.group.WORLD)
    assert size == 3
    assert parameters[-1].grad is kept
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("bucket", [1, 100, 1 << 20])
def test_all_reduce_gives_the_mean_gradient(bucket: int) -> None:
    for found in ranks(3).run(averaged, bucket):
        for gradient, (shape, dtype) in zip(found, KINDS, strict=True):
            parts = [of_rank(rank, shape, dtype) for rank in range(3)]
            assert torch.allclose(gradient, (parts[0] + parts[1] + parts[2]) / 3, rtol=1e-5)
            assert gradient.dtype == dtype


def some_have_none() -> list[Tensor | None]:
    mine, others, nobody = (nn.Parameter(torch.zeros(2).double()) for _ in range(3))
    if dist.get_rank() == 0:
        mine.grad = torch.tensor([3.0, 6.0]).double()
    else:
        others.grad = torch.tensor([6.0, 9.0]).double()
    average_gradients([mine, others, nobody], dist.group.WORLD)
    return [mine.grad, others.grad, nobody.grad]


def test_all_reduce_of_missing_gradients_counts_them_as_zero() -> None:
    for mine, others, nobody in ranks(3).run(some_have_none):
        assert mine.tolist() == [1.0, 2.0]
        assert others.tolist() == [4.0, 6.0]
        assert nobody is None


def in_parts() -> list[Tensor | None]:
    """Average DTensor gradients over the same ranks that they are sharded over."""
    first = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh()["dp"], [Shard(0)]))
    second = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh()["dp"], [Shard(0)]))
    first.grad = distribute_tensor(torch.arange(8.0).view(4, 2), mesh()["dp"], [Shard(0)])
    if dist.get_rank() == 0:
        second.grad = torch.ones_like(second)
    average_gradients([first, second], dist.group.WORLD)
    return [whole(first.grad), whole(second.grad)]


def test_all_reduce_of_dtensor_gradients() -> None:
    for first, second in ranks(2).run(in_parts):
        assert first.tolist() == [[2.0, 3.0], [4.0, 5.0]] * 2
        assert second.tolist() == [[0.5, 0.5]] * 4


def sparse() -> str:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RunError) as error:
        average_gradients(layer.parameters(), dist.group.WORLD)
    return str(error.value)


def test_all_reduce_refuses_sparse_gradients() -> None:
    for message in ranks(2).run(sparse):
        assert "(4, 2) has a sparse gradient" in message
