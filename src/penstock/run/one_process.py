"""A pipe whose ranks are all in this process: threads, or the caller's thread alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor, nn

from penstock.cost import Cost
from penstock.errors import RunError
from penstock.gradients.clip import Clipping, clip_to_norm, norm_over_ranks
from penstock.gradients.overflow import agree_on_overflow
from penstock.ir import Program
from penstock.partition.undoing import rehearsed
from penstock.partition.wrapping import check_apart
from penstock.run.asking import Arrangement, Fellows, Lesson, Ready, Settings, manner_of
from penstock.run.call import AS_EVER, AS_USUAL, Call, Runtime, Terms
from penstock.run.capture.captures import Captures
from penstock.run.capture.choosing import chosen, fallen_back
from penstock.run.capture.watching import Uncapturable, captured_around
from penstock.run.feed import Batch, feed
from penstock.run.inline import Inline
from penstock.run.memory import Memory
from penstock.run.metering import held_by_ranks, weighed
from penstock.run.passage import Passage
from penstock.run.threads import Crew, Threads
from penstock.run.ties import Ties
from penstock.run.training import HasTimeline, StepResult, train
from penstock.run.transport import Mailboxes
from penstock.run.weighing import Ledger, loss_scale
from penstock.stage.added import behind_call
from penstock.stage.batchnorm import deferred_in
from penstock.stage.compiled import turns_for
from penstock.stage.loss import ending_in_loss
from penstock.stage.reduction import reduction_of
from penstock.stage.stage import Stage
from penstock.timeline import Timeline


class OneProcess:
    """Answers a pipe's calls. A copy has threads of its own."""

    def __init__(self, arranged: Arrangement) -> None:
        self._arranged = arranged
        self._split, self._programs = arranged.split, arranged.programs
        self._replicas = arranged.replicas
        self._deferred = deferred_in(self._split.stages_here)
        self._made = _Made()

    def forward(self, settings: Settings, batch: Batch) -> Any:
        """What the model computes of a batch; behind it, an autograd function."""
        self._arranged.check()
        self._replicas.check_call()
        fed = feed(self._split.partition, settings.chunks, batch, self._device_of)
        size = settings.size(fed.chunks, torch.is_grad_enabled())
        program, *phases = self._programs.on(fed.graph).halves(size)
        stages = behind_call(self._split.partition.stages)
        ran = chosen(settings.runtime, list(self._split.places.values()), self._replicas)
        runtime, tracked = self._runtime(ran.runtime), torch.is_grad_enabled()
        terms = Terms(AS_EVER._replace(watched=not captured_around()))
        call = self._call(runtime, program, stages, tracked, terms)
        passage = Passage(call, (phases[0], phases[1]), fed.given)
        with self._replicas.held():
            tensors = passage.tracked() if torch.is_grad_enabled() else passage.forward()[0]
        return fed.together(passage.outputs(tensors))

    def step(self, settings: Settings, batch: Batch, lesson: Lesson) -> StepResult:
        """Forward, loss and backward of a batch under the schedule."""
        self._arranged.check()
        fed = feed(self._split.partition, settings.chunks, batch, self._device_of)
        scale = loss_scale(lesson.scaler, self._device_of(len(self._split.partition.stages) - 1))
        with self._turn():
            result = self._taken(Ready(settings, lesson, fed, scale))
        if torch.is_grad_enabled():
            if lesson.scaler is not None:
                agree_on_overflow(self._split.partition.parameters(), None)
            self._made.last = result.measured
        return result

    def _taken(self, ready: Ready) -> StepResult:
        """By what was asked for, or by what can."""
        ran = chosen(ready.settings.runtime, list(self._split.places.values()), self._replicas)
        if ran.runtime == "graph":
            for layer in self._deferred:  # or what the last step left would make another kind
                layer.begin(ready.fed.chunks)
            try:
                return replace(self._captures.step(ready, self._run), ran=ran)
            except Uncapturable as reason:
                ran = fallen_back(ready.settings.runtime, reason, self._made.warned)
        return replace(self._run(ready, self._runtime(ran.runtime)), ran=ran)

    def _run(self, ready: Ready, runtime: Runtime, terms: Terms = AS_USUAL) -> StepResult:
        settings, lesson, fed = ready.settings, ready.lesson, ready.fed
        program, phase = self._arranged.run_of_step(settings, fed)
        rule = fed.rule(reduction_of(lesson.loss_fn, settings.reduction))
        stages = ending_in_loss(
            self._split.partition.stages,
            lesson.loss_fn,
            rule.counting,
            fed.target,
            lesson.outputs,
        )
        ledger = Ledger(rule, fed.rows.shares(), fed.targets, ready.scale)
        call = self._call(runtime, program, stages, False, terms)
        result = train(call, program, phase, fed, ledger, self._replicas)
        if lesson.optimizer is not None:
            lesson.optimizer.step()
        return result

    @property
    def _captures(self) -> Captures:
        if self._made.captures is None:
            places = list(self._split.places.values())
            self._made.captures = Captures(self._split.partition, places, self._split.placement)
        return self._made.captures

    def calling(self, kind: str, **facts: object) -> AbstractContextManager[object]:
        """Nothing has to be told to anybody."""
        return nullcontext()

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, how: Clipping) -> Tensor:
        """All are here."""
        total = norm_over_ranks(parameters, None, how)
        clip_to_norm(parameters, total, max_norm, how)
        return total

    def saves_with(self) -> Fellows:
        """There is one process."""
        return Fellows()

    def forecast(self, settings: Settings, cost: Cost | None) -> Timeline:
        """With the costs of the last step, if there was one."""
        return self._arranged.forecast(settings, cost, self._made.last)

    def memory(self, settings: Settings, batch: Batch, lesson: Lesson) -> Memory:
        """Of a step that is taken in this thread."""
        self._arranged.check()
        if self._replicas:
            raise RunError(
                "pipe.memory leaves no trace, and stages in DistributedDataParallel or fully_shard "
                "would: weigh the pipe without them"
            )
        partition, placement = self._split.partition, self._split.placement
        inside = (module for stage in partition.stages for module in stage.modules())
        with (
            self._turn(),
            rehearsed(list(dict.fromkeys([*partition.names(), *inside])), batch) as given,
        ):
            fed = feed(partition, settings.chunks, given, self._device_of)
            program, _ = self._arranged.run_of_step(settings, fed)
            run = partial(self._run, Ready(settings, lesson, fed, None))
            readings = weighed(run, self._split.places, placement)
        return Memory(program, readings, held_by_ranks(partition.stages, placement))

    def _call(
        self,
        runtime: Runtime,
        program: Program,
        stages: Sequence[Stage],
        tracked: bool,
        terms: Terms,
    ) -> Call:
        schedule = program.schedule
        for layer in self._deferred:
            layer.begin(schedule.chunks)
        places, placement = self._split.places, self._split.placement
        places = dict(enumerate(terms.places)) or places
        ties = Ties(stages, list(places.values()), placement, tracked, schedule.chunks)
        manner = manner_of(schedule, tracked or terms.closed)
        return Call(stages, places, placement, manner, runtime, ties, terms.draws)

    def _runtime(self, runtime: str) -> Runtime:
        where = list(self._split.places.values()), self._split.placement
        if len(self._split.places) == 1 or runtime == "inline":
            return Inline(Mailboxes(*where))  # of one rank, there is nothing to run beside
        return Threads(self._crew_at_hand(), *where, self._turns())

    def _turns(self) -> AbstractContextManager[object] | None:
        """Stages in wrappers of data parallelism wait for other processes: they take none."""
        return None if self._replicas else turns_for(self._modules)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        found = self._split.partition.computing()
        return list(dict.fromkeys(module for one in found for module in one.modules()))

    def _device_of(self, stage: int) -> torch.device:
        return self._split.place_of(stage).device

    def _turn(self) -> AbstractContextManager[object]:
        """Within, no other thread takes a step: it would find gradients of another unit."""
        if self._made.crew is not None:
            self._made.crew.check_caller()
        return self._made.stepping

    def _crew_at_hand(self) -> Crew:
        """The threads: made at the first call, and ended with the pipe."""
        with self._made.making:  # one crew, though several threads call
            if self._made.crew is None or not self._made.crew.here:
                check_apart(self._split.partition, self._split.placement)
                self._made.crew = Crew(len(self._split.places))
            return self._made.crew


@dataclass
class _Made:
    """What is made when it is first needed. A copy of the pipe makes its own."""

    crew: Crew | None = None
    captures: Captures | None = None
    warned: set[str] = field(default_factory=set)  # why steps were not captured
    making: Lock = field(default_factory=Lock)
    stepping: AbstractContextManager[object] = field(default_factory=RLock)
    last: HasTimeline | None = None

    def __reduce__(self) -> tuple[type[_Made], tuple[()]]:
        return _Made, ()
