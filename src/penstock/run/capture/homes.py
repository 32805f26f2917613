"""Where captured steps leave the gradients: for each parameter a tensor that stays in its place.

A replay adds to it. If `.grad` was None before a step, the home begins with zeros and becomes
`.grad`; if it is another tensor, its numbers go through the home and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.run.capture.watching import Uncapturable

Taken = dict[nn.Parameter, Tensor]


class Homes:
    """Of one pipe's parameters; all its recordings add to the same."""

    def __init__(self) -> None:
        self._of: Taken = {}

    @contextmanager
    def moved_in(self, parameters: Iterable[nn.Parameter]) -> Iterator[Taken]:
        """Within, for a capture, each `.grad` is at home; after it, as it was.

        Gives those that the capture adds to, once it has ended.
        """
        before = {p: p.grad for p in parameters if p.requires_grad}
        touched: Taken = {}
        try:
            versions = {p: self._at_home(p)._version for p in before}
            yield touched
            for parameter, version in versions.items():
                home = self._of[parameter]
                if parameter.grad is not home:
                    raise Uncapturable(
                        f"the gradient of a parameter of shape {tuple(parameter.shape)} is not "
                        "added to the one before: it is sparse, or a hook takes it away"
                    )
                if home._version != version:
                    touched[parameter] = home
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient

    def _at_home(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._of:
            own = parameter.grad
            self._of[parameter] = torch.zeros_like(parameter) if own is None else own.detach()
        parameter.grad = self._of[parameter]
        return self._of[parameter]


def fits(parameters: Iterable[nn.Parameter]) -> bool:
    """Are all gradients such as homes can hold?"""
    return all(
        p.grad is None or (type(p.grad) is Tensor and p.grad.layout is torch.strided)
        for p in parameters
    )


@contextmanager
@torch.no_grad()
def at_home(taken: Taken) -> Iterator[None]:
    """Around a replay."""
    empty: list[Tensor] = []
    strangers: list[tuple[nn.Parameter, Tensor]] = []
    for parameter, home in taken.items():
        gradient = parameter.grad
        if gradient is home:
            continue
        if gradient is None:
            empty.append(home)
        else:
            strangers.append((parameter, gradient))
            home.copy_(gradient)
        parameter.grad = home
    if empty:
        torch._foreach_zero_(empty)
    yield
    for parameter, gradient in strangers:
        gradient.copy_(taken[parameter])
        parameter.grad = gradient
