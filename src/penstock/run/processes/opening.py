"""How a call among processes begins: what the ranks must agree on, and who has which data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batch import Chunk, MicrobatchRows, NoChunk
from penstock.run.asking import CallOptions
from penstock.run.feed import Batch, StageInputs
from penstock.run.processes.agreement import RankFacts
from penstock.run.processes.codec import WireTensorSpec


def collect_call_facts(options: CallOptions, **extra_facts: object) -> RankFacts:
    """What must be the same on every rank, whatever the data."""
    contexts = [
        f"{kind} {torch.get_autocast_dtype(kind)}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return {
        "chunks": str(options.chunks),
        "checkpoint": options.checkpoint,
        "training mode": str(options.training),
        "gradients": str(torch.is_grad_enabled()),
        "autocast": ", ".join(contexts) or "none",
        **{name: str(value) for name, value in extra_facts.items()},
    }


def collect_batch_facts(batch: Batch) -> RankFacts:
    """The kinds and sizes of what was given."""
    return {
        "inputs": _describe_value(batch.inputs),
        **{
            f"input {name!r}": _describe_value(value)
            for name, value in batch.keyword_inputs.items()
        },
        "target": _describe_value(batch.target),
    }


def collect_batch_tensors(batch: Batch) -> list[Tensor]:
    """All of them."""
    leaves = pytree.tree_leaves([batch.inputs, dict(batch.keyword_inputs), batch.target])
    bare = (leaf.tensor if isinstance(leaf, NoChunk | Chunk) else leaf for leaf in leaves)
    return [leaf for leaf in bare if isinstance(leaf, Tensor)]


def describe_batch_strides(batch: Batch) -> str:
    """How tensors lie in memory: messages keep that, and it may differ where sizes do not."""
    return str([tensor.stride() for tensor in collect_batch_tensors(batch)])


def describe_module_flags(modules: Iterable[nn.Module]) -> str:
    """What messages may depend on beside the data: what learns, and what is in training."""
    flags = []
    for module in modules:
        flags.append("t" if module.training else "e")
        flags += ["-" if p is None else "01"[p.requires_grad] for p in module._parameters.values()]
    return "".join(flags)


def _describe_value(value: Any) -> str:
    leaves, spec = pytree.tree_flatten(value)
    said = ", ".join(map(_describe_leaf, leaves)) or "none"
    flat = spec.type is tuple and all(child.is_leaf() for child in spec.children())
    return said if flat else f"{said} in {spec}"


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, NoChunk):
        return f"NoChunk({_describe_leaf(leaf.tensor)})"
    if isinstance(leaf, Chunk):
        return f"Chunk({_describe_leaf(leaf.tensor)}, dim={leaf.dim})"
    if isinstance(leaf, Tensor):
        learns = ", wants a gradient" if leaf.requires_grad else ""
        return f"{WireTensorSpec.from_tensor(leaf)}{learns}"
    return repr(leaf) if isinstance(leaf, int | float | str | bool | None) else type(leaf).__name__


@dataclass(frozen=True)
class BatchAnnouncement:
    """What the first rank tells of data that it alone has."""

    rows: MicrobatchRows
    chunks: int
    input_stages: tuple[int, ...]  # that are given something
    has_target: bool

    @staticmethod
    def from_stage_inputs(stage_inputs: StageInputs, has_target: bool) -> BatchAnnouncement:
        """Of what it has cut."""
        return BatchAnnouncement(
            stage_inputs.rows, stage_inputs.chunks, tuple(stage_inputs.by_stage), has_target
        )

    def to_json(self) -> str:
        """As text."""
        rows = [list(self.rows.counts), self.rows.dim]
        return json.dumps([rows, self.chunks, list(self.input_stages), self.has_target])

    @staticmethod
    def from_json(text: str) -> BatchAnnouncement:
        """From text."""
        (counts, dim), chunks, stages, target = json.loads(text)
        return BatchAnnouncement(MicrobatchRows(tuple(counts), dim), chunks, tuple(stages), target)
