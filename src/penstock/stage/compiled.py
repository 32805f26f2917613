"""What `torch.compile` has compiled, and what it must leave alone.

Layers may be compiled, each by itself. Inside them nothing stands in for a weight: the compiler
would compile anew for each stand-in, and soon give up. Their weights get their gradients in I.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def compiled_parts(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The compiled modules among these, and everything inside them."""
    return {part for module in modules if _is_compiled(module) for part in module.modules()}


def _is_compiled(module: nn.Module) -> bool:
    """In place, as `torch.compile(module)`, by its forward alone, or by `torch.jit.script`."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def never_compiled(method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs as it is, also in a function or module that is compiled as a whole."""
    alone: list[Callable[P, R]] = []  # made when it is first needed

    @wraps(method)
    def as_it_is(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # it takes seconds to load
            return method(*args, **kwargs)
        if not alone:
            alone.append(torch.compiler.disable(method))
        return alone[0](*args, **kwargs)

    as_it_is._torchdynamo_disable = True  # type: ignore[attr-defined]
    return as_it_is
