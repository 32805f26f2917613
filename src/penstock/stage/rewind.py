"""A recomputation finds its modules as its forward did, and what it writes is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Quietly = dict[tuple[nn.Module, str], bool]  # is the buffer written so that nobody counts it?


class Copied(NamedTuple):
    """A buffer before a forward: which it was, and what it held."""

    owner: nn.Module
    name: str
    buffer: Tensor
    version: int
    before: Tensor


def _only_tracks(owner: nn.Module) -> bool:
    """Is it a norm as PyTorch or we wrote it, which never reads its statistics in training?"""
    library = type(owner).__module__.partition(".")[0]
    return isinstance(owner, _NormBase) and library in ("torch", "penstock")


def copied(owners: Sequence[nn.Module]) -> list[Copied]:
    """What the buffers hold now. Running statistics are left out: training never reads them."""
    return [
        Copied(owner, name, buffer, buffer._version, buffer.clone())
        for owner in owners
        if not _only_tracks(owner)
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def changed(copies: Sequence[Copied]) -> list[Copied]:
    """Those that have been written or replaced since."""
    return [copy for copy in copies if not _is_held(copy) or copy.buffer._version != copy.version]


def _is_held(copy: Copied) -> bool:
    """What a ScriptModule has as the table of its buffers is no dict."""
    table = copy.owner._buffers
    return copy.name in table and table[copy.name] is copy.buffer


def written(copies: Sequence[Copied], quietly: Quietly) -> list[Copied]:
    """The same of a forward; also those that it wrote so that no version tells.

    By their `.data`, or as PyTorch's own batch_norm does. With one of a module's buffers come the
    others: it may have written to them what they held. To compare numbers, a host must wait for its
    GPU: there it is done once for each buffer.
    """
    found = {id(copy) for copy in changed(copies)}
    for copy in copies:
        place = copy.owner, copy.name
        if id(copy) not in found and (place not in quietly or copy.buffer.device.type == "cpu"):
            differs = not torch.equal(copy.buffer, copy.before)
            quietly[place] = differs or quietly.get(place, False)
    writers = {copy.owner for copy in copies if quietly.get((copy.owner, copy.name))}
    return [copy for copy in copies if id(copy) in found or copy.owner in writers]


def untouched(copies: Sequence[Copied], those: Sequence[Copied]) -> list[Copied]:
    """The copies but those, without what they held."""
    names = {(copy.owner, copy.name) for copy in those}
    left = [copy for copy in copies if (copy.owner, copy.name) not in names]
    return [copy._replace(before=copy.buffer) for copy in left]


@contextmanager
def rewound(owners: Sequence[nn.Module], copies: Sequence[Copied]) -> Iterator[None]:
    """Within, the buffers that a forward changed are as it found them; after, as they were."""
    now = [(owner, name, buffer) for owner in owners for name, buffer in owner._buffers.items()]
    for owner, name, buffer in now:
        if buffer is not None and _only_tracks(owner):
            owner._buffers[name] = buffer.clone()
    for copy in copies:
        copy.owner._buffers[copy.name] = copy.before.clone()
    try:
        yield
    finally:
        for owner, name, buffer in now:
            owner._buffers[name] = buffer


@contextmanager
def training_as(modules: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
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
