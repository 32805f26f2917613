"""The dry run: follows a forward, and writes down what it does.

What follows from the inputs alone is computed with its numbers, as the forward may decide by them.
Units, and what follows from them, are computed without.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _get_current_function_mode_stack

from penstock.errors import CutError
from penstock.partition.forward.absent import Look
from penstock.partition.forward.dry import NEEDS_NUMBERS, computed_without_numbers
from penstock.partition.forward.skeleton import Watcher
from penstock.partition.forward.tables import (
    CHECKING,
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
from penstock.partition.forward.trees import flatten, hidden_in, mapped, tensors_in, unflatten


class Leak(Exception):
    """A value left a unit sideways: the unit must be opened."""

    def __init__(self, unit: str, where: str) -> None:
        super().__init__(unit)
        self.unit, self.where = unit, where


@contextmanager
def aside(watcher: Watcher) -> Iterator[None]:
    """Within, nobody watches: what is computed is one thing."""
    stack = _get_current_function_mode_stack()
    above = stack[stack.index(watcher) :]
    for _ in above:
        torch._C._pop_torch_function_stack()
    for mode in above[1:]:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in above[1:]:
            torch._C._pop_torch_function_stack()
        for mode in above:
            torch._C._push_on_torch_function_stack(mode)


_OURS = ("/penstock/partition/forward/", "/torch/")


def where_now() -> str:
    """The line of the model's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if not any(part in name for part in _OURS) and not name.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@dataclass
class _Extremes:
    """A value that was drawn, or follows from one: as it is for the least and the largest draw."""

    least: Any
    largest: Any


