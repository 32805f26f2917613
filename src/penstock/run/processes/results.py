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
from penstock.run.call import Execution, build_measured_timeline, compute_span_seconds
from penstock.run.processes.peers import ControlChannel
from penstock.timeline import Timeline

_LOSS_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_HEADER_LENGTH = (
    5  # loss, its dtype, the factor of gradients, whether anybody drew, whether there is more
)


@dataclass(frozen=True)
class RankResult:
    """What a rank has to tell when its lane has ended."""

    loss: Tensor | None = None  # the last rank alone knows it
    rescale_factor: Tensor | None = (
        None  # of all gradients, if their unit was known only at the end
    )
    used_rng: bool = False
    has_outputs: bool = False  # values follow


@dataclass(frozen=True)
class GlobalResult:
    """What all ranks know after it."""

    loss: float
    loss_dtype: torch.dtype
    rescale_factor: Tensor | None
    used_rng: bool
    has_outputs: bool
    timings: GatheredTimings


@dataclass(frozen=True)
class GatheredTimings:
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
        return build_measured_timeline(self.program, spans)


def all_gather_results(
    channel: ControlChannel, program: Program, execution: Execution, rank_result: RankResult
) -> GlobalResult:
    """Tell all ranks. On a GPU this waits until the step has ended."""
    longest = max(map(len, program.lanes))
    mine = [math.nan] * (_HEADER_LENGTH + 2 * longest)
    if rank_result.loss is not None:
        mine[0], mine[1] = float(rank_result.loss), _LOSS_DTYPES.index(rank_result.loss.dtype)
    if rank_result.rescale_factor is not None:
        mine[2] = float(rank_result.rescale_factor)
    mine[3], mine[4] = rank_result.used_rng, rank_result.has_outputs
    (worker,), (origin,) = execution.workers, execution.time_origins
    for mark in worker.timed_actions:
        at = _HEADER_LENGTH + 2 * mark.bound_action.lane_index
        mine[at], mine[at + 1] = compute_span_seconds(mark, origin)
    numbers = torch.tensor(mine, dtype=torch.float64)
    rows = [row.tolist() for row in channel.all_gather(numbers, "the end of the step")]
    last = rows[program.schedule.placement[-1]]
    return GlobalResult(
        last[0],
        _LOSS_DTYPES[int(last[1])] if not math.isnan(last[1]) else torch.float32,
        None if math.isnan(last[2]) else torch.tensor(last[2], dtype=torch.float64),
        any(row[3] for row in rows),
        bool(last[4]),
        GatheredTimings(program, [row[_HEADER_LENGTH:] for row in rows]),
    )
