"""The captured steps of a pipe: which are there, when one is made, and what stands against it.

The first step of a kind is taken as it comes, in the caller's thread: it shows what layers do, and
lets libraries make what they cannot make during a capture. The second is captured, and replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.run.asking import Ready
from penstock.run.call import Draws, Measured, Runtime
from penstock.run.capture.captured import Captured
from penstock.run.capture.homes import Homes, fits
from penstock.run.capture.lending import Lending
from penstock.run.capture.likeness import Likeness, changed_number, likeness_of, numbers_of
from penstock.run.capture.rebound import bound, put_back
from penstock.run.capture.recording import CudaRecording, Pools, Recording
from penstock.run.capture.sources import Asked, Cell, Sources
from penstock.run.capture.standing import Inputs, Standing, inputs_of
from penstock.run.capture.watching import Constants, Uncapturable, Watch, naming
from penstock.run.inline import Inline
from penstock.run.training import StepResult
from penstock.run.transport import Mailboxes
from penstock.stage.places import Place

KEPT = 8  # recordings; the one that was not used for longest is dropped
NOTED = 64  # kinds of steps that were seen once, or could not be captured

Run = Callable[[Ready, Runtime, Draws, bool], StepResult]
Record = Callable[[Sequence[torch.device], Pools], Recording]


class Captures:
    """Of one pipe, whose modules have names."""

    def __init__(
        self,
        run: Run,
        places: Sequence[Place],
        placement: Sequence[int],
        names: Mapping[nn.Module, str],
        parameters: Sequence[nn.Parameter],
        record: Record = CudaRecording,
    ) -> None:
        self._run, self._record = run, record
        self._where = places, placement
        self._names, self._modules = names, list(names)
        self._parameters = parameters
        self._kinds = frozenset(place.device.type for place in places)
        self._pools, self._homes = Pools(), Homes()
        self._captured: OrderedDict[Likeness, Captured] = OrderedDict()
        self._seen: OrderedDict[Likeness, Mapping[Cell, int]] = OrderedDict()
        self._refused: OrderedDict[Likeness, str] = OrderedDict()

    def step(self, ready: Ready) -> StepResult:
        """Replayed, if there is a recording; else captured, if one like it was seen."""
        inputs = inputs_of(ready.fed, ready.scale)
        key = likeness_of(ready, inputs, self._modules, self._kinds)
        if key is None:
            raise Uncapturable("inference mode, or hooks on saved tensors")
        for refused in (key, key._replace(numbers=())):
            if refused in self._refused:
                raise Uncapturable(self._refused[refused])
        if not fits(self._parameters):
            raise Uncapturable("a gradient is sparse, or no plain tensor")
        captured = self._captured.get(key)
        if captured is None:
            if key not in self._seen:
                return self._first(ready, key)
            captured = self._try(ready, inputs, key)
        self._captured.move_to_end(key)
        return captured.replay(inputs.tensors)

    def _first(self, ready: Ready, key: Likeness) -> StepResult:
        """As the reference does it."""
        asked, numbers = Asked(), numbers_of(self._modules)
        result = self._run(ready, Inline(Mailboxes(*self._where)), asked.draws, False)
        name = changed_number(self._modules, numbers)
        if name is None:
            _note(self._seen, key, asked.times)
        else:
            _note(self._refused, key._replace(numbers=()), _counts(name))
        return result

    def _try(self, ready: Ready, inputs: Inputs, key: Likeness) -> Captured:
        try:
            with naming(self._names):
                captured = self._capture(ready, inputs, self._seen.pop(key))
        except Uncapturable as reason:
            _note(self._refused, key, str(reason))
            raise
        while len(self._captured) >= KEPT:
            self._captured.popitem(last=False)
        self._captured[key] = captured
        return captured

    def _capture(self, ready: Ready, inputs: Inputs, asked: Mapping[Cell, int]) -> Captured:
        places, placement = self._where
        recording = self._record([place.device for place in places], self._pools)
        watch = Watch(self._kinds)
        sources = Sources(recording, watch, asked, lambda s: places[placement[s]].device)
        standing = Standing(inputs)
        lending = Lending(places, placement)
        fed, scale = standing.fed(ready.fed)
        static = Ready(ready.settings, ready.lesson, fed, scale)
        numbers, tensors = numbers_of(self._modules), bound(self._modules)

        def body() -> StepResult:
            with Constants(self._kinds), watch:
                result = self._run(static, Inline(lending), sources.draws, True)
                put_back(tensors)
            return result

        with self._homes.moved_in(self._parameters) as taken:
            result = recording.capture(body)
        name = changed_number(self._modules, numbers)
        if name is not None:
            raise Uncapturable(_counts(name))
        sources.close()
        standing.close()
        assert isinstance(result.measured, Measured)
        return Captured(recording, standing, taken, sources, result, result.measured, static)

    def clear(self) -> None:
        """Drop all recordings, and their memory."""
        self._captured.clear()


def _note(notes: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    notes[key] = value
    while len(notes) > NOTED:
        notes.popitem(last=False)


def _counts(name: str) -> str:
    return (
        f"a layer changes its attribute '{name}' in every step, and a replay would not: keep the "
        "number in a buffer, as a tensor"
    )
