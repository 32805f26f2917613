"""The caller's state of PyTorch that lives in a thread, so that workers can compute under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class CallerContext:
    """Grad mode, inference mode, autocast, default device and hooks on saved tensors."""

    grad_enabled: bool
    inference_mode: bool
    autocast_dtypes: tuple[tuple[str, torch.dtype], ...]
    autocast_cache_enabled: bool
    default_device: torch.device | None
    saved_tensors_hooks: tuple[Any, Any] | None

    @staticmethod
    def current(device_types: frozenset[str]) -> CallerContext:
        """That of this thread, as far as it matters on these types of devices."""
        default = torch.get_default_device()
        return CallerContext(
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast_dtypes=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in sorted(device_types | {"cpu"})
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache_enabled=torch.is_autocast_cache_enabled(),
            default_device=None if default == torch.device("cpu") else default,
            saved_tensors_hooks=_current_saved_tensors_hooks(),
        )

    @cached_property
    def is_grad_mode_only(self) -> bool:
        """Does nothing but grad mode matter to a forward?"""
        return (
            not self.autocast_dtypes
            and self.default_device is None
            and self.saved_tensors_hooks is None
        )

    @contextmanager
    def apply_for_forward(self) -> Iterator[None]:
        """Within, what holds while a forward or a recomputation computes, besides grad mode."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast_dtypes:
                stack.enter_context(
                    torch.autocast(kind, dtype, cache_enabled=self.autocast_cache_enabled)
                )
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                )
            yield


def _current_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Those in use here. PyTorch's checkpoint has some that repeat the whole call: not for us."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if is_from_torch_checkpoint(hooks):
        return _identity, _identity
    found: tuple[Any, Any] | None = hooks
    return found


def is_from_torch_checkpoint(hooks: tuple[Any, Any] | None) -> bool:
    """Are these hooks on saved tensors those of PyTorch's checkpoint?"""
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def no_autocast() -> Iterator[None]:
    """Within, as in a thread that has just begun: a backward may be asked for under autocast."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
