"""One captured step: the recording, where its inputs and gradients are, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.run.call import MeasuredRun
from penstock.run.capture.homes import GradBufferMap, redirect_grads_for_replay
from penstock.run.capture.recording import RecordedGraph
from penstock.run.capture.sources import GraphGenerators
from penstock.run.capture.standing import StaticInputs
from penstock.run.training import StepResult
from penstock.run.worker import TimedAction
from penstock.stage.places import GraphTimestamp, Timestamp
from penstock.stage.stamps import GraphTimestamps, ReplayTimestamps
from penstock.timeline import Timeline


@dataclass
class CapturedStep:
    """It is replayed with other numbers each time."""

    graph: RecordedGraph
    static_inputs: StaticInputs
    grad_buffers: GradBufferMap
    generators: GraphGenerators
    clocks: GraphTimestamps  # which it writes down
    result: StepResult  # whose tensors it writes, too
    measured: MeasuredRun
    keep_alive: Any  # what has to live as long as the recording
    replay_count: int = 0

    def replay(self, tensors: Sequence[Tensor]) -> StepResult:
        """The step, of the caller's tensors."""
        self.static_inputs.copy_from(tensors)
        self.generators.seed_generators()
        with redirect_grads_for_replay(self.grad_buffers):
            self.graph.replay()
        self.static_inputs.write_back(tensors)
        self.replay_count += 1
        return replace(
            self.result,
            loss=self.result.loss.clone(),
            outputs=_clone_tensors(self.result.outputs),
            metrics=_clone_tensors(self.result.metrics),
            measured=_ReplayMeasurement(self.measured, self.clocks.snapshot()),
        )


def _clone_tensors(value: Any) -> Any:
    """The caller's own: the next replay writes other numbers."""
    if value is None or (isinstance(value, dict) and not value):  # in most steps
        return value
    with torch.no_grad():
        return pytree.tree_map_only(Tensor, Tensor.clone, value)


@dataclass(frozen=True)
class _ReplayMeasurement:
    """When a replay did what."""

    capture: MeasuredRun
    timestamps: ReplayTimestamps

    @cached_property
    def timeline(self) -> Timeline:
        """This waits until the replay has ended."""
        written = self.timestamps.read()

        def to_seconds(moment: Timestamp) -> Timestamp:
            if isinstance(moment, GraphTimestamp):
                return written[moment.device][moment.slot] / 1e9
            return moment

        program, lanes, origins = (
            self.capture.program,
            self.capture.timed_actions,
            self.capture.time_origins,
        )
        marks = [
            [TimedAction(m.bound_action, to_seconds(m.start), to_seconds(m.end)) for m in lane]
            for lane in lanes
        ]
        return MeasuredRun(program, marks, list(map(to_seconds, origins))).timeline
