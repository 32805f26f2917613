"""Values between the processes of a test: pickled, tensors by their numbers.

PyTorch's own ways to send a tensor to another process open files, and take as long as a case.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A tensor of numbers in memory; all else as it is."""
        if type(value) is not Tensor or value.layout is not torch.strided or not value.is_leaf:
            return NotImplemented
        numbers = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (numbers, value.dtype, tuple(value.shape), value.requires_grad)


def _tensor(numbers: bytes, dtype: torch.dtype, shape: tuple[int, ...], learns: bool) -> Tensor:
    flat = (
        torch.frombuffer(bytearray(numbers), dtype=dtype) if numbers else torch.empty(0).to(dtype)
    )
    return flat.reshape(shape).requires_grad_(learns)


def packed(value: Any) -> bytes:
    """As bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """The value again; its tensors are new ones."""
    return pickle.loads(content)
