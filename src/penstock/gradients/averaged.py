"""Stages in `DistributedDataParallel` or `replicate`: the mean of their gradients, once a step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import ArgumentError, RunError
from penstock.gradients.average import average, give_firsts
from penstock.gradients.shards import Group

_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")


class Averaged:
    """The wrappers among some modules.

    Each keeps to its own way of computing a forward, told that it is one without reduction. What
    its reducer would do in backwards is done here, by the caller's thread.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._composed = [part for part in parts if _is_composed(part)]
        found = [part for part in parts if isinstance(part, DistributedDataParallel)]
        self._wrappers = [*found, *map(_wrapper_of, self._composed)]
        self._flags: list[tuple[bool, ...]] = []
        self._active: DistributedDataParallel | None = None
        for wrapper in self._wrappers:
            _check(wrapper)

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    def begin(self, trains: bool) -> None:
        """No reduction from now on. Buffers are those of the first replica, as the wrapper says."""
        self._active = DistributedDataParallel._get_active_ddp_module()
        self._flags = [tuple(getattr(w, flag) for flag in _FLAGS) for w in self._wrappers]
        for module in self._composed:
            module.set_requires_gradient_sync(False)  # type: ignore[operator]
        for wrapper in self._wrappers:
            if trains and wrapper.broadcast_buffers:
                give_firsts(_buffers(wrapper), wrapper.process_group)
            for flag in _FLAGS:
                setattr(wrapper, flag, False)

    def end(self) -> None:
        """As it was before."""
        # Threads that enter and leave wrappers at once may leave one of them as the active one.
        DistributedDataParallel._active_ddp_module = self._active
        for module in self._composed:
            module.set_requires_gradient_sync(True)  # type: ignore[operator]
        for wrapper, flags in zip(self._wrappers, self._flags, strict=True):
            for flag, value in zip(_FLAGS, flags, strict=True):
                setattr(wrapper, flag, value)

    def over(self, members: Collection[int]) -> Iterator[DistributedDataParallel]:
        """Those whose replicas are in these processes."""
        for wrapper in self._wrappers:
            if set(dist.get_process_group_ranks(wrapper.process_group)) == set(members):
                yield wrapper

    def reduce(self) -> None:
        """A parameter in several wrappers of one group is averaged once."""
        together: dict[Group, list[nn.Parameter]] = {}
        for wrapper in self._wrappers:
            together.setdefault(wrapper.process_group, []).extend(_parameters(wrapper))
        for group, parameters in together.items():
            average(parameters, group)


@dataclass
class Surroundings:
    """What was seen of a pipe's surroundings. A copy has its own."""

    wrapped: bool = False  # in DistributedDataParallel

    def check_step(self) -> None:
        """A step can learn there."""
        active = DistributedDataParallel._get_active_ddp_module()  # that of a module around it
        if torch.is_grad_enabled() and (self.wrapped or active is not None):
            raise RunError(
                "the pipe is wrapped in DistributedDataParallel, which averages the gradients of a "
                "forward, and step is none: call the wrapper, or leave it away and average .grad "
                "after each step with torch.distributed.all_reduce"
            )

    def __reduce__(self) -> tuple[type[Surroundings], tuple[()]]:
        return Surroundings, ()


def _composable() -> Any:
    """The module of `replicate`; None if nobody has loaded it, and so nobody uses it."""
    return sys.modules.get("torch.distributed._composable.replicate")


def _is_composed(part: nn.Module) -> bool:
    known = _composable()
    return known is not None and isinstance(part, known.DDP)


def _wrapper_of(part: nn.Module) -> DistributedDataParallel:
    """The one inside. It is made in the first forward, if not now: by whichever thread is there."""
    state = _composable().replicate.state(part)
    if not state.has_initialized:
        state.lazy_init()
    wrapper: DistributedDataParallel = state._ddp
    return wrapper


def _parameters(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = wrapper.parameters_to_ignore
    return [p for name, p in wrapper.module.named_parameters() if name not in ignored]


def _buffers(wrapper: DistributedDataParallel) -> list[Tensor]:
    ignored = wrapper.parameters_to_ignore
    return [b for name, b in wrapper.module.named_buffers() if name not in ignored]


def _check(wrapper: DistributedDataParallel) -> None:
    """Whatever makes another reduction of it than a mean at the end, it cannot have here."""
    reasons = {
        "static_graph=True": wrapper.static_graph,
        "a communication hook or mixed_precision": getattr(wrapper, "_comm_hooks", ()),
        "delay_all_reduce_named_params": getattr(wrapper, "_delay_all_reduce_params", ()),
        "a layer with sparse=True": any(getattr(m, "sparse", False) for m in wrapper.modules()),
    }
    found = [reason for reason, there in reasons.items() if there]
    if found:
        raise ArgumentError(
            f"a stage is in DistributedDataParallel or replicate with {', '.join(found)}, but a "
            "pipe averages the gradients itself, once a step: leave that out"
        )
