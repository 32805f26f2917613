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
from penstock.model.traced.dry_run import FakeTensorFactory
from penstock.model.traced.interception import get_source_location
from penstock.model.traced.remote_tensor import TensorSpec
from penstock.model.traced.torch_functions import SIZE_QUERIES
from penstock.model.traced.trace import TracedValue


class EscapedTensor(Exception):
    """A value left a unit sideways: the unit must be opened."""

    def __init__(self, unit: str, location: str) -> None:
        super().__init__(unit)
        self.unit, self.location = unit, location


@dataclass(frozen=True)
class RandomRange:
    """A value that was drawn, or follows from one: as it is for the least and the largest draw."""

    least: Any
    largest: Any


class ValueTable:
    """Tensors are known by identity; a change in place makes them other values."""

    def __init__(self, models: Sequence[nn.Module], fake_factory: FakeTensorFactory) -> None:
        """Names are those of the last of the models that has a tensor."""
        self.values: list[TracedValue] = []
        self.shape_read_values: set[int] = (
            set()
        )  # values of which the host knows how large they are
        self.fake_factory = fake_factory
        self._value_by_tensor: dict[
            int, int
        ] = {}  # tensors, by identity: the values that they are now
        self._kept_alive: list[Tensor] = []
        self._fake_by_value: dict[int, Tensor] = {}  # by value
        self._value_by_fake: dict[int, int] = {}  # back, by identity
        self._tensors_by_storage: dict[int, list[Tensor]] = {}  # the tensors in one memory
        self._name_counts: Counter[str] = Counter()
        self._parameter_names = {id(p): name for m in models for name, p in m.named_parameters()}
        self._buffer_names = {id(b): name for m in models for name, b in m.named_buffers()}

    def register_inputs(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The inputs."""
        return tuple(
            self.register(
                t, TracedValue(TensorSpec.from_tensor(t), True, None, f"input {at}", input_index=at)
            )
            for at, t in enumerate(tensors)
        )

    def value_of(self, tensor: Tensor) -> int:
        """Which value it is now."""
        found = self._value_by_tensor.get(id(tensor), self._value_by_fake.get(id(tensor)))
        if found is not None:
            return found
        parameter = self._parameter_names.get(id(tensor), "")
        buffer = self._buffer_names.get(id(tensor), "")
        if isinstance(tensor, FakeTensor) and not (parameter or buffer):
            raise EscapedTensor(getattr(tensor, "made_in", ""), get_source_location())
        look = TensorSpec.from_tensor(tensor)
        name = parameter or buffer or self.make_unique_name(f"constant {look}")
        return self.register(
            tensor, TracedValue(look, not parameter, None, name, parameter, buffer)
        )

    def record_metadata_read(self, func: Any, args: tuple[Any, ...]) -> None:
        """The host looks at a tensor."""
        if func in SIZE_QUERIES:
            self.shape_read_values.update(
                self._value_by_tensor[id(t)] for t in args[:1] if id(t) in self._value_by_tensor
            )

    def is_input_only(self, value: int) -> bool:
        """Does it follow from the inputs alone?"""
        return self.values[value].input_only

    def check_own_parameters(self, unit: str, target: nn.Module) -> None:
        """A unit computes with its own parameters, and with none that the forward has made."""
        for tensor in target.parameters():
            at = self._value_by_tensor.get(id(tensor))
            value = None if at is None else self.values[at]
            if value is not None and value.producer is not None and not value.parameter_name:
                raise CutError(
                    f"at {get_source_location()}, unit '{unit}' is called with other tensors in the place "
                    "of its parameters (torch.func.functional_call), and stages would all put "
                    "theirs there: give them to functions (F.linear), or put it all into one unit "
                    "with units="
                )

    def is_persistent(self, tensor: Tensor) -> bool:
        """Is it there after the forward?"""
        those = (self.values[self.value_of(t)] for t in (tensor, *self._iter_aliases(tensor)))
        return any(
            value.parameter_name or value.buffer_name for value in those
        )  # also by its `.data`

    def register(self, tensor: Tensor, value: TracedValue) -> int:
        """From now on the tensor is this value."""
        at = len(self.values)
        self.values.append(value)
        if id(tensor) not in self._value_by_tensor:
            self._kept_alive.append(tensor)
            home = _get_storage_key(tensor)
            if home is not None:
                self._tensors_by_storage.setdefault(home, []).append(tensor)
        self._value_by_tensor[id(tensor)] = at
        return at

    def make_unique_name(self, stem: str) -> str:
        """That no other value has; the same on every rank."""
        if len(stem) > 200:
            stem = f"{stem[:180]}~{hashlib.sha256(stem.encode()).hexdigest()[:12]}"
        self._name_counts[stem] += 1
        return f"{stem} #{self._name_counts[stem]}"

    def get_fake(self, tensor: Tensor) -> Tensor:
        """The same without numbers.

        What shares its memory is made so with it: not when one of them was changed already.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        for one in (tensor, *self._tensors_by_storage.get(_get_storage_key(tensor) or 0, ())):
            value = self.value_of(one)
            if not isinstance(one, FakeTensor) and value not in self._fake_by_value:
                self._fake_by_value[value] = made = self.fake_factory.from_tensor(one)
                self._value_by_fake.setdefault(id(made), value)
                self._tensors_by_storage.setdefault(_get_storage_key(made) or 0, []).append(
                    one
                )  # views to come are there
        return self._fake_by_value[self.value_of(tensor)]

    def record_mutation(
        self, node_index: int, input_only: bool, mutated: Sequence[Tensor]
    ) -> dict[int, int]:
        """All tensors in the memory of what a step changed in place are other values after it."""
        changes: dict[int, int] = {}
        members: dict[int, Tensor] = {}
        for tensor in mutated:
            for one in (tensor, *self._iter_aliases(tensor)):
                members[id(one)] = one
        for one in members.values():
            before = self.value_of(one)
            value = self.values[before]
            fake = None if input_only else self.get_fake(one)
            name = self.make_unique_name(f"{value.name} changed")
            after = replace(
                value, input_only=input_only, producer=node_index, name=name, input_index=None
            )
            changes[before] = self.register(one, after)
            if fake is not None:
                self._fake_by_value[changes[before]] = fake
                self._value_by_fake[id(fake)] = changes[before]
        return changes

    def _iter_aliases(self, tensor: Tensor) -> Iterator[Tensor]:
        """All that is in its memory, or was made from what stands for it without numbers."""
        fake = self._fake_by_value.get(self.value_of(tensor), tensor)
        for home in {_get_storage_key(tensor) or 0, _get_storage_key(fake) or 0} - {0}:
            yield from self._tensors_by_storage.get(home, ())

    def collect_constants(self) -> dict[int, Tensor]:
        """The tensors that are no inputs, parameters or buffers, and were there before."""
        return {
            at: tensor
            for tensor in self._kept_alive
            if (at := self._value_by_tensor.get(id(tensor)))
            is not None  # a buffer that nobody used
            and (value := self.values[at]).producer is None
            and not (value.parameter_name or value.buffer_name or value.input_index is not None)
        }


def _get_storage_key(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
