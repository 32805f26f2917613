"""Numbers that a forward reads in Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.stage.branches import BranchWatch


def read_array(tensor: Tensor) -> BranchWatch:
    watch = BranchWatch()
    with watch:
        tensor.tolist()
    assert watch.has_read
    return watch


@pytest.mark.parametrize("size", [6, 6000])
def test_arrays_of_complex_numbers_differ_by_their_imaginary_parts(size: int) -> None:
    """These were left out, with a warning of PyTorch."""
    numbers = torch.randn(size, dtype=torch.complex64)
    assert read_array(numbers).arrays == read_array(numbers.clone()).arrays
    assert read_array(numbers).arrays != read_array(numbers.conj()).arrays


def test_large_whole_numbers_are_part_of_the_way() -> None:
    """As float32 numbers, ids above 2 ** 24 were the same."""
    ids = torch.tensor([2**40, 2**41])
    assert read_array(ids).way == read_array(ids.clone()).way
    assert read_array(ids).way != read_array(ids + 1).way


def test_numbers_that_are_read_inside_of_a_transform_are_noted() -> None:
    """The tensors of `torch.func` have no memory, and asking for it raised in the forward."""

    def compute(weight: Tensor) -> Tensor:
        numbers = torch.stack([weight.sum(), weight[0]])
        return weight.sum() * (1.0 if numbers[0].item() > 0 else numbers[1].item())

    watch = BranchWatch()
    with watch:
        gradient = torch.func.grad(compute)(torch.tensor([-3.0, 2.0]))
    assert torch.equal(gradient, torch.tensor([-3.0, -3.0]))
    assert watch.has_read
    assert watch.arrays == [-1.0, -3.0]
