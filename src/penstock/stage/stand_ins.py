"""Stand-ins for parameters that have hooks.

Through `pipe(x)` a parameter gets the sum of its micro-batches' gradients, and its hooks are for
that. A stage computes one micro-batch: it must not meet them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


class StandIns:
    """For the hooked parameters of some modules: the same memory, no hooks."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._homes = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad and parameter._backward_hooks
        ]
        hooked = dict.fromkeys(parameter for _, _, parameter in self._homes)
        self._made = {parameter: nn.Parameter(parameter.detach()) for parameter in hooked}

    def __bool__(self) -> bool:
        return bool(self._made)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What stands in for it: itself, if it has no hooks."""
        return self._made.get(parameter, parameter)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within, the modules compute with the stand-ins."""
        for module, name, parameter in self._homes:
            module._parameters[name] = self._made[parameter]
        try:
            yield
        finally:
            for module, name, parameter in self._homes:
                module._parameters[name] = parameter
