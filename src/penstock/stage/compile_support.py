"""Support for layers that `torch.compile` or `torch.jit.script` has compiled.

Layers may be compiled one by one. Three things need care:

- The weights inside a compiled module are not replaced by proxies: the compiler would recompile for
  each proxy, and soon give up. These weights get their gradients in I instead of W.
- Penstock's own functions that run below a compiled layer must not be compiled.
- Threads must not run compiled layers of the same class at the same time: see `make_forward_lock`.

Importing the compiler takes seconds, so this file never imports it. If it is not loaded, no layer
is compiled, and there is nothing to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from inspect import unwrap
from threading import Lock
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from penstock import torch_compat
from penstock.torch_compat import (
    is_compiled_by_dynamo,
    is_dynamo_loaded,
    skip_compilation,
)

P = ParamSpec("P")
R = TypeVar("R")


def find_compiled_modules(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the compiled modules among these, and all modules inside them."""
    return {
        part
        for module in modules
        if isinstance(module, torch.jit.ScriptModule) or is_compiled_by_dynamo(module)
        for part in module.modules()
    }


def skip_dynamo_tracing(module_name: str) -> None:
    """Tell the compiler to run all functions of one of Penstock's modules as written.

    The functions of a dispatch mode also run below a compiled layer, where the layer calls code
    that is not compiled. The compiler would try to compile each of these functions for nothing.
    """
    if is_dynamo_loaded():
        _skip_module_code(module_name)


@cache
def _skip_module_code(module_name: str) -> None:
    # Functions that the module imports from torch_compat are skipped as well. They wrap
    # functions of PyTorch, which the compiler skips by itself.
    module_names = module_name, torch_compat.__name__
    members = [
        member
        for member in vars(sys.modules[module_name]).values()
        if getattr(member, "__module__", None) in module_names
    ]
    methods = [member for cls in members if isinstance(cls, type) for member in vars(cls).values()]
    functions = map(unwrap, filter(callable, (*members, *methods)))
    skip_compilation(function for function in functions if isinstance(function, FunctionType))


def has_compiled_module(modules: Iterable[nn.Module]) -> bool:
    """Return whether `torch.compile` compiled any of the modules."""
    return is_dynamo_loaded() and any(map(is_compiled_by_dynamo, modules))


def make_forward_lock(modules: Iterable[nn.Module]) -> AbstractContextManager[object] | None:
    """Return a lock for forwards in threads if any of the modules is compiled, else None.

    The compiler caches its results with the code that it compiled, and layers of one class share
    their code. While one thread uses the cache, another thread may not find an entry that is there,
    and compiles again. After eight compilations (its recompile limit) the compiler gives up, and
    the code runs as written.
    """
    return Lock() if has_compiled_module(modules) else None
