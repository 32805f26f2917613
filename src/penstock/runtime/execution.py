"""One call of a pipe: what it was given, what it keeps, and how it is carried out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.device.device import CallerStreams, Device, Gpu, GraphTimestamp, Timestamp
from penstock.runtime.program_cache import Phase
from penstock.runtime.transport import Transport
from penstock.runtime.worker import CellIO, TimedAction, Worker
from penstock.schedules.ir import Program
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline, cost_from_spans
from penstock.stage.caller_context import CallerContext
from penstock.stage.parameter_proxies import StageProxies
from penstock.stage.rng import (
    RngSource,
    advance_caller_rng,
    derive_cell_seed,
    get_shared_rng_states,
    peek_seed,
)
from penstock.stage.stage import Stage
from penstock.stage.stage_runner import SavedForBackward, StageRunner


class LaneExecutor(Protocol):
    """How the ranks of this process carry out their lanes, and what joins them."""

    def endpoint(self, rank: int) -> Transport:
        """The rank's end of what carries messages."""

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Carry out a phase; each worker its rank's lane."""


class TiedWeights(Protocol):
    """What stages share with others: what they compute with instead, and settling it after."""

    @property
    def proxies(self) -> Mapping[int, StageProxies]:
        """By stage."""

    def accumulate_gradients(self) -> None:
        """Hand over what the stand-ins have learned."""


class CellPolicy(NamedTuple):
    """How the cells of a call are computed."""

    saved_for_backward: Callable[
        [int, int], SavedForBackward
    ]  # what a (stage, micro-batch) leaves behind
    splits_backward: Callable[[int, int], bool]  # is its backward split?
    require_known_leaves: bool = False  # by the caller's graph


class RngPolicy(NamedTuple):
    """Where the random numbers of a call come from, and what is done once some were used."""

    make_seed: Callable[[], int] = peek_seed
    advance_rng: Callable[[], None] = advance_caller_rng
    make_cell_rng: Callable[[int, int, int], RngSource | int] = (
        derive_cell_seed  # of seed, stage, micro-batch
    )
    detect_outside_rng_use: bool = True  # is it noticed if others draw while the call runs?


DEFAULT_RNG_POLICY = RngPolicy()


class CaptureOverrides(NamedTuple):
    """How a step that is captured, or about to be, differs from others."""

    rng_policy: RngPolicy = DEFAULT_RNG_POLICY
    require_known_leaves: bool = False  # does nothing learn but parameters?
    devices: Sequence[Device] = ()  # by rank, if they are not the pipe's own


NO_OVERRIDES = CaptureOverrides()


