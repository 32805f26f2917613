"""What comes of a step, told to every rank: its loss, its timeline, whether anybody drew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.ir import Program
from penstock.play import Span
from penstock.run.call import Call, seconds_of, timeline_of
from penstock.run.processes.peers import Peers
from penstock.timeline import Timeline

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_HEAD = 5  # loss, its dtype, the factor of gradients, whether anybody drew, whether there is more


@dataclass(frozen=True)
class Ending:
    """What a rank has to tell when its lane has ended."""

    loss: Tensor | None = None  # the last rank alone knows it
    factor: Tensor | None = None  # of all gradients, if their unit was known only at the end
    drew: bool = False
    more: bool = False  # values follow


@dataclass(frozen=True)
class Told:
    """What all ranks know after it."""

    loss: float
    dtype: torch.dtype
    factor: Tensor | None
    drew: bool
    more: bool
    measured: Gathered


@dataclass(frozen=True)
class Gathered:
    """When every rank did what; each counted from the moment when the ranks had agreed."""

    program: Program
    times: Sequence[Sequence[float]]  # by rank: begin and end of each action; nan: none

    @cached_property
    def timeline(self) -> Timeline:
        """When everything ran."""
        spans = []
        for rank, lane in enumerate(self.program.lanes):
            for at, action in enumerate(lane):
                start, end = self.times[rank][2 * at : 2 * at + 2]
                if not math.isnan(end):
                    spans.append(Span(rank, at, action, start, end))
        return timeline_of(self.program, spans)


def tell(peers: Peers, program: Program, call: Call, ending: Ending) -> Told:
    """Tell all ranks. On a GPU this waits until the step has ended."""
    longest = max(map(len, program.lanes))
    mine = [math.nan] * (_HEAD + 2 * longest)
    if ending.loss is not None:
        mine[0], mine[1] = float(ending.loss), _DTYPES.index(ending.loss.dtype)
    if ending.factor is not None:
        mine[2] = float(ending.factor)
    mine[3], mine[4] = ending.drew, ending.more
    (worker,), (origin,) = call.workers, call.origins
    for mark in worker.marks:
        at = _HEAD + 2 * mark.step.at
        mine[at], mine[at + 1] = seconds_of(mark, origin)
    numbers = torch.tensor(mine, dtype=torch.float64)
    rows = [row.tolist() for row in peers.exchange(numbers, "the end of the step")]
    last = rows[program.schedule.placement[-1]]
    return Told(
        last[0],
        _DTYPES[int(last[1])] if not math.isnan(last[1]) else torch.float32,
        None if math.isnan(last[2]) else torch.tensor(last[2], dtype=torch.float64),
        any(row[3] for row in rows),
        bool(last[4]),
        Gathered(program, [row[_HEAD:] for row in rows]),
    )
