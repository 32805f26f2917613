"""One stage's part of a forward: its steps are run, the others are passed over.

The model's own forward runs on the stage's skeleton. Where it calls a unit of another stage, or an
operation that another stage runs, it gets what looks like the result; what the stage itself
runs gets the real values, made here or received. After the stage's last step, the forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import CutError
from penstock.partition.forward.absent import Absent
from penstock.partition.forward.boxes import hooks_after, with_hooks
from penstock.partition.forward.dry import numberless
from penstock.partition.forward.filled import Filled, filled, taken_over
from penstock.partition.forward.score import Act, Score
from penstock.partition.forward.tables import (
    LOOKING,
    MIRRORED,
    SHAPED,
    TYING,
    called,
    only_looks,
)
from penstock.partition.forward.trace import Kind, New, Same, Step
from penstock.partition.forward.trees import changed_in_call, flatten, mapped, tensors_in, unflatten
from penstock.partition.forward.watching import Handle, Muted, Watcher, aside, where_now


class Ended(BaseException):
    """The stage's part is done. No model catches it by mistake."""


def _tied_to_nothing(*_: Any, **__: Any) -> Handle:
    return Handle()


def _is_of(step: Step, func: Any) -> bool:
    known = step.func
    if step.kind is Kind.UNIT:
        return bool(known.unit == func)
    return known is func or bool(known == func) or func is MIRRORED.get(known, known)


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
        self._device = score.device  # wherever the model's other parts are
        self._roots, self._received, self._last = score.roots, received, score.last
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
            found = func(*args, **(kwargs or {}))
            return self._device if type(found) is torch.device else found
        return self.operation(func, args, kwargs or {}, func)

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Run it, or pass over it."""
        if self._over:
            return call(*args, **kwargs)
        if self._mute:
            raise Muted
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
        change = self._shaped if func in SHAPED and not step.takes else self._real
        some_args, some_kwargs = mapped((args, kwargs), change)
        if func in TYING and not some_args[0].requires_grad:  # in a forward without a graph
            call = _tied_to_nothing
        found = call(*some_args, **some_kwargs)
        if isinstance(found, tuple | list) and step.result is not None:
            self._check_count(step, found)
        if act.keeps:
            self._keep(act, found, lambda: list(tensors_in((some_args, some_kwargs))))
        return found

    def unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run it, or pass over it; its hooks are told in any case."""
        if self._over:
            raise Ended
        if self._mute:
            raise Muted
        act = self._next(name)
        if not act.runs:
            found = act.ready
            if act.rebinds or not act.plain:
                tensors = _tensors_of((args, kwargs))
                if act.rebinds:
                    self._rebind(act, tensors)
                found = act.ready if act.plain else self._given(act, tensors)
                found = taken_over(found, args, kwargs)
            self._tell_hooks(name, target, args, kwargs, found)
            return found
        some_args, some_kwargs = changed_in_call(args, kwargs, self._real)
        run: Callable[..., Any] = with_hooks(self._targets[name], self.hooks.get(name))
        if self.checkpointed is not None:
            how = {"use_reentrant": False, **self.checkpointed}
            run = partial(checkpoint, run, **how)
        with aside(self):
            found = filled(run, some_args, some_kwargs)
            if act.shapes:
                _check_shapes(act, found)
            if act.keeps:  # a copy that is made of one is no step of the forward
                given = some_args, some_kwargs
                self._keep(act, found, lambda: _tensors_of(given))
        if isinstance(found, Filled) is not act.fills:
            raise self._elsewhere(f"unit '{name}', which fills a list or a dict now and then")
        return taken_over(found, args, kwargs)

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
        if at >= self._end and not self._only_sets(at):
            self._over = True
            raise Ended
        if at < len(self._acts) and _is_of(self._acts[at].step, func):
            self._at = at + 1
            return self._acts[at]
        raise self._elsewhere(f"unit '{func}'" if isinstance(func, str) else called(func))

    def _only_sets(self, at: int) -> bool:
        """A step that has to do with no tensor: it may leave `no_grad`, and must not be missed.

        Nor does a forward end before its next step: it may still assign what it has computed.
        """
        return at < len(self._acts) and self._acts[at].step.kind is Kind.CALL

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
            "inputs, on settings and on whether it trains, and not on anything else that changes: "
            "let it go by these, or put what decides into one unit with units="
        )

    def _real(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Absent:
            if tensor.value not in self._received:
                raise self._elsewhere("a value that no stage sends to this one")
            return self._received[tensor.value]
        return self._instead.get(id(tensor), tensor) if self._instead else tensor

    def _check_count(self, step: Step, found: Sequence[Any]) -> None:
        """Into how many parts something falls may depend on its shape, and that on numbers."""
        assert step.result is not None
        count = len(flatten(found)[0])
        if count != len(step.result.leaves):
            raise CutError(
                f"at {step.where}, {called(step.func)} gives {count} values, and "
                f"{len(step.result.leaves)} were planned for inputs like these: how many depends "
                "on numbers that other stages do not have; put it into one unit, with all that "
                "follows from it, with units="
            )

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

    def _tell_hooks(self, name: str, target: nn.Module, args: Any, kwargs: Any, found: Any) -> None:
        """What they collect is there; what they compute is computed where the unit runs."""
        for key, hook in hooks_after(target, self.hooks.get(name)).items():
            self._mute = True
            try:
                if key in target._forward_hooks_with_kwargs:
                    hook(target, args, kwargs, found)
                else:
                    hook(target, args, found)
            except Muted:
                pass
            finally:
                self._mute = False


def _check_shapes(act: Act, found: Any) -> None:
    """Other stages know what the unit gives by the shape that it was planned with."""
    leaves = [found] if isinstance(found, Tensor) else flatten(found)[0]
    for leaf, planned in zip(leaves, act.shapes, strict=False):
        now = tuple(leaf.shape) if isinstance(leaf, Tensor) else None
        if planned is not None and now != planned:
            raise CutError(
                f"unit '{act.step.func}' gives a tensor of the shape {now}, and {planned} was "
                f"planned for inputs like these: it depends on numbers, and the forward goes on by "
                f"it, on stages that do not have them ({act.step.where}). Let the unit give one "
                "shape (pad, or mask instead of picking), or put all that goes by the shape into "
                "one unit with units="
            )


def _tensors_of(given: Any) -> list[Tensor]:
    """The tensors that a unit is given, wherever they are in its arguments."""
    return [leaf for leaf in flatten(given)[0] if isinstance(leaf, Tensor)]
