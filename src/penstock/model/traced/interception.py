"""Who watches a forward: the part that the dry run and the stages have in common.

A watcher is a TorchFunctionMode. It sees every operation between units, and is asked where a unit
is called. Four things a mode does not see: functions with a backward of their own, scripted
functions, `vmap`, and PyTorch's checkpoint. These tell a watcher of themselves, once
`follow_all` was called.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import apis as _apis
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint as torch_checkpoint

from penstock.model.traced.containers import ReboundHooks, rebind_function


class OpInterceptor(TorchFunctionMode):
    """Sees each operation of a forward, and is asked where a unit is called."""

    checkpoint_options: dict[str, Any] | None = None  # how, inside PyTorch's checkpoint
    unit_hooks: Mapping[str, ReboundHooks] = {}

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A parent calls a unit."""
        raise NotImplementedError

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """A function is called; `call` is how, if another name is to be known for it."""
        raise NotImplementedError


def get_current_interceptor() -> OpInterceptor | None:
    """The one under which this thread computes; None inside units, and where nobody watches."""
    for at in range(torch._C._len_torch_function_stack() - 1, -1, -1):
        mode = torch._C._get_function_stack_at(at)
        if isinstance(mode, OpInterceptor):
            return mode
    return None


@contextmanager
def without_interception(interceptor: OpInterceptor) -> Iterator[None]:
    """Within, nobody watches: what is computed is one thing."""
    stack = _get_current_function_mode_stack()
    above = stack[stack.index(interceptor) :]
    for _ in above:
        torch._C._pop_torch_function_stack()
    for mode in above[1:]:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in above[1:]:
            torch._C._pop_torch_function_stack()
        for mode in above:
            torch._C._push_on_torch_function_stack(mode)


_LIBRARY_PATHS = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")


def get_source_location() -> str:
    """The line of the model's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARY_PATHS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class HookSkipped(Exception):
    """A hook of a unit that is not run here computes."""


class NullHookHandle:
    """In the place of a hook's handle, where the hook is on another stage."""

    def remove(self) -> None:
        """There is none."""

    def __enter__(self) -> NullHookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# ---- what a mode does not see -------------------------------------------------------------

functorch_apis: Any = _apis  # its names are not exported
checkpoint_module: Any = torch_checkpoint

_patch_lock = threading.Lock()


def install_interception_patches() -> None:
    """Let what a mode does not see tell a watcher; where nobody watches, nothing is different."""
    with _patch_lock:
        if not hasattr(torch.autograd.Function.apply, "_tells_watchers"):
            _patch_autograd_function()
            _patch_script_function()
            _patch_vmap()
            _patch_checkpoint()


def _patch_autograd_function() -> None:
    original = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = get_current_interceptor()
        if watcher is None:
            return original(cls, *args, **kwargs)
        if cls is torch_checkpoint.CheckpointFunction:
            function, preserve, *rest = args
            with _set_checkpoint_options(watcher, {"preserve_rng_state": preserve}):
                return function(*rest)
        with without_interception(watcher):
            return watcher.intercept_op(cls, args, kwargs, lambda *a, **k: original(cls, *a, **k))

    apply._tells_watchers = True  # type: ignore[attr-defined]
    apply.__doc__ = original.__doc__
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def _patch_script_function() -> None:
    kind = torch.jit.ScriptFunction
    original = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = get_current_interceptor()
        if watcher is None:
            return original(self, *args, **kwargs)
        with without_interception(watcher):
            return watcher.intercept_op(self, args, kwargs, lambda *a, **k: original(self, *a, **k))

    kind.__call__ = call  # type: ignore[method-assign]


def _patch_vmap() -> None:
    original = functorch_apis.vmap_impl

    def vmap_impl(func: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = get_current_interceptor()
        if watcher is None:
            return original(func, *args, **kwargs)
        captured = list(_iter_captured_tensors(func))

        def call(current_tensors: list[Tensor], *call_args: Any, **call_kwargs: Any) -> Any:
            pairs = zip(captured, current_tensors, strict=True)
            made = {id(before): after for before, after in pairs if after is not before}
            return original(
                rebind_function(func, made) if made else func, *call_args, **call_kwargs
            )

        with without_interception(watcher):
            return watcher.intercept_op(original, (captured, *args), kwargs, call)

    functorch_apis.vmap_impl = vmap_impl


def _iter_captured_tensors(func: Any) -> Iterator[Tensor]:
    """The tensors that a function has from around it, and those that functions there have."""
    waiting, seen = [func], set[int]()
    while waiting:
        inside = waiting.pop()
        if id(inside) in seen:
            continue
        seen.add(id(inside))
        if isinstance(inside, Tensor):
            yield inside
        elif isinstance(inside, tuple | list):
            waiting += inside
        elif isinstance(inside, partial):
            waiting += [inside.func, *inside.args, *inside.keywords.values()]
        elif isinstance(inside, FunctionType):
            waiting += [
                cell.cell_contents for cell in inside.__closure__ or () if _has_contents(cell)
            ]


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _patch_checkpoint() -> None:
    """What a parent checkpoints is checkpointed unit by unit: so it can be cut anywhere."""
    original = checkpoint_module._checkpoint_without_reentrant_generator

    def generator(
        function: Any,
        preserve_rng_state: bool,
        context_fn: Any,
        determinism_check: Any,
        debug: Any,
        *more: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        watcher = get_current_interceptor()
        if watcher is None:
            yield from original(
                function, preserve_rng_state, context_fn, determinism_check, debug, *more, **kwargs
            )
            return
        how = {
            "preserve_rng_state": preserve_rng_state,
            "context_fn": context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
        }
        with _set_checkpoint_options(watcher, how):
            yield

    checkpoint_module._checkpoint_without_reentrant_generator = generator


@contextmanager
def _set_checkpoint_options(interceptor: OpInterceptor, options: dict[str, Any]) -> Iterator[None]:
    before, interceptor.checkpoint_options = interceptor.checkpoint_options, options
    try:
        yield
    finally:
        interceptor.checkpoint_options = before
