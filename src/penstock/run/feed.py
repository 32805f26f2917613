"""What comes from outside: the micro-batches of a call, for each stage that takes some of it.

Of a Sequential, the batch goes to the first stage, the target to the last, a side input to every
stage whose layers name it. Of a whole forward, each stage gets the inputs that its part takes.
All is moved there at once, not from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.batch import Rows, are_alike, check_inputs, gather, moved, scatter
from penstock.ir import StageGraph
from penstock.partition.forward.whole import Dealt, Whole
from penstock.partition.partition import Layers, Partition
from penstock.partition.side import Side, check_named
from penstock.stage.loss import own_loss
from penstock.stage.reduction import Counting, Reduction

Given = Mapping[int, list[tuple[Any, ...]]]  # by stage, the values of each micro-batch
Where = Callable[[int], torch.device | None]  # a stage's device; None: it is not fed here


@dataclass(frozen=True)
class Batch:
    """What a call was given."""

    inputs: tuple[Any, ...]
    side: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[Any, ...] = ()  # of one, or of none
    scores_itself: bool = False  # the loss is the model's own


@dataclass(frozen=True)
class Fed:
    """What each stage is given from outside, and the rows that it was cut by."""

    given: Given
    rows: Rows
    chunks: int
    graph: StageGraph  # who feeds whom in this call
    target: bool = False  # is the last value of the last stage's
    divided: str = ""  # how: the same on every rank that divides the forward in the same way
    counting: Counting | None = None  # what counts of targets that the model's own loss has
    shares: Sequence[float | Tensor] = ()  # of the micro-batches in that loss, outside of a step
    labels: Sequence[tuple[Any, ...]] = ()  # that it may count, and it is not known how
    wholes: tuple[Tensor, ...] = ()  # what was cut, if it was these alone, and all by their rows

    def rule(self, known: Reduction) -> Reduction:
        """How losses make one, if the model's own says what counts in it."""
        if self.counting is None or known.sums:
            return known
        return replace(known, counting=self.counting)

    def together(self, outputs: Sequence[Any]) -> Any:
        """One output of those of the micro-batches; a loss of the model's own is one number."""
        losses = [own_loss(output) for output in outputs]
        if not self.shares or not all(isinstance(x, Tensor) and not x.dim() for x in losses):
            return gather(outputs, self.rows)
        parts = [_part(*pair) for pair in zip(losses, self.shares, strict=True)]
        total = torch.stack(parts).sum().to(losses[0].dtype)
        leaves = pytree.tree_leaves(outputs[0])
        at = next(number for number, leaf in enumerate(leaves) if leaf is losses[0])
        return total if outputs[0] is losses[0] else gather(outputs, self.rows, {at: total})

    def of_others(self, wholes: Sequence[Tensor]) -> Given:
        """What would be given if these had been cut."""
        columns = [torch.split(whole, list(self.rows.counts)) for whole in wholes]
        pieces, inputs = list(zip(*columns, strict=True)), len(wholes) - self.target
        given = {0: [piece[:inputs] for piece in pieces]}
        if self.target:
            _deal_target(given, max(self.given), [piece[-1] for piece in pieces])
        return given

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """Those of the micro-batches; empty, if there is none."""
        if not self.target:
            return list(self.labels) or [()] * self.chunks
        return [values[-1:] for values in self.given[max(self.given)]]


def feed(partition: Partition, chunks: int, batch: Batch, where: Where) -> Fed:
    """Cut a batch, and deal it out to the stages."""
    check_inputs(batch.inputs, batch.side.values(), where(0))
    if isinstance(partition.how, Whole):
        return _to_parts(partition, partition.how, chunks, batch, where)
    return _to_layers(partition, partition.how, chunks, batch, where)


def _to_layers(partition: Partition, how: Layers, chunks: int, batch: Batch, where: Where) -> Fed:
    inputs, side, target = batch.inputs, batch.side, batch.target
    if not side and not target:
        pieces, rows = scatter(inputs, chunks)
        given = {0: pieces} if where(0) else {}
        return Fed(given, rows, len(pieces), partition.graph, wholes=_alike(inputs))
    takers = _takers(partition, how, side)
    last = len(partition.stages) - 1
    values, names = list(inputs), [f"input {at}" for at in range(len(inputs))]
    homes: dict[tuple[str, torch.device | None], int] = {}
    for name, stages in takers.items():
        for device in dict.fromkeys(map(where, stages)):
            homes[name, device] = len(values)
            values.append(moved(side[name], device))
            names.append(name)
    for value in target:
        values.append(moved(value, where(last)))
        names.append("target")
    pieces, rows = scatter(tuple(values), chunks, names)
    given = {0: [piece[: len(inputs)] for piece in pieces]}
    for stage in sorted({stage for stages in takers.values() for stage in stages}):
        mine = {name: homes[name, where(stage)] for name in takers if stage in takers[name]}
        before = given.get(stage, [()] * len(pieces))
        given[stage] = [
            (*values, Side({name: piece[at] for name, at in mine.items()}))
            for values, piece in zip(before, pieces, strict=True)
        ]
    if target:
        _deal_target(given, last, [piece[-1] for piece in pieces])
    fed = {stage: parts for stage, parts in given.items() if where(stage) is not None}
    wholes = _alike(tuple(values)) if not side else ()
    return Fed(fed, rows, len(pieces), partition.graph, bool(target) and last in fed, wholes=wholes)


