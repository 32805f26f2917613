"""What comes from outside: the micro-batches of a call, for each stage that takes some of it.

The batch goes to the first stage, the target to the last, a side input to every stage whose layers
name it: moved there at once, not from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.batch import Rows, check_inputs, moved, scatter
from penstock.partition.sequential import Partition
from penstock.partition.side import Side, check_named

Given = Mapping[int, list[tuple[Any, ...]]]  # by stage, the values of each micro-batch
Where = Callable[[int], torch.device | None]  # a stage's device; None: it is not fed here


@dataclass(frozen=True)
class Batch:
    """What a call was given."""

    inputs: tuple[Any, ...]
    side: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[Any, ...] = ()  # of one, or of none


@dataclass(frozen=True)
class Fed:
    """What each stage is given from outside, and the rows that it was cut by."""

    given: Given
    rows: Rows
    chunks: int
    target: bool = False  # is the last value of the last stage's

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """Those of the micro-batches; empty, if there is none."""
        if not self.target:
            return [()] * self.chunks
        return [values[-1:] for values in self.given[max(self.given)]]


def feed(partition: Partition, chunks: int, batch: Batch, where: Where) -> Fed:
    """Cut a batch, and deal it out to the stages."""
    inputs, side, target = batch.inputs, batch.side, batch.target
    check_inputs(inputs, side.values(), where(0))
    if not side and not target:
        pieces, rows = scatter(inputs, chunks)
        return Fed({0: pieces} if where(0) else {}, rows, len(pieces))
    takers = _takers(partition, side)
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
    given: dict[int, list[tuple[Any, ...]]] = {0: [piece[: len(inputs)] for piece in pieces]}
    for stage in sorted({stage for stages in takers.values() for stage in stages}):
        mine = {name: homes[name, where(stage)] for name in takers if stage in takers[name]}
        before = given.get(stage, [()] * len(pieces))
        given[stage] = [
            (*values, Side({name: piece[at] for name, at in mine.items()}))
            for values, piece in zip(before, pieces, strict=True)
        ]
    if target:
        before = given.get(last, [()] * len(pieces))
        given[last] = [(*values, piece[-1]) for values, piece in zip(before, pieces, strict=True)]
    fed = {stage: parts for stage, parts in given.items() if where(stage) is not None}
    return Fed(fed, rows, len(pieces), bool(target) and last in fed)


def _takers(partition: Partition, side: Mapping[str, Any]) -> dict[str, list[int]]:
    """The stages that take each side input."""
    takes, stages = partition.takes, partition.stages
    layers = [name for stage in stages for name in stage.names]
    check_named(side, layers, [names for stage in takes for names in stage])
    return {
        name: [at for at, stage in enumerate(takes) if any(name in names for names in stage)]
        for name in side
    }
