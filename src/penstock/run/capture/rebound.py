"""Tensors that layers give another name while a step is captured: `self.mean = new`.

A replay reads what was there when it was captured, and writes what was there afterwards. So the
new numbers are copied to the old place, in the recording, and the layer has its old tensor again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.run.capture.watching import Uncapturable


class Bound(NamedTuple):
    """One name of a tensor in a table of a module's."""

    module: nn.Module
    table: dict[str, Any]
    name: str
    tensor: Tensor


def bound(modules: Iterable[nn.Module]) -> list[Bound]:
    """All of the modules' buffers, and tensors that are plain attributes."""
    return [
        Bound(module, table, name, value)
        for module in modules
        for table in (module._buffers, vars(module))
        for name, value in table.items()
        if isinstance(value, Tensor)
    ]


@torch.no_grad()
def put_back(before: Iterable[Bound]) -> None:
    """At the end of a capture, as a part of it."""
    for module, table, name, old in before:
        new = table.get(name)
        if new is old or not isinstance(new, Tensor) or new.requires_grad:
            continue
        same = (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
        if not same:
            raise Uncapturable(
                f"{type(module).__name__} has another tensor as its '{name}' after every step: let "
                "it keep its shape, its dtype and its device"
            )
        old.detach().copy_(new)
        table[name] = old
