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

REGISTRIES = ("_parameters", "_buffers", "_modules")  # that a module registers


def unwrap_proxy(value: Any) -> Any:
    """What a stand-in stands for: another call may be computing with one, in another thread."""
    return value.__dict__.get("_stands_for", value)


class ProxyPool:
    """The stand-ins of one rank in one call, each made when it is first asked for.

    A parameter's has no hooks and a gradient of its own, and is of the same memory if it is on the
    same device. A buffer's counts changes by itself. A module's is a copy that holds stand-ins.
    What is `foreign` is told by its id: a tensor takes long to hash.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        foreign_ids: Collection[int] = (),
        replace_hooked: bool = False,
    ) -> None:
        self._device, self.foreign_ids, self._replace_hooked = device, foreign_ids, replace_hooked
        self._proxies: dict[int, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return self._replace_hooked or bool(self.foreign_ids)

    def get_proxy(self, original: Any) -> Any:
        """What stands in for it: itself, if it can be used as it is."""
        if id(original) not in self.foreign_ids and not (
            self._replace_hooked and _has_hooks(original)
        ):
            return original
        if id(original) not in self._proxies:
            self._proxies[id(original)] = original, self._create_proxy(original)
        return self._proxies[id(original)][1]

    def get_existing_proxy(self, parameter: nn.Parameter) -> nn.Parameter:
        """What has been made for it; itself, if nothing has been."""
        found: tuple[Any, nn.Parameter] | None = self._proxies.get(id(parameter))
        return parameter if found is None else found[1]

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Those who wait for a gradient, with what their stand-ins got; it is taken away."""
        found = []
        for thing, double in self._proxies.values():
            if isinstance(double, Tensor) and double is not thing and double.grad is not None:
                found.append((thing, double.grad))
                double.grad = None
        return found

    def _create_proxy(self, original: Any) -> Any:
        if isinstance(original, nn.Module):
            return self._copy_module(original) if _has_tensors(original) else original
        learns = original.requires_grad
        if not isinstance(original, nn.Parameter):
            return _mark_proxy(
                move_to_device(original.data, self._device).requires_grad_(learns), original
            )
        here = original.detach()
        data = move_to_device(here, self._device)
        if learns or data is not here:
            return _mark_proxy(nn.Parameter(data, learns), original)
        return original  # frozen, and on this device

    def _copy_module(self, module: nn.Module) -> nn.Module:
        copy = object.__new__(type(module))
        copy.__dict__.update(module.__dict__, _stands_for=module)
        for kind in REGISTRIES:
            copy.__dict__[kind] = {
                name: None if thing is None else self.get_proxy(unwrap_proxy(thing))
                for name, thing in module.__dict__[kind].items()
            }
        return copy


class _ProxySwap(NamedTuple):
    """An entry of a module's, and what stands in for it."""

    registry: dict[str, Any]
    name: str
    original: Any
    proxy: Any


class StageProxies:
    """Of one stage: `modules` is what it computes with, once the stand-ins are `used`.

    What is `shared` with other stages must not change meanwhile.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        pool: ProxyPool | None = None,
        shared_ids: Collection[int] = (),
    ) -> None:
        self._pool = pool = ProxyPool() if pool is None else pool
        self.modules: list[nn.Module] = list(modules)
        self._swaps: list[_ProxySwap] = []
        self._shared_entries: list[tuple[dict[str, Any], str]] = []
        if pool:
            own = [module for module in modules if id(module) not in pool.foreign_ids]
            self._swaps = [
                _ProxySwap(home, name, thing, double)
                for home, name, thing in _iterate_registered(
                    own, REGISTRIES if pool.foreign_ids else REGISTRIES[:1]
                )
                if (double := pool.get_proxy(thing)) is not thing
            ]
        if shared_ids:
            self.modules = [pool.get_proxy(module) for module in modules]
            self._shared_entries = [
                (home, name)
                for home, name, thing in _iterate_registered(self.modules, REGISTRIES[:2])
                if id(thing) in shared_ids
            ]

    def __bool__(self) -> bool:
        return bool(self._swaps or self._shared_entries)

    def get_proxy(self, parameter: nn.Parameter) -> nn.Parameter:
        """What stands in for it: itself, if nothing does."""
        return self._pool.get_existing_proxy(parameter)

    @property
    def proxy_tensors(self) -> list[Tensor]:
        """Those that are no modules."""
        return [swap.proxy for swap in self._swaps if isinstance(swap.proxy, Tensor)]

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Within, the modules compute with the stand-ins."""
        for home, name, _, double in self._swaps:
            home[name] = double
        before = self._read_shared_versions()
        try:
            yield
            self._check_shared_unchanged(before)
        finally:
            for home, name, own, _ in self._swaps:
                home[name] = own

    def _read_shared_versions(self) -> list[tuple[Any, int]]:
        now = [home.get(name) for home, name in self._shared_entries]
        return [(t, -1 if t is None or t.is_inference() else t._version) for t in now]

    def _check_shared_unchanged(self, versions_before: Sequence[tuple[Any, int]]) -> None:
        for (_, name), (was, version), (now, later) in zip(
            self._shared_entries, versions_before, self._read_shared_versions(), strict=True
        ):
            if was is not now or version != later:
                raise RunError(
                    f"a layer changed '{name}', which layers of several stages share, while it "
                    "computed, so that the others may have seen it before or after: put the layers "
                    "that share it into one stage, or give each its own"
                )


def move_to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor if it is there, or a copy; on the caller's stream, for which the ranks wait."""
    return tensor if device is None else tensor.to(device)


def _iterate_registered(
    modules: Iterable[nn.Module], registries: Sequence[str]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What is registered in modules: where, under which name, and what it really is."""
    for module in modules:
        for kind in registries:
            home: dict[str, Any] = getattr(module, kind)
            for name, thing in home.items():
                if thing is not None:
                    yield home, name, unwrap_proxy(thing)


def _has_hooks(value: Any) -> bool:
    return bool(value._backward_hooks) and isinstance(value, nn.Parameter)


def _has_tensors(module: nn.Module) -> bool:
    return any(m._parameters or m._buffers for m in module.modules())


def _mark_proxy(proxy: Tensor, original: Tensor) -> Tensor:
    proxy._stands_for = original  # type: ignore[attr-defined]
    return proxy
