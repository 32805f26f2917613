"""What comes from outside: the micro-batches of a call, for each stage that takes some of it.

The batch goes to the first stage, the target to the last, a side input to every stage whose layers
name it: moved there at once, not from stage to stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.batch import Rows, check_inputs, moved, scatter
from penstock.partition.side import Side, check_named
from penstock.partition.split import Split

Given = Mapping[int, list[tuple[Any, ...]]]  # by stage, the values of each micro-batch


@dataclass(frozen=True)
class Fed:
    """What each stage is given from outside, and the rows that it was cut by."""

    given: Given
    rows: Rows
    target: bool = False  # is the last value of the last stage's

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """Those of the micro-batches; empty, if there is none."""
        return [values[-1:] if self.target else () for values in self.given[max(self.given)]]

    @property
    def chunks(self) -> int:
        """How many micro-batches there are."""
        return len(self.given[0])


def feed(
    split: Split,
    chunks: int,
    inputs: tuple[Any, ...],
    side: Mapping[str, Any],
    target: tuple[Any, ...] = (),
) -> Fed:
    """Cut a batch, and deal it out to the stages. A target is a tuple of one, or of none."""
    check_inputs(inputs, side.values(), split.place_of(0).device)
    if not side and not target:
        pieces, rows = scatter(inputs, chunks)
        return Fed({0: pieces}, rows)
    takers = _takers(split, side)
    last = len(split.placement) - 1
    values, names = list(inputs), [f"input {at}" for at in range(len(inputs))]
    homes: dict[tuple[str, torch.device], int] = {}
    for name, stages in takers.items():
        for device in dict.fromkeys(split.place_of(stage).device for stage in stages):
            homes[name, device] = len(values)
            values.append(moved(side[name], device))
            names.append(name)
    for value in target:
        values.append(moved(value, split.place_of(last).device))
        names.append("target")
    pieces, rows = scatter(tuple(values), chunks, names)
    given: dict[int, list[tuple[Any, ...]]] = {0: [piece[: len(inputs)] for piece in pieces]}
    for stage in sorted({stage for stages in takers.values() for stage in stages}):
        device = split.place_of(stage).device
        mine = {name: homes[name, device] for name in takers if stage in takers[name]}
        before = given.get(stage, [()] * len(pieces))
        given[stage] = [
            (*values, Side({name: piece[at] for name, at in mine.items()}))
            for values, piece in zip(before, pieces, strict=True)
        ]
    if target:
        before = given.get(last, [()] * len(pieces))
        given[last] = [(*values, piece[-1]) for values, piece in zip(before, pieces, strict=True)]
    return Fed(given, rows, bool(target))


def _takers(split: Split, side: Mapping[str, Any]) -> dict[str, list[int]]:
    """The stages that take each side input."""
    takes, stages = split.partition.takes, split.partition.stages
    layers = [name for stage in stages for name in stage.names]
    check_named(side, layers, [names for stage in takes for names in stage])
    return {
        name: [at for at, stage in enumerate(takes) if any(name in names for names in stage)]
        for name in side
    }
