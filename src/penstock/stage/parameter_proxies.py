"""Proxies for parameters, buffers and modules that a stage cannot use directly.

Two kinds of objects are replaced while a micro-batch is computed:

1. A parameter, a buffer or a module that another rank owns (tied weights). Two threads must not add
   to the same `.grad` or write to the same module, and the owner may be on another device.
2. In one process, a parameter with hooks. Its hooks expect the gradient of the whole batch, and a
   stage computes one gradient for each micro-batch.

A proxy collects its own gradient. After the run the caller's thread adds it to that of the original
(`runtime/tied_gradients.py`). Proxies are swapped into the registries of the modules before each
micro-batch and out again after it, so the caller never sees them on the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError

# The attributes of an nn.Module that hold what is registered in it.
REGISTRIES = ("_parameters", "_buffers", "_modules")


def unwrap_proxy(value: Any) -> Any:
    """Return the original behind a proxy, or the value itself.

    Code that reads the registries of a module may find a proxy there, as another thread may be
    computing with the same module.
    """
    return value.__dict__.get("_stands_for", value)


class ProxyPool:
    """The proxies of one rank in one call; each is made when it is first needed.

    The proxy of a parameter has a `.grad` of its own and no hooks, and shares the memory if it is
    on the same device. The proxy of a buffer has a version counter of its own. The proxy of a
    module is a shallow copy that holds proxies.

    Args:
        device: The device of the rank.
        foreign_ids: The `id()` of each object that another rank owns. (Hashing a tensor is slow.)
        replace_hooked: Whether parameters with hooks get a proxy, too.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        foreign_ids: Collection[int] = (),
        replace_hooked: bool = False,
    ) -> None:
        self._device, self.foreign_ids, self.replaces_hooked = device, foreign_ids, replace_hooked
        # Original and proxy by the id of the original. The original is kept alive with its proxy,
        # so that its id is not reused.
        self._proxies: dict[int, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return self.replaces_hooked or bool(self.foreign_ids)

    def get_proxy(self, original: Any) -> Any:
        """Return the proxy of an object, or the object itself if it can be used directly."""
        if id(original) not in self.foreign_ids and not (
            self.replaces_hooked and _has_hooks(original)
        ):
            return original
        if id(original) not in self._proxies:
            self._proxies[id(original)] = original, self._create_proxy(original)
        return self._proxies[id(original)][1]

    def get_existing_proxy(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the proxy that was made for a parameter, or the parameter itself."""
        entry: tuple[Any, nn.Parameter] | None = self._proxies.get(id(parameter))
        return parameter if entry is None else entry[1]

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the originals with the gradients of their proxies, and clear these gradients."""
        gradients = []
        for original, proxy in self._proxies.values():
            if isinstance(proxy, Tensor) and proxy is not original and proxy.grad is not None:
                gradients.append((original, proxy.grad))
                proxy.grad = None
        return gradients

    def _create_proxy(self, original: Any) -> Any:
        if isinstance(original, nn.Module):
            return self._copy_module(original) if _has_tensors(original) else original
        requires_grad = original.requires_grad
        if not isinstance(original, nn.Parameter):
            # `.data` shares the memory but not the version counter, which `detach` would share.
            return _mark_proxy(
                move_to_device(original.data, self._device).requires_grad_(requires_grad), original
            )
        detached = original.detach()
        data = move_to_device(detached, self._device)
        if requires_grad or data is not detached:
            return _mark_proxy(nn.Parameter(data, requires_grad), original)
        return original  # it is frozen and on this device: nothing to keep apart

    def _copy_module(self, module: nn.Module) -> nn.Module:
        """Return a shallow copy of a module whose members are proxies where they need to be."""
        # `copy.copy` would go through `__setstate__`, which modules override. This copy only gets
        # the same attributes.
        copy = object.__new__(type(module))
        copy.__dict__.update(module.__dict__, _stands_for=module)
        for kind in REGISTRIES:
            copy.__dict__[kind] = {
                name: None if member is None else self.get_proxy(unwrap_proxy(member))
                for name, member in module.__dict__[kind].items()
            }
        return copy


NO_PROXIES = ProxyPool()  # replaces nothing, and so stays empty


class _ProxySwap(NamedTuple):
    """An entry of a module's registry, and the proxy that replaces it."""

    registry: dict[str, Any]
    name: str
    original: Any
    proxy: Any


class StageProxies:
    """The proxies of one stage.

    Attributes:
        modules: The modules that the stage computes with while the proxies are active.
        shared_ids: As given.

    Args:
        modules: The modules of the stage.
        pool: The proxies of the rank.
        shared_ids: The `id()` of each parameter and buffer that several stages use. The stage must
            not change these in its forward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        pool: ProxyPool = NO_PROXIES,
        shared_ids: Collection[int] = (),
    ) -> None:
        self._pool, self.shared_ids = pool, shared_ids
        self.modules: list[nn.Module] = list(modules)
        self._swaps: list[_ProxySwap] = []
        self._shared_entries: list[tuple[dict[str, Any], str]] = []
        if pool:
            # Modules of other ranks are not touched. They are replaced as a whole, by copies.
            local_modules = [module for module in modules if id(module) not in pool.foreign_ids]
            entries = _list_registered(
                local_modules, REGISTRIES if pool.foreign_ids else REGISTRIES[:1]
            )
            self._swaps = [
                _ProxySwap(registry, name, original, proxy)
                for registry, name, original in entries
                if (pool.replaces_hooked or id(original) in pool.foreign_ids)
                and (proxy := pool.get_proxy(original)) is not original
            ]
        if shared_ids:
            self.modules = [pool.get_proxy(module) for module in modules]
            self._shared_entries = [
                (registry, name)
                for registry, name, original in _list_registered(self.modules, REGISTRIES[:2])
                if id(original) in shared_ids
            ]

    def __bool__(self) -> bool:
        return bool(self._swaps or self._shared_entries)

    def get_proxy(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the proxy of a parameter, or the parameter itself if it has none."""
        return self._pool.get_existing_proxy(parameter)

    @property
    def proxy_tensors(self) -> list[Tensor]:
        """Return the proxies of parameters and buffers."""
        return [swap.proxy for swap in self._swaps if isinstance(swap.proxy, Tensor)]

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Let the modules compute with the proxies inside the context.

        Raises:
            RunError: The stage changed a shared parameter or buffer.
        """
        for registry, name, _, proxy in self._swaps:
            registry[name] = proxy
        before = self._read_shared_versions()
        try:
            yield
            self._check_shared_unchanged(before)
        finally:
            for registry, name, original, _ in self._swaps:
                registry[name] = original

    # Layers that share a buffer take turns in the unsplit model. Stages run at the same time, or at
    # different micro-batches, so the order of reads and writes would be another one.
    def _read_shared_versions(self) -> list[tuple[Any, int]]:
        tensors = [registry.get(name) for registry, name in self._shared_entries]
        return [(t, -1 if t is None or t.is_inference() else t._version) for t in tensors]

    def _check_shared_unchanged(self, versions_before: Sequence[tuple[Any, int]]) -> None:
        for (_, name), (old_tensor, old_version), (tensor, version) in zip(
            self._shared_entries, versions_before, self._read_shared_versions(), strict=True
        ):
            if old_tensor is not tensor or old_version != version:
                raise RunError(
                    f"a layer changed '{name}' in its forward, but layers of several stages share "
                    "it. The other stages may read it before or after the change. Put the layers "
                    "that share it into one stage, or give each layer its own."
                )


def move_to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return the tensor if it is on the device, or else a copy on the device.

    The copy is made on the caller's stream. Ranks wait for that stream before they start.
    """
    return tensor if device is None else tensor.to(device)


def _list_registered(
    modules: Iterable[nn.Module], registries: Sequence[str]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the entries of the modules' registries: the registry, the name and the original."""
    # In every call, so this is one loop without calls. See `unwrap_proxy`.
    entries = []
    for module in modules:
        for kind in registries:
            registry: dict[str, Any] = getattr(module, kind)
            for name, member in registry.items():
                if member is not None:
                    entries.append((registry, name, member.__dict__.get("_stands_for", member)))
    return entries


def _has_hooks(value: Any) -> bool:
    """Return whether a value is a parameter with hooks on its gradient."""
    return bool(value._backward_hooks) and isinstance(value, nn.Parameter)


def _has_tensors(module: nn.Module) -> bool:
    """Return whether the module has parameters or buffers. Without them it needs no proxy."""
    return any(m._parameters or m._buffers for m in module.modules())


def _mark_proxy(proxy: Tensor, original: Tensor) -> Tensor:
    proxy._stands_for = original  # type: ignore[attr-defined]
    return proxy
