"""Stand-ins for what a stage computes with and cannot use as it is.

A parameter, a buffer or a module that is another rank's: two threads may neither add to one `.grad`
nor write one module, and the owner may be on another device. And, through `pipe(x)`, a parameter
that has hooks: they are for its gradient, and a stage has one for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError

ALL = ("_parameters", "_buffers", "_modules")  # that a module registers


def real(thing: Any) -> Any:
    """What a stand-in stands for: another call may be computing with one, in another thread."""
    return thing.__dict__.get("_stands_for", thing)


class Doubles:
    """The stand-ins of one rank in one call, each made when it is first asked for.

    A parameter's has no hooks and a gradient of its own, and is of the same memory if it is on the
    same device. A buffer's counts changes by itself. A module's is a copy that holds stand-ins.
    What is `foreign` is told by its id: a tensor takes long to hash.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        foreign: Collection[int] = (),
        hooked: bool = False,
    ) -> None:
        self._device, self.foreign, self._hooked = device, foreign, hooked
        self._made: dict[int, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return self._hooked or bool(self.foreign)

    def of(self, thing: Any) -> Any:
        """What stands in for it: itself, if it can be used as it is."""
        if id(thing) not in self.foreign and not (self._hooked and _has_hooks(thing)):
            return thing
        if id(thing) not in self._made:
            self._made[id(thing)] = thing, self._make(thing)
        return self._made[id(thing)][1]

    def made(self, parameter: nn.Parameter) -> nn.Parameter:
        """What has been made for it; itself, if nothing has been."""
        found: tuple[Any, nn.Parameter] | None = self._made.get(id(parameter))
        return parameter if found is None else found[1]

    def learned(self) -> list[tuple[Tensor, Tensor]]:
        """Those who wait for a gradient, with what their stand-ins got; it is taken away."""
        found = []
        for thing, double in self._made.values():
            if isinstance(double, Tensor) and double is not thing and double.grad is not None:
                found.append((thing, double.grad))
                double.grad = None
        return found

    def _make(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return self._copied(thing) if _has_tensors(thing) else thing
        learns = thing.requires_grad
        if not isinstance(thing, nn.Parameter):
            return _marked(on(thing.data, self._device).requires_grad_(learns), thing)
        here = thing.detach()
        data = on(here, self._device)
        if learns or data is not here:
            return _marked(nn.Parameter(data, learns), thing)
        return thing  # frozen, and on this device

    def _copied(self, module: nn.Module) -> nn.Module:
        copy = object.__new__(type(module))
        copy.__dict__.update(module.__dict__, _stands_for=module)
        for kind in ALL:
            copy.__dict__[kind] = {
                name: None if thing is None else self.of(real(thing))
                for name, thing in module.__dict__[kind].items()
            }
        return copy


class _Swap(NamedTuple):
    """An entry of a module's, and what stands in for it."""

    home: dict[str, Any]
    name: str
    own: Any
    double: Any


class StandIns:
    """Of one stage: `modules` is what it computes with, once the stand-ins are `used`.

    What is `shared` with other stages must not change meanwhile.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        doubles: Doubles | None = None,
        shared: Collection[int] = (),
    ) -> None:
        self._doubles = doubles = Doubles() if doubles is None else doubles
        self.modules: list[nn.Module] = list(modules)
        self._swaps: list[_Swap] = []
        self._shared: list[tuple[dict[str, Any], str]] = []
        if doubles:
            own = [module for module in modules if id(module) not in doubles.foreign]
            self._swaps = [
                _Swap(home, name, thing, double)
                for home, name, thing in _entries(own, ALL if doubles.foreign else ALL[:1])
                if (double := doubles.of(thing)) is not thing
            ]
        if shared:
            self.modules = [doubles.of(module) for module in modules]
            self._shared = [
                (home, name)
                for home, name, thing in _entries(self.modules, ALL[:2])
                if id(thing) in shared
            ]

    def __bool__(self) -> bool:
        return bool(self._swaps or self._shared)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What stands in for it: itself, if nothing does."""
        return self._doubles.made(parameter)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are no modules."""
        return [swap.double for swap in self._swaps if isinstance(swap.double, Tensor)]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within, the modules compute with the stand-ins."""
        for home, name, _, double in self._swaps:
            home[name] = double
        before = self._state()
        try:
            yield
            self._check_state(before)
        finally:
            for home, name, own, _ in self._swaps:
                home[name] = own

    def _state(self) -> list[tuple[Any, int]]:
        now = [home.get(name) for home, name in self._shared]
        return [(t, -1 if t is None or t.is_inference() else t._version) for t in now]

    def _check_state(self, before: Sequence[tuple[Any, int]]) -> None:
        for (_, name), (was, version), (now, later) in zip(
            self._shared, before, self._state(), strict=True
        ):
            if was is not now or version != later:
                raise RunError(
                    f"a layer changed '{name}', which layers of several stages share, while it "
                    "computed, so that the others may have seen it before or after: put the layers "
                    "that share it into one stage, or give each its own"
                )


def on(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor if it is there, or a copy; on the caller's stream, for which the ranks wait."""
    return tensor if device is None else tensor.to(device)


def _entries(
    modules: Iterable[nn.Module], kinds: Sequence[str]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What is registered in modules: where, under which name, and what it really is."""
    for module in modules:
        for kind in kinds:
            home: dict[str, Any] = getattr(module, kind)
            for name, thing in home.items():
                if thing is not None:
                    yield home, name, real(thing)


def _has_hooks(thing: Any) -> bool:
    return bool(thing._backward_hooks) and isinstance(thing, nn.Parameter)


def _has_tensors(module: nn.Module) -> bool:
    return any(m._parameters or m._buffers for m in module.modules())


def _marked(double: Tensor, thing: Tensor) -> Tensor:
    double._stands_for = thing  # type: ignore[attr-defined]
    return double