class Recorder(Watcher):
    """Writes steps and values."""

    def __init__(self, model: nn.Module, fake: FakeTensorMode) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.fake = fake
        self.region: int | None = None
        self._known: dict[int, int] = {}  # tensors, by identity: the values that they are now
        self._alive: list[Tensor] = []
        self._fakes: dict[int, Tensor] = {}  # by value
        self._of_fakes: dict[int, int] = {}  # back, by identity
        self._homes: dict[int, list[Tensor]] = {}  # the tensors in one memory
        self._drawn: dict[int, _Extremes] = {}
        self._turns: Counter[str] = Counter()
        self._names: Counter[str] = Counter()
        self._shared: list[frozenset[int]] = []
        self._parameters = {
            id(p): name for name, p in model.named_parameters(remove_duplicate=True)
        }
        self._buffers = {id(b): name for name, b in model.named_buffers()}

    # ---- values ---------------------------------------------------------------------------

    def given(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The inputs."""
        return tuple(
            self._register(t, Value(Look.of(t), True, None, f"input {at}", given=at))
            for at, t in enumerate(tensors)
        )

    def value_of(self, tensor: Tensor) -> int:
        """Which value it is now."""
        found = self._known.get(id(tensor), self._of_fakes.get(id(tensor)))
        if found is not None:
            return found
        parameter = self._parameters.get(id(tensor), "")
        buffer = self._buffers.get(id(tensor), "")
        if isinstance(tensor, FakeTensor) and not (parameter or buffer):
            raise Leak(getattr(tensor, "made_in", ""), where_now())
        look = Look.of(tensor)
        name = parameter or buffer or self._new_name("constant " + str(look))
        made = Value(look, not parameter, None, name, parameter, buffer)
        return self._register(tensor, made)

    def _register(self, tensor: Tensor, value: Value) -> int:
        at = len(self.values)
        self.values.append(value)
        if id(tensor) not in self._known:
            self._alive.append(tensor)
            home = _home(tensor)
            if home is not None:
                self._homes.setdefault(home, []).append(tensor)
        self._known[id(tensor)] = at
        return at

    def _new_name(self, stem: str) -> str:
        self._names[stem] += 1
        return f"{stem} #{self._names[stem]}"

    def _faked(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        value = self.value_of(tensor)
        if value not in self._fakes:
            made = self.fake.from_tensor(tensor)
            self._fakes[value] = made
            self._of_fakes.setdefault(id(made), value)
        return self._fakes[value]

    # ---- operations -----------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One step, unless it only looks."""
        if only_looks(func, args):
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, kwargs or {}, func)

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Compute it, with numbers if they are there, and write it down."""
        tensors = list(tensors_in((args, kwargs)))
        takes = tuple(map(self.value_of, tensors))
        step = Step(Kind.GLUE, func, takes, None, where_now(), region=self.region)
        if func in SHAPED:
            plain = mapped((args, kwargs), numberless)
            found = call(*plain[0], **plain[1])
            step = replace(step, takes=(), free=True, arguments=plain)
            return self._write(step, found, ())
        if func in CHECKING or func in TYING:
            return self._tied(step)
        if all(self.values[at].free for at in takes):
            return self._with_numbers(step, args, kwargs, call, tensors)
        return self._without_numbers(step, args, kwargs, call, tensors)

    def _tied(self, step: Step) -> Any:
        self._add(replace(step, lasting=True))
        return Handle()

    def _with_numbers(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        before, drawn = _versions(tensors), torch.get_rng_state()
        found = call(*args, **kwargs)
        changed = _changed(step.func, tensors, before)
        if not tensors and not any(True for _ in tensors_in(found)):
            self._add(replace(step, kind=Kind.CALL))
            return found
        if not torch.equal(drawn, torch.get_rng_state()):
            return self._draw(step, args, kwargs, found, tensors)
        if any(self.values[self.value_of(t)].buffer for t in changed):
            step = replace(step, lasting=True)
        else:
            refs = mapped((args, kwargs), lambda t: Ref(self.value_of(t)))
            step = replace(step, free=True, arguments=refs)
        if not changed and not any(True for _ in tensors_in(found)):
            self._check_read(step, found)
            self._add(replace(step, kind=Kind.READ, asks=True, outcome=found))
            return found
        if step.free and tensors and not changed and self._shape_asks(args, kwargs, call):
            shapes = [tuple(t.shape) for t in tensors_in(found)]
            step = replace(step, asks=True, outcome=shapes)
        return self._write(step, found, tensors, changed)

    def _check_read(self, step: Step, found: Any) -> None:
        if step.lasting:
            raise _read_of(step, "a buffer that the forward changes")

    def _draw(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Any,
        tensors: Sequence[Tensor],
    ) -> Any:
        """Random numbers: drawn on one stage. For uniform ones it is known how far they reach."""
        found = self._write(replace(step, lasting=True), found, tensors)
        if step.func in UNIFORM and isinstance(found, Tensor):
            largest = torch.nextafter(torch.ones_like(found), torch.zeros_like(found))
            self._drawn[self.value_of(found)] = _Extremes(torch.zeros_like(found), largest)
        return found

    def _shape_asks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> bool:
        """Does the shape of what it makes depend on numbers?"""
        try:
            fakes = mapped((args, kwargs), self._faked)
            with self.fake:
                call(*fakes[0], **fakes[1])
        except Exception:  # whatever a fake cannot do
            return True
        return False

    def _without_numbers(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        if any(at in self._drawn for at in step.takes):
            settled = self._follow_draws(step, args, kwargs, call, tensors)
            if settled is not None:
                return settled[0]
        fakes = mapped((args, kwargs), self._faked)
        inside = list(tensors_in(fakes))
        before = _versions(inside)
        try:
            with self.fake:
                found = call(*fakes[0], **fakes[1])
        except NEEDS_NUMBERS as error:
            raise _read_of(step, self._whose(step)) from error
        changed = _changed(step.func, inside, before)
        those = _outside(tensors, inside, changed)
        if not changed and not any(True for _ in tensors_in(found)):
            if found is not None:
                raise _read_of(step, self._whose(step))
            self._add(replace(step, lasting=True))
            return None
        lasting = any(self._stays(tensor) for tensor in those)
        return self._write(replace(step, lasting=lasting), found, tensors, those, inside)

    def _stays(self, tensor: Tensor) -> bool:
        value = self.values[self.value_of(tensor)]
        return bool(value.parameter or value.buffer)

    def _follow_draws(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        tensors: Sequence[Tensor],
    ) -> tuple[Any] | None:
        """What is decided by chance is refused; `rand() < 0.0` is not decided by chance."""
        if not all(at in self._drawn or self.values[at].free for at in step.takes):
            return None

        def at_extreme(which: str) -> Any:
            def chosen(tensor: Tensor) -> Tensor:
                drawn = self._drawn.get(self.value_of(tensor))
                return tensor if drawn is None else getattr(drawn, which)

            some_args, some_kwargs = mapped((args, kwargs), chosen)
            return call(*some_args, **some_kwargs)

        least, largest = at_extreme("least"), at_extreme("largest")
        if isinstance(least, Tensor):
            found = self._write(replace(step, lasting=True), least.clone(), tensors)
            self._drawn[self.value_of(found)] = _Extremes(least, largest)
            return (found,)
        if least != largest:
            raise CutError(
                f"at {step.where}, random numbers decide what the forward does next, and every "
                "stage would draw its own: switch it off (layerdrop=0, or another such option)"
            )
        self._add(replace(step, kind=Kind.READ, takes=(), outcome=least))
        return (least,)

    def _whose(self, step: Step) -> str:
        """What it was that the host wanted to look at."""
        makers = [self.values[at].maker for at in step.takes if not self.values[at].free]
        for maker in sorted({m for m in makers if m is not None}, reverse=True):
            unit = self._unit_before(maker)
            if unit is not None:
                return f"a value that follows from unit '{unit}'"
        return "a value that follows from a parameter"

    def _unit_before(self, maker: int) -> str | None:
        seen, waiting = set(), [maker]
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            if self.steps[at].kind is Kind.UNIT:
                return str(self.steps[at].func)
            found = [self.values[value].maker for value in self.steps[at].takes]
            waiting += [one for one in found if one is not None]
        return None

    # ---- units ----------------------------------------------------------------------------

    def unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Compute it without numbers, and write it down."""
        with aside(self):
            return self._unit(name, target, args, kwargs)

    def _unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        where = where_now()
        leaves, spec = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for leaf in leaves:
            self._check_open(leaf, f"unit '{name}' is given", where)
        takes = tuple(map(self.value_of, tensors))
        fakes = [self._faked(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inside = [leaf for leaf in fakes if isinstance(leaf, Tensor)]
        before = _versions(inside)
        found = computed_without_numbers(self.fake, name, target, *unflatten(fakes, spec))
        changed = _changed(None, inside, before)
        call = CallOf(name, self._turns[name])
        self._turns[name] += 1
        for leaf in flatten(found)[0]:
            if not isinstance(leaf, Tensor) and any(True for _ in hidden_in(leaf)):
                raise Leak(name, where)
        step = Step(Kind.UNIT, call, takes, None, where, region=self.region)
        return self._write(step, found, tensors, _outside(tensors, inside, changed), inside)

    def _check_open(self, leaf: Any, what: str, where: str) -> None:
        if isinstance(leaf, Tensor | nn.Module):
            return
        for tensor in hidden_in(leaf):
            if isinstance(tensor, FakeTensor):
                raise CutError(
                    f"at {where}, {what} a {type(leaf).__name__} with a tensor of another unit "
                    "inside, where it cannot be followed: pass tuples, lists, dicts or "
                    "dataclasses, or register the class with "
                    "torch.utils._pytree.register_pytree_node; for a cache, use_cache=False"
                )

    # ---- writing --------------------------------------------------------------------------

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

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
        changes = self._change(at, step, changed)
        places = {id(t): n for n, t in reversed(list(enumerate(inside or tensors)))}
        places |= {id(t): n for n, t in reversed(list(enumerate(tensors)))}
        leaves, spec = flatten(found)
        written: list[Any] = []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                written.append(leaf)
            elif id(leaf) in places:
                written.append(Same(places[id(leaf)]))
                leaves[position] = tensors[places[id(leaf)]]
            else:
                name = self._named(step, position)
                made = Value(Look.of(leaf), step.free, at, name)
                written.append(New(self._register(leaf, made)))
        self._add(replace(step, result=Result(tuple(written), spec), changes=changes))
        return unflatten(leaves, spec)

    def _named(self, step: Step, position: int) -> str:
        if step.kind is Kind.UNIT:
            return f"{step.func}.{position}"
        taken = ", ".join(self.values[at].name for at in step.takes)
        stem = f"{called(step.func)}({taken})"
        return self._new_name(stem if len(stem) < 200 else f"{stem[:180]}~{hash_of(stem)}")

    def _change(self, at: int, step: Step, changed: Sequence[Tensor]) -> dict[int, int]:
        """All tensors in the memory of what was changed in place are other values from now on."""
        changes: dict[int, int] = {}
        members: dict[int, Tensor] = {}
        for tensor in changed:
            for one in (tensor, *self._homes.get(_home(tensor) or 0, ())):
                members[id(one)] = one
        for one in members.values():
            before = self.value_of(one)
            value = self.values[before]
            name = self._new_name(f"{value.name} changed")
            fake = None if step.free else self._faked(one)
            kept = replace(value, free=step.free, maker=at, name=name, given=None)
            changes[before] = self._register(one, kept)
            if fake is not None:
                self._fakes[changes[before]] = fake
                self._of_fakes[id(fake)] = changes[before]
        if len(changes) > 1:
            self._shared.append(frozenset(changes.values()))
        return changes

    def constants(self) -> dict[int, Tensor]:
        """The tensors that are no inputs, parameters or buffers, and were there before."""
        return {
            at: tensor
            for tensor in self._alive
            if (value := self.values[at := self._known[id(tensor)]]).maker is None
            and not (value.parameter or value.buffer or value.given is not None)
        }

    def trace(self, inputs: tuple[int, ...], output: Any, lasting: Mapping[str, Tensor]) -> Trace:
        """What was seen."""
        leaves, spec = flatten(output)
        for leaf in leaves:
            self._check_open(leaf, "the model gives", "its end")
        written = [New(self.value_of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        anew = {name: self.value_of(tensor) for name, tensor in lasting.items()}
        result = Result(tuple(written), spec)
        return Trace(
            tuple(self.steps), tuple(self.values), inputs, result, anew, tuple(self._shared)
        )


class Handle:
    """In the place of a hook's handle, where the hook is on another stage."""

    def remove(self) -> None:
        """There is none."""

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def hash_of(text: str) -> str:
    """A few letters, the same everywhere."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read_of(step: Step, what: str) -> CutError:
    return CutError(
        f"at {step.where}, {called(step.func)} looks at the numbers of {what}, which only one "
        "stage has, and what the forward does next, or the shape of it, depends on them: compute "
        "it inside a unit, on tensors (torch.where), or put all that depends on it into one unit "
        "with units="
    )


def numberless(tensor: Tensor) -> Tensor:
    """The same to look at, in next to no memory."""
    if tensor.layout is not torch.strided:
        return tensor
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [-1 if t.is_inference() else t._version for t in tensors]


def _changed(func: Any, tensors: Sequence[Tensor], before: Sequence[int]) -> list[Tensor]:
    now = _versions(tensors)
    found = [t for t, a, b in zip(tensors, now, before, strict=True) if a != b]
    if not found and -1 in before and func is not None and _works_in_place(called(func)):
        return list(tensors[:1])  # in inference mode nothing is counted
    return found


def _outside(
    tensors: Sequence[Tensor], inside: Sequence[Tensor], changed: Sequence[Tensor]
) -> list[Tensor]:
    """The arguments for which those stood that were changed."""
    ids = set(map(id, changed))
    return [t for t, one in zip(tensors, inside, strict=True) if id(one) in ids]


def _works_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


_IN_PLACE = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor")
)


def _home(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
