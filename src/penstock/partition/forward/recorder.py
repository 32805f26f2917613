"""The dry run: follows a forward, and writes down what it does.

What follows from the inputs alone is computed with its numbers, as the forward may decide by them.
Units, and what follows from them, are computed without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.partition.forward.absent import Look
from penstock.partition.forward.boxes import filling, hooks_on
from penstock.partition.forward.counted import LOSSES
from penstock.partition.forward.dry import (
    DATA_DECIDES,
    changed_among,
    computed_with_any,
    computed_without_numbers,
    numberless,
    outside,
    random_state,
    versions,
)
from penstock.partition.forward.faking import Fakes
from penstock.partition.forward.filled import taken_over
from penstock.partition.forward.history import (
    check_open,
    check_plain,
    check_transforms,
    goes_on,
    is_check,
    looked,
)
from penstock.partition.forward.ledger import Extremes, Leak, Ledger
from penstock.partition.forward.packing import PACK, PAD, Packing
from penstock.partition.forward.tables import (
    ANSWERED,
    CHECKING,
    COMPARING,
    COUNTING,
    SHAPED,
    TYING,
    UNIFORM,
    called,
    only_looks,
)
from penstock.partition.forward.trace import (
    CallOf,
    Kind,
    New,
    Ref,
    Result,
    Same,
    Step,
    Trace,
    Value,
)
from penstock.partition.forward.trees import (
    Called,
    flatten,
    hidden_in,
    mapped,
    said_in,
    tensors_in,
    unflatten,
)
from penstock.partition.forward.watching import Handle, Watcher, aside, where_now


class Recorder(Watcher):
    """Writes steps and values."""

    def __init__(self, models: Sequence[nn.Module], fakes: Fakes) -> None:
        super().__init__()
        self.ledger = Ledger(models, fakes)
        self.steps: list[Step] = []
        self.shared: Mapping[str, Sequence[Any]] = {}  # lists and such of units that others have
        self._drawn, self._turns = dict[int, Extremes](), Counter[str]()
        self._packing, self._told = Packing(fakes), dict[int, Tensor]()

    # ---- operations -----------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One step, unless it only looks."""
        if only_looks(func, args):
            self.ledger.look(func, args)
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, kwargs or {}, func)

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Compute it, with numbers if they are there, and write it down."""
        asked = Called(args, kwargs, call, list(tensors_in((args, kwargs))))
        takes = tuple(map(self.ledger.value_of, asked.tensors))
        said, where = said_in((args, kwargs)), where_now()
        step = Step(Kind.GLUE, func, takes, None, where, said=said, call=call)
        check_transforms(step)
        if func in ANSWERED:
            found = call(*args, **kwargs)
            self.steps.append(replace(step, kind=Kind.READ, takes=(), outcome=found))
            return found
        if func in SHAPED and len(takes) == 1:  # else it takes the numbers of the others
            found, plain = asked.with_each(numberless)
            arguments = mapped((args, kwargs), lambda t: plain.pop(0))
            self.ledger.measured.update(takes)
            step = replace(step, takes=(), free=True, arguments=arguments)
            return self._write(step, found, ())
        if func in CHECKING or func in TYING:
            self.steps.append(replace(step, lasting=True))
            return Handle() if func in TYING else None
        if all(map(self.ledger.is_free, takes)):
            return self._with_numbers(step, asked)
        if func is Tensor.__bool__ and is_check(self.ledger.values[takes[0]], self.steps):
            self.steps.append(replace(step, kind=Kind.READ, lasting=True, outcome=True))
            return True
        if func in COMPARING and any(at in self._drawn for at in takes):
            settled = self._follow_draws(step, asked)
            if settled is not None:
                return settled[0]
        if func is PACK or func is PAD:
            return self._packed(step, asked)
        return self._without_numbers(step, asked)

    def _packed(self, step: Step, asked: Called) -> Any:
        free = {id(t): t for t in asked.tensors if self._is_known(t)}
        found = self._packing.computed(asked, free)
        if found is None:
            raise looked(step, self.steps, self.ledger.values)
        if step.func is PACK:  # the rest follows from how much it packs
            step = self._asking(step, asked, found)
        return self._write(step, found, asked.tensors)

    def _with_numbers(self, step: Step, asked: Called) -> Any:
        before, random = versions(asked.tensors), random_state(self.ledger.fakes.device)
        refs = self._refs(asked)
        found = asked.call(*asked.args, **asked.kwargs)
        changed = changed_among(step.func, asked.tensors, before, asked.args, asked.kwargs)
        gives = any(True for _ in tensors_in(found))
        if not asked.tensors and not gives:
            self.steps.append(replace(step, kind=Kind.CALL))
            return found
        if not torch.equal(random, random_state(self.ledger.fakes.device)):
            return self._draw(step, asked, found)
        if any(map(self.ledger.stays, changed)):
            return self._write(replace(step, lasting=True), found, asked.tensors, changed)
        step = replace(step, free=True, arguments=refs)
        if not changed and not gives:
            self.steps.append(replace(step, kind=Kind.READ, asks=True, outcome=found))
            return found
        if asked.tensors and not changed and self._shape_asks(asked):
            shapes = [tuple(t.shape) for t in tensors_in(found)]
            step = replace(step, asks=True, outcome=shapes)
        return self._write(step, found, asked.tensors, changed)

    def _shape_asks(self, asked: Called) -> bool:
        """Does the shape of what it makes depend on numbers?"""
        try:
            with self.ledger.fakes.mode:
                asked.with_each(self.ledger.faked)
        except DATA_DECIDES:
            return True
        except Exception:  # whatever else a fake cannot do
            return False
        return False

    def _without_numbers(self, step: Step, asked: Called) -> Any:
        fakes = {id(t): self.ledger.faked(t) for t in asked.tensors}
        inside = [fakes[id(t)] for t in asked.tensors]
        before = versions(inside)
        args, kwargs = mapped((asked.args, asked.kwargs), lambda t: fakes[id(t)])
        known = {id(fakes[id(t)]): t for t in asked.tensors if self._is_known(t)}
        how = (self.ledger.fakes, "", asked.call, args, kwargs, known)
        try:
            found, drew = computed_without_numbers(*how)
        except DATA_DECIDES as error:
            if not self._known_decides(step, asked):
                raise looked(step, self.steps, self.ledger.values) from error
            found, drew = computed_with_any(*how), False
            step = self._asking(step, asked, found)
        changed = changed_among(step.func, inside, before, args, kwargs)
        changed = outside(asked.tensors, inside, changed)
        if not changed and not any(True for _ in tensors_in(found)):
            if found is not None:
                raise looked(step, self.steps, self.ledger.values)
            self.steps.append(replace(step, lasting=True))
            return None
        step = replace(step, lasting=any(map(self.ledger.stays, changed)), draws=drew)
        if step.func in LOSSES:
            step = replace(step, arguments=self._refs(asked))
        return self._write(step, found, asked.tensors, changed, inside)

    def _is_known(self, tensor: Tensor) -> bool:
        return self.ledger.is_free(self.ledger.value_of(tensor))

    def _known_decides(self, step: Step, asked: Called) -> bool:
        """Is it decided by what is known, as for `x[mask]` with a mask of the inputs'?"""
        if step.func in COUNTING:
            return bool(asked.kwargs.get("minlength"))
        unknown = [t for t in asked.tensors if not self._is_known(t)]
        return len(unknown) < len(asked.tensors) and all(t.is_floating_point() for t in unknown)

    def _asking(self, step: Step, asked: Called, found: Any) -> Step:
        shapes = [tuple(t.shape) for t in tensors_in(found)]
        if step.func in COUNTING or not any(shapes):
            return step
        return replace(step, asks=True, outcome=shapes, arguments=self._refs(asked))

    def _refs(self, asked: Called) -> Any:
        return mapped((asked.args, asked.kwargs), lambda t: Ref(self.ledger.value_of(t)))

    # ---- random numbers -------------------------------------------------------------------

    def _draw(self, step: Step, asked: Called, found: Any) -> Any:
        """Drawn on one stage. Of uniform ones it is known how far they reach."""
        found = self._write(replace(step, lasting=True, draws=True), found, asked.tensors)
        if step.func in UNIFORM and isinstance(found, Tensor):
            largest = torch.nextafter(torch.ones_like(found), torch.zeros_like(found))
            value = self.ledger.value_of(found)
            self._drawn[value] = Extremes(torch.zeros_like(found), largest)
        return found

    def _follow_draws(self, step: Step, asked: Called) -> tuple[Any] | None:
        """What is decided by chance is refused; `rand() < 0.0` is not decided by chance."""
        value_of = self.ledger.value_of
        if not all(at in self._drawn or self.ledger.is_free(at) for at in step.takes):
            return None

        def at_extreme(which: str) -> Any:
            def chosen(tensor: Tensor) -> Tensor:
                drawn = self._drawn.get(value_of(tensor))
                return tensor if drawn is None else getattr(drawn, which)

            return asked.with_each(chosen)[0]

        least, largest = at_extreme("least"), at_extreme("largest")
        if isinstance(least, Tensor):
            found = self._write(replace(step, lasting=True), least.clone(), asked.tensors)
            self._drawn[value_of(found)] = Extremes(least, largest)
            return (found,)
        if least != largest:
            raise CutError(
                f"at {step.where}, random numbers decide what the forward does next, and every "
                "stage would draw its own: switch it off (layerdrop=0, or another such option)"
            )
        self.steps.append(replace(step, kind=Kind.READ, takes=(), outcome=least))
        return (least,)

    # ---- units ----------------------------------------------------------------------------

    def unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Compute it without numbers, and write it down."""
        filled = filling(self.shared.get(name, ()))
        with aside(self):
            found = self._unit(name, target, args, kwargs)
        if filled():
            raise Leak(name, where_now())
        return found

    def _unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        where = where_now()
        self.ledger.check_parameters(name, target)
        leaves, spec = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for leaf in leaves:
            check_open(leaf, f"unit '{name}' is given", where)
        takes = tuple(map(self.ledger.value_of, tensors))
        fakes = [self.ledger.faked(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inside = [leaf for leaf in fakes if isinstance(leaf, Tensor)]
        before = versions(inside)
        known = {id(f): t for f, t in zip(inside, tensors, strict=True) if self._is_known(t)}
        known |= self._packing.told(inside)
        told = ((at, known.get(id(fake))) for at, fake in zip(takes, inside, strict=True))
        self._told |= {at: t for at, t in told if t is not None and not t.is_floating_point()}
        with hooks_on(target, self.hooks.get(name)):
            how = (self.ledger.fakes, name, target, *unflatten(fakes, spec), known)
            found, _ = computed_without_numbers(*how)
        changed = outside(tensors, inside, changed_among(None, inside, before))
        call = CallOf(name, self._turns[name])
        self._turns[name] += 1
        for leaf in flatten(found)[0]:
            if not isinstance(leaf, Tensor) and any(True for _ in hidden_in(leaf)):
                raise Leak(name, where)
        numbers = iter(takes)
        refs = [Ref(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        step = Step(Kind.UNIT, call, takes, None, where, arguments=(refs, spec))
        return taken_over(self._write(step, found, tensors, changed, inside), args, kwargs)

    # ---- writing --------------------------------------------------------------------------

    def _write(
        self,
        step: Step,
        found: Any,
        tensors: Sequence[Tensor],
        changed: Sequence[Tensor] = (),
        inside: Sequence[Tensor] | None = None,
    ) -> Any:
        """A step that gave tensors; `inside` are the arguments as they were computed with."""
        at = len(self.steps)
        changes = self.ledger.change(at, step.free, changed)
        places = {id(t): n for n, t in reversed(list(enumerate(inside or tensors)))}
        places |= {id(t): n for n, t in reversed(list(enumerate(tensors)))}
        leaves, spec = flatten(found)
        written: list[Any] = []
        twice: dict[int, New] = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                written.append(leaf)
            elif id(leaf) in twice:
                written.append(twice[id(leaf)])
            elif id(leaf) in places:
                written.append(Same(places[id(leaf)]))
                leaves[position] = tensors[places[id(leaf)]]
            else:
                check_plain(leaf, step.where)
                made = Value(Look.of(leaf), step.free, at, self._named(step, position))
                twice[id(leaf)] = New(self.ledger.register(leaf, made))
                written.append(twice[id(leaf)])
        self.steps.append(replace(step, result=Result(tuple(written), spec), changes=changes))
        return unflatten(leaves, spec)

    def _named(self, step: Step, position: int) -> str:
        if step.kind is Kind.UNIT:
            return f"{step.func}.{position}"
        taken = ", ".join(self.ledger.values[at].name for at in step.takes)
        return self.ledger.new_name(f"{called(step.func)}({taken}){step.said}")

    def trace(self, inputs: tuple[int, ...], output: Any, lasting: Mapping[str, Tensor]) -> Trace:
        """What was seen; `lasting` are buffers that were assigned anew."""
        leaves, spec = flatten(output)
        for leaf in leaves:
            check_open(leaf, "the model gives", "its end")
        value_of = self.ledger.value_of
        written = [New(value_of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        anew = {name: value_of(tensor) for name, tensor in lasting.items()}
        values = self.ledger.values
        anew = {name: v for name, v in anew.items() if goes_on(name, v, self.steps, values)}
        steps, gives = tuple(self.steps), Result(tuple(written), spec)
        measured = frozenset(self.ledger.measured)
        return Trace(steps, tuple(values), inputs, gives, anew, measured, self._told)
