"""Remote tensors: placeholders for tensors that another stage has.

Every stage runs the model's own forward. Where that forward handles a tensor that another stage
computes, this stage passes a `RemoteTensor` around instead. It has the shape, strides, dtype and
device of the real tensor, so Python code that reads metadata works as usual. It has no memory, so
an operation on it raises, unless the stage's interpreter has replaced it by a received tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.data_parallel.dtensor import Sharding
from penstock.errors import RunError
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import disabled_torch_function, make_wrapper_subclass


class _ForwardCounter(threading.local):
    count = 0


# Counts the stage forwards of this thread. `StageForward` increments it; hashes depend on it.
FORWARD_COUNTER = _ForwardCounter()


class RemoteTensor(Tensor):
    """A placeholder with the metadata of a tensor that another stage has.

    It is a wrapper subclass and not a meta tensor: a meta tensor would report the wrong device, and
    an operation on it would not raise.
    """

    value_index: int  # the index of the value in `Trace.values`, or NO_VALUE for a module's tensor
    sharding: Sharding | None = None  # of a DTensor
    # Function modes still see the tensor. Without this line every operation would also go through
    # `Tensor.__torch_function__`, which wraps its results in the subclass.
    __torch_function__ = disabled_torch_function

    @staticmethod
    def from_spec(spec: TensorSpec, device: torch.device, value_index: int) -> RemoteTensor:
        """Return a placeholder for a value.

        It is built once per stage program and used for every micro-batch. That is safe because no
        operation can change it.
        """
        remote_tensor: RemoteTensor = make_wrapper_subclass(
            RemoteTensor,
            spec.shape,
            strides=spec.strides,
            dtype=spec.dtype,
            device=device,
            requires_grad=spec.requires_grad,
        )
        remote_tensor.value_index = value_index
        return remote_tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RemoteTensor.from_spec, (TensorSpec.from_tensor(self), self.device, self.value_index)

    def __hash__(self) -> int:
        """Return a hash that differs between forwards.

        A real tensor is a new object in each forward. A model that caches results in a dict with
        tensors as keys would find a stale entry if the placeholder hashed the same every time.
        """
        return hash((id(self), FORWARD_COUNTER.count))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Raise: the interpreter handles every operation that the trace contains before this."""
        raise RunError(
            f"{func} was called with a tensor that another stage computes, which the traced "
            "forward did not do. The forward took another path, or it computes where Penstock "
            "cannot follow it (a compiled or scripted function between units). Put that code into "
            "one unit with units=."
        )
