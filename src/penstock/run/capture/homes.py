"""Where captured steps leave the gradients: for each parameter a tensor that stays in its place.

A replay adds to it. If `.grad` was None before a step, the home begins with zeros and becomes
`.grad`; if it is another tensor, its numbers go through the home and back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.run.capture.watching import Uncapturable

Called = Callable[[nn.Parameter], str]


class Home:
    """Memory for one gradient. Its tensor is what `.grad` is, and so the caller may keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._users = self._used_by()

    def settle(self) -> None:
        """Whatever a recording holds of it is known from now on."""
        self._users = self._used_by()

    @property
    def viewed(self) -> bool:
        """Does somebody keep a view of it, who does not expect its numbers to change?"""
        return self._used_by() > self._users

    def _used_by(self) -> int:
        memory = self.tensor.untyped_storage()
        return torch._C._storage_Use_Count(memory._cdata)

    @property
    def holders(self) -> int:
        """How many hold the tensor."""
        return sys.getrefcount(self.tensor)

    def part(self) -> None:
        """Who has kept the tensor keeps its numbers; the memory stays the home's."""
        kept, self.tensor = self.tensor, self.tensor.detach()
        kept.data = kept.clone()


def _of_a_gradient() -> int:
    parameter = nn.Parameter(torch.empty(0))
    parameter.grad = torch.empty(0)
    return Home(parameter.grad).holders


_ALONE = Home(torch.empty(0)).holders
_USERS = Home(torch.empty(0))._users
_AS_GRADIENT = _of_a_gradient()  # in some versions of PyTorch the parameter is one more

Taken = dict[nn.Parameter, Home]


class Homes:
    """Of one pipe's parameters; all its recordings add to the same."""

    def __init__(self) -> None:
        self._of: Taken = {}

    @contextmanager
    def moved_in(self, learning: Iterable[nn.Parameter], called: Called) -> Iterator[Taken]:
        """Within, for a capture, the `.grad` of those that learn is at home; after it, as it was.

        Gives those that the capture adds to, once it has ended.
        """
        homes = {p: self._home(p) for p in learning}
        before = {p: p.grad for p in homes}
        touched: Taken = {}
        try:
            for parameter, home in homes.items():
                parameter.grad = home.tensor
            versions = {p: home.tensor._version for p, home in homes.items()}
            yield touched
            for parameter, home in homes.items():
                if parameter.grad is not home.tensor:
                    raise Uncapturable(
                        f"the gradient of {called(parameter)} is not added to the one before: a "
                        "hook takes it away, or it is sparse"
                    )
                if home.tensor._version != versions[parameter]:
                    touched[parameter] = home
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient
        for home in touched.values():
            home.settle()

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """For new ones: their memory is somebody else's now."""
        for parameter in parameters:
            self._of.pop(parameter, None)

    def _home(self, parameter: nn.Parameter) -> Home:
        """Where its gradient is already, if nobody else knows that one."""
        found = self._of.get(parameter)
        if found is None or not _fits(found.tensor, parameter):
            found = _adopted(parameter) or Home(torch.zeros_like(parameter))
            self._of[parameter] = found
        return found


def _adopted(parameter: nn.Parameter) -> Home | None:
    if parameter.grad is None or not _fits(parameter.grad, parameter):
        return None
    home = Home(parameter.grad)
    alone = home.holders <= _AS_GRADIENT and home._users <= _USERS
    return home if alone and not _of_a_larger_one(home.tensor) else None


def _fits(tensor: Tensor, parameter: nn.Parameter) -> bool:
    kinds = [(t.shape, t.dtype, t.device) for t in (tensor, parameter)]
    return kinds[0] == kinds[1]


def _of_a_larger_one(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def check_dense(parameters: Iterable[nn.Parameter], called: Called) -> None:
    """All gradients are such as homes can hold."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or (type(gradient) is Tensor and gradient.layout is torch.strided):
            continue
        raise Uncapturable(
            f"the gradient of {called(parameter)} is a {type(gradient).__name__} with layout "
            f"{gradient.layout}, and a replay adds to plain tensors alone"
        )


class Learned:
    """Which parameters a step gives a gradient; made before it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._before = {p: (p.grad, _version(p.grad)) for p in parameters if p.requires_grad}

    def found(self) -> list[nn.Parameter]:
        """After it."""
        return [
            p
            for p, (gradient, version) in self._before.items()
            if p.grad is not gradient or _version(p.grad) != version
        ]


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None or gradient.is_inference() else gradient._version


def viewed(taken: Taken) -> set[nn.Parameter]:
    """Those of whose last gradient somebody keeps a view: a replay would change its numbers."""
    return {p for p, home in taken.items() if p.grad is not home.tensor and home.viewed}


@contextmanager
def at_home(taken: Taken) -> Iterator[None]:
    """Around a replay."""
    away = [(p, home) for p, home in taken.items() if p.grad is not home.tensor]
    for _, home in away:
        if home.holders > _ALONE:
            home.part()
    strangers = [(p, p.grad, home.tensor) for p, home in away if p.grad is not None]
    _fill([home.tensor for p, home in away if p.grad is None])
    _copy([(home, gradient) for _, gradient, home in strangers])
    for parameter, home in away:
        parameter.grad = home.tensor
    try:
        yield
        _copy([(gradient, home) for _, gradient, home in strangers])
    finally:
        for parameter, gradient, _ in strangers:
            parameter.grad = gradient


@torch.no_grad()
def _fill(homes: list[Tensor]) -> None:
    """With zeros."""
    if homes:
        torch._foreach_zero_(homes)


@torch.no_grad()
def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """To the one from the other, in as few launches as can be."""
    if pairs:
        to, of = zip(*pairs, strict=True)
        torch._foreach_copy_(to, of)
