"""Units that another process has: their code is here, and what they have can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.absent import Absent, Look
from penstock.partition.forward.faking import Fakes
from penstock.partition.forward.skeleton import remade

_HOLLOW = "_hollow"  # the attribute


def hollow(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with other tensors: what a process keeps of another's unit."""
    made = remade(module, change)
    made.__dict__[_HOLLOW] = True
    return made


def is_hollow(module: nn.Module) -> bool:
    """Is it another process's?"""
    return _HOLLOW in module.__dict__


@contextmanager
def faked(modules: Collection[nn.Module], fakes: Fakes) -> Iterator[None]:
    """Within, what is elsewhere can be computed with; what is set on the modules is undone."""
    before = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in modules]
    made: dict[int, Tensor] = {}
    for module in modules:
        homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in homes:
            for key, tensor in held.items():
                if isinstance(tensor, Absent):
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor, fakes)
                    held[key] = made[id(tensor)]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


def _fake(tensor: Absent, fakes: Fakes) -> Tensor:
    look = Look.of(tensor)
    with fakes.mode:
        made = torch.empty_strided(look.shape, look.strides, dtype=look.dtype, device=fakes.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, look.learns)
    return made
