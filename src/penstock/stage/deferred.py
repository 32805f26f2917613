"""A forward whose weights wait: its modules compute with stand-ins for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.stage.compiled import compiled_parts
from penstock.stage.later import Pair, Shelf
from penstock.stage.operations import Weight


class Deferral:
    """Stand-ins for the weights of some modules, and a shelf for what they put off.

    What is `around` them may be compiled.
    """

    def __init__(self, modules: Sequence[nn.Module], around: Sequence[nn.Module] = ()) -> None:
        self._shelf = Shelf()
        self._homes: list[tuple[dict[str, Any], str, nn.Parameter, Weight]] = []
        made: dict[nn.Parameter, Weight] = {}
        closed = compiled_parts([*around, *modules])
        for module in modules:
            if module in closed:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and _can_wait(parameter):
                    if parameter not in made:
                        made[parameter] = Weight.of(parameter, parameter, self._shelf)
                    self._homes.append((module._parameters, name, parameter, made[parameter]))

    @contextmanager
    def used(self) -> Iterator[list[Pair]]:
        """Within, the modules compute with the stand-ins; gives what is put off."""
        for home, name, parameter, weight in self._homes:
            if home.get(name) is parameter:
                home[name] = weight
        try:
            yield self._shelf.open()
        finally:
            self._shelf.close()
            for home, name, parameter, weight in self._homes:
                if home.get(name) is weight:
                    home[name] = parameter


def _can_wait(parameter: nn.Parameter) -> bool:
    """A matrix or more, of the usual kind; hooks of its own want its whole gradient at once."""
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dim() > 1
        and parameter.layout is torch.strided
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )
