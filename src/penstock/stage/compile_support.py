"""What `torch.compile` has compiled, and what it must leave alone.

Layers may be compiled, each by itself. Inside them nothing stands in for a weight: the compiler
would compile anew for each stand-in, and soon give up. Their weights get their gradients in I.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from inspect import unwrap
from threading import Lock
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def find_compiled_modules(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The compiled modules among these, and everything inside them."""
    return {part for module in modules if _is_compiled(module) for part in module.modules()}


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile`, or by `torch.jit.script`."""
    return isinstance(module, torch.jit.ScriptModule) or _is_dynamo_compiled(module)


def _is_dynamo_compiled(module: nn.Module) -> bool:
    """In place, as `torch.compile(module)`, or by its forward alone."""
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def skip_dynamo_tracing(module_name: str) -> None:
    """Let the compiler pass over a module of ours, of whose functions it could make nothing.

    They run wherever a layer that is compiled calls what is not, and it would try each of them.
    """
    if "torch._dynamo" in sys.modules:
        _skip_module_code(module_name)


@cache
def _skip_module_code(module_name: str) -> None:
    skip: Any = getattr(torch._dynamo.eval_frame, "skip_code", None)
    own = [
        found
        for found in vars(sys.modules[module_name]).values()
        if _is_defined_in(found, module_name)
    ]
    inside = [found for kind in own if isinstance(kind, type) for found in vars(kind).values()]
    for function in map(unwrap, filter(callable, (*own, *inside))):
        if skip is not None and isinstance(function, FunctionType):
            within = (one for one in function.__code__.co_consts if isinstance(one, CodeType))
            for code in (function.__code__, *within):
                skip(code)


def _is_defined_in(value: object, module_name: str) -> bool:
    return getattr(value, "__module__", None) == module_name


def has_compiled_module(modules: Iterable[nn.Module]) -> bool:
    """Is one of them compiled by `torch.compile`?"""
    return "torch._dynamo" in sys.modules and any(map(_is_dynamo_compiled, modules))


def make_forward_lock(modules: Iterable[nn.Module]) -> AbstractContextManager[object]:
    """What threads enter one at a time to compute forward, if any of the modules is compiled.

    The compiler keeps what it made with the code that it made it of, and layers of one class have
    their code in common. A thread that looks there while another does may miss what is there, and
    compiles it again; after eight times the compiler gives the code up, and it runs as written.
    """
    return Lock() if has_compiled_module(modules) else nullcontext()


def disable_compile(method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs as it is, also in a function or module that is compiled as a whole."""
    alone: list[Callable[P, R]] = []  # made when it is first needed

    @wraps(method)
    def run_eagerly(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # it takes seconds to load
            return method(*args, **kwargs)
        if not alone:
            alone.append(torch.compiler.disable(method))
        return alone[0](*args, **kwargs)

    run_eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]
    return run_eagerly
