"""The values of a forward while it is followed: which tensor is which, and what shares memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.errors import CutError
from penstock.partition.forward.absent import Look
from penstock.partition.forward.faking import Fakes
from penstock.partition.forward.tables import MEASURING
from penstock.partition.forward.trace import Value
from penstock.partition.forward.watching import where_now


class Leak(Exception):
    """A value left a unit sideways: the unit must be opened."""

    def __init__(self, unit: str, where: str) -> None:
        super().__init__(unit)
        self.unit, self.where = unit, where


@dataclass(frozen=True)
class Extremes:
    """A value that was drawn, or follows from one: as it is for the least and the largest draw."""

    least: Any
    largest: Any


class Ledger:
    """Tensors are known by identity; a change in place makes them other values."""

    def __init__(self, models: Sequence[nn.Module], fakes: Fakes) -> None:
        """Names are those of the last of the models that has a tensor."""
        self.values: list[Value] = []
        self.measured: set[int] = set()  # values of which the host knows how large they are
        self.fakes = fakes
        self._known: dict[int, int] = {}  # tensors, by identity: the values that they are now
        self._alive: list[Tensor] = []
        self._fakes: dict[int, Tensor] = {}  # by value
        self._of_fakes: dict[int, int] = {}  # back, by identity
        self._homes: dict[int, list[Tensor]] = {}  # the tensors in one memory
        self._names: Counter[str] = Counter()
        self._parameters = {id(p): name for m in models for name, p in m.named_parameters()}
        self._buffers = {id(b): name for m in models for name, b in m.named_buffers()}

    def given(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The inputs."""
        return tuple(
            self.register(t, Value(Look.of(t), True, None, f"input {at}", given=at))
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
        name = parameter or buffer or self.new_name(f"constant {look}")
        return self.register(tensor, Value(look, not parameter, None, name, parameter, buffer))

    def look(self, func: Any, args: tuple[Any, ...]) -> None:
        """The host looks at a tensor."""
        if func in MEASURING:
            self.measured.update(self._known[id(t)] for t in args[:1] if id(t) in self._known)

    def is_free(self, value: int) -> bool:
        """Does it follow from the inputs alone?"""
        return self.values[value].free

    def check_parameters(self, unit: str, target: nn.Module) -> None:
        """A unit computes with its own parameters, and with none that the forward has made."""
        for tensor in target.parameters():
            at = self._known.get(id(tensor))
            value = None if at is None else self.values[at]
            if value is not None and value.maker is not None and not value.parameter:
                raise CutError(
                    f"at {where_now()}, unit '{unit}' is called with other tensors in the place "
                    "of its parameters (torch.func.functional_call), and stages would all put "
                    "theirs there: give them to functions (F.linear), or put it all into one unit "
                    "with units="
                )

    def stays(self, tensor: Tensor) -> bool:
        """Is it there after the forward?"""
        those = (self.values[self.value_of(t)] for t in (tensor, *self._beside(tensor)))
        return any(value.parameter or value.buffer for value in those)  # also by its `.data`

    def register(self, tensor: Tensor, value: Value) -> int:
        """From now on the tensor is this value."""
        at = len(self.values)
        self.values.append(value)
        if id(tensor) not in self._known:
            self._alive.append(tensor)
            home = _home(tensor)
            if home is not None:
                self._homes.setdefault(home, []).append(tensor)
        self._known[id(tensor)] = at
        return at

    def new_name(self, stem: str) -> str:
        """That no other value has; the same on every rank."""
        if len(stem) > 200:
            stem = f"{stem[:180]}~{hashlib.sha256(stem.encode()).hexdigest()[:12]}"
        self._names[stem] += 1
        return f"{stem} #{self._names[stem]}"

    def faked(self, tensor: Tensor) -> Tensor:
        """The same without numbers.

        What shares its memory is made so with it: not when one of them was changed already.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        for one in (tensor, *self._homes.get(_home(tensor) or 0, ())):
            value = self.value_of(one)
            if not isinstance(one, FakeTensor) and value not in self._fakes:
                self._fakes[value] = made = self.fakes.of(one)
                self._of_fakes.setdefault(id(made), value)
                self._homes.setdefault(_home(made) or 0, []).append(one)  # views to come are there
        return self._fakes[self.value_of(tensor)]

    def change(self, at: int, free: bool, changed: Sequence[Tensor]) -> dict[int, int]:
        """All tensors in the memory of what a step changed in place are other values after it."""
        changes: dict[int, int] = {}
        members: dict[int, Tensor] = {}
        for tensor in changed:
            for one in (tensor, *self._beside(tensor)):
                members[id(one)] = one
        for one in members.values():
            before = self.value_of(one)
            value = self.values[before]
            fake = None if free else self.faked(one)
            name = self.new_name(f"{value.name} changed")
            after = replace(value, free=free, maker=at, name=name, given=None)
            changes[before] = self.register(one, after)
            if fake is not None:
                self._fakes[changes[before]] = fake
                self._of_fakes[id(fake)] = changes[before]
        return changes

    def _beside(self, tensor: Tensor) -> Iterator[Tensor]:
        """All that is in its memory, or was made from what stands for it without numbers."""
        fake = self._fakes.get(self.value_of(tensor), tensor)
        for home in {_home(tensor) or 0, _home(fake) or 0} - {0}:
            yield from self._homes.get(home, ())

    def constants(self) -> dict[int, Tensor]:
        """The tensors that are no inputs, parameters or buffers, and were there before."""
        return {
            at: tensor
            for tensor in self._alive
            if (at := self._known.get(id(tensor))) is not None  # a buffer that nobody used
            and (value := self.values[at]).maker is None
            and not (value.parameter or value.buffer or value.given is not None)
        }


def _home(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
