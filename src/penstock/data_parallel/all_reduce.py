"""Gradients averaged over replicas, and tensors that the first one gives: in a few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.data_parallel.dtensor import AnyProcessGroup, to_local
from penstock.errors import RunError

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class ReplicaGroup:
    """The processes that have the same stages in copies of a pipe, by their ranks in the world.

    `waiting` is told before each wait for them, and what for.
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
    """Make each `.grad` the mean of those of all ranks of the group.

    What was averaged before stays as it is, so that steps may be added. A gradient that some ranks
    have counts as 0 for the others; one that nobody has is left alone. Every rank of the group
    calls this, with the same parameters in the same order.
    """
    if group.size() == 1:
        return
    wanted = list(dict.fromkeys(p for p in parameters if p.requires_grad))
    _check_dense(wanted)
    buckets = [_Bucket(those) for those in _group_into_buckets(wanted)]
    for bucket in buckets:  # each is sent while the next is filled
        bucket.start_all_reduce(group)
    for bucket in buckets:
        on_wait()
        bucket.finish_all_reduce()


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: AnyProcessGroup) -> None:
    """Give every rank of the group what its first has."""
    alike: dict[Any, list[Tensor]] = {}
    for part in map(to_local, tensors):
        if part.numel():
            alike.setdefault((part.device, part.dtype), []).append(part)
    for those in alike.values():
        flat = torch.cat([part.reshape(-1) for part in those])
        group.broadcast([flat], dist.BroadcastOptions()).wait()
        for part, numbers in zip(those, flat.split([p.numel() for p in those]), strict=True):
            part.copy_(numbers.view_as(part))


def _check_dense(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise RunError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which is "
                "not averaged over replicas: make its layer with sparse=False"
            )


def _bucket_key(parameter: nn.Parameter) -> tuple[torch.device, torch.dtype]:
    """Of its gradient, whether it has one or not: all ranks must come to the same."""
    asked: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.device, asked or parameter.dtype


def _group_into_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those of one kind together, up to some size."""
    full: list[list[nn.Parameter]] = []
    filling: dict[Any, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind = _bucket_key(parameter)
        those, size = filling.pop(kind, ([], 0))
        those.append(parameter)
        size += to_local(parameter).numel() * kind[1].itemsize
        if size >= BUCKET_BYTES:
            full.append(those)
        else:
            filling[kind] = those, size
    return [*full, *(those for those, _ in filling.values())]


class _Bucket:
    """Gradients one after the other, and behind them for each a 1 if there is one, or a 0."""

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
        """Fill it, and begin to add those of all ranks."""
        pairs = list(zip(self._gradient_views, self._parameters, strict=True))
        for part, parameter in pairs:
            if parameter.grad is not None:
                part.copy_(to_local(parameter.grad))
        there = [parameter.grad is not None for parameter in self._parameters]
        self._flat.mul_(1 / group.size())
        self._presence_flags.copy_(torch.tensor(there, dtype=self._flat.dtype))
        summed = torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat
        self._work: Any = group.allreduce([summed])

    def finish_all_reduce(self) -> None:
        """Wait for it, and put the means where they belong."""
        self._work.wait()
        for at, (part, parameter) in enumerate(
            zip(self._gradient_views, self._parameters, strict=True)
        ):
            if parameter.grad is not None:
                to_local(parameter.grad).copy_(part)
            elif (
                self._presence_flags[at] != 0
            ):  # to ask is to wait for it, but who has one need not
                parameter.grad = torch.zeros_like(parameter)
                to_local(parameter.grad).copy_(part)
