"""One stage's part of a forward: its steps are run, the others are passed over.

The model's own forward runs on the stage's skeleton. Where it calls a unit of another stage, or an
operation that another stage runs, it gets what looks like the result; what the stage itself
runs gets the real values, made here or received. After the stage's last step, the forward ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.partition.forward.absent import Absent
from penstock.partition.forward.division import Division, sources_of
from penstock.partition.forward.recorder import Handle, aside, numberless, where_now
from penstock.partition.forward.skeleton import Watcher
from penstock.partition.forward.tables import LOOKING, SHAPED, TYING, called, only_looks
from penstock.partition.forward.trace import Kind, New, Same, Step
from penstock.partition.forward.trees import flatten, mapped, tensors_in, unflatten


class Ended(BaseException):
    """The stage's part is done. No model catches it by mistake."""


class _Muted(Exception):
    """A hook of a unit that is not run here computes."""


@dataclass(frozen=True)
class Act:
    """What a stage does at a step."""

    step: Step
    runs: bool
    ready: Any = None  # what it gives instead, if it does not run
    plain: bool = True  # `ready` is given as it is
    keeps: tuple[Kept, ...] = ()
    rebinds: tuple[tuple[int, int], ...] = ()  # values that are now others, which arrive


class Kept(NamedTuple):
    """A value that is needed when the step is over."""

    value: int
    place: New | Same | int  # in the result, among the arguments, or as an older value
    sent: bool
    copied: bool  # it is changed in place, later on


@dataclass(frozen=True)
class Score:
    """All that a stage does in a forward, ready to be performed."""

    acts: tuple[Act, ...]
    end: int
    inputs: tuple[Any, ...]  # what stands for inputs that it does not take, by their places
    given: tuple[int, ...]
    arriving: Mapping[int, tuple[int, ...]]
    departing: Mapping[int, tuple[int, ...]]
    copied: tuple[int, ...]  # of what arrives
    roots: Mapping[int, int]  # of what was changed in place: the value that it was at first
    last: bool


def score_of(division: Division, stage: int, device: torch.device) -> Score:
    """Of a stage on a device."""
    trace, portion = division.trace, division.portions[stage]
    stand_ins: dict[int, Absent] = {}

    def absent(value: int) -> Absent:
        if value not in stand_ins:
            stand_ins[value] = Absent.of(trace.values[value].look, device, value)
        return stand_ins[value]

    changing = _Changing(division, stage)
    acts = []
    for at, step in enumerate(trace.steps):
        runs = at in portion.runs or step.kind is Kind.CALL
        if runs:
            acts.append(Act(step, True, keeps=changing.keeps(step)))
            continue
        ready, plain = _ready(step, absent)
        acts.append(Act(step, False, ready, plain, rebinds=changing.rebinds(step)))
    last = stage == len(division.portions) - 1
    return Score(
        tuple(acts),
        len(acts) + 1 if last else portion.end,
        tuple(absent(value) for value in trace.inputs),
        tuple(portion.given),
        {source: tuple(values) for source, values in portion.arriving.items()},
        {dst: tuple(values) for dst, values in portion.departing.items()},
        changing.copied(),
        _roots(trace.steps),
        last,
    )


def _roots(steps: Sequence[Step]) -> dict[int, int]:
    found: dict[int, int] = {}
    for step in steps:
        for old, new in step.changes.items():
            found[new] = found.get(old, old)
    return found


