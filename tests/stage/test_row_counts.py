"""Sizes that know what they would be for other numbers of rows."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.stage.branches import RowWatch
from penstock.stage.row_counts import RowCount, RowCounts

ROWS, WHOLE, WIDTH = 2, 8, 3


def join(sizes: Any, *others: int) -> Any:
    return sizes + others


def watch(function: Callable[[Tensor], Any], *buffers: Tensor) -> RowCounts:
    """Run a function on a micro-batch of two rows of a batch of eight."""
    counts = RowCounts(ROWS, [ROWS, WHOLE], {id(buffer) for buffer in buffers})
    with RowWatch(row_counts=counts):
        function(torch.randn(ROWS, WIDTH))
    return counts


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.shape[0] > 4,
        lambda x: x.size(0) > 4,
        lambda x: x.size()[0] * 2 + 1 >= 9,
        lambda x: x.numel() // WIDTH == 8,
        lambda x: 10 - x.shape[0] < 5,
        lambda x: min(4, x.shape[0]),
        lambda x: x.t().shape[1] > 4,
        lambda x: x.view(-1).shape[0] > 20,
        lambda x: x.shape[0] / 4 > 1,
        lambda x: 1 if x.shape[0] - 8 else 2,
        lambda x: x * (1 + x.shape[0] // 8),
        lambda x: torch.tensor(x.shape),
        lambda x: torch.tensor([[1, x.shape[0]]]),
        lambda x: torch.as_tensor(data=x.shape),
        lambda x: torch.add(x, other=1 + x.shape[0] // 8),
        len,
        lambda x: int(x.shape[0]),
        lambda x: math.sqrt(x.shape[0]),
        lambda x: math.ceil(x.shape[0] / 4),
        lambda x: 1 // (x.shape[0] - 8),
        lambda x: x * (1 + (x.shape[0] >> 3)),
        lambda x: x * (1 + (x.shape[0] & 8)),
        lambda x: divmod(x.shape[0], 8),
        lambda x: -x.shape[0] < -4,
        lambda x: {(8, 3): 2.0}.get(tuple(x.shape), 1.0),
        lambda x: torch.tensor(x.shape[0]) // 8,
        lambda x: x.new_full((), x.shape[0]) // 8,
        lambda x: x.shape[0] in (1, 2, 4),
        lambda x: list(x.shape) == [8, 3],
        lambda x: 0.5 * x.shape[0] > 2,
        lambda x: math.log(x.shape[0]) > 1,
        lambda x: x.shape.numel() > 8,
        lambda x: x.shape[:1].numel() > 4,
        lambda x: join(x.shape[:1], 2).numel() > 8,
        lambda x: math.prod(x.shape) > 8,
        lambda x: x.nbytes > 30,
        lambda x: x.untyped_storage().nbytes() > 30,
        lambda x: x.t().contiguous().stride(0) > 4,
        lambda x: str(x.shape[0]) == "8",
        lambda x: x.shape[0].bit_length() > 3,
        lambda x: list(range(x.shape[0])),
        lambda x: [0] * x.shape[0],
    ],
)
def test_branch_on_the_number_of_rows(function: Callable[[Tensor], Any]) -> None:
    counts = watch(function)
    assert counts.is_decisive
    assert counts.is_compared


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.shape[1] > 2,
        lambda x: x.view(x.shape[0], -1).reshape(x.size(0) * WIDTH),
        lambda x: x.sum() / x.shape[0],
        lambda x: x.shape == (2 * x).shape,
        lambda x: torch.zeros(x.shape).new_full((x.shape[0], 2), 1.0).expand(x.shape[0], 2),
        lambda x: x.shape[0] == x.numel() // WIDTH,
        lambda x: x * (0.5 * x.shape[0]),
        lambda x: (x[: x.shape[0]], x.narrow(0, 0, x.shape[0]), torch.arange(x.shape[0])),
        lambda x: torch.zeros((*x.shape[:1], 2)).new_zeros((1, *x.shape)).view(-1, *x.shape),
        lambda x: isinstance(x.shape, torch.Size) and isinstance(x.shape[0], int),
        lambda x: torch.ones(x.shape[0]).repeat(x.shape[0]).unflatten(0, (x.shape[0], -1)),
        lambda x: nn.Linear(WIDTH, 8)(x).shape[-1] > 4,
        lambda x: nn.Parameter(torch.zeros(4, 2)).shape[0] > 4,
    ],
)
def test_sizes_that_decide_nothing(function: Callable[[Tensor], Any]) -> None:
    counts = watch(function)
    assert not counts.is_decisive
    assert not counts.is_compared


def test_comparison_with_the_same_result_for_all_micro_batches() -> None:
    counts = watch(lambda x: x.shape[0] < 1000)
    assert counts.is_compared  # a later batch may have more rows
    assert not counts.is_decisive


def test_size_of_a_buffer_does_not_depend_on_the_rows() -> None:
    table = torch.zeros(4, WIDTH)
    assert watch(lambda x: x.shape[0] > table.shape[0], table).is_decisive
    assert not watch(lambda x: table.shape[0] > 4, table).is_compared


def test_row_count_is_like_an_int() -> None:
    """Nothing of it is left in what is saved or copied."""
    number: Any = RowCount(2, [8], RowCounts(2, [8]))
    assert (number + 1, 3 * number, -number, f"{number}", hash(number)) == (3, 6, -2, "2", 2)
    assert {2: "two"}[number] == "two"
    assert [type(copy.deepcopy(number)), type(pickle.loads(pickle.dumps(number)))] == [int, int]
    assert [isinstance(number, int), isinstance(number / 4, float)] == [True, True]
    with RowWatch():
        assert torch.zeros(number, number * 2).shape == (2, 4)
    assert (number + 1).others == [9]
    assert (number / 4).others == [2.0]
    assert number.__eq__("2") is NotImplemented
    assert number.__add__("2") is NotImplemented
