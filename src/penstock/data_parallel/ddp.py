"""Stages in `DistributedDataParallel` or `replicate`: their gradients are averaged once per step.

The reducer of DDP expects one forward and one backward per step. A pipe runs a forward and a
backward for each micro-batch, from several threads. So the wrapper computes the forwards with its
gradient synchronisation switched off, and `average_gradients` does the reducer's work at the end of
the step, in the caller's thread.
"""

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

# The attributes that `DistributedDataParallel.no_sync` and its forward use.
_SYNC_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")


class DDPModules:
    """The DDP wrappers among some modules, those of `replicate` included."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._replicate_modules = [module for module in modules if _is_replicate_module(module)]
        ddp_modules = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._wrappers = [*ddp_modules, *map(get_replicate_wrapper, self._replicate_modules)]
        self._saved_flags: list[tuple[bool, ...]] = []
        self._active_ddp_module: DistributedDataParallel | None = None
        for wrapper in self._wrappers:
            _check_supported(wrapper)

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    def disable_sync(self, with_grad: bool) -> None:
        """Switch gradient synchronisation off, and broadcast buffers if the wrapper asks for it."""
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
        """Restore the flags that `disable_sync` has changed."""
        # DDP keeps the wrapper whose forward is running in one class variable. Threads that enter
        # and leave wrappers at the same time may leave a wrong one behind.
        set_active_ddp(self._active_ddp_module)
        for module in self._replicate_modules:
            module.set_requires_gradient_sync(True)  # type: ignore[operator]
        for wrapper, flags in zip(self._wrappers, self._saved_flags, strict=True):
            for flag, value in zip(_SYNC_FLAGS, flags, strict=True):
                setattr(wrapper, flag, value)

    def find_wrappers_over(
        self, global_ranks: Collection[int]
    ) -> Iterator[DistributedDataParallel]:
        """Yield the wrappers whose replicas are in exactly these processes."""
        for wrapper in self._wrappers:
            if set(dist.get_process_group_ranks(wrapper.process_group)) == set(global_ranks):
                yield wrapper

    def reduce_gradients(self) -> None:
        """Average the gradients of all wrappers over their replicas."""
        # Wrappers of one process group are reduced together. `average_gradients` then sees a
        # parameter that is in several wrappers once.
        parameters_by_group: dict[AnyProcessGroup, list[nn.Parameter]] = {}
        for wrapper in self._wrappers:
            parameters_by_group.setdefault(wrapper.process_group, []).extend(
                _synced_parameters(wrapper)
            )
        for group, parameters in parameters_by_group.items():
            average_gradients(parameters, group)


@dataclass
class EnclosingDDP:
    """A record of whether the pipe itself is inside DistributedDataParallel.

    A copy of the pipe starts unwrapped.
    """

    is_wrapped: bool = False

    def check_step_allowed(self) -> None:
        """Raise if `pipe.step` is called with gradients while DDP wraps the pipe.

        A module around the pipe may be wrapped, too. DDP then is in a forward of that wrapper.
        """
        if torch.is_grad_enabled() and (self.is_wrapped or get_active_ddp() is not None):
            raise RunError(
                "the pipe is wrapped in DistributedDataParallel, which averages gradients only "
                "after a forward of the wrapper. pipe.step would leave each replica with its own "
                "gradients. Call the wrapper, or do not wrap the pipe and average .grad after "
                "each step with torch.distributed.all_reduce."
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
    """Raise if the wrapper needs anything but one mean at the end of a step."""
    options = {
        "static_graph=True": wrapper.static_graph,
        "a communication hook or mixed_precision": has_comm_hooks(wrapper),
        "delay_all_reduce_named_params": has_delayed_all_reduce(wrapper),
        "a layer with sparse=True": any(getattr(m, "sparse", False) for m in wrapper.modules()),
    }
    unsupported = [option for option, is_set in options.items() if is_set]
    if unsupported:
        raise ArgumentError(
            "a stage is in DistributedDataParallel or replicate with "
            f"{', '.join(unsupported)}. A pipe averages the gradients itself, once per step, and "
            "does not support this. Wrap the stage without it."
        )
