"""A recomputation finds its modules as its forward did, and what it writes is dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# -------------------------------------------------------------------------------------------------
# Is this forward one that will be repeated, or the repetition? For layers that ask.
# -------------------------------------------------------------------------------------------------


class _RecomputeState(threading.local):
    def __init__(self) -> None:
        self.checkpointing = False
        self.recomputing = False


_thread_state = _RecomputeState()


def is_checkpointing() -> bool:
    """In a layer: will this forward be recomputed for its backward?"""
    return _thread_state.checkpointing


def is_recomputing() -> bool:
    """In a layer: is this the recomputation of an earlier forward?"""
    return _thread_state.recomputing


@contextmanager
def mark_checkpointing() -> Iterator[None]:
    """Tell the layers that this forward will be recomputed."""
    _thread_state.checkpointing = True
    try:
        yield
    finally:
        _thread_state.checkpointing = False


@contextmanager
def mark_recomputing() -> Iterator[None]:
    """Tell the layers that this is a recomputation."""
    _thread_state.recomputing = True
    try:
        yield
    finally:
        _thread_state.recomputing = False


# -------------------------------------------------------------------------------------------------

SilentWrites = dict[tuple[nn.Module, str], bool]  # is the buffer written so that nobody counts it?


class BufferSnapshot(NamedTuple):
    """A buffer before a forward: which it was, and what it held."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor


def _has_write_only_buffers(module: nn.Module) -> bool:
    """Is it a norm as PyTorch or we wrote it, which never reads its statistics in training?"""
    library = type(module).__module__.partition(".")[0]
    return isinstance(module, _NormBase) and library in ("torch", "penstock")


def snapshot_buffers(modules: Sequence[nn.Module]) -> list[BufferSnapshot]:
    """What the buffers hold now. Running statistics are left out: training never reads them."""
    return [
        BufferSnapshot(owner, name, buffer, buffer._version, buffer.clone())
        for owner in modules
        if not _has_write_only_buffers(owner)
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def find_changed(snapshots: Sequence[BufferSnapshot]) -> list[BufferSnapshot]:
    """Those that have been written or replaced since."""
    return [
        copy
        for copy in snapshots
        if not _is_registered(copy) or copy.buffer._version != copy.version
    ]


def _is_registered(snapshot: BufferSnapshot) -> bool:
    """What a ScriptModule has as the table of its buffers is no dict."""
    table = snapshot.module._buffers
    return snapshot.name in table and table[snapshot.name] is snapshot.buffer


def find_written(
    snapshots: Sequence[BufferSnapshot], silent_writes: SilentWrites
) -> list[BufferSnapshot]:
    """The same of a forward; also those that it wrote so that no version tells.

    By their `.data`, or as PyTorch's own batch_norm does. With one of a module's buffers come the
    others: it may have written to them what they held. To compare numbers, a host must wait for its
    GPU: there it is done once for each buffer.
    """
    found = {id(copy) for copy in find_changed(snapshots)}
    for copy in snapshots:
        place = copy.module, copy.name
        if id(copy) not in found and (
            place not in silent_writes or copy.buffer.device.type == "cpu"
        ):
            differs = not torch.equal(copy.buffer, copy.value)
            silent_writes[place] = differs or silent_writes.get(place, False)
    writers = {copy.module for copy in snapshots if silent_writes.get((copy.module, copy.name))}
    return [copy for copy in snapshots if id(copy) in found or copy.module in writers]


def exclude_written(
    snapshots: Sequence[BufferSnapshot], written: Sequence[BufferSnapshot]
) -> list[BufferSnapshot]:
    """The copies but those, without what they held."""
    names = {(copy.module, copy.name) for copy in written}
    left = [copy for copy in snapshots if (copy.module, copy.name) not in names]
    return [copy._replace(value=copy.buffer) for copy in left]


@contextmanager
def restore_buffers(
    modules: Sequence[nn.Module], snapshots: Sequence[BufferSnapshot]
) -> Iterator[None]:
    """Within, the buffers that a forward changed are as it found them; after, as they were."""
    now = [(owner, name, buffer) for owner in modules for name, buffer in owner._buffers.items()]
    for owner, name, buffer in now:
        if buffer is not None and _has_write_only_buffers(owner):
            owner._buffers[name] = buffer.clone()
    for copy in snapshots:
        copy.module._buffers[copy.name] = copy.value.clone()
    try:
        yield
    finally:
        for owner, name, buffer in now:
            owner._buffers[name] = buffer


@contextmanager
def override_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
    """Within, the modules are in training or not as the flags say; after, as they were."""
    now = [module.training for module in modules]
    if now == list(flags):
        yield
        return
    _set_training(modules, flags)
    try:
        yield
    finally:
        _set_training(modules, now)


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
