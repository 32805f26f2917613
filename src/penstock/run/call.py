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

from penstock.ir import Program
from penstock.play import Span
from penstock.run.phase import Phase
from penstock.run.transport import Transport
from penstock.run.worker import Desk, Mark, Worker
from penstock.stage.context import Context
from penstock.stage.places import Gpu, Moment, Place, Stamp, Streams
from penstock.stage.randomness import (
    Source,
    move_on,
    next_seed,
    seed_of_cell,
    shared_states,
)
from penstock.stage.stage import Stage
from penstock.stage.stand_ins import StandIns
from penstock.stage.tape import Keep, Tape
from penstock.timeline import Timeline, observed


class Runtime(Protocol):
    """How the ranks of this process carry out their lanes, and what joins them."""

    def end(self, rank: int) -> Transport:
        """The rank's end of what carries messages."""

    def carry_out(self, workers: Sequence[Worker], phase: Phase, context: Context) -> None:
        """Carry out a phase; each worker its rank's lane."""


class Shared(Protocol):
    """What stages share with others: what they compute with instead, and settling it after."""

    @property
    def stand_ins(self) -> Mapping[int, StandIns]:
        """By stage."""

    def settle(self) -> None:
        """Hand over what the stand-ins have learned."""


class Manner(NamedTuple):
    """How the cells of a call are computed."""

    keep: Callable[[int, int], Keep]  # what a (stage, micro-batch) leaves behind
    divided: Callable[[int, int], bool]  # is its backward split?
    tracked: bool = False  # by the caller's graph


class Draws(NamedTuple):
    """Where the random numbers of a call come from, and what is done once some were used."""

    seed: Callable[[], int] = next_seed
    used: Callable[[], None] = move_on
    source: Callable[[int, int, int], Source | int] = seed_of_cell  # of seed, stage, micro-batch
    watched: bool = True  # is it noticed if others draw while the call runs?


AS_EVER = Draws()


class Terms(NamedTuple):
    """How a step that is captured, or about to be, differs from others."""

    draws: Draws = AS_EVER
    closed: bool = False  # does nothing learn but parameters?
    places: Sequence[Place] = ()  # by rank, if they are not the pipe's own


AS_USUAL = Terms()


class Call:
    """Carries out phases over the stages of this process's ranks, which `places` names."""

    def __init__(
        self,
        stages: Sequence[Stage],
        places: Mapping[int, Place],
        placement: Sequence[int],
        manner: Manner,
        runtime: Runtime,
        shared: Shared,
        draws: Draws = AS_EVER,
    ) -> None:
        self.desk = Desk()
        self._places, self._placement, self._runtime = places, placement, runtime
        if any(isinstance(place, Gpu) for place in places.values()):
            _meant_so()
        self.context = Context.here(frozenset(place.device.type for place in places.values()))
        self._shared, self._draws = shared, draws
        self.tapes = [
            Tape(
                stage,
                self.context,
                partial(manner.keep, stage.index),
                partial(manner.divided, stage.index),
                manner.tracked,
                shared.stand_ins[stage.index],
            )
            for stage in stages
            if placement[stage.index] in places
        ]
        if any(tape.may_draw for tape in self.tapes):
            seed = draws.seed()
            for tape in self.tapes:
                tape.source = partial(draws.source, seed, tape.stage.index)
        self.done = self._moved_on = False
        self.workers = [
            Worker(
                rank,
                place,
                {t.stage.index: t for t in self.tapes if placement[t.stage.index] == rank},
                runtime.end(rank),
                self.desk,
            )
            for rank, place in places.items()
        ]
        self.origins: list[Moment] = []

    @property
    def drew(self) -> bool:
        """Did any stage draw random numbers?"""
        return any(tape.drew for tape in self.tapes)

    def run(self, phase: Phase, retain: bool = False) -> None:
        """Carry out a phase: all that the caller asked for before comes before it, and so on."""
        streams = Streams()
        places = list(self._places.values())
        for worker in self.workers:
            worker.retain = retain
            worker.place.join(streams)
        if not self.origins:
            self.origins = _origins(places)
        states = shared_states(place.device for place in places) if self._draws.watched else []
        try:
            self._runtime.carry_out(self.workers, phase, self.context)
        except BaseException:
            with suppress(RuntimeError):  # a device that refuses has said so: that is to be told
                self._part(streams)
            raise
        self._part(streams)
        self._shared.settle()
        self._look_after(states)

    def _part(self, streams: Streams) -> None:
        for worker in self.workers:
            worker.place.part(streams)

    def anchors(self) -> list[GradientEdge]:
        """Where the parameters' gradients arrive, made on the streams of their ranks.

        Held while the call is put into the caller's graph: made there, they would be on the
        caller's stream, and every backward of every rank would wait for that one stream.
        """
        found: list[GradientEdge] = []
        for tape in self.tapes:  # the first that has a parameter is its owner's
            place = self._places[self._placement[tape.stage.index]]
            if isinstance(place, Gpu):
                with place.entered():
                    found += map(get_gradient_edge, tape.parameters)
        return found

    def _look_after(self, states: Sequence[torch.Tensor]) -> None:
        """Move the caller's generator on, if the call drew; notice draws that came unexpected."""
        devices = [place.device for place in self._places.values()]
        if states and not all(map(torch.equal, shared_states(devices), states)):
            for tape in self.tapes:
                tape.stage.forget()
            if any(tape.recomputes for tape in self.tapes):
                warnings.warn(
                    "somebody drew random numbers while the pipe ran: if it was a layer that had "
                    "not done so before, its recomputation in this call drew others; the next "
                    "calls repeat them rightly",
                    stacklevel=4,
                )
        if self.drew and not self._moved_on:
            self._moved_on = True
            self._draws.used()

    def measured(self, program: Program) -> Measured:
        """When each rank did what."""
        return Measured(program, [worker.marks for worker in self.workers], self.origins)

    def clear(self) -> None:
        """Drop all that is kept for backwards."""
        self.done = True
        for tape in self.tapes:
            tape.clear()


@cache
def _meant_so() -> None:
    """PyTorch warns that these streams are not the caller's; it need not."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)


def _origins(places: Sequence[Place]) -> list[Moment]:
    """A moment at the beginning, for each place; those on one device have it in common."""
    first = {place.device: place for place in reversed(places)}
    found = {device: place.now() for device, place in first.items()}
    return [found[place.device] for place in places]


def _seconds(start: Moment, end: Moment) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(start, Stamp)
    assert not isinstance(end, float | Stamp)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Measured:
    """A run that took place; on a GPU it may still be going on."""

    program: Program
    marks: Sequence[Sequence[Mark]]
    origins: Sequence[Moment]

    @cached_property
    def timeline(self) -> Timeline:
        """When everything ran. On a GPU this waits until the run has ended."""
        lanes = zip(self.marks, self.origins, strict=True)
        spans = [
            Span(rank, m.step.at, m.step.action, *seconds_of(m, origin))
            for rank, (lane, origin) in enumerate(lanes)
            for m in lane
        ]
        return timeline_of(self.program, spans)


def seconds_of(mark: Mark, origin: Moment) -> tuple[float, float]:
    """From when to when, counted from the origin."""
    _, start, end = mark
    if type(start) is type(end) is type(origin) is float:  # on the host
        return start - origin, end - origin
    return _seconds(origin, start), _seconds(origin, end)


def timeline_of(program: Program, spans: Sequence[Span]) -> Timeline:
    """Of spans that were measured, in any order."""
    ordered = sorted(spans, key=lambda span: (span.start, span.end))
    return Timeline(program, observed(program, ordered), tuple(ordered))
