"""One stage's part of a forward: its steps are run, the others are passed over.

The model's own forward runs on the stage's skeleton. Where it calls a unit of another stage, or an
operation that another stage runs, it gets what looks like the result; what the stage itself
runs gets the real values, made here or received. After the stage's last step, the forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import CutError
from penstock.partition.forward.absent import Absent
from penstock.partition.forward.division import Division, sources_of
from penstock.partition.forward.dry import numberless
from penstock.partition.forward.tables import LOOKING, SHAPED, TYING, called, only_looks
from penstock.partition.forward.trace import Kind, New, Same, Step
from penstock.partition.forward.trees import flatten, mapped, tensors_in, unflatten
from penstock.partition.forward.watching import Handle, Watcher, aside, where_now


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
    keeps: tuple[tuple[int, New | Same | int], ...] = ()  # values to be kept, and where they are
    rebinds: tuple[tuple[int, int], ...] = ()  # values that are now others


@dataclass(frozen=True)
class Score:
    """All that a stage does in a forward, ready to be performed."""

    acts: tuple[Act, ...]
    end: int
    inputs: tuple[Any, ...]  # what stands for inputs that it does not take, by their places
    given: tuple[int, ...]
    arriving: Mapping[int, tuple[int, ...]]
    departing: Mapping[int, tuple[int, ...]]
    last: bool
    anew: tuple[str, ...]  # buffers that it assigns anew


def score_of(division: Division, stage: int, device: torch.device) -> Score:
    """Of a stage on a device."""
    trace, portion = division.trace, division.portions[stage]
    stand_ins: dict[int, Absent] = {}

    def absent(value: int) -> Absent:
        if value not in stand_ins:
            stand_ins[value] = Absent.of(trace.values[value].look, device, value)
        return stand_ins[value]

    leaving = {value for values in portion.departing.values() for value in values}
    olds = {
        old
        for at in portion.runs
        for old, new in trace.steps[at].changes.items()
        if new in leaving and old not in trace.steps[at].takes
    }
    first: dict[int, int] = {}  # what a changed value was called when it was made
    acts = []
    for at, step in enumerate(trace.steps):
        runs = at in portion.runs or step.kind is Kind.CALL
        made = set(step.result.made if step.result else ()) | set(step.changes.values())
        kept = sorted(made & (leaving | olds)) if runs else []
        keeps = tuple((value, sources_of(step, value)) for value in kept)
        ready, plain = (None, True) if runs else _ready(step, absent)
        first |= {new: first.get(old, old) for old, new in step.changes.items()}
        rebinds = () if runs else tuple(
            (first[new], new) for new in step.changes.values() if new in portion.needs
        )  # fmt: skip
        acts.append(Act(step, runs, ready, plain, keeps, rebinds))
    last = stage == len(division.portions) - 1
    return Score(
        tuple(acts),
        len(acts) + 1 if last else portion.end,
        tuple(absent(value) for value in trace.inputs),
        tuple(portion.given),
        {source: tuple(values) for source, values in portion.arriving.items()},
        {dst: tuple(values) for dst, values in portion.departing.items()},
        last,
        tuple(name for name in trace.lasting if division.writes[name] == stage),
    )


def _ready(step: Step, absent: Callable[[int], Absent]) -> tuple[Any, bool]:
    if step.kind is Kind.READ:
        return step.outcome, True
    if step.result is None:
        return (Handle() if step.func in TYING else None), True
    leaves = [absent(leaf.value) if isinstance(leaf, New) else leaf for leaf in step.result.leaves]
    if len(leaves) == 1 and isinstance(leaves[0], Absent) and step.result.spec.is_leaf():
        return leaves[0], True
    return leaves, False


def _tied_to_nothing(*_: Any, **__: Any) -> Handle:
    return Handle()


class Performer(Watcher):
    """Performs a score once. `received` has the values that came from other stages."""

    def __init__(
        self, score: Score, targets: Mapping[str, nn.Module], received: dict[int, Tensor]
    ) -> None:
        super().__init__()
        self._acts, self._end, self._targets = score.acts, score.end, targets
        self._received, self._last = received, score.last
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
            if act.rebinds:
                self._rebind(act.rebinds)
            if act.plain:
                return act.ready
            return self._given(act, list(tensors_in((args, kwargs))))
        if step.kind is Kind.CALL:
            return call(*args, **kwargs)
        change = self._shaped if func in SHAPED else self._real
        some_args, some_kwargs = mapped((args, kwargs), change)
        if func in TYING and not some_args[0].requires_grad:  # in a forward without a graph
            call = _tied_to_nothing
        found = call(*some_args, **some_kwargs)
        if act.keeps:
            self._keep(act, found, lambda: list(tensors_in((some_args, some_kwargs))))
        return found

    def unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run it, or pass over it; its hooks are told in any case."""
        if self._over:
            raise Ended
        if self._mute:
            raise _Muted
        act = self._next(name)
        if not act.runs:
            if act.rebinds:
                self._rebind(act.rebinds)
            tensors = [t for t in flatten((args, kwargs))[0] if isinstance(t, Tensor)]
            found = act.ready if act.plain else self._given(act, tensors)
            self._tell_hooks(target, args, kwargs, found)
            return found
        leaves, spec = flatten((args, kwargs))
        leaves = [self._real(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        some_args, some_kwargs = unflatten(leaves, spec)
        run = self._targets[name]
        with aside(self):
            if self.checkpointed is None:
                found = run(*some_args, **some_kwargs)
            else:
                how = {"use_reentrant": False, **self.checkpointed}
                found = checkpoint(run, *some_args, **how, **some_kwargs)
        if act.keeps:
            self._keep(act, found, lambda: [t for t in leaves if isinstance(t, Tensor)])
        return found

    def finished(self, output: Any) -> Any:
        """The model's output, with the values that other stages sent."""
        if self._at != len(self._acts):
            raise self._elsewhere("the end of the forward")
        self._over = True
        if not self._last:
            return None
        leaves, spec = flatten(output)
        leaves = [self._real(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return unflatten(leaves, spec)

    def _next(self, func: Any) -> Act:
        at = self._at
        if at >= self._end:  # and not before: the forward may still assign what it has computed
            self._over = True
            raise Ended
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
        return tensor

    def _shaped(self, tensor: Tensor) -> Tensor:
        return numberless(tensor) if type(tensor) is Absent else tensor

    def _given(self, act: Act, tensors: Sequence[Tensor]) -> Any:
        assert act.step.result is not None
        leaves = [tensors[x.argument] if isinstance(x, Same) else x for x in act.ready]
        return unflatten(leaves, act.step.result.spec)

    def _rebind(self, rebinds: Sequence[tuple[int, int]]) -> None:
        for old, new in rebinds:
            if new in self._received:
                self._received[old] = self._received[new]

    def _keep(self, act: Act, found: Any, arguments: Callable[[], list[Tensor]]) -> None:
        leaves = flatten(found)[0]
        assert act.step.result is not None
        places = act.step.result.leaves
        for value, place in act.keeps:
            if isinstance(place, New):
                self.kept[value] = leaves[places.index(place)]
            elif isinstance(place, Same):
                self.kept[value] = arguments()[place.argument]
            else:
                self.kept[value] = self.kept[place]

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