class _Changing:
    """What a stage has to see to because tensors are changed in place."""

    def __init__(self, division: Division, stage: int) -> None:
        steps, self._portion = division.trace.steps, division.portions[stage]
        self._leaving = {v for values in self._portion.departing.values() for v in values}
        self._shared = Counter(v for portion in division.portions for v in portion.needs)
        self._changed: set[int] = set()  # by this stage
        self._held: set[int] = set()
        for at, step in reversed(list(enumerate(steps))):
            here = at in self._portion.runs
            self._changed.update(step.changes if here else ())
            wanted = self._leaving | self._held if here else self._portion.needs | self._held
            self._held |= {
                old for old, new in step.changes.items() if new in wanted and old not in step.takes
            }

    def keeps(self, step: Step) -> tuple[Kept, ...]:
        """The values of a step that are sent, or looked for when what they look at is changed."""
        made = set(step.result.made if step.result else ()) | set(step.changes.values())
        return tuple(
            Kept(value, sources_of(step, value), value in self._leaving, value in self._changed)
            for value in sorted(made & (self._leaving | self._held))
        )

    def rebinds(self, step: Step) -> tuple[tuple[int, int], ...]:
        """What another stage changes in the step, and is used here afterwards."""
        wanted = self._portion.needs | self._held
        return tuple((old, new) for old, new in step.changes.items() if new in wanted)

    def copied(self) -> tuple[int, ...]:
        """What arrives here, is changed here, and is elsewhere, too."""
        arriving = {v for values in self._portion.arriving.values() for v in values}
        return tuple(sorted(v for v in arriving & self._changed if self._shared[v] > 1))


def _ready(step: Step, absent: Callable[[int], Absent]) -> tuple[Any, bool]:
    if step.kind is Kind.READ:
        return step.outcome, True
    if step.result is None:
        return (Handle() if step.func in TYING else None), True
    leaves = [absent(leaf.value) if isinstance(leaf, New) else leaf for leaf in step.result.leaves]
    if len(leaves) == 1 and isinstance(leaves[0], Absent) and step.result.spec.is_leaf():
        return leaves[0], True
    return leaves, False


