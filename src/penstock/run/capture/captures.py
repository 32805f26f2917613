"""The captured steps of a pipe: which are there, when one is made, and what stands against it.

The first step of a kind is taken as it comes, in the caller's thread: it shows what layers do, and
lets libraries make what they cannot make during a capture. The second is captured, and replayed.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.partition.partition import Partition
from penstock.run.asking import Ready
from penstock.run.call import Measured, Runtime, Terms
from penstock.run.capture.captured import Captured
from penstock.run.capture.homes import Homes, Learned, check_dense, viewed
from penstock.run.capture.host import Host
from penstock.run.capture.layers import attributes_of, check_same
from penstock.run.capture.lending import Lending
from penstock.run.capture.likeness import Likeness, check_counts, likeness_of, numbers_of
from penstock.run.capture.rebound import AsItWas, Rebound, bound
from penstock.run.capture.recording import CudaRecording, Pools, Recording
from penstock.run.capture.sources import Asked, Sources
from penstock.run.capture.standing import Inputs, Standing, inputs_of
from penstock.run.capture.subject import Subject
from penstock.run.capture.watching import Uncapturable, Watch, constants_for, naming
from penstock.run.inline import Inline
from penstock.run.training import StepResult
from penstock.run.transport import Mailboxes
from penstock.stage.places import Place
from penstock.stage.stamps import Clocks

KEPT = 8  # recordings; the one that was not used for longest is dropped
NOTED = 64  # kinds of steps that were seen once, or could not be captured
IN_A_ROW = 16  # steps, each of another kind: then something changes that should not
TRIES = 2  # what stood against it so often is not tried again

Run = Callable[[Ready, Runtime, Terms], StepResult]
Record = Callable[[Sequence[torch.device], Pools], Recording]


class Seen(NamedTuple):
    """What the first step of a kind has shown."""

    asked: Asked
    learning: list[nn.Parameter]


@dataclass
class _Notes:
    """Of kinds of steps."""

    captured: OrderedDict[Likeness, Captured] = field(default_factory=OrderedDict)
    seen: OrderedDict[Likeness, Seen] = field(default_factory=OrderedDict)
    refused: OrderedDict[Likeness, str] = field(default_factory=OrderedDict)
    failed: OrderedDict[Likeness, int] = field(default_factory=OrderedDict)  # how often


class Captures:
    """Of one pipe."""

    def __init__(
        self,
        partition: Partition,
        places: Sequence[Place],
        placement: Sequence[int],
        record: Record = CudaRecording,
    ) -> None:
        self._partition, self._record = partition, record
        self._where = places, placement
        self._kinds = frozenset(place.device.type for place in places)
        self._pools, self._homes, self._rebound = Pools(), Homes(), Rebound()
        self._notes = _Notes()
        self._subject: Subject | None = None
        self._last: Likeness | None = None
        self._in_a_row = 0

    def step(self, ready: Ready, run: Run) -> StepResult:
        """Replayed, if there is a recording; else captured, if one like it was seen."""
        self._rebound.settle()
        subject, notes = self._subject_of(ready), self._notes
        check_dense(subject.parameters, subject.named)
        inputs = inputs_of(ready.fed, ready.scale)
        key = likeness_of(ready, inputs, subject, self._kinds)
        captured = self._recorded(key)
        if captured is None:
            for refused in (key, key.whatever_layers_have()):
                if refused in notes.refused:
                    raise Uncapturable(notes.refused[refused])
            if key not in notes.seen:
                return self._first(ready, run, key, subject)
            captured = self._try(ready, run, inputs, key, subject)
        notes.captured.move_to_end(key)
        self._in_a_row = 0
        return captured.replay(inputs.tensors)

    def _recorded(self, key: Likeness) -> Captured | None:
        """What may be replayed: not what would write where old gradients are still looked at."""
        recordings = self._notes.captured
        captured = recordings.get(key)
        gone = set() if captured is None else viewed(captured.taken)
        if gone:
            self._homes.leave(gone)
            for other in [other for other, one in recordings.items() if gone & one.taken.keys()]:
                del recordings[other]
        return recordings.get(key)

    def _subject_of(self, ready: Ready) -> Subject:
        """That of the last step, if nothing of it has changed."""
        loss_fn = ready.lesson.loss_fn
        if self._subject is None or not self._subject.still(loss_fn):
            self._subject = Subject(self._partition, loss_fn)
        return self._subject

    # ---- the first of its kind ------------------------------------------------------------

    def _first(self, ready: Ready, run: Run, key: Likeness, subject: Subject) -> StepResult:
        """As the reference does it."""
        self._count(key)
        modules, optimizer = subject.modules, ready.lesson.optimizer
        asked, learned, host = Asked(), Learned(subject.parameters), Host()
        attributes, tensors = attributes_of(modules), bound(modules)
        numbers = numbers_of(optimizer)
        result = run(ready, Inline(Mailboxes(*self._where)), Terms(asked.draws))
        asked.close()
        try:
            check_same(attributes, attributes_of(modules), subject.called)
            host.check()
            check_counts(optimizer, numbers)
            check_dense(subject.parameters, subject.named)
            self._rebound.notice(tensors, modules, subject.called)
        except Uncapturable as reason:
            self._failed(key.whatever_layers_have(), reason)
        else:
            moved = key._replace(places=subject.places_now())
            _note(self._notes.seen, moved, Seen(asked, learned.found()))
        return result

    def _count(self, key: Likeness) -> None:
        last, self._last = self._last, key
        self._in_a_row += 1
        if self._in_a_row == IN_A_ROW and last is not None:
            warnings.warn(
                f"{IN_A_ROW} steps in a row were each of another kind, and so none was replayed: "
                f"the last two differ in {key.difference(last)}",
                stacklevel=9,
            )

    # ---- the second -----------------------------------------------------------------------

    def _try(
        self, ready: Ready, run: Run, inputs: Inputs, key: Likeness, subject: Subject
    ) -> Captured:
        notes, before, host = self._notes, AsItWas(subject.modules), Host()
        while len(notes.captured) >= KEPT:
            notes.captured.popitem(last=False)
        try:
            with naming(self._partition.names):
                captured = self._capture(ready, run, inputs, notes.seen[key], subject)
                host.check()
        except BaseException as reason:
            before.put_back()
            host.put_back()
            if isinstance(reason, Uncapturable):
                self._failed(key, reason, TRIES if reason.passing else 1)
            raise
        finally:
            torch.clear_autocast_cache()  # what was cast in the recording is of no use outside
        notes.captured[key] = captured
        return captured

    def _capture(
        self, ready: Ready, run: Run, inputs: Inputs, seen: Seen, subject: Subject
    ) -> Captured:
        places, placement = self._where
        recording = self._record([place.device for place in places], self._pools)
        watch = Watch(self._kinds)
        sources = Sources(recording, watch, seen.asked, lambda s: places[placement[s]].device)
        standing = Standing(inputs)
        clocks = Clocks(places)
        lending = Lending(clocks.places, placement)
        standing.fill(inputs.tensors)  # numbers that are possible, for whoever tries a kernel out
        fed, scale = standing.fed(ready.fed, inputs)
        static = Ready(ready.settings, ready.lesson, fed, scale)
        modules = subject.modules
        others = {p: p.grad for p in set(subject.parameters) - set(seen.learning)}
        attributes, tensors = attributes_of(modules), bound(modules)

        def body() -> StepResult:
            with constants_for(modules, self._kinds), watch:
                result = run(static, Inline(lending), Terms(sources.draws, True, clocks.places))
                self._rebound.put_back(tensors, modules, subject.called)
            return result

        torch.clear_autocast_cache()  # or what was cast before would be part of the recording
        try:
            with self._homes.moved_in(seen.learning, subject.named) as taken:
                result = recording.capture(body)
                for parameter, gradient in others.items():
                    if parameter.grad is not gradient:
                        raise Uncapturable(
                            f"{subject.named(parameter)} gets a gradient, and got none before"
                        )
        except BaseException:
            for parameter, gradient in others.items():
                parameter.grad = gradient
            raise
        check_same(attributes, attributes_of(modules), subject.called)
        sources.close()
        standing.close()
        assert isinstance(result.measured, Measured)
        return Captured(
            recording, standing, taken, sources, clocks, result, result.measured, static
        )

    def _failed(self, key: Likeness, reason: Uncapturable, tries: int = TRIES) -> None:
        """Remember it, if it was so before: some layers make in their first step what they keep."""
        times = self._notes.failed.get(key, 0) + 1
        _note(self._notes.failed, key, times)
        if times >= tries:
            _note(self._notes.refused, key, str(reason))


def _note(notes: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    notes[key] = value
    notes.move_to_end(key)
    while len(notes) > NOTED:
        notes.popitem(last=False)
