"""All-reduce of gradients: average them over replicas; broadcast tensors from the first replica.

Both work on flat buckets, so that many small tensors travel in a few messages. A bucket of
gradients ends with one flag per parameter:

    [ grad of p0 | grad of p1 | ... | flag 0, flag 1, ... ]

A flag is 1 on a rank that has the gradient. After the sum, a flag of 0 means that no rank has one,
and the parameter keeps `.grad = None`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.data_parallel.dtensor import AnyProcessGroup, to_local
from penstock.errors import RunError

BUCKET_BYTES = 25 << 20  # 25 MiB, the default of DistributedDataParallel


@dataclass(frozen=True)
class ReplicaGroup:
    """The processes that hold the same stages in all replicas of a pipe.

    `on_wait` is called before each wait for the other processes, with a description of the wait.
    """

    process_group: AnyProcessGroup
    global_ranks: frozenset[int]
    on_wait: Callable[[str], object]


def _ignore_wait() -> None:
    pass


@torch.no_grad()
def average_gradients(
    parameters: Iterable[nn.Parameter],
    group: AnyProcessGroup,
    on_wait: Callable[[], object] = _ignore_wait,
) -> None:
    """Replace each `.grad` by the mean over all ranks of the group.

    The mean of equal gradients is the same gradient, so `.grad` may already contain the averaged
    gradients of earlier steps. A gradient that some ranks lack counts as 0 there. If all ranks lack
    it, it stays None.

    Every rank of the group must call this with the same parameters in the same order.
    """
    if group.size() == 1:
        return
    trainable = list(dict.fromkeys(p for p in parameters if p.requires_grad))
    _check_dense(trainable)
    buckets = [_Bucket(bucket_parameters) for bucket_parameters in _group_into_buckets(trainable)]
    for bucket in buckets:  # one bucket travels while the next one is filled
        bucket.start_all_reduce(group)
    for bucket in buckets:
        on_wait()
        bucket.finish_all_reduce()


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: AnyProcessGroup) -> None:
    """Overwrite the tensors of every rank with those of the first rank of the group."""
    # One message for all tensors of one device and dtype.
    tensors_by_kind: dict[Any, list[Tensor]] = {}
    for tensor in map(to_local, tensors):
        if tensor.numel():
            tensors_by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for local_tensors in tensors_by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in local_tensors])
        group.broadcast([flat], dist.BroadcastOptions()).wait()
        sizes = [tensor.numel() for tensor in local_tensors]
        for tensor, values in zip(local_tensors, flat.split(sizes), strict=True):
            tensor.copy_(values.view_as(tensor))


def _check_dense(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise RunError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which "
                "cannot be averaged over replicas. Create its layer with sparse=False."
            )


def _bucket_key(parameter: nn.Parameter) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of the gradient that a parameter has or would have.

    The key must not depend on `.grad`: a rank without the gradient has to build the same buckets.
    """
    grad_dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.device, grad_dtype or parameter.dtype


def _group_into_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters with the same bucket key, up to `BUCKET_BYTES` in each group."""
    # Several buckets fill at the same time, one for each key, so that parameters of mixed dtypes do
    # not end up in many small buckets.
    full: list[list[nn.Parameter]] = []
    filling: dict[Any, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key = _bucket_key(parameter)
        bucket_parameters, size = filling.pop(key, ([], 0))
        bucket_parameters.append(parameter)
        size += to_local(parameter).numel() * key[1].itemsize
        if size >= BUCKET_BYTES:
            full.append(bucket_parameters)
        else:
            filling[key] = bucket_parameters, size
    return [*full, *(bucket_parameters for bucket_parameters, _ in filling.values())]


class _Bucket:
    """A flat tensor with the gradients of some parameters, followed by their presence flags."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        sizes = [to_local(parameter).numel() for parameter in parameters]
        device, dtype = _bucket_key(parameters[0])
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=device)
        *parts, self._presence_flags = flat.split([*sizes, len(sizes)])
        self._gradient_views = [
            part.view(to_local(p).shape) for part, p in zip(parts, parameters, strict=True)
        ]
        self._flat = flat

    def start_all_reduce(self, group: AnyProcessGroup) -> None:
        """Copy the gradients into the bucket and start the sum over all ranks."""
        pairs = list(zip(self._gradient_views, self._parameters, strict=True))
        for view, parameter in pairs:
            if parameter.grad is not None:
                view.copy_(to_local(parameter.grad))
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        # Divide before the sum, as DistributedDataParallel does: a sum of float16 gradients could
        # overflow. The flags are written after the division.
        self._flat.mul_(1 / group.size())
        self._presence_flags.copy_(torch.tensor(has_gradient, dtype=self._flat.dtype))
        # Not every backend sums complex numbers, so they travel as pairs of real ones.
        summands = torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat
        self._work: Any = group.allreduce([summands])

    def finish_all_reduce(self) -> None:
        """Wait for the sum and copy the means into the gradients."""
        self._work.wait()
        for index, (view, parameter) in enumerate(
            zip(self._gradient_views, self._parameters, strict=True)
        ):
            if parameter.grad is not None:
                to_local(parameter.grad).copy_(view)
            # Reading a flag on a GPU makes the host wait, so it is read only where it is needed.
            elif self._presence_flags[index] != 0:
                parameter.grad = torch.zeros_like(parameter)
                to_local(parameter.grad).copy_(view)
