"""Stages in `DistributedDataParallel` or `replicate`: the mean of their gradients, once a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.data_parallel.all_reduce import average_gradients, broadcast_from_first
from penstock.data_parallel.dtensor import AnyProcessGroup
from penstock.errors import ArgumentError, RunError
from penstock.torch_compat import (
    get_active_ddp,
    get_replicate_module,
    get_replicate_wrapper,
    has_comm_hooks,
    has_delayed_all_reduce,
    set_active_ddp,
)

_SYNC_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")


class DDPModules:
    """The wrappers among some modules.

    Each keeps to its own way of computing a forward, told that it is one without reduction. What
    its reducer would do in backwards is done here, by the caller's thread.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._replicate_modules = [part for part in modules if _is_replicate_module(part)]
        found = [part for part in modules if isinstance(part, DistributedDataParallel)]
        self._wrappers = [*found, *map(get_replicate_wrapper, self._replicate_modules)]
        self._saved_flags: list[tuple[bool, ...]] = []
        self._active_ddp_module: DistributedDataParallel | None = None
        for wrapper in self._wrappers:
            _check_supported(wrapper)

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    def disable_sync(self, with_grad: bool) -> None:
        """No reduction from now on. Buffers are those of the first replica, as the wrapper says."""
        self._active_ddp_module = get_active_ddp()
        self._saved_flags = [
            tuple(getattr(w, flag) for flag in _SYNC_FLAGS) for w in self._wrappers
        ]
        for module in self._replicate_modules:
            module.set_requires_gradient_sync(False)  # type: ignore[operator]
        for wrapper in self._wrappers:
            if with_grad and wrapper.broadcast_buffers:
                broadcast_from_first(_synced_buffers(wrapper), wrapper.process_group)
            for flag in _SYNC_FLAGS:
                setattr(wrapper, flag, False)

    def restore_sync(self) -> None:
        """As it was before."""
        # Threads that enter and leave wrappers at once may leave one of them as the active one.
        set_active_ddp(self._active_ddp_module)
        for module in self._replicate_modules:
            module.set_requires_gradient_sync(True)  # type: ignore[operator]
        for wrapper, flags in zip(self._wrappers, self._saved_flags, strict=True):
            for flag, value in zip(_SYNC_FLAGS, flags, strict=True):
                setattr(wrapper, flag, value)

    def find_wrappers_over(
        self, global_ranks: Collection[int]
    ) -> Iterator[DistributedDataParallel]:
        """Those whose replicas are in these processes."""
        for wrapper in self._wrappers:
            if set(dist.get_process_group_ranks(wrapper.process_group)) == set(global_ranks):
                yield wrapper

    def reduce_gradients(self) -> None:
        """A parameter in several wrappers of one group is averaged once."""
        together: dict[AnyProcessGroup, list[nn.Parameter]] = {}
        for wrapper in self._wrappers:
            together.setdefault(wrapper.process_group, []).extend(_synced_parameters(wrapper))
        for group, parameters in together.items():
            average_gradients(parameters, group)


@dataclass
class EnclosingDDP:
    """What was seen of a pipe's surroundings. A copy has its own."""

    is_wrapped: bool = False  # in DistributedDataParallel

    def check_step_allowed(self) -> None:
        """A step can learn there."""
        active = get_active_ddp()  # that of a module around it
        if torch.is_grad_enabled() and (self.is_wrapped or active is not None):
            raise RunError(
                "the pipe is wrapped in DistributedDataParallel, which averages the gradients of a "
                "forward, and step is none: call the wrapper, or leave it away and average .grad "
                "after each step with torch.distributed.all_reduce"
            )

    def __reduce__(self) -> tuple[type[EnclosingDDP], tuple[()]]:
        return EnclosingDDP, ()


def _is_replicate_module(module: nn.Module) -> bool:
    replicate = get_replicate_module()
    return replicate is not None and isinstance(module, replicate.DDP)


def _synced_parameters(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = wrapper.parameters_to_ignore
    return [p for name, p in wrapper.module.named_parameters() if name not in ignored]


def _synced_buffers(wrapper: DistributedDataParallel) -> list[Tensor]:
    ignored = wrapper.parameters_to_ignore
    return [b for name, b in wrapper.module.named_buffers() if name not in ignored]


def _check_supported(wrapper: DistributedDataParallel) -> None:
    """Whatever makes another reduction of it than a mean at the end, it cannot have here."""
    reasons = {
        "static_graph=True": wrapper.static_graph,
        "a communication hook or mixed_precision": has_comm_hooks(wrapper),
        "delay_all_reduce_named_params": has_delayed_all_reduce(wrapper),
        "a layer with sparse=True": any(getattr(m, "sparse", False) for m in wrapper.modules()),
    }
    found = [reason for reason, there in reasons.items() if there]
    if found:
        raise ArgumentError(
            f"a stage is in DistributedDataParallel or replicate with {', '.join(found)}, but a "
            "pipe averages the gradients itself, once a step: leave that out"
        )
