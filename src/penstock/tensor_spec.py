"""The metadata of a tensor: everything about it except its numbers and its memory.

One class serves traces, remote tensors, messages between processes, cache keys and static inputs.
It is a tuple, because specs are compared for every message and hashed for every step.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """The shape, strides and dtype of a tensor, and whether it requires grad.

    A tensor that is not strided (a sparse one) has contiguous strides here. The device is not part
    of it: it is the device of the stage, or is kept beside the spec.

    >>> str(TensorSpec.from_tensor(torch.zeros(2, 3)))
    'float32[2, 3]'
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    layout: torch.layout = torch.strided

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        shape, layout = tensor.shape, tensor.layout
        strides = tensor.stride() if layout is torch.strided else contiguous_strides(shape)
        return TensorSpec(shape, strides, tensor.dtype, tensor.requires_grad, layout)

    @staticmethod
    def of_packed(tensor: Tensor) -> TensorSpec:
        """Return the spec of a copy without gaps, as the receiver of a tensor allocates it.

        A dense tensor keeps its strides (for example channels_last). A tensor with gaps in its
        memory becomes contiguous. The copy does not require grad.
        """
        keeps_strides = not tensor.is_contiguous() and is_dense(tensor)
        strides = tensor.stride() if keeps_strides else contiguous_strides(tensor.shape)
        return TensorSpec(tensor.shape, strides, tensor.dtype)

    def allocate(self, device: torch.device | str, pinned: bool = False) -> Tensor:
        """Return an uninitialised tensor of this shape, strides and dtype."""
        return torch.empty_strided(
            self.shape, self.strides, dtype=self.dtype, device=device, pin_memory=pinned
        )

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def spanned_bytes(self) -> int:
        """The bytes from the first to the last element, gaps included.

        >>> TensorSpec.from_tensor(torch.zeros(3, 4)[:, :2]).spanned_bytes
        40
        """
        if not all(self.shape):
            return 0
        last = sum([(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)])
        return (last + 1) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_replaceable_by(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and device, with any strides."""
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