class Performer(Watcher):
    """Performs a score once. `received` has the values that came from other stages, `given` those
    from outside.
    """

    def __init__(
        self,
        score: Score,
        targets: Mapping[str, nn.Module],
        received: dict[int, Tensor],
        given: Mapping[int, Tensor],
    ) -> None:
        super().__init__()
        self._acts, self._end, self._targets = score.acts, score.end, targets
        self._roots, self._received = score.roots, received
        for value in score.copied:
            received[value] = received[value].clone()
        self._held: dict[int, Tensor] = dict(given)
        self._instead: dict[int, Tensor] = {}  # of tensors that were changed elsewhere, by identity
        self.kept: dict[int, Tensor] = {}
        self._at, self._over, self._mute = 0, False, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One step, unless it only looks."""
        if func in LOOKING and only_looks(func, args):
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, kwargs or {}, func)

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Run it, or pass over it."""
        if self._over:
            return call(*args, **kwargs)
        if self._mute:
            raise _Muted
        act = self._next(func)
        step = act.step
        if not act.runs:
            if act.plain and not act.rebinds:
                return act.ready
            tensors = list(tensors_in((args, kwargs)))
            if act.rebinds:
                self._rebind(act, tensors)
            return act.ready if act.plain else self._given(act, tensors)
        if step.kind is Kind.CALL:
            return call(*args, **kwargs)
        some_args, some_kwargs = mapped(
            (args, kwargs), self._shaped if func in SHAPED else self._real
        )
        found = call(*some_args, **some_kwargs)
        if act.keeps:
            self._keep(act, found, lambda: list(tensors_in((some_args, some_kwargs))))
        if self._at == self._end:
            self._over = True
            raise Ended
        return found

    def unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run it, or pass over it; its hooks are told in any case."""
        if self._over:
            raise Ended
        if self._mute:
            raise _Muted
        act = self._next(name)
        if not act.runs:
            tensors = [t for t in flatten((args, kwargs))[0] if isinstance(t, Tensor)]
            if act.rebinds:
                self._rebind(act, tensors)
            found = act.ready if act.plain else self._given(act, tensors)
            self._tell_hooks(target, args, kwargs, found)
            return found
        leaves, spec = flatten((args, kwargs))
        leaves = [self._real(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        some_args, some_kwargs = unflatten(leaves, spec)
        with aside(self):
            found = self._targets[name](*some_args, **some_kwargs)
        if act.keeps:
            self._keep(act, found, lambda: [t for t in leaves if isinstance(t, Tensor)])
        if self._at == self._end:
            self._over = True
            raise Ended
        return found

    def finished(self, output: Any) -> Any:
        """The model's output, with the values that other stages sent."""
        if self._at != len(self._acts):
            raise self._elsewhere("the end of the forward")
        self._over = True
        leaves, spec = flatten(output)
        leaves = [self._real(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return unflatten(leaves, spec)

    def _next(self, func: Any) -> Act:
        at = self._at
        if at < len(self._acts):
            act = self._acts[at]
            known = act.step.func
            if known is func or (
                known.unit == func if act.step.kind is Kind.UNIT else known == func
            ):
                self._at = at + 1
                return act
        raise self._elsewhere(f"unit '{func}'" if isinstance(func, str) else called(func))

    def _elsewhere(self, found: str) -> CutError:
        at = self._at
        planned = "its end"
        if at < len(self._acts):
            step = self._acts[at].step
            unit = step.kind is Kind.UNIT
            planned = f"unit '{step.func}'" if unit else f"{called(step.func)} ({step.where})"
        return CutError(
            f"the forward took another path at its step {at}: with inputs like these there came "
            f"{planned}, and now {found} ({where_now()}). What a forward does may depend on the "
            "inputs, on settings and on whether it trains, and not on anything else that changes"
        )

    def _real(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Absent:
            return self._received[tensor.value]
        return self._instead.get(id(tensor), tensor) if self._instead else tensor

    def _shaped(self, tensor: Tensor) -> Tensor:
        return numberless(tensor) if type(tensor) is Absent else tensor

    def _given(self, act: Act, tensors: Sequence[Tensor]) -> Any:
        assert act.step.result is not None
        leaves = [tensors[x.argument] if isinstance(x, Same) else x for x in act.ready]
        return unflatten(leaves, act.step.result.spec)

    def _rebind(self, act: Act, tensors: Sequence[Tensor]) -> None:
        """Tensors were changed in place on another stage, which sends them as they are now."""
        takes = act.step.takes
        for old, new in act.rebinds:
            here = tensors[takes.index(old)] if old in takes else self._held.get(old)
            if here is not None:
                self._held[new] = here
            if new in self._received:
                self._use(here, self._received[new], self._roots.get(old, old))

    def _use(self, here: Tensor | None, instead: Tensor, root: int) -> None:
        """From now on; what is not here is known by the value that it was at first."""
        if here is None:
            self._received[root] = instead
        elif type(here) is Absent:
            self._received[here.value] = instead
        else:
            self._instead[id(here)] = instead

    def _keep(self, act: Act, found: Any, arguments: Callable[[], list[Tensor]]) -> None:
        leaves = flatten(found)[0]
        assert act.step.result is not None
        places = act.step.result.leaves
        for value, place, sent, copied in act.keeps:
            if isinstance(place, New):
                tensor = leaves[places.index(place)]
            elif isinstance(place, Same):
                tensor = arguments()[place.argument]
            elif place in self._held:
                tensor = self._held[place]
            else:
                tensor = self._received[self._roots.get(place, place)]
            self._held[value] = tensor
            if sent:
                self.kept[value] = tensor.clone() if copied else tensor

    def _tell_hooks(self, target: nn.Module, args: Any, kwargs: Any, found: Any) -> None:
        """What they collect is there; what they compute is computed where the unit runs."""
        for key, hook in target._forward_hooks.items():
            self._mute = True
            try:
                if key in target._forward_hooks_with_kwargs:
                    hook(target, args, kwargs, found)
                else:
                    hook(target, args, found)
            except _Muted:
                pass
            finally:
                self._mute = False
