"""What computes in a step: the layers of a pipe, and a loss that is a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.partition.partition import Partition
from penstock.run.capture.layers import (
    ModuleSnapshot,
    are_same_objects,
    fingerprint_attributes,
    fingerprint_tensors_and_hooks,
)
from penstock.run.capture.told import CachedHash
from penstock.run.capture.watching import CaptureError


class StepModules:
    """As it is now: layers may have come and gone since the last step."""

    def __init__(self, partition: Partition, loss_fn: Any) -> None:
        self._partition = partition
        self._roots = _list_roots(partition, loss_fn)
        layers = partition.modules()
        found = {id(p): p for m in layers for p in m._parameters.values() if p is not None}
        self.parameters = list(found.values())  # of the layers: a loss that learns is refused
        of_loss = loss_fn.modules() if isinstance(loss_fn, nn.Module) else ()
        self.modules = list(dict.fromkeys([*layers, *of_loss]))
        self._check_no_script_modules()
        self.training_modes = CachedHash(tuple([module.training for module in self.modules]))
        self.tensors_and_hooks = self.fingerprint_current_tensors()
        told = fingerprint_attributes(self.modules)
        self.attributes = CachedHash(tuple([tuple(own.items()) for own in told.values()]))
        self._snapshot = ModuleSnapshot(self.modules)

    def is_current(self, loss_fn: Any) -> bool:
        """Is it what would be made now?"""
        return (
            are_same_objects(_list_roots(self._partition, loss_fn), self._roots)
            and self._snapshot.is_unchanged()
        )

    def _check_no_script_modules(self) -> None:
        """What a ScriptModule has, and what it changes, is not to be seen from Python."""
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise CaptureError(
                    f"{self.describe_module(module)} is a ScriptModule, and what it changes in a step "
                    "cannot be seen: give the module that it was made of, or take torch.compile"
                )

    def fingerprint_current_tensors(self) -> CachedHash:
        """Where the tensors of the same modules are."""
        return CachedHash(fingerprint_tensors_and_hooks(self.modules))

    def describe_module(self, module: nn.Module) -> str:
        """For people."""
        name = self._partition.names().get(module, "")
        return f"layer {name} ({type(module).__name__})" if name else type(module).__name__

    def describe_parameter(self, parameter: nn.Parameter) -> str:
        """For people."""
        for module, of_module in self._partition.names().items():
            for name, value in module._parameters.items():
                if value is parameter:
                    return f"{of_module}.{name}".lstrip(".")
        return f"a parameter of shape {tuple(parameter.shape)}"


def _list_roots(partition: Partition, loss_fn: Any) -> list[nn.Module]:
    return [*partition.roots(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
