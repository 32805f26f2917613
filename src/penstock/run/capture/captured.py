"""One captured step: the recording, where its inputs and gradients are, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.run.call import Measured
from penstock.run.capture.homes import Taken, at_home
from penstock.run.capture.recording import Recording
from penstock.run.capture.sources import Sources
from penstock.run.capture.standing import Standing
from penstock.run.training import StepResult
from penstock.run.worker import Mark
from penstock.stage.places import Moment, Stamp
from penstock.stage.stamps import Clocks, Times
from penstock.timeline import Timeline


@dataclass
class Captured:
    """It is replayed with other numbers each time."""

    recording: Recording
    standing: Standing
    taken: Taken
    sources: Sources
    clocks: Clocks  # which it writes down
    result: StepResult  # whose tensors it writes, too
    measured: Measured
    held: Any  # what has to live as long as the recording
    replays: int = 0

    def replay(self, tensors: Sequence[Tensor]) -> StepResult:
        """The step, of the caller's tensors."""
        self.standing.fill(tensors)
        self.sources.seed()
        with at_home(self.taken):
            self.recording.replay()
        self.standing.pass_on(tensors)
        self.replays += 1
        return replace(
            self.result,
            loss=self.result.loss.clone(),
            outputs=_copied(self.result.outputs),
            metrics=_copied(self.result.metrics),
            measured=_Replayed(self.measured, self.clocks.copied()),
        )


def _copied(value: Any) -> Any:
    """The caller's own: the next replay writes other numbers."""
    if value is None or (isinstance(value, dict) and not value):  # in most steps
        return value
    with torch.no_grad():
        return pytree.tree_map_only(Tensor, Tensor.clone, value)


@dataclass(frozen=True)
class _Replayed:
    """When a replay did what."""

    captured: Measured
    times: Times

    @cached_property
    def timeline(self) -> Timeline:
        """This waits until the replay has ended."""
        written = self.times.read()

        def seconds(moment: Moment) -> Moment:
            if isinstance(moment, Stamp):
                return written[moment.device][moment.number] / 1e9
            return moment

        program, lanes, origins = self.captured.program, self.captured.marks, self.captured.origins
        marks = [[Mark(m.step, seconds(m.start), seconds(m.end)) for m in lane] for lane in lanes]
        return Measured(program, marks, list(map(seconds, origins))).timeline
