"""A model whose forward is divided: for each kind of micro-batch, who does what of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError, RunError
from penstock.partition.forward.counted import Counted, counted_in
from penstock.partition.forward.division import Division, Homes, digest_of, divide
from penstock.partition.forward.excerpt import Cast, Excerpt
from penstock.partition.forward.hollow import is_hollow
from penstock.partition.forward.ledger import Leak
from penstock.partition.forward.replay import Questions, Replay
from penstock.partition.forward.score import Score, score_of
from penstock.partition.forward.state import State, state_of, surroundings
from penstock.partition.forward.survey import Survey
from penstock.partition.forward.trace import CallOf, Trace
from penstock.partition.forward.tracing import traced
from penstock.partition.forward.trees import Itself, flatten
from penstock.partition.hugging_face import defaults_of
from penstock.stage.reduction import Counting

KINDS = 64  # of micro-batches that are remembered
WAYS = 16  # of each kind: how the forward went on, as its questions were answered


@dataclass(frozen=True)
class Cut:
    """Where the units and parameters of a model are at home."""

    stages: int
    calls: Mapping[CallOf, int]  # as the example has them
    units: Mapping[str, tuple[int, ...]]
    parameters: Homes
    written: Mapping[str, int] = field(default_factory=dict)  # buffers that the forward changes

    def placed(self, call: CallOf, before: int) -> int:
        """The stage of a call, after others on the stage before."""
        found = self.calls.get(call)
        if found is not None and (found >= before or len(self.units[call.unit]) == 1):
            return found
        homes = [home for home in self.units[call.unit] if home >= before]
        if not homes:
            raise CutError(
                f"unit '{call}' is on stage {max(self.units[call.unit])}, and with these inputs "
                f"the model calls it after a unit of stage {before}: with the example it was not "
                "so; make the Pipe with an example like these inputs"
            )
        return homes[0]


@dataclass(frozen=True, eq=False)
class Handed:
    """What a stage is told of a micro-batch, beside the tensors that it takes."""

    scores: Mapping[int, Score]
    leaves: tuple[Any, ...]  # of the inputs, without the tensors
    places: tuple[int, ...]  # where those were
    spec: Any
    state: State
    neighbours: Mapping[int, tuple[int, ...]]  # by stage: to whom it sends in this call


@dataclass(frozen=True)
class _Known:
    questions: Questions
    division: Division
    scores: Mapping[int, Score]
    counted: Counted | None
    targets: Replay  # leads to those of the loss, if they are counted
    digest: str  # of the division


Plans = OrderedDict[Any, list[_Known]]  # by the kind of micro-batch


@dataclass
class Whole:
    """A model, its units, and how its forward was divided so far."""

    model: nn.Module
    units: Mapping[str, nn.Module]
    parents: Mapping[str, nn.Module]
    cut: Cut
    devices: Mapping[int, torch.device]  # of the stages that are here
    survey: Survey
    excerpt: Excerpt | None = None  # in one of several processes
    _known: Plans = field(default_factory=OrderedDict, repr=False)
    _before: list[Any] = field(default_factory=list, repr=False)  # what the parents had

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": OrderedDict(), "_before": []}

    def learn(
        self,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        trace: Trace,
        division: Division,
        constants: Mapping[int, Tensor],
    ) -> None:
        """What the example was divided into."""
        key, _, _ = self._key(*example, self.state())
        if key not in self._known:
            self._add(key, trace, division, constants)

    @property
    def children(self) -> dict[str, nn.Module | None]:
        """The model's own."""
        return dict(self.model._modules)

    def state(self) -> State:
        """How the model is set now. Stages follow it for each new one: not all of it is told."""
        return state_of(self.parents.values())

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs that the model is given besides, unless the caller gives them."""
        return defaults_of(self.model, given)

    def check_unchanged(self) -> None:
        """The units are those that were cut, and the parents have what they had."""
        for name, unit in self.units.items():
            path, _, key = name.rpartition(".")
            if path not in self.parents:  # inside another unit, that has it as a part
                continue
            if self.parents[path]._modules.get(key) is not unit and not is_hollow(unit):
                raise RunError(
                    f"unit '{name}' was replaced after the pipe was made, and would not run: make "
                    "the Pipe after the change, or change what is inside the unit"
                )
        now = list(_held(self.parents, self.cut.written))
        before = self._before = self._before or now
        if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
            return
        names = ", ".join(f"'{name}'" if name else "the model" for name in self.parents)
        raise RunError(
            "a parameter, a buffer or a part of what is around the units was replaced, added or "
            f"taken away after the pipe was made, in one of {names}, and would not be used: make "
            "the Pipe after the change, or change it in place (copy_, load_state_dict)"
        )

    def divided(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: State) -> Dealt:
        """How the forward of these inputs is divided: known, or found by a dry run."""
        key, leaves, spec = self._key(args, kwargs, state)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for known in self._known.get(key, ()):
            if known.questions.same_answers(tensors):
                self._known.move_to_end(key)
                return Dealt(known, leaves, spec, tensors)
        try:
            trace, constants = traced(self.model, self.units, args, dict(kwargs), self._device)
        except Leak as leak:
            raise CutError(
                f"at {leak.where}, the forward uses a tensor that left unit '{leak.unit}' "
                "sideways, which it did not with the example: make the Pipe with an example like "
                "these inputs"
            ) from None
        written = {name: frozenset({stage}) for name, stage in self.cut.written.items()}
        homes = {**self.cut.parameters, **written}
        division = divide(trace, self.cut.placed, self.cut.stages, homes)
        self._check_homes(division)
        known = self._add(key, trace, division, constants)
        return Dealt(known, leaves, spec, tensors)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.devices.values()))

    def _check_homes(self, division: Division) -> None:
        for name, users in division.uses.items():
            if users - self.cut.parameters[name]:
                raise CutError(
                    f"'{name}' would be used on stages {sorted(users)}, and its home is "
                    f"{sorted(self.cut.parameters[name])}: make the Pipe with an example like "
                    "these inputs"
                )
        for name, home in self.cut.written.items():
            others = sorted(division.reads.get(name, frozenset()) - {home})
            if others:
                raise CutError(
                    f"the forward changes the buffer '{name}' on stage {home}, between units, and "
                    f"with these inputs reads it on others, {', '.join(map(str, others))}: change "
                    "and read it in one unit, or cut elsewhere with stages="
                )
        for name, stage in division.writes.items():
            if self.cut.written.get(name) != stage:
                raise CutError(
                    f"the forward changes the buffer '{name}' between units, and with the example "
                    "it did not: make the Pipe with the model set as now (in training, say), and "
                    "an example like these inputs"
                )

    def _add(
        self, key: Any, trace: Trace, division: Division, constants: Mapping[int, Tensor]
    ) -> _Known:
        scores = {stage: score_of(division, stage, d) for stage, d in self.devices.items()}
        counted = counted_in(trace)
        goals = [] if counted is None else [counted.target, counted.classes]
        makers = [trace.values[value].maker for value in goals if value is not None]
        known = _Known(
            Questions(trace, constants, self._buffer),
            division,
            scores,
            counted,
            Replay(trace, constants, self._buffer, [m for m in makers if m is not None]),
            digest_of(division),
        )
        ways = self._known.setdefault(key, [])
        ways.insert(0, known)
        del ways[WAYS:]
        if len(self._known) > KINDS:
            self._known.popitem(last=False)
        return known

    def _buffer(self, name: str) -> Tensor:
        path, _, key = name.rpartition(".")
        unit, inner = path, ""
        while unit and unit not in self.units:
            unit, _, last = unit.rpartition(".")
            inner = f"{last}.{inner}".strip(".")
        holder = self.units[unit].get_submodule(inner) if unit else self.parents[path]
        found = holder._buffers[key]
        assert found is not None
        return found

    def cast(self, cast: Cast) -> None:
        """The model was cast: what was seen of it holds no longer."""
        if self.excerpt is not None:
            self.excerpt.cast(cast)
        self._known, self._before = OrderedDict(), []

    def _key(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: State
    ) -> tuple[Any, list[Any], Any]:
        leaves, spec = flatten((args, dict(kwargs)))
        signs = tuple([_sign(leaf) for leaf in leaves])
        return (str(spec), signs, state, surroundings()), leaves, spec


@dataclass(frozen=True)
class Dealt:
    """The division of one micro-batch, and its inputs."""

    known: _Known
    leaves: list[Any]
    spec: Any
    tensors: Sequence[Tensor]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Who sends to whom."""
        return self.known.division.edges

    @property
    def digest(self) -> str:
        """The same in every process that divides in the same way."""
        return self.known.digest

    def counted(self) -> tuple[Tensor, Counting] | None:
        """The targets of the model's own loss, and what of them counts; None: not known."""
        counted = self.known.counted
        if counted is None:
            return None
        wanted = [counted.target] + ([] if counted.classes is None else [counted.classes])
        target, *classes = self.known.targets.values(self.tensors, wanted)
        return target, Counting(counted.ignored, *classes)

    def handed(self, state: State, neighbours: Mapping[int, tuple[int, ...]]) -> Handed:
        """For every stage."""
        places = tuple(at for at, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor))
        plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return Handed(self.known.scores, plain, places, self.spec, state, neighbours)

    def draws(self, stage: int) -> bool:
        """Does the stage draw random numbers between units?"""
        return self.known.scores[stage].draws

    def mutates(self, stage: int) -> bool:
        """Does the stage change what it takes, in place?"""
        return self.known.scores[stage].mutates

    def taken(self, stage: int) -> list[Tensor]:
        """The tensors that a stage takes of the inputs."""
        return [self.tensors[at] for at in self.known.scores[stage].given]


def _held(parents: Mapping[str, nn.Module], written: Mapping[str, int]) -> Iterator[Any]:
    """What the parents have, but for buffers that the forward itself assigns anew."""
    for name, module in parents.items():
        yield from module._modules.values()
        yield from module._parameters.values()
        for key, buffer in module._buffers.items():
            if f"{name}.{key}".lstrip(".") not in written:
                yield buffer


def _sign(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), Itself(leaf)  # held, so that no other one has its place
    return type(leaf), leaf
