"""Stages that compute with whole numbers, in the place of real ones: a thousand schedules a minute.

Each multiplies the sum of what it gets by its weight, all modulo a prime, so that every number is
exact, and the gradients of the unsplit model are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, cast

from torch import Tensor

from penstock.device.device import Cpu, Device
from penstock.runtime.threads import WorkerPool
from penstock.runtime.transport import Transport
from penstock.runtime.worker import BoundAction, CellIO, Worker, bind_lane
from penstock.schedules.ir import Op, Program, StageGraph
from penstock.stage.payload import Payload
from penstock.stage.stage import OUTSIDE
from penstock.stage.stage_runner import StageRunner

PRIME = 1_000_003


def weight(stage: int) -> int:
    return 3 + 2 * stage


def given(microbatch: int) -> int:
    """What comes from outside, forward and backward."""
    return 10 + microbatch


def parcel(number: int) -> Payload:
    return Payload((cast(Tensor, number % PRIME),))


def number(parcel: Payload) -> int:
    return cast(int, parcel.tensors[0])


@dataclass(frozen=True)
class Named:
    """What a worker asks of a stage."""

    index: int


class Paper:
    """In the place of a tape: it insists on the order of what is done in a cell."""

    def __init__(self, stage: int, program: Program) -> None:
        self.stage = Named(stage)
        self.gradient = 0
        self._graph, self._schedule = program.graph, program.schedule
        self._saved: dict[int, int] = {}  # sums of inputs, by micro-batch
        self._inputs: dict[int, int] = {}  # of those that are to be recomputed
        self._later: dict[int, int] = {}  # what W has to add

    def forward(self, microbatch: int, arrived: Mapping[int, Payload]) -> dict[int, Payload]:
        before = self._graph.before(self.stage.index)
        assert set(arrived) == {*before, *([] if self.stage.index else [OUTSIDE])}
        total = sum(map(number, arrived.values())) % PRIME
        again = (self.stage.index, microbatch) in self._schedule.recomputed
        (self._inputs if again else self._saved)[microbatch] = total
        after = self._graph.after(self.stage.index) or (OUTSIDE,)
        return {stage: parcel(total * weight(self.stage.index)) for stage in after}

    def recompute(self, microbatch: int) -> None:
        self._saved[microbatch] = self._inputs.pop(microbatch)

    def backward(
        self, microbatch: int, gradients: Mapping[int, Sequence[Any]], retain: bool
    ) -> dict[int, tuple[Any, ...]]:
        total = sum(tensors[0] for tensors in gradients.values()) % PRIME
        learned = self._saved.pop(microbatch) * total % PRIME
        if (self.stage.index, microbatch) in self._schedule.divided:
            self._later[microbatch] = learned
        else:
            self.gradient = (self.gradient + learned) % PRIME
        before = self._graph.before(self.stage.index) or (OUTSIDE,)
        return {stage: (total * weight(self.stage.index) % PRIME,) for stage in before}

    def backward_weights(self, microbatch: int) -> None:
        self.gradient = (self.gradient + self._later.pop(microbatch)) % PRIME

    @property
    def left(self) -> int:
        """How much it still holds."""
        return len(self._saved) + len(self._inputs) + len(self._later)


# ---- a program over such stages -----------------------------------------------------------


class Mail(Protocol):
    """What carries messages: `Mailboxes`, or `Rendezvous`."""

    def endpoint(self, rank: int) -> Transport: ...

    def stop(self) -> None: ...


Make = Callable[[Sequence[Device], Sequence[int]], Mail]
Lane = Callable[[Program, int], Sequence[BoundAction]]  # of a rank, ready to be carried out


@dataclass(frozen=True)
class Outcome:
    """What the last stage gave of each micro-batch, and the gradient of each stage's weight."""

    outputs: list[int]
    gradients: list[int]


def carried_out(program: Program, make: Make, lane: Lane = bind_lane) -> Outcome:
    """A program run by workers, one thread a rank, over a transport."""
    schedule = program.schedule
    places = [Cpu() for _ in program.lanes]
    mail, desk = make(places, schedule.placement), CellIO()
    desk.inputs = {(0, i): parcel(given(i)) for i in range(schedule.chunks)}
    desk.compute_output_gradients = lambda microbatch, made: parcel(given(microbatch))
    papers = [Paper(stage, program) for stage in range(schedule.stages)]
    jobs = []
    for rank, place in enumerate(places):
        mine = {
            p.stage.index: cast(StageRunner, p)
            for p in papers
            if schedule.placement[p.stage.index] == rank
        }
        worker = Worker(rank, place, mine, mail.endpoint(rank), desk)
        jobs.append(partial(_all, worker, lane(program, rank)))
    crew(len(places)).run_jobs(jobs, mail.stop)
    if any(a.op is not Op.F for lane in schedule.lanes for a in lane):
        assert sum(paper.left for paper in papers) == 0
    outputs = [number(desk.outputs[schedule.stages - 1, i]) for i in range(schedule.chunks)]
    return Outcome(outputs, [paper.gradient for paper in papers])


@cache
def crew(size: int) -> WorkerPool:
    return WorkerPool(size)


def _all(worker: Worker, steps: Sequence[BoundAction]) -> None:
    for step in steps:
        worker.execute(step)


def unsplit(graph: StageGraph, stages: int, chunks: int, trains: bool) -> Outcome:
    """The same numbers without a schedule."""
    outputs, gradients = [], [0] * stages
    for microbatch in range(chunks):
        totals: list[int] = []
        for stage in range(stages):
            sources = graph.before(stage)
            arrived = sum(totals[s] * weight(s) for s in sources)
            totals.append((arrived + (0 if stage else given(microbatch))) % PRIME)
        outputs.append(totals[-1] * weight(stages - 1) % PRIME)
        back = [0] * stages
        for stage in reversed(range(stages)):
            answers = sum(back[t] * weight(t) for t in graph.after(stage))
            back[stage] = (answers if graph.after(stage) else given(microbatch)) % PRIME
            if trains:
                gradients[stage] = (gradients[stage] + totals[stage] * back[stage]) % PRIME
    return Outcome(outputs, gradients)
