"""Recomputation of a forward: it sees the state that the forward saw, and leaves none behind.

A cell that is recomputed runs its layers twice. The second run must see the buffers and training
flags of the first, and what it writes to buffers must be dropped, or running statistics would
advance twice.

    forward         snapshot_buffers -> run -> find_written, exclude_written
    recomputation   restore_buffers(written) -> run -> put the current buffers back

Layers can ask which run they are in: `is_checkpointing`, `is_recomputing`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.torch_compat import NormBase

# ---- questions that a layer may ask ------------------------------------------------------------


class _RecomputeState(threading.local):
    """The kind of forward that this thread runs."""

    def __init__(self) -> None:
        self.checkpointing = False
        self.recomputing = False


_thread_state = _RecomputeState()


def is_checkpointing() -> bool:
    """Return whether the current forward will be recomputed before its backward.

    Layers call it in their forward. Outside of a pipe it returns False.

    Example:

    >>> is_checkpointing()
    False
    """
    return _thread_state.checkpointing


def is_recomputing() -> bool:
    """Return whether the current forward is the recomputation of an earlier one.

    Layers call it in their forward, for example to count a batch only once. Outside of a pipe it
    returns False.

    Example:

    >>> class Counter(nn.Module):
    ...     calls = 0
    ...     def forward(self, x: Tensor) -> Tensor:
    ...         if not is_recomputing():
    ...             self.calls += 1
    ...         return x
    """
    return _thread_state.recomputing


@contextmanager
def mark_checkpointing() -> Iterator[None]:
    """Let `is_checkpointing` return True inside the context."""
    _thread_state.checkpointing = True
    try:
        yield
    finally:
        _thread_state.checkpointing = False


@contextmanager
def mark_recomputing() -> Iterator[None]:
    """Let `is_recomputing` return True inside the context."""
    _thread_state.recomputing = True
    try:
        yield
    finally:
        _thread_state.recomputing = False


@contextmanager
def mark_only_run() -> Iterator[None]:
    """Let both questions be answered with False: what runs here runs once in a training step."""
    checkpointing, recomputing = _thread_state.checkpointing, _thread_state.recomputing
    _thread_state.checkpointing = _thread_state.recomputing = False
    try:
        yield
    finally:
        _thread_state.checkpointing, _thread_state.recomputing = checkpointing, recomputing


# ---- buffers -----------------------------------------------------------------------------------

# Whether a forward writes a buffer without a change of its version counter, by module and name. A
# buffer that is not in the dict has not been compared yet.
SilentWrites = dict[tuple[nn.Module, str], bool]


class BufferSnapshot(NamedTuple):
    """A buffer before a forward: the tensor itself, its version counter and a copy of its value."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor


def _has_write_only_buffers(module: nn.Module) -> bool:
    """Return whether training never reads the buffers of a module, but only writes them.

    That is known of the norms of PyTorch and Penstock. A norm of another library may read its
    running statistics in training.
    """
    library = type(module).__module__.partition(".")[0]
    return isinstance(module, NormBase) and library in ("torch", "penstock")


def snapshot_buffers(modules: Sequence[nn.Module]) -> list[BufferSnapshot]:
    """Return snapshots of all buffers except running statistics, which training never reads."""
    return [
        BufferSnapshot(owner, name, buffer, buffer._version, buffer.clone())
        for owner in modules
        if not _has_write_only_buffers(owner)
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def find_changed(snapshots: Sequence[BufferSnapshot]) -> list[BufferSnapshot]:
    """Return the snapshots of buffers that were written or replaced since, by version counter."""
    return [
        snapshot
        for snapshot in snapshots
        if not _is_registered(snapshot) or snapshot.buffer._version != snapshot.version
    ]


def _is_registered(snapshot: BufferSnapshot) -> bool:
    """Return whether the module still has the same tensor as this buffer.

    The `_buffers` of a ScriptModule is not a dict and has no `get`.
    """
    registry = snapshot.module._buffers
    return snapshot.name in registry and registry[snapshot.name] is snapshot.buffer


def find_written(
    snapshots: Sequence[BufferSnapshot], silent_writes: SilentWrites
) -> list[BufferSnapshot]:
    """Return the snapshots of buffers that a forward wrote, silent writes included.

    A silent write does not change the version counter: a write through `.data`, or by PyTorch's
    own `batch_norm`. This function finds silent writes by comparing values, and remembers them in
    `silent_writes`. On a GPU the host has to wait for a comparison, so each buffer there is
    compared in one forward only. If a module writes one buffer silently, all its buffers count as
    written, because a write may leave a value unchanged.
    """
    changed_ids = {id(snapshot) for snapshot in find_changed(snapshots)}
    for snapshot in snapshots:
        key = snapshot.module, snapshot.name
        if id(snapshot) not in changed_ids and (
            key not in silent_writes or snapshot.buffer.device.type == "cpu"
        ):
            differs = not torch.equal(snapshot.buffer, snapshot.value)
            silent_writes[key] = differs or silent_writes.get(key, False)
    writers = {
        snapshot.module
        for snapshot in snapshots
        if silent_writes.get((snapshot.module, snapshot.name))
    }
    return [
        snapshot
        for snapshot in snapshots
        if id(snapshot) in changed_ids or snapshot.module in writers
    ]


def exclude_written(
    snapshots: Sequence[BufferSnapshot], written: Sequence[BufferSnapshot]
) -> list[BufferSnapshot]:
    """Return the other snapshots, with the buffer itself as value, so that the copy is freed."""
    keys = {(snapshot.module, snapshot.name) for snapshot in written}
    unwritten = [snapshot for snapshot in snapshots if (snapshot.module, snapshot.name) not in keys]
    return [snapshot._replace(value=snapshot.buffer) for snapshot in unwritten]


@contextmanager
def restore_buffers(
    modules: Sequence[nn.Module], snapshots: Sequence[BufferSnapshot]
) -> Iterator[None]:
    """Let modules find the buffers of an earlier forward inside the context.

    Inside, changed buffers hold copies of the snapshots, and running statistics are copies, too.
    Afterwards all modules have their current buffers back, and the writes inside are gone.
    """
    current = [
        (owner, name, buffer) for owner in modules for name, buffer in owner._buffers.items()
    ]
    for owner, name, buffer in current:
        if buffer is not None and _has_write_only_buffers(owner):
            owner._buffers[name] = buffer.clone()
    for snapshot in snapshots:
        snapshot.module._buffers[snapshot.name] = snapshot.value.clone()
    try:
        yield
    finally:
        for owner, name, buffer in current:
            owner._buffers[name] = buffer


# ---- training flags ----------------------------------------------------------------------------


@contextmanager
def override_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
    """Set the `training` flag of each module inside the context, and restore it afterwards."""
    current = [module.training for module in modules]
    if current == list(flags):
        yield
        return
    _set_training(modules, flags)
    try:
        yield
    finally:
        _set_training(modules, current)


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
