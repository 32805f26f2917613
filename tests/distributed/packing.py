"""Pickle values that the processes of a test exchange, with tensors stored as raw bytes.

PyTorch's own ways to send a tensor to another process open files, and take as long as a test case.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce a dense leaf tensor to its bytes. Everything else is pickled as usual."""
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
    """Return the value as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """Return the value that `packed` turned into bytes. Its tensors are new ones."""
    return pickle.loads(content)
