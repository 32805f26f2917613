"""What computes in a step: the layers of a pipe, and a loss that is a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.partition.partition import Partition
from penstock.run.capture.layers import Glance, attributes_of, places_of, same
from penstock.run.capture.told import Once
from penstock.run.capture.watching import Uncapturable


class Subject:
    """As it is now: layers may have come and gone since the last step."""

    def __init__(self, partition: Partition, loss_fn: Any) -> None:
        self._partition = partition
        self._roots = _roots(partition, loss_fn)
        layers = partition.modules()
        found = {id(p): p for m in layers for p in m._parameters.values() if p is not None}
        self.parameters = list(found.values())  # of the layers: a loss that learns is refused
        of_loss = loss_fn.modules() if isinstance(loss_fn, nn.Module) else ()
        self.modules = list(dict.fromkeys([*layers, *of_loss]))
        self._check_open()
        self.modes = Once(tuple([module.training for module in self.modules]))
        self.places = self.places_now()
        told = attributes_of(self.modules)
        self.attributes = Once(tuple([tuple(own.items()) for own in told.values()]))
        self._glance = Glance(self.modules)

    def still(self, loss_fn: Any) -> bool:
        """Is it what would be made now?"""
        return same(_roots(self._partition, loss_fn), self._roots) and self._glance.still()

    def _check_open(self) -> None:
        """What a ScriptModule has, and what it changes, is not to be seen from Python."""
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise Uncapturable(
                    f"{self.called(module)} is a ScriptModule, and what it changes in a step "
                    "cannot be seen: give the module that it was made of, or take torch.compile"
                )

    def places_now(self) -> Once:
        """Where the tensors of the same modules are."""
        return Once(places_of(self.modules))

    def called(self, module: nn.Module) -> str:
        """For people."""
        name = self._partition.names().get(module, "")
        return f"layer {name} ({type(module).__name__})" if name else type(module).__name__

    def named(self, parameter: nn.Parameter) -> str:
        """For people."""
        for module, of_module in self._partition.names().items():
            for name, value in module._parameters.items():
                if value is parameter:
                    return f"{of_module}.{name}".lstrip(".")
        return f"a parameter of shape {tuple(parameter.shape)}"


def _roots(partition: Partition, loss_fn: Any) -> list[nn.Module]:
    return [*partition.roots(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
