"""Recomputation of a forward: it sees the state that the forward saw, and leaves none behind.

A cell that is recomputed runs its layers twice. The second run must see the buffers and training
flags of the first, and what it writes to buffers must be dropped, or running statistics would
advance twice. The same goes for Python attributes that a layer sets, such as a counter.

    forward         snapshot_buffers -> run -> find_written, exclude_written
    recomputation   restore_state(written) -> run -> put the current buffers back

What else a layer may depend on cannot be restored: attributes, globals, the grad mode. So the first
recomputation of a stage is compared with its forward (`check_repeated`).

Layers can ask which run they are in: `is_checkpointing`, `is_recomputing`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError
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


class _Mark:
    """A context that sets one of the flags above for this thread. It can be entered many times."""

    def __init__(self, flag: str) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        setattr(_thread_state, self._flag, True)

    def __exit__(self, *exception: object) -> None:
        setattr(_thread_state, self._flag, False)


# Inside these contexts, `is_checkpointing` or `is_recomputing` returns True.
mark_checkpointing, mark_recomputing = _Mark("checkpointing"), _Mark("recomputing")


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


# ---- Python attributes -------------------------------------------------------------------------

# A layer may count its calls, or append to a list. Its recomputation must find the count of its
# forward, and must not count again. What only the recomputation sets stays.

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_CONTAINER_TYPES = (list, dict, set, deque, OrderedDict, defaultdict)
_MISSING: Any = object()

WrittenAttributes = list[tuple[nn.Module, str]]


class AttributeSnapshot(NamedTuple):
    """An attribute of a module before a forward, and a copy of it if it is a list or a dict."""

    module: nn.Module
    name: str
    value: Any
    contents: Any


def list_attributes(modules: Iterable[nn.Module]) -> WrittenAttributes:
    """Return all attributes of modules that are not PyTorch's own."""
    return [(m, name) for m in modules for name in vars(m) if name not in _MODULE_ATTRIBUTES]


def snapshot_attributes(attributes: WrittenAttributes) -> list[AttributeSnapshot]:
    """Return snapshots of these attributes."""
    snapshots = []
    for module, name in attributes:
        value = vars(module).get(name, _MISSING)
        contents = copy(value) if type(value) in _CONTAINER_TYPES else None
        snapshots.append(AttributeSnapshot(module, name, value, contents))
    return snapshots


def find_written_attributes(
    modules: Iterable[nn.Module], snapshots: Sequence[AttributeSnapshot]
) -> WrittenAttributes:
    """Return the attributes that were set or changed since the snapshots of all of them.

    Tensors do not count: a layer may leave one for the loss, which needs that of the last run.
    """
    known = {(id(module), name) for module, name, _, _ in snapshots}
    written = [
        (module, name)
        for module, name in list_attributes(modules)
        if (id(module), name) not in known and not isinstance(vars(module)[name], Tensor)
    ]
    for module, name, value, contents in snapshots:
        now = vars(module).get(name, _MISSING)
        if now is not value:
            is_written = not isinstance(now, Tensor)
        else:
            is_written = contents is not None and not _have_same_items(now, contents)
        if is_written:
            written.append((module, name))
    return written


def select_attributes(
    snapshots: Sequence[AttributeSnapshot], attributes: WrittenAttributes
) -> list[AttributeSnapshot]:
    """Return the snapshots of these attributes. One without a snapshot did not exist then."""
    by_key = {(id(snapshot.module), snapshot.name): snapshot for snapshot in snapshots}
    return [
        by_key.get((id(module), name), AttributeSnapshot(module, name, _MISSING, None))
        for module, name in attributes
    ]


def _have_same_items(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        first, second = [*first, *first.values()], [*second, *second.values()]
    return len(first) == len(second) and all(map(is_, first, second))


@contextmanager
def restore_attributes(snapshots: Sequence[AttributeSnapshot]) -> Iterator[None]:
    """Let modules find the attributes of an earlier forward in the context, and undo changes."""
    current = snapshot_attributes([(module, name) for module, name, _, _ in snapshots])
    _set_attributes(snapshots)
    try:
        yield
    finally:
        _set_attributes(current)


def _set_attributes(snapshots: Iterable[AttributeSnapshot]) -> None:
    for module, name, value, contents in snapshots:
        if value is _MISSING:
            vars(module).pop(name, None)
            continue
        vars(module)[name] = value
        if contents is not None:
            value.clear()
            (value.extend if hasattr(value, "extend") else value.update)(contents)


# ---- the second forward ------------------------------------------------------------------------


@contextmanager
def restore_state(
    modules: Sequence[nn.Module], training_flags: list[bool], snapshots: Sequence[BufferSnapshot]
) -> Iterator[None]:
    """Let modules find the training flags and buffers of an earlier forward inside the context.

    Inside, changed buffers hold copies of the snapshots, and running statistics are copies, too.
    Afterwards all modules have their current flags and buffers back, and writes inside are gone.
    """
    current_flags = [module.training for module in modules]
    current_buffers = [
        (owner, name, buffer) for owner in modules for name, buffer in owner._buffers.items()
    ]
    if current_flags != training_flags:
        _set_training(modules, training_flags)
    for owner, name, buffer in current_buffers:
        if buffer is not None and _has_write_only_buffers(owner):
            owner._buffers[name] = buffer.clone()
    for snapshot in snapshots:
        snapshot.module._buffers[snapshot.name] = snapshot.value.clone()
    try:
        yield
    finally:
        if current_flags != training_flags:
            _set_training(modules, current_flags)
        for owner, name, buffer in current_buffers:
            owner._buffers[name] = buffer


# ---- the first recomputation of a stage --------------------------------------------------------

# How far a recomputation may be from its forward, relative to the largest number of a tensor. With
# a graph PyTorch may choose another kernel, and some kernels add in no fixed order.
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 5e-2


def checksum(tensor: Tensor) -> Tensor | None:
    """Return the sum of a tensor's bit patterns, or None for a kind of tensor that has none."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dtype = integer.get(tensor.element_size())
    if dtype is None or tensor.is_meta or not _is_plain(tensor):
        return None
    return tensor.detach().view(dtype).sum(dtype=torch.int64)


def check_repeated(forward: Sequence[Tensor], repeated: Sequence[Tensor]) -> None:
    """Raise if a recomputation gave other outputs than the forward."""
    pairs = zip(forward, repeated, strict=False)
    if len(forward) == len(repeated) and all(_is_close(old, new.detach()) for old, new in pairs):
        return
    raise RunError(
        "the recomputation of these layers gave another output than their forward, so their "
        "gradients would be wrong. A layer depends on something that changed in between: on state "
        "that it keeps in an attribute or a global, on a random generator of its own, or on "
        "torch.is_grad_enabled() or x.requires_grad, which are False in a forward that will be "
        "recomputed. Let it depend on inputs, parameters and buffers only (is_recomputing() tells "
        "the second run), or set checkpoint='never'."
    )


def _is_plain(tensor: Tensor) -> bool:
    is_known_type = type(tensor) in (Tensor, nn.Parameter)
    return is_known_type and tensor.layout is torch.strided and not tensor.is_quantized


def _is_close(old: Tensor, new: Tensor) -> bool:
    if not _is_plain(old) or not _is_plain(new) or new.is_meta:
        return True
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    if torch.equal(old, new):
        return True
    if not (old.is_floating_point() or old.is_complex()):
        return False
    tolerance = _TOLERANCES.get(old.dtype, _LOW_PRECISION_TOLERANCE)
    finite = old[old.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(old, new, rtol=0, atol=tolerance * largest, equal_nan=True)


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
