"""Stages in `fully_shard`: their gradients are scattered and reduced once a step.

Between steps its parameters are sharded, also after a forward that no backward follows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.torch_compat import (
    clear_unsharded_grads,
    finish_fsdp_backward,
    get_fsdp_params,
    get_fsdp_states,
    is_fsdp_root,
)


def is_fsdp_module(module: nn.Module) -> bool:
    """Has `fully_shard` been called on it?"""
    known: Any = sys.modules.get("torch.distributed.fsdp")  # else nobody uses it
    return known is not None and isinstance(module, known.FSDPModule)


class FSDPModules:
    """The modules among some that were given to `fully_shard`."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules: list[Any] = [part for part in modules if is_fsdp_module(part)]
        self._previous_gradients: list[tuple[Any, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._modules)

    def disable_sync(self) -> None:
        """No reduction from now on; what a backward has gathered stays for the next."""
        self._set_flags(reduce_gradients=False, is_last_backward=False)
        self._previous_gradients = [
            (inner, inner.unsharded_accumulated_grad)
            for inner in self._iter_fsdp_params()
            if inner.unsharded_accumulated_grad is not None
        ]
        for inner, _ in self._previous_gradients:
            inner.unsharded_accumulated_grad = None

    def finish_step(self, reduce_gradients: bool, rescale_factor: Tensor | None) -> None:
        """All backwards have been: reduce what they gave, unless another step is to add to it.

        What is kept in the dtype of the reduction nobody else could multiply by the factor.
        """
        for inner in self._iter_fsdp_params():
            kept = inner.unsharded_accumulated_grad
            if kept is not None and rescale_factor is not None:
                kept.mul_(rescale_factor.to(kept.device))
        for inner, before in self._previous_gradients:
            kept = inner.unsharded_accumulated_grad
            inner.unsharded_accumulated_grad = before if kept is None else before.add_(kept)
        self._set_flags(reduce_gradients=reduce_gradients, is_last_backward=True)
        for state in self._find_root_states():
            finish_fsdp_backward(state)
        self._set_flags(reduce_gradients=True, is_last_backward=True)

    def reshard(self) -> None:
        """Shard what a forward has left whole."""
        for module in self._modules:
            module.reshard()

    def discard_gradients(self) -> None:
        """The step has failed: nothing of it may be in the next."""
        for inner in self._iter_fsdp_params():
            clear_unsharded_grads(inner)
        for module in self._modules:
            (state,) = get_fsdp_states([module])
            if is_fsdp_root(state) and hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
        self._set_flags(reduce_gradients=True, is_last_backward=True)
        self.reshard()

    def _set_flags(self, reduce_gradients: bool, is_last_backward: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(reduce_gradients, recurse=False)
            module.set_reshard_after_backward(is_last_backward, recurse=False)
            module.set_is_last_backward(is_last_backward)

    def _find_root_states(self) -> list[Any]:
        """Those that a forward has found to be in no other; none before the first."""
        return [state for state in get_fsdp_states(self._modules) if is_fsdp_root(state)]

    def _iter_fsdp_params(self) -> Iterator[Any]:
        """What it keeps of each parameter, after the first forward."""
        for state in get_fsdp_states(self._modules):
            yield from get_fsdp_params(state)
