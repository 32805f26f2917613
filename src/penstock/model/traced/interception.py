"""Interception of every operation of a forward, for the tracer and for the stages.

An interceptor is a `TorchFunctionMode`. It sees every operation between units, and the proxy of a
unit asks it what the call of that unit returns. Four kinds of calls are invisible to a function
mode (`torch.autograd.Function`, scripted functions, `vmap` and `torch.utils.checkpoint`);
`torch_compat.install_call_handlers` reports those for as long as an interceptor is entered.

These classes derive from `OpInterceptor`: `Tracer` records a forward, `StageInterpreter` runs one
stage of it, `_ConsistencyChecker` in `trace_model` runs none of it, and those in `whole_model` run
all of it, with each unit where it is.

A function mode is used, and not a dispatch mode, because it acts above autograd: a tensor that is
replaced below autograd would get no gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock import torch_compat
from penstock.model.traced.containers import NO_REBOUND_HOOKS, ReboundHooks, rebind_function
from penstock.model.traced.torch_functions import is_metadata_only
from penstock.nested_values import iter_captured_values, iter_tensors, map_tensors
from penstock.torch_compat import (
    TORCH_DIRECTORY,
    CallHandler,
    find_function_mode,
    install_call_handlers,
    remove_call_handlers,
    without_function_mode,
)


class OpInterceptor(TorchFunctionMode, CallHandler):
    """A function mode that also handles calls of units, and calls that no function mode sees."""

    # The arguments of the `torch.utils.checkpoint` that the forward is inside of, if any.
    checkpoint_options: dict[str, Any] | None = None
    in_hook = False  # whether a forward hook of a unit on another stage is running
    # By unit: hooks that refer to a parent, rebound to the copy of that parent (see `containers`).
    unit_hooks: Mapping[str, ReboundHooks] = {}

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return the output of a unit that the model's forward calls."""
        raise NotImplementedError

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Return the result of an operation.

        `func` identifies the operation and `call` runs it. Both are the same object for an ordinary
        PyTorch function. They differ for the four kinds of calls that a function mode does not see.
        """
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a read of metadata, and handle any other function as an operation."""
        if is_metadata_only(func, args):
            return func(*args, **(kwargs or {}))
        return self.intercept_op(func, args, kwargs or {}, func)

    def __enter__(self) -> OpInterceptor:
        install_call_handlers(get_current_interceptor)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            remove_call_handlers()

    def handle_script_function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Treat a scripted function as one operation."""
        with without_interception(self):
            return self.intercept_op(function, args, kwargs, call)

    handle_autograd_function = handle_script_function  # `function.apply` is one operation, too

    def handle_vmap(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], vmap: Callable[..., Any]
    ) -> Any:
        """Treat a run under `vmap` as one operation.

        The function may close over tensors of other stages. They become arguments of the operation,
        and the function that runs is a copy which closes over what these arguments turn out to be.
        """
        captured = list(_iter_captured_tensors(function))

        def call(current_tensors: list[Tensor], *call_args: Any, **call_kwargs: Any) -> Any:
            pairs = zip(captured, current_tensors, strict=True)
            replaced = {id(before): after for before, after in pairs if after is not before}
            func = rebind_function(function, replaced) if replaced else function
            return vmap(func, *call_args, **call_kwargs)

        with without_interception(self):
            return self.intercept_op(vmap, (captured, *args), kwargs, call)

    @contextmanager
    def handle_checkpoint(self, options: dict[str, Any]) -> Iterator[None]:
        """Run the function as part of the forward, and remember its checkpoint options.

        Code that a parent checkpoints is checkpointed unit by unit, so it can be cut anywhere.
        """
        before, self.checkpoint_options = self.checkpoint_options, options
        try:
            yield
        finally:
            self.checkpoint_options = before

    def notify_hooks(
        self, name: str, target: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Call the forward hooks of a unit that runs on another stage.

        A hook that only collects values works here, too. A hook that computes is abandoned at its
        first operation, by `HookSkipped`: it computes on the stage that runs the unit.
        """
        hooks = self.unit_hooks.get(name, NO_REBOUND_HOOKS).get_forward_hooks(target)
        for key, hook in hooks.items():
            hook_kwargs = (kwargs,) if key in target._forward_hooks_with_kwargs else ()
            self.in_hook = True
            try:
                hook(target, args, *hook_kwargs, output)
            except HookSkipped:
                pass
            finally:
                self.in_hook = False


def get_current_interceptor() -> OpInterceptor | None:
    """Return the interceptor of this thread. Inside a unit there is none."""
    return find_function_mode(OpInterceptor)


def without_interception(interceptor: OpInterceptor) -> AbstractContextManager[None]:
    """Take the interceptor out of the mode stack, so that what runs counts as one operation."""
    return without_function_mode(interceptor)


# Frames of files that start with these paths are not lines of the user's model. Code that is
# generated at run time has a file name such as "<string>".
_LIBRARY_PATHS = (str(Path(__file__).parent), TORCH_DIRECTORY, torch_compat.__file__, "<")


def get_source_location() -> str:
    """Return the line of the model's code that is running, for error messages."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARY_PATHS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class HookSkipped(Exception):
    """Ends a forward hook at its first operation, if its unit runs on another stage.

    Hooks of all units are called on all stages, because the model may use what they collect.
    Their operations run only on the stage that runs the unit.
    """


class EscapedTensor(Exception):
    """A tensor of a unit reached the forward without being returned by the unit, or the reverse.

    It was stored in an attribute, captured by a hook or hidden in an object. A stage that does not
    run the unit would not have it. The remedy is to expand the unit: its submodules become units.
    `problem` is the beginning of a message.
    """

    def __init__(self, unit: str, location: str, problem: str = "") -> None:
        super().__init__(unit)
        self.unit, self.location = unit, location
        name = f"unit '{unit}'" if unit else "a unit"
        self.problem = problem or f"the forward uses a tensor that {name} made but did not return"


class StaleUnit(EscapedTensor):
    """A unit reads an object that the forward has changed on a copy: it would see the old state."""

    def __init__(self, unit: str, location: str) -> None:
        problem = f"unit '{unit}' shares an object with the forward, which has changed it"
        super().__init__(unit, location, problem)


class NullHookHandle:
    """The return value of `register_hook` where the tensor is on another stage.

    It has the interface of `torch.utils.hooks.RemovableHandle`.
    """

    def remove(self) -> None:
        """Do nothing: no hook was registered."""

    def __enter__(self) -> NullHookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _iter_captured_tensors(func: Any) -> Iterator[Tensor]:
    """Yield the tensors that a function closes over, directly or through other functions."""
    pending, visited = [func], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            pending += iter_captured_values(value)


@dataclass(frozen=True)
class FunctionCall:
    """A function with its arguments, and the tensors among the arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Callable[..., Any]
    tensors: list[Tensor]

    def call_with_mapped_tensors(self, transform: Callable[[Tensor], Any]) -> tuple[Any, list[Any]]:
        """Call the function with each tensor transformed. Return the result and the new tensors."""
        args, kwargs = map_tensors((self.args, self.kwargs), transform)
        return self.call(*args, **kwargs), list(iter_tensors((args, kwargs)))