def _deal_target(given: dict[int, list[tuple[Any, ...]]], last: int, targets: list[Any]) -> None:
    """To the last stage, after what it has."""
    before = given.get(last, [()] * len(targets))
    given[last] = [(*values, one) for values, one in zip(before, targets, strict=True)]


def _alike(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return values if are_alike(values) else ()


def _takers(partition: Partition, how: Layers, side: Mapping[str, Any]) -> dict[str, list[int]]:
    """The stages that take each side input."""
    takes, stages = how.takes, partition.stages
    layers = [name for stage in stages for name in stage.names]
    check_named(side, layers, [names for stage in takes for names in stage])
    return {
        name: [at for at, stage in enumerate(takes) if any(name in names for names in stage)]
        for name in side
    }


def _to_parts(partition: Partition, whole: Whole, chunks: int, batch: Batch, where: Where) -> Fed:
    """Each micro-batch is divided in its own way; who feeds whom in one of them, does in all."""
    inputs, side = batch.inputs, {**whole.defaults(batch.side), **batch.side}
    last = len(partition.stages) - 1
    target = tuple(moved(value, where(last)) for value in batch.target)
    names = [*(f"input {at}" for at in range(len(inputs))), *side, "target"]
    pieces, rows = scatter((*inputs, *side.values(), *target), chunks, names)
    state, split_at = whole.state(), len(inputs)
    ends = split_at + len(side)
    dealt = [
        whole.divided(piece[:split_at], dict(zip(side, piece[split_at:ends], strict=True)), state)
        for piece in pieces
    ]
    edges = sorted({edge for one in dealt for edge in one.edges})
    graph = StageGraph.chain(len(partition.stages), edges)
    sends = {s: tuple(d for a, d in graph.edges if a == s) for s in range(last + 1)}
    handed = [one.handed(state, sends) for one in dealt]
    given: dict[int, list[tuple[Any, ...]]] = {}
    for stage in range(last + 1):
        device = where(stage)
        if device is not None:
            partition.stages[stage].watched |= any(one.draws(stage) for one in dealt)
            partition.stages[stage].mutates |= any(one.mutates(stage) for one in dealt)
            given[stage] = [
                (told, *(moved(tensor, device) for tensor in one.taken(stage)))
                for told, one in zip(handed, dealt, strict=True)
            ]
    targets, counting = [piece[-1] for piece in pieces] if target else [], None
    own = None if target else _own_targets(dealt)
    shares = _shares(rows, own, where(last)) if not batch.scores_itself else ()
    if own is not None and batch.scores_itself:
        targets, counting = [moved(one, where(last)) for one in own[0]], own[1]
    if targets and last in given:
        _deal_target(given, last, targets)
    labels = (
        [()]
        if own or target
        else [
            tuple(v for name, v in zip(names, piece, strict=False) if "label" in name)
            for piece in pieces
        ]
    )
    has_target, ways = bool(targets) and last in given, " ".join(one.digest for one in dealt)
    return Fed(given, rows, len(pieces), graph, has_target, ways, counting, shares, labels)


def _shares(
    rows: Rows, own: tuple[list[Tensor], Counting] | None, device: torch.device | None
) -> Sequence[float | Tensor]:
    """The micro-batches' parts in the model's own loss: by what counts, or by rows."""
    if own is None:
        return rows.shares()
    counts = torch.stack([own[1](target) for target in own[0]])
    return list((counts / counts.sum()).to(device).unbind())


def _part(loss: Tensor, share: float | Tensor) -> Tensor:
    """What counts for nothing may be no number."""
    return loss * share if isinstance(share, float) else (loss * share).masked_fill(share == 0, 0)


def _own_targets(dealt: Sequence[Dealt]) -> tuple[list[Tensor], Counting] | None:
    """Those of the model's own loss, if every micro-batch has them, and counts them alike."""
    found = [pair for one in dealt if (pair := one.counted()) is not None]
    if len(found) < len(dealt) or len({counting.ignored for _, counting in found}) > 1:
        return None
    return [target for target, _ in found], found[0][1]
