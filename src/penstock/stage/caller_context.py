"""The thread-local state of the caller, which worker threads apply when they compute.

Grad mode, inference mode, autocast, the default device, hooks on saved tensors, context variables
and the values in a `threading.local` belong to a thread. A worker thread starts with the defaults.
Without this module, `with torch.autocast` around a call of the pipe would have no effect on its
stages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from penstock.device.accelerator import list_autocast_types
from penstock.torch_compat import (
    are_checkpoint_hooks,
    get_default_device,
    get_innermost_dispatch_mode,
    get_saved_tensor_hooks,
    has_draw_key,
)

_CPU = torch.device("cpu")
_NULL_CONTEXT = nullcontext()


def is_inside_cell() -> bool:
    """Return whether this thread computes a cell of a pipe, with random numbers of its own."""
    return has_draw_key() or getattr(get_innermost_dispatch_mode(), "belongs_to_cell", False)


@dataclass(frozen=True)
class CallerContext:
    """The state of a calling thread, as far as it matters to a forward.

    Attributes:
        grad_enabled: The grad mode. The runtime applies it, together with inference mode.
        inference_mode: Whether inference mode is on.
        autocast_dtypes: The device types for which autocast is on, each with its dtype.
        autocast_cache_enabled: Whether autocast caches the weights that it has cast.
        default_device: The device of `torch.set_default_device`, or None for the CPU.
        saved_tensors_hooks: The innermost hooks on saved tensors, or None.
        variables: The caller's context variables (`contextvars`).
        thread_locals: The values that the caller has in each `threading.local` of the model.
        thread: The caller's thread.
    """

    grad_enabled: bool
    inference_mode: bool
    autocast_dtypes: tuple[tuple[str, torch.dtype], ...]
    autocast_cache_enabled: bool
    default_device: torch.device | None
    saved_tensors_hooks: tuple[Any, Any] | None
    variables: Context = field(default_factory=copy_context, compare=False, repr=False)
    thread_locals: tuple[tuple[threading.local, dict[str, Any]], ...] = field(
        default=(), compare=False, repr=False
    )

    thread: int = field(default_factory=threading.get_ident, compare=False, repr=False)

    @staticmethod
    def current(
        device_types: AbstractSet[str], thread_locals: Sequence[threading.local] = ()
    ) -> CallerContext:
        """Return the context of this thread for stages on devices of these types."""
        # A stage on a GPU may compute with CPU tensors, too, so autocast for the CPU always counts.
        default = get_default_device()
        kinds = sorted(device_types | {"cpu"})
        return CallerContext(
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast_dtypes=tuple(
                [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
            ),
            autocast_cache_enabled=torch.is_autocast_cache_enabled(),
            default_device=None if default == _CPU else default,
            saved_tensors_hooks=_current_saved_tensors_hooks(),
            thread_locals=tuple([(local, dict(vars(local))) for local in thread_locals]),
        )

    @cached_property
    def is_grad_mode_only(self) -> bool:
        """Return whether `apply_for_forward` has nothing to do, so that it can be left out."""
        return (
            not self.autocast_dtypes
            and self.default_device is None
            and self.saved_tensors_hooks is None
        )

    def copy_variables(self) -> Context:
        """Return the context variables of the caller, to run a lane under them.

        Threads cannot enter one context at the same time, so each lane has a copy. What layers set
        is gone after it.
        """
        return self.variables.copy()

    @contextmanager
    def use_thread_locals(self) -> Iterator[None]:
        """Give this thread the thread-local values of the caller within the context."""
        tables = [vars(local) for local, _ in self.thread_locals]
        before = [dict(table) for table in tables]
        for table, (_, values) in zip(tables, self.thread_locals, strict=True):
            # A worker keeps what layers have left there. In the caller's own thread, the table may
            # be the one that the layers should see, and they may change it.
            if threading.get_ident() == self.thread and not _has_same_values(table, values):
                table.clear()
            table.update(values)
        try:
            yield
        finally:
            for table, old, (_, values) in zip(tables, before, self.thread_locals, strict=True):
                if threading.get_ident() != self.thread:
                    for name in values.keys() - old.keys():
                        table.pop(name, None)
                    table.update({name: old[name] for name in values.keys() & old.keys()})
                elif not _has_same_values(old, values):
                    table.clear()
                    table.update(old)

    @contextmanager
    def apply_for_forward(self) -> Iterator[None]:
        """Apply autocast, the default device and hooks to a forward or recomputation."""
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


def _has_same_values(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(first[name] is second[name] for name in first)


def _current_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the innermost hooks on saved tensors of this thread."""
    hooks = get_saved_tensor_hooks()
    # `torch.utils.checkpoint` around a call of the pipe sets hooks that drop each saved tensor and
    # repeat the whole call when one is needed. They must not see the tensors of a stage. Where the
    # stage runs in the caller's own thread they are active, so hooks that keep each tensor are put
    # on top of them.
    if are_checkpoint_hooks(hooks):
        return _identity, _identity
    return hooks


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def no_autocast() -> AbstractContextManager[object]:
    """Turn autocast off for the duration of the context, as it is in a new thread.

    The runtime uses it for work that runs in the caller's own thread. `loss.backward()` may be
    called inside `with torch.autocast`, and gradients must not depend on that.
    """
    enabled = [kind for kind in list_autocast_types() if torch.is_autocast_enabled(kind)]
    if not enabled:
        return _NULL_CONTEXT
    stack = ExitStack()
    for kind in enabled:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
