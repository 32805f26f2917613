"""One call of a pipe: what it was given, what it keeps, and how it is carried out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.ir import Program
from penstock.play import Span
from penstock.run.inline import run_inline
from penstock.run.phase import Phase
from penstock.run.threads import Crew
from penstock.run.ties import Ties
from penstock.run.transport import Mailboxes, Stopped
from penstock.run.worker import Desk, Mark, Step, Worker
from penstock.stage.context import Context, no_autocast
from penstock.stage.places import Gpu, Moment, Place, Streams
from penstock.stage.randomness import move_on, next_seed, shared_states
from penstock.stage.stage import Stage
from penstock.stage.tape import Keep, Tape
from penstock.timeline import Timeline, observed


class Call:
    """Carries out phases over stages, in the crew's threads, or inline without a crew."""

    def __init__(
        self,
        stages: Sequence[Stage],
        places: Sequence[Place],
        placement: Sequence[int],
        keep: Callable[[int, int], Keep],
        divided: Callable[[int, int], bool],
        crew: Crew | None,
        tracked: bool,
        chunks: int,
    ) -> None:
        self.desk = Desk()
        self._places, self._placement, self._crew = places, placement, crew
        self.context = Context.here(frozenset(place.device.type for place in places))
        self._ties = Ties(stages, places, placement, tracked, chunks)
        self.tapes = [
            Tape(
                stage,
                self.context,
                partial(keep, stage.index),
                partial(divided, stage.index),
                tracked,
                stand_ins,
            )
            for stage, stand_ins in zip(stages, self._ties.stand_ins, strict=True)
        ]
        if any(tape.may_draw for tape in self.tapes):
            seed = next_seed()
            for tape in self.tapes:
                tape.seed = seed
        self.done = self._moved_on = False
        self._mailboxes = Mailboxes(places, placement)
        self.workers = [
            Worker(
                rank,
                place,
                {t.stage.index: t for t in self.tapes if placement[t.stage.index] == rank},
                self._mailboxes.end(rank),
                self.desk,
            )
            for rank, place in enumerate(places)
        ]
        self.origins: list[Moment] = []

    def run(self, phase: Phase, retain: bool = False) -> None:
        """Carry out a phase: all that the caller asked for before comes before it, and so on."""
        streams = Streams()
        for worker in self.workers:
            worker.retain = retain
            worker.place.join(streams)
        if not self.origins:
            self.origins = _origins(self._places)
        states = shared_states(place.device for place in self._places)
        try:
            if self._crew is None:
                with no_autocast(), torch.set_grad_enabled(self.context.grad):
                    run_inline(self.workers, phase)
            else:
                jobs = [
                    partial(self._lane, worker, steps)
                    for worker, steps in zip(self.workers, phase.lanes, strict=True)
                ]
                self._crew.do(jobs, self._mailboxes.stop)
        finally:
            for worker in self.workers:
                worker.place.part(streams)
        self._ties.settle()
        self._look_after(states)

    def anchors(self) -> list[GradientEdge]:
        """Where the parameters' gradients arrive, made on the streams of their ranks.

        Held while the call is put into the caller's graph: made there, they would be on the
        caller's stream, and every backward of every rank would wait for that one stream.
        """
        found: list[GradientEdge] = []
        for tape in self.tapes:  # the first that has a parameter is its owner's
            place = self._places[self._placement[tape.stage.index]]
            if isinstance(place, Gpu):
                _meant_so()
                with place.entered():
                    found += map(get_gradient_edge, tape.parameters)
        return found

    def _lane(self, worker: Worker, steps: Sequence[Step]) -> None:
        # inference_mode(False) would switch autograd's threads on again
        inference = self.context.inference
        mode = torch.inference_mode() if inference else torch.set_grad_enabled(self.context.grad)
        with mode, worker.place.entered():
            for step in steps:
                if self._mailboxes.stopped:
                    raise Stopped
                worker.do(step)

    def _look_after(self, states: Sequence[torch.Tensor]) -> None:
        """Move the caller's generator on, if the call drew; notice draws that came unexpected."""
        now = shared_states(place.device for place in self._places)
        if not all(map(torch.equal, now, states)):
            for tape in self.tapes:
                tape.stage.forget()
            if any(tape.recomputes for tape in self.tapes):
                warnings.warn(
                    "somebody drew random numbers while the pipe ran: if it was a layer that had "
                    "not done so before, its recomputation in this call drew others; the next "
                    "calls repeat them rightly",
                    stacklevel=4,
                )
        if any(tape.drew for tape in self.tapes) and not self._moved_on:
            self._moved_on = True
            move_on()

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
    found: dict[torch.device, Moment] = {}
    return [found.setdefault(place.device, place.now()) for place in places]


def _seconds(start: Moment, end: Moment) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
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
        spans = [
            Span(rank, m.step.at, m.step.action, _seconds(origin, m.start), _seconds(origin, m.end))
            for rank, (lane, origin) in enumerate(zip(self.marks, self.origins, strict=True))
            for m in lane
        ]
        spans.sort(key=lambda span: (span.start, span.end))
        return Timeline(self.program, observed(self.program, spans), tuple(spans))
