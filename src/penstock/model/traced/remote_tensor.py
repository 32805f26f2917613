"""Values that are not here: what stands for a tensor that another stage has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError


@dataclass(frozen=True)
class TensorSpec:
    """What can be seen of a tensor without its numbers, but for its device: that is the stage's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorSpec:
        """Of a tensor that is here; one without strides looks as if it had the usual ones."""
        shape = tuple(tensor.shape)
        strides = (
            tuple(tensor.stride()) if tensor.layout is torch.strided else _contiguous_strides(shape)
        )
        return TensorSpec(shape, strides, tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class _ForwardCounter(threading.local):
    count = 0


FORWARD_COUNTER = _ForwardCounter()  # which forward this thread is in


class RemoteTensor(Tensor):
    """Looks like the tensor that it stands for; whoever computes with it is told."""

    value_index: int  # which one of the plan's
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def from_spec(spec: TensorSpec, device: torch.device, value_index: int) -> RemoteTensor:
        """Made once, and used in every run: nobody can change it."""
        made: RemoteTensor = Tensor._make_wrapper_subclass(
            RemoteTensor,
            spec.shape,
            strides=spec.strides,
            dtype=spec.dtype,
            device=device,
            requires_grad=spec.requires_grad,
        )
        made.value_index = value_index
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RemoteTensor.from_spec, (TensorSpec.from_tensor(self), self.device, self.value_index)

    def __hash__(self) -> int:
        """Another one in each run, as a tensor would be: what was remembered of it is not found."""
        return hash((id(self), FORWARD_COUNTER.count))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Only what no plan foresaw comes here."""
        raise RunError(
            f"{func} was called with a value of another stage, where no plan foresaw it: the "
            "forward did something that it had not done when it was planned, or computes where "
            "it cannot be followed (a compiled or scripted function between units)"
        )
