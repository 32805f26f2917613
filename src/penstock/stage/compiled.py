"""Which modules `torch.compile` has compiled.

Inside them nothing stands in for a weight: the compiler would compile anew for each stand-in, and
soon give up. Their weights get their gradients in I.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def compiled_parts(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The compiled modules among these, and everything inside them."""
    return {part for module in modules if _is_compiled(module) for part in module.modules()}


def _is_compiled(module: nn.Module) -> bool:
    """In place, as `torch.compile(module)`, or by its forward alone."""
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )
