"""Stages in `fully_shard`: their gradients are reduced and scattered once per step.

`fully_shard` reduces in every backward, and a step has one for each micro-batch. During a step the
unsharded gradients are accumulated instead:

    disable_sync     no reduction; gradients accumulated in earlier no_sync steps are set aside
    (the step)       every backward adds to the unsharded, accumulated gradient
    finish_step      rescale, add the earlier gradients, reduce once, reshard

Between steps the parameters are sharded, also after a forward without a backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.torch_compat import (
    accumulates_in_grad,
    clear_unsharded_grads,
    finish_fsdp_backward,
    get_accumulated_grad,
    get_fsdp_params,
    get_fsdp_states,
    is_fsdp_root,
    reset_fsdp_after_error,
    set_accumulated_grad,
)


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module."""
    # If torch.distributed.fsdp has not been imported, no module can be sharded. Importing it here
    # would take long.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class FSDPModules:
    """The modules, out of a list, on which `fully_shard` was called."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules: list[Any] = [module for module in modules if is_fsdp_module(module)]
        self._previous_gradients: list[tuple[Any, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._modules)

    def disable_sync(self) -> None:
        """Switch the reduction off. Backwards accumulate unsharded gradients from now on."""
        self._set_flags(reduce_gradients=False, is_last_backward=False)
        self._previous_gradients = [
            (fsdp_param, gradient)
            for fsdp_param in self._iter_fsdp_params()
            if (gradient := get_accumulated_grad(fsdp_param)) is not None
        ]
        for fsdp_param, _ in self._previous_gradients:
            set_accumulated_grad(fsdp_param, None)

    def finish_step(self, reduce_gradients: bool, rescale_factor: Tensor | None) -> None:
        """Finish the step after all backwards. Reduce unless a later step adds to the gradients."""
        # The loss accumulator has rescaled every `.grad`. An accumulated gradient that is elsewhere
        # has its provisional scale until here.
        for fsdp_param in self._iter_fsdp_params():
            gradient = get_accumulated_grad(fsdp_param)
            if gradient is None or rescale_factor is None or accumulates_in_grad(fsdp_param):
                continue
            gradient.mul_(rescale_factor.to(gradient.device))
        for fsdp_param, previous in self._previous_gradients:
            gradient = get_accumulated_grad(fsdp_param)
            total = previous if gradient is None else previous.add_(gradient)
            set_accumulated_grad(fsdp_param, total)
        self._set_flags(reduce_gradients=reduce_gradients, is_last_backward=True)
        for state in self._find_root_states():
            finish_fsdp_backward(state)
        self._set_flags(reduce_gradients=True, is_last_backward=True)

    def reshard(self) -> None:
        """Free the unsharded parameters that a forward has left behind."""
        for module in self._modules:
            module.reshard()

    def discard_gradients(self) -> None:
        """Drop all gradients that were not reduced, after the step has failed."""
        for fsdp_param in self._iter_fsdp_params():
            clear_unsharded_grads(fsdp_param)
        self._set_flags(reduce_gradients=True, is_last_backward=True)
        for state in self._find_root_states():
            reset_fsdp_after_error(state)
        self.reshard()

    def _set_flags(self, reduce_gradients: bool, is_last_backward: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(reduce_gradients, recurse=False)
            module.set_reshard_after_backward(is_last_backward, recurse=False)
            module.set_is_last_backward(is_last_backward)

    def _find_root_states(self) -> list[Any]:
        """Return the FSDP states of the outermost sharded modules.

        FSDP determines them in its first forward. Before that the list is empty.
        """
        return [state for state in get_fsdp_states(self._modules) if is_fsdp_root(state)]

    def _iter_fsdp_params(self) -> Iterator[Any]:
        """Yield the records that `fully_shard` keeps of its parameters, after the first forward."""
        for state in get_fsdp_states(self._modules):
            yield from get_fsdp_params(state)