class Execution:
    """Carries out phases over the stages of this process's ranks, which `places` names."""

    def __init__(
        self,
        stages: Sequence[Stage],
        devices: Mapping[int, Device],
        placement: Sequence[int],
        cell_policy: CellPolicy,
        executor: LaneExecutor,
        tied_weights: TiedWeights,
        rng_policy: RngPolicy = DEFAULT_RNG_POLICY,
    ) -> None:
        self.cell_io = CellIO()
        self._devices, self._placement, self._executor = devices, placement, executor
        if any(isinstance(place, Gpu) for place in devices.values()):
            _silence_stream_mismatch_warning()
        self.context = CallerContext.current(
            frozenset(place.device.type for place in devices.values())
        )
        self._tied_weights, self._rng_policy = tied_weights, rng_policy
        self.stage_runners = [
            StageRunner(
                stage,
                self.context,
                partial(cell_policy.saved_for_backward, stage.index),
                partial(cell_policy.splits_backward, stage.index),
                cell_policy.require_known_leaves,
                tied_weights.proxies[stage.index],
            )
            for stage in stages
            if placement[stage.index] in devices
        ]
        if any(tape.may_draw_random for tape in self.stage_runners):
            seed = rng_policy.make_seed()
            for tape in self.stage_runners:
                tape.rng_source = partial(rng_policy.make_cell_rng, seed, tape.stage.index)
        self.is_cleared = self._rng_advanced = False
        self.workers = [
            Worker(
                rank,
                place,
                {t.stage.index: t for t in self.stage_runners if placement[t.stage.index] == rank},
                executor.endpoint(rank),
                self.cell_io,
            )
            for rank, place in devices.items()
        ]
        self.time_origins: list[Timestamp] = []

    @property
    def used_rng(self) -> bool:
        """Did any stage draw random numbers?"""
        return any(tape.has_drawn for tape in self.stage_runners)

    def run(self, phase: Phase, retain_graph: bool = False) -> None:
        """Carry out a phase: all that the caller asked for before comes before it, and so on."""
        streams = CallerStreams()
        places = list(self._devices.values())
        for worker in self.workers:
            worker.retain_graph = retain_graph
            worker.device.wait_for_caller(streams)
        if not self.time_origins:
            self.time_origins = _record_time_origins(places)
        states = (
            get_shared_rng_states(place.device for place in places)
            if self._rng_policy.detect_outside_rng_use
            else []
        )
        try:
            self._executor.execute(self.workers, phase, self.context)
        except BaseException:
            with suppress(RuntimeError):  # a device that refuses has said so: that is to be told
                self._release_streams(streams)
            raise
        self._release_streams(streams)
        self._tied_weights.accumulate_gradients()
        self._update_caller_rng(states)

    def _release_streams(self, streams: CallerStreams) -> None:
        for worker in self.workers:
            worker.device.release_to_caller(streams)

    def create_grad_accumulators(self) -> list[GradientEdge]:
        """Where the parameters' gradients arrive, made on the streams of their ranks.

        Held while the call is put into the caller's graph: made there, they would be on the
        caller's stream, and every backward of every rank would wait for that one stream.
        """
        found: list[GradientEdge] = []
        for tape in self.stage_runners:  # the first that has a parameter is its owner's
            place = self._devices[self._placement[tape.stage.index]]
            if isinstance(place, Gpu):
                with place.activate():
                    found += map(get_gradient_edge, tape.parameters)
        return found

    def _update_caller_rng(self, states_before: Sequence[torch.Tensor]) -> None:
        """Move the caller's generator on, if the call drew; notice draws that came unexpected."""
        devices = [place.device for place in self._devices.values()]
        if states_before and not all(
            map(torch.equal, get_shared_rng_states(devices), states_before)
        ):
            for tape in self.stage_runners:
                tape.stage.reset_behaviors()
            if any(tape.has_recomputed for tape in self.stage_runners):
                warnings.warn(
                    "somebody drew random numbers while the pipe ran: if it was a layer that had "
                    "not done so before, its recomputation in this call drew others; the next "
                    "calls repeat them rightly",
                    stacklevel=4,
                )
        if self.used_rng and not self._rng_advanced:
            self._rng_advanced = True
            self._rng_policy.advance_rng()

    def build_measured_run(self, program: Program) -> MeasuredRun:
        """When each rank did what."""
        return MeasuredRun(
            program, [worker.timed_actions for worker in self.workers], self.time_origins
        )

    def clear(self) -> None:
        """Drop all that is kept for backwards."""
        self.is_cleared = True
        for tape in self.stage_runners:
            tape.clear()


@cache
def _silence_stream_mismatch_warning() -> None:
    """PyTorch warns that these streams are not the caller's; it need not."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)


def _record_time_origins(devices: Sequence[Device]) -> list[Timestamp]:
    """A moment at the beginning, for each place; those on one device have it in common."""
    first = {place.device: place for place in reversed(devices)}
    found = {device: place.record_timestamp() for device, place in first.items()}
    return [found[place.device] for place in devices]


def _elapsed_seconds(start: Timestamp, end: Timestamp) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(start, GraphTimestamp)
    assert not isinstance(end, float | GraphTimestamp)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class MeasuredRun:
    """A run that took place; on a GPU it may still be going on."""

    program: Program
    timed_actions: Sequence[Sequence[TimedAction]]
    time_origins: Sequence[Timestamp]

    @cached_property
    def timeline(self) -> Timeline:
        """When everything ran. On a GPU this waits until the run has ended."""
        lanes = zip(self.timed_actions, self.time_origins, strict=True)
        spans = [
            Span(
                rank,
                m.bound_action.lane_index,
                m.bound_action.action,
                *compute_span_seconds(m, origin),
            )
            for rank, (lane, origin) in enumerate(lanes)
            for m in lane
        ]
        return build_measured_timeline(self.program, spans)


def compute_span_seconds(timed_action: TimedAction, origin: Timestamp) -> tuple[float, float]:
    """From when to when, counted from the origin."""
    _, start, end = timed_action
    if type(start) is type(end) is type(origin) is float:  # on the host
        return start - origin, end - origin
    return _elapsed_seconds(origin, start), _elapsed_seconds(origin, end)


def build_measured_timeline(program: Program, spans: Sequence[Span]) -> Timeline:
    """Of spans that were measured, in any order."""
    ordered = sorted(spans, key=lambda span: (span.start, span.end))
    return Timeline(program, cost_from_spans(program, ordered), tuple(ordered))
