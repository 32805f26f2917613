"""Units that another process has: their code is here, and what they have can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.absent import RemoteTensor, TensorSpec
from penstock.partition.forward.faking import FakeTensorFactory
from penstock.partition.forward.skeleton import copy_module_tree

_REMOTE_UNIT_KEY = "_hollow"  # the attribute


def build_remote_unit(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with other tensors: what a process keeps of another's unit."""
    made = copy_module_tree(module, transform)
    made.__dict__[_REMOTE_UNIT_KEY] = True
    return made


def is_remote_unit(module: nn.Module) -> bool:
    """Is it another process's?"""
    return _REMOTE_UNIT_KEY in module.__dict__


@contextmanager
def fake_remote_tensors(
    modules: Collection[nn.Module], fake_factory: FakeTensorFactory
) -> Iterator[None]:
    """Within, what is elsewhere can be computed with; what is set on the modules is undone."""
    before = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in modules]
    made: dict[int, Tensor] = {}
    for module in modules:
        homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in homes:
            for key, tensor in held.items():
                if isinstance(tensor, RemoteTensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = _make_fake(tensor, fake_factory)
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


def _make_fake(tensor: RemoteTensor, fake_factory: FakeTensorFactory) -> Tensor:
    look = TensorSpec.from_tensor(tensor)
    with fake_factory.mode:
        made = torch.empty_strided(
            look.shape, look.strides, dtype=look.dtype, device=fake_factory.device
        )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, look.requires_grad)
    return made
