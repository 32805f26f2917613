"""A forward whose weights wait: its modules compute with stand-ins for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.stage.compiled import find_compiled_modules
from penstock.stage.later import PendingWeightGrad, WeightGradRecorder
from penstock.stage.operations import WeightProxy


class WeightGradDeferral:
    """Stand-ins for the weights of some modules, and a shelf for what they put off.

    What is `around` them may be compiled.
    """

    def __init__(self, modules: Sequence[nn.Module], wrappers: Sequence[nn.Module] = ()) -> None:
        self._recorder = WeightGradRecorder()
        self._proxied_entries: list[tuple[dict[str, Any], str, nn.Parameter, WeightProxy]] = []
        made: dict[nn.Parameter, WeightProxy] = {}
        closed = find_compiled_modules([*wrappers, *modules])
        for module in modules:
            if module in closed:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and _is_deferrable_parameter(parameter):
                    if parameter not in made:
                        made[parameter] = WeightProxy.wrap(parameter, parameter, self._recorder)
                    self._proxied_entries.append(
                        (module._parameters, name, parameter, made[parameter])
                    )

    @contextmanager
    def activate(self) -> Iterator[list[PendingWeightGrad]]:
        """Within, the modules compute with the stand-ins; gives what is put off."""
        for home, name, parameter, weight in self._proxied_entries:
            if home.get(name) is parameter:
                home[name] = weight
        try:
            yield self._recorder.start()
        finally:
            self._recorder.stop()
            for home, name, parameter, weight in self._proxied_entries:
                if home.get(name) is weight:
                    home[name] = parameter


def _is_deferrable_parameter(parameter: nn.Parameter) -> bool:
    """A matrix or more, of the usual kind; hooks of its own want its whole gradient at once."""
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dim() > 1
        and parameter.layout is torch.strided
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )
