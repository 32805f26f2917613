"""How a call among processes begins: what the ranks must agree on, and who has which data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batch import Chunk, NoChunk, Rows
from penstock.run.asking import Settings
from penstock.run.feed import Batch, Fed
from penstock.run.processes.agreement import Facts
from penstock.run.processes.codec import Shape


def facts_of(settings: Settings, **more: object) -> Facts:
    """What must be the same on every rank, whatever the data."""
    contexts = [
        f"{kind} {torch.get_autocast_dtype(kind)}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return {
        "chunks": str(settings.chunks),
        "checkpoint": settings.checkpoint,
        "training mode": str(settings.training),
        "gradients": str(torch.is_grad_enabled()),
        "autocast": ", ".join(contexts) or "none",
        **{name: str(value) for name, value in more.items()},
    }


def facts_of_data(batch: Batch) -> Facts:
    """The kinds and sizes of what was given."""
    return {
        "inputs": _described(batch.inputs),
        **{f"input {name!r}": _described(value) for name, value in batch.side.items()},
        "target": _described(batch.target),
    }


def tensors_in(batch: Batch) -> list[Tensor]:
    """All of them."""
    leaves = pytree.tree_leaves([batch.inputs, dict(batch.side), batch.target])
    bare = (leaf.tensor if isinstance(leaf, NoChunk | Chunk) else leaf for leaf in leaves)
    return [leaf for leaf in bare if isinstance(leaf, Tensor)]


def layout_of(batch: Batch) -> str:
    """How tensors lie in memory: messages keep that, and it may differ where sizes do not."""
    return str([tensor.stride() for tensor in tensors_in(batch)])


def own_state(modules: Iterable[nn.Module]) -> str:
    """What messages may depend on beside the data: what learns, and what is in training."""
    flags = []
    for module in modules:
        flags.append("t" if module.training else "e")
        flags += ["-" if p is None else "01"[p.requires_grad] for p in module._parameters.values()]
    return "".join(flags)


def _described(value: Any) -> str:
    leaves, spec = pytree.tree_flatten(value)
    said = ", ".join(map(_leaf, leaves)) or "none"
    flat = spec.type is tuple and all(child.is_leaf() for child in spec.children())
    return said if flat else f"{said} in {spec}"


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, NoChunk):
        return f"NoChunk({_leaf(leaf.tensor)})"
    if isinstance(leaf, Chunk):
        return f"Chunk({_leaf(leaf.tensor)}, dim={leaf.dim})"
    if isinstance(leaf, Tensor):
        learns = ", wants a gradient" if leaf.requires_grad else ""
        return f"{Shape.of(leaf)}{learns}"
    return repr(leaf) if isinstance(leaf, int | float | str | bool | None) else type(leaf).__name__


@dataclass(frozen=True)
class Announcement:
    """What the first rank tells of data that it alone has."""

    rows: Rows
    chunks: int
    stages: tuple[int, ...]  # that are given something
    target: bool

    @staticmethod
    def of(fed: Fed, target: bool) -> Announcement:
        """Of what it has cut."""
        return Announcement(fed.rows, fed.chunks, tuple(fed.given), target)

    def dumps(self) -> str:
        """As text."""
        rows = [list(self.rows.counts), self.rows.dim]
        return json.dumps([rows, self.chunks, list(self.stages), self.target])

    @staticmethod
    def loads(text: str) -> Announcement:
        """From text."""
        (counts, dim), chunks, stages, target = json.loads(text)
        return Announcement(Rows(tuple(counts), dim), chunks, tuple(stages), target)
