"""A pipe each of whose ranks is a process: what one of them does when all call the pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batch import moved
from penstock.cost import Cost
from penstock.errors import RunError
from penstock.gradients.clip import Clipping, clip_to_norm, norm_over_ranks
from penstock.gradients.overflow import agree_on_overflow
from penstock.ir import Program
from penstock.run.asking import Arrangement, Fellows, Lesson, Settings, manner_of
from penstock.run.call import Call, Draws
from penstock.run.feed import Batch
from penstock.run.memory import Memory
from penstock.run.passage import Cell, from_outside, pass_changes_on, tensors_by_cell
from penstock.run.phase import Phase
from penstock.run.processes.agreement import Facts, agree
from penstock.run.processes.beginning import Beginning, Opened
from penstock.run.processes.book import Book
from penstock.run.processes.carrying import carried_here, carry_away, cells_away
from penstock.run.processes.copies import begin_together
from penstock.run.processes.lane import OneRank
from penstock.run.processes.links import HostLinks, Links
from penstock.run.processes.opening import facts_of
from penstock.run.processes.results import Ending, Told, tell
from penstock.run.processes.sharing import Sharing
from penstock.run.processes.team import LEARNING, SLOW, Team
from penstock.run.processes.ties import TiesBetween
from penstock.run.processes.wire import Learned, Wire, tags_of
from penstock.run.training import HasTimeline, StepResult, pass_gradients_on
from penstock.run.weighing import Ledger, loss_scale
from penstock.stage.added import behind_call
from penstock.stage.batchnorm import deferred_in
from penstock.stage.loss import ending_in_loss
from penstock.stage.parcel import Parcel, put_together
from penstock.stage.places import Place
from penstock.stage.randomness import move_on
from penstock.stage.reduction import reduction_of
from penstock.stage.stage import Stage
from penstock.timeline import Timeline


class ManyProcesses:
    """Answers a pipe's calls, on one of its ranks."""

    def __init__(self, team: Team, arranged: Arrangement, sharing: Sharing) -> None:
        self.team, self._arranged, self._sharing = team, arranged, sharing
        self._split, self._programs = arranged.split, arranged.programs
        self._replicas = arranged.replicas
        self._deferred = deferred_in(self._split.stages_here)
        team.link(self._split.talking)
        self._beginning = Beginning(team, self._split, sharing)
        self._last: HasTimeline | None = None

    # ---- the two doors --------------------------------------------------------------------

    def forward(self, settings: Settings, batch: Batch) -> Any:
        """What the model computes of a batch: on the last rank, or on all."""
        with self.team.call("forward") as name:
            opened = self._open(name, settings, batch, facts_of(settings), "")
            if torch.is_grad_enabled():
                raise RunError(
                    "pipe(x) cannot be differentiated over several processes, as the loss would be "
                    "on one of them alone: train with pipe.step(x, target=y), and call pipe(x) "
                    "under torch.no_grad()"
                )
            size = settings.size(opened.fed.chunks, False)
            program, phase, _ = self._programs.on(opened.fed.graph).halves(size)
            call, wire = self._call(program, behind_call(self._stages), opened)
            self._take_inputs(call, program, opened)
            call.run(phase)
            _pass_changes_on(tensors_by_cell(opened.fed.given), call)
            outputs = None
            if self._split.is_here(self._last_stage):
                cells = [(self._last_stage, i) for i in range(opened.fed.chunks)]
                values = [_value(call.desk.outputs.pop(cell)) for cell in cells]
                outputs = opened.fed.together(values)
            told = tell(self.team.peers, program, call, Ending(drew=call.drew))
            self._end(told, opened, wire)
            return self._spread(outputs) if self._sharing.outputs == "all" else outputs

    def step(self, settings: Settings, batch: Batch, lesson: Lesson) -> StepResult:
        """Forward, loss and backward of a batch under the schedule."""
        with self.team.call("step") as name:
            facts = facts_of(
                settings,
                outputs=lesson.outputs,
                scaler=lesson.scaler is not None,
                optimizer=lesson.optimizer is not None,
                no_sync=not self._replicas.reduces,
            )
            opened = self._open(name, settings, batch, facts, _name_of(lesson.loss_fn))
            program, phase = self._arranged.run_of_step(settings, opened.fed)
            result = self._train(settings, lesson, opened, program, phase)
        if lesson.optimizer is not None:
            lesson.optimizer.step()
        return result

    def clip(
        self, parameters: Sequence[nn.Parameter], max_norm: float, how: Clipping
    ) -> torch.Tensor:
        """All ranks call it, and each owns what no rank before has."""
        with self.team.call("clipping gradients") as name:
            agree(self.team.peers, name, {"max_norm": str(max_norm), **_told(asdict(how))})
            elsewhere = {id(t.tensor) for t in self._split.ties if t.owner != self.team.rank}
            owned = [p for p in parameters if id(p) not in elsewhere]
            total = norm_over_ranks(owned, self.team.peers, how)
        clip_to_norm(parameters, total, max_norm, how)
        return total

    @contextmanager
    def calling(self, kind: str, **facts: object) -> Iterator[None]:
        """Within, what is raised on one rank is raised on all; it may take long."""
        with self.team.call(kind, SLOW) as name:
            agree(self.team.peers, name, _told(facts))
            yield

    def saves_with(self) -> Fellows:
        """The ranks of all copies."""
        return Fellows(self.team.group_for_saves(), self.team.standing.copy)

    def forecast(self, settings: Settings, cost: Cost | None) -> Timeline:
        """With the costs of the last step, if there was one."""
        return self._arranged.forecast(settings, cost, self._last)

    def memory(self, settings: Settings, batch: Batch, lesson: Lesson) -> Memory:
        """Refused."""
        raise RunError(
            "pipe.memory takes its step in one thread, and this pipe's ranks are processes: make "
            "the same pipe in one process, or read torch.cuda.max_memory_allocated() on each rank"
        )

    # ---- how a call begins and ends -------------------------------------------------------

    @property
    def _stages(self) -> Sequence[Stage]:
        return self._split.partition.stages

    @property
    def _last_stage(self) -> int:
        return len(self._stages) - 1

    @property
    def _place(self) -> Place:
        return self._split.places[self.team.rank]

    def _open(self, name: str, settings: Settings, batch: Batch, facts: Facts, own: str) -> Opened:
        """Agree on what is about to be done; then every rank knows the sizes of it."""
        self._arranged.check()
        opened = self._beginning.opened(name, settings, batch, facts, own)
        self.team.link(self._split.talking_over(opened.fed.graph))
        return opened

    def _call(self, program: Program, stages: Sequence[Stage], opened: Opened) -> tuple[Call, Wire]:
        schedule, team = program.schedule, self.team
        for layer in self._deferred:
            layer.begin(schedule.chunks)
        wire = self._wire(team.links, program, opened.learned)
        here = [stages[stage.index] for stage in self._split.stages_here]
        ties = TiesBetween(here, self._split.ties, schedule.chunks, team.peers)
        draws = Draws(lambda: opened.seed, lambda: None)  # it moves on when all have told
        at = partial(team.watch.at, patience=LEARNING) if opened.first else team.watch.at
        lane = OneRank(wire, at, opened.learned)
        where = self._split.places, self._split.placement
        return Call(stages, *where, manner_of(schedule), lane, ties, draws), wire

    def _wire(self, links: Links, program: Program, learned: Learned) -> Wire:
        team = self.team
        return Wire(
            links, self._split.placement, tags_of(program), learned, team.peers, team.watched
        )

    def _take_inputs(self, call: Call, program: Program, opened: Opened) -> None:
        """What comes from outside into this rank's cells, and from it into others'."""
        split, given = self._split, opened.fed.given
        call.desk.inputs = from_outside({s: v for s, v in given.items() if split.is_here(s)})
        if self._beginning.carries:
            wire = self._wire(HostLinks(self.team.peers.group), program, opened.learned)
            cells = cells_away(opened.announced, split)
            if self.team.rank == split.placement[0]:
                carry_away(given, cells, split, wire)
            else:
                call.desk.inputs |= carried_here(cells, split, wire, self._place.device)

    def _end(self, told: Told, opened: Opened, wire: Wire) -> None:
        """All went well: the generator moves on if any rank drew, and what was seen is known."""
        if told.drew:
            move_on()
        self.team.peers.flush()
        opened.learned.weighted = wire.weighted
        self.team.learned(opened.key).known = True

    def _spread(self, value: Any) -> Any:
        """What the last stage's rank has, on all of them."""
        last = self._split.placement[self._last_stage]
        found = self.team.peers.value(last, value, "outputs")
        return moved(found, self._place.device)

    # ---- a training step ------------------------------------------------------------------

    def _train(
        self, settings: Settings, lesson: Lesson, opened: Opened, program: Program, phase: Phase
    ) -> StepResult:
        rule = opened.fed.rule(reduction_of(lesson.loss_fn, settings.reduction))
        target = opened.announced.target
        stages = ending_in_loss(self._stages, lesson.loss_fn, rule.counting, target, lesson.outputs)
        call, wire = self._call(program, stages, opened)
        self._take_inputs(call, program, opened)
        scale = loss_scale(lesson.scaler, self._place.device)
        ends_here = self._split.is_here(self._last_stage)
        ledger, together = None, None
        if ends_here:
            targets = self._targets(call, opened) if target else [()] * opened.fed.chunks
            ledger = Ledger(rule, opened.fed.rows.shares(), targets, scale)
            if self.team.line is not None:
                together = begin_together(self.team.line, opened.facts, ledger, opened.fed.rows)
        book = Book(ledger, together, wire, opened.learned)
        call.desk.prepare = book.prepare
        call.desk.answer = book.answer if ends_here else None
        with self._replicas.held(self.team.averaging) as held:
            try:
                call.run(phase)
                more = lesson.outputs and self._sharing.outputs == "all"
                ending = book.ending(call.drew, opened.fed.rows, more)
                told = tell(self.team.peers, program, call, ending)
            except BaseException:
                book.give_up()
                raise
            book.finish(told.factor)
            held.factor = told.factor
            self._meet_before_reduction()
        if lesson.scaler is not None and torch.is_grad_enabled():
            agree_on_overflow(self._split.partition.parameters(), self.team.peers)
        return self._result(call, opened, wire, book, told)

    def _meet_before_reduction(self) -> None:
        """Of the wrappers' collectives nobody can be woken: let all copies come so far first."""
        if self._replicas and self.team.twins is not None:
            self.team.twins.exchange(torch.zeros(1), "the end of its step")
            self.team.watch.at("the reduction of gradients")

    def _targets(self, call: Call, opened: Opened) -> list[tuple[Any, ...]]:
        cells = [(self._last_stage, i) for i in range(opened.fed.chunks)]
        parcels = [call.desk.inputs[cell] for cell in cells]
        return [put_together(p.tensors, p.layout)[-1:] for p in parcels]  # type: ignore[arg-type]

    def _result(self, call: Call, opened: Opened, wire: Wire, book: Book, told: Told) -> StepResult:
        """After all ranks have told: the same result on each."""
        self._end(told, opened, wire)
        given = tensors_by_cell(opened.fed.given)
        _pass_changes_on(given, call)
        pass_gradients_on(given, call, self._of_inputs(told.factor))
        outputs, metrics = book.outputs(opened.fed.rows), book.metrics
        if told.more:
            seen = outputs if self._sharing.outputs == "all" else None
            others = self._spread((seen, metrics))
            outputs = others[0] if outputs is None else outputs
            metrics = others[1]
        loss = torch.tensor(told.loss, dtype=told.dtype, device=self._place.device)
        if torch.is_grad_enabled():
            self._last = told.measured
        return StepResult(loss, outputs, metrics, told.measured)

    def _of_inputs(self, factor: Tensor | None) -> Tensor | None:
        """The factor of gradients that are not averaged over copies."""
        if self.team.line is None:
            return factor
        return (torch.ones(()).double() if factor is None else factor) / self.team.line.size


def _value(parcel: Parcel) -> Any:
    (value,) = put_together(parcel.tensors, parcel.layout)  # type: ignore[arg-type]
    return value


def _pass_changes_on(given: Mapping[Cell, Sequence[Tensor]], call: Call) -> None:
    for cell, tensors in given.items():
        if cell in call.desk.inputs:
            pass_changes_on(tensors, call.desk.inputs[cell].tensors)


def _told(values: Mapping[str, object]) -> Facts:
    return {name: str(value) for name, value in values.items()}


def _name_of(loss_fn: Any) -> str:
    named = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    return f"{named.__module__}.{named.__qualname__}"
