"""Fake stages that compute with integers, to run a thousand schedules a minute.

Each stage multiplies the sum of its inputs by its weight, modulo a prime. So every number is
exact, and the gradients of the unsplit model are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, cast

from torch import Tensor

from penstock.device.device import Cpu, Device
from penstock.runtime.threads import WorkerPool
from penstock.runtime.transport import Transport
from penstock.runtime.worker import BoundAction, CellIO, Worker, bind_lane
from penstock.schedules.ir import Op, Program, StageGraph
from penstock.stage.payload import Payload
from penstock.stage.stage import OUTSIDE
from penstock.stage.stage_runner import StageRunner
from tests.runtime.test_worker import GivenGradients

PRIME = 1_000_003


def weight(stage: int) -> int:
    return 3 + 2 * stage


def given(microbatch: int) -> int:
    """Return the input of the first stage, and the output gradient of the last."""
    return 10 + microbatch


def to_payload(number: int) -> Payload:
    return Payload((cast(Tensor, number % PRIME),))


def number(payload: Payload) -> int:
    return cast(int, payload.tensors[0])


@dataclass(frozen=True)
class Named:
    """The part of a stage that a worker uses."""

    index: int


class IntegerStageRunner:
    """A fake `StageRunner` that fails if the actions of a cell run in the wrong order."""

    def __init__(self, stage: int, program: Program) -> None:
        self.stage = Named(stage)
        self.gradient = 0
        self._graph, self._schedule = program.graph, program.schedule
        self._saved: dict[int, int] = {}  # sums of inputs, by micro-batch
        self._inputs: dict[int, int] = {}  # of the cells that are recomputed
        self._later: dict[int, int] = {}  # weight gradients that W adds

    def forward(self, microbatch: int, arrived: Mapping[int, Payload]) -> dict[int, Payload]:
        before = self._graph.before(self.stage.index)
        assert set(arrived) == {*before, *([] if self.stage.index else [OUTSIDE])}
        total = sum(map(number, arrived.values())) % PRIME
        again = (self.stage.index, microbatch) in self._schedule.recomputed
        (self._inputs if again else self._saved)[microbatch] = total
        after = self._graph.after(self.stage.index) or (OUTSIDE,)
        return {stage: to_payload(total * weight(self.stage.index)) for stage in after}

    def recompute(self, microbatch: int) -> dict[int, Payload]:
        self._saved[microbatch] = self._inputs.pop(microbatch)
        return {}

    def backward(
        self, microbatch: int, gradients: Mapping[int, Payload], retain: bool
    ) -> dict[int, Payload]:
        total = sum(map(number, gradients.values())) % PRIME
        learned = self._saved.pop(microbatch) * total % PRIME
        if (self.stage.index, microbatch) in self._schedule.divided:
            self._later[microbatch] = learned
        else:
            self.gradient = (self.gradient + learned) % PRIME
        before = self._graph.before(self.stage.index) or (OUTSIDE,)
        return {stage: to_payload(total * weight(self.stage.index)) for stage in before}

    def backward_weights(self, microbatch: int) -> None:
        self.gradient = (self.gradient + self._later.pop(microbatch)) % PRIME

    @property
    def left(self) -> int:
        """Return how many values it still holds."""
        return len(self._saved) + len(self._inputs) + len(self._later)


# ---- a program over these stages ----------------------------------------------------------


class Mail(Protocol):
    """A message transport: `Mailboxes` or `Rendezvous`."""

    def endpoint(self, rank: int) -> Transport: ...

    def stop(self) -> None: ...


Make = Callable[[Sequence[Device], Sequence[int]], Mail]
Lane = Callable[[Program, int], Sequence[BoundAction]]  # the bound actions of a rank


@dataclass(frozen=True)
class Outcome:
    """The output of the last stage per micro-batch, and the weight gradient of each stage."""

    outputs: list[int]
    gradients: list[int]


def carried_out(program: Program, make: Make, lane: Lane = bind_lane) -> Outcome:
    """Run a program with real workers, one thread per rank, over a transport."""
    schedule = program.schedule
    places = [Cpu() for _ in program.lanes]
    mail, cell_io = make(places, schedule.placement), CellIO()
    cell_io.inputs = {(0, i): to_payload(given(i)) for i in range(schedule.chunks)}
    cell_io.loss = GivenGradients(lambda microbatch: to_payload(given(microbatch)))
    runners = [IntegerStageRunner(stage, program) for stage in range(schedule.stages)]
    jobs = []
    for rank, place in enumerate(places):
        mine = {
            p.stage.index: cast(StageRunner, p)
            for p in runners
            if schedule.placement[p.stage.index] == rank
        }
        worker = Worker(rank, place, mine, mail.endpoint(rank), cell_io)
        jobs.append(partial(_all, worker, lane(program, rank)))
    worker_pool(len(places)).run_jobs(jobs, mail.stop)
    if any(a.op is not Op.F for lane in schedule.lanes for a in lane):
        assert sum(runner.left for runner in runners) == 0
    outputs = [number(cell_io.outputs[schedule.stages - 1, i]) for i in range(schedule.chunks)]
    return Outcome(outputs, [runner.gradient for runner in runners])


@cache
def worker_pool(size: int) -> WorkerPool:
    return WorkerPool(size)


def _all(worker: Worker, steps: Sequence[BoundAction]) -> None:
    for step in steps:
        worker.execute(step)


def unsplit(graph: StageGraph, stages: int, chunks: int, trains: bool) -> Outcome:
    """Return the same numbers without a schedule."""
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
