"""The value table of the tracer: which tensor is which value, and which tensors share memory.

Python sees tensors; a trace has values. A tensor object becomes another value each time its memory
is changed in place, also through a view or an alias:

    y = x[0]          x -> v0, y -> v1      both in one storage
    x.add_(1)         x -> v2, y -> v3      one in-place operation makes two new values

A tensor is known by its identity. A real tensor may have a fake tensor as well, on which operations
are executed whose other arguments have no contents. Both stand for the same value.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.traced.dry_run import FakeTensorFactory
from penstock.model.traced.interception import EscapedTensor, get_source_location
from penstock.model.traced.torch_functions import METADATA_QUERIES
from penstock.model.traced.trace import TracedValue
from penstock.nested_values import find_referred_values, iter_tensors
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import FakeTensor, get_storage_address


def _name_tensors(model: nn.Module) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of parameters and of buffers by id, as `named_parameters` gives them.

    One loop for both. The generators of PyTorch are nested as deeply as the modules.
    """
    names: tuple[dict[int, str], dict[int, str]] = {}, {}
    visited: set[nn.Module] = set()
    todo = [("", model)]
    while todo:
        prefix, module = todo.pop()
        if module in visited:
            continue
        visited.add(module)
        members: tuple[Mapping[str, Tensor | None], ...] = module._parameters, module._buffers
        for table, tensors in zip(names, members, strict=True):
            for name, tensor in tensors.items():
                if tensor is not None:
                    table.setdefault(id(tensor), prefix + name)
        children = [(f"{prefix}{name}.", m) for name, m in module._modules.items() if m is not None]
        todo += reversed(children)
    return names


class ValueTable:
    """Maps tensors to values while a forward is traced."""

    def __init__(self, models: Sequence[nn.Module], fake_factory: FakeTensorFactory) -> None:
        """Create a table without values.

        The names of parameters and buffers come from `models`. If several models have a tensor, the
        last of them decides.
        """
        self.values: list[TracedValue] = []
        # See `Trace.metadata_reads`.
        self.metadata_reads: dict[str, set[int]] = {"shape": set(), "ndim": set(), "dtype": set()}
        self.fake_factory = fake_factory
        # Keys are `id(tensor)`: the values that the tensors are now. `_kept_alive` holds a
        # reference to each tensor, because Python reuses the id of an object that is gone.
        self._value_by_tensor: dict[int, int] = {}
        self._kept_alive: list[Tensor] = []
        self._fake_by_value: dict[int, Tensor] = {}
        self._value_by_fake: dict[int, int] = {}  # keys are `id(fake)`
        self._tensors_by_storage: dict[int, list[Tensor]] = {}
        self._name_counts: Counter[str] = Counter()
        self._parameter_names: dict[int, str] = {}
        self._buffer_names: dict[int, str] = {}
        for model in models:
            parameter_names, buffer_names = _name_tensors(model)
            self._parameter_names |= parameter_names
            self._buffer_names |= buffer_names
        self._models = models

    def register_inputs(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Register the tensors that the forward is called with, and return their values."""
        return tuple(
            self.register(
                t,
                TracedValue(
                    TensorSpec.from_tensor(t), True, None, f"input {index}", input_index=index
                ),
            )
            for index, t in enumerate(tensors)
        )

    def value_of(self, tensor: Tensor) -> int:
        """Return the value that a tensor is now.

        A tensor that was never seen before is a parameter, a buffer or a constant, and is
        registered. Raises `EscapedTensor` if it was made inside a unit.
        """
        value = self._value_by_tensor.get(id(tensor), self._value_by_fake.get(id(tensor)))
        if value is not None:
            return value
        parameter = self._parameter_names.get(id(tensor), "")
        buffer = self._buffer_names.get(id(tensor), "")
        if isinstance(tensor, FakeTensor) and not (parameter or buffer):
            raise EscapedTensor(getattr(tensor, "made_in", ""), get_source_location())
        spec = TensorSpec.from_tensor(tensor)
        name = parameter or buffer or self.make_unique_name(f"constant {spec}")
        return self.register(
            tensor, TracedValue(spec, not parameter, None, name, parameter, buffer)
        )

    def find_buffer_names(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        """Return the names of those tensors that are buffers."""
        return frozenset(self._buffer_names[id(t)] for t in tensors if id(t) in self._buffer_names)

    def record_metadata_read(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note that Python read the shape or dtype of a tensor. Other metadata need no note."""
        kind = METADATA_QUERIES.get(func)
        if kind is not None:
            self.metadata_reads[kind].update(
                self._value_by_tensor[id(t)] for t in args[:1] if id(t) in self._value_by_tensor
            )

    def is_input_only(self, value: int) -> bool:
        """Return whether a value depends on no parameter and on no output of a unit."""
        return self.values[value].input_only

    def check_own_parameters(self, unit: str, target: nn.Module) -> None:
        """Raise if the forward has put computed tensors in place of a unit's parameters.

        `torch.func.functional_call` does that for the duration of a call. The proxies of all stages
        share the unit, so each stage would overwrite the tensors of the others.
        """
        for tensor in target.parameters():
            value_index = self._value_by_tensor.get(id(tensor))
            value = None if value_index is None else self.values[value_index]
            if value is not None and value.producer is not None and not value.parameter_name:
                raise CutError(
                    f"at {get_source_location()}, unit '{unit}' is called with other tensors in "
                    "place of its parameters (torch.func.functional_call). Every stage would put "
                    "its own tensors there. Pass the tensors to functions such as F.linear, or put "
                    "the call and the code that makes the tensors into one unit with units=."
                )

    def is_persistent(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with a parameter or a buffer.

        A change to it outlives the forward. The `.data` of a parameter is such a tensor.
        """
        values = (self.values[self.value_of(t)] for t in (tensor, *self._iter_aliases(tensor)))
        return any(value.parameter_name or value.buffer_name for value in values)

    def shares_memory_with_units(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with one that is not input-only.

        A unit may return a view of an input.
        """
        return not all(self.is_input_only(self.value_of(t)) for t in self._iter_aliases(tensor))

    def _check_not_kept(self, tensor: Tensor) -> None:
        """Raise if a tensor that is changed in place is an attribute of the model or a global.

        The change outlives the forward. All stages refer to the tensor, and a recomputation would
        repeat the change; only of buffers do the stages keep track.
        """
        value = self.values[self.value_of(tensor)]
        if value.producer is not None or value.input_index is not None:
            return
        if value.parameter_name or value.buffer_name:
            return
        for path, module in self._models[-1].named_modules():
            attributes = {f"{path}.{key}".lstrip("."): v for key, v in vars(module).items()}
            referred = find_referred_values(getattr(type(module), "forward", None))
            for name, content in (*attributes.items(), *referred.items()):
                if any(t is tensor for t in iter_tensors(content)):
                    raise CutError(
                        f"at {get_source_location()}, the forward changes '{name}' in place, a "
                        "tensor that is not a buffer. Stages keep track of changes to buffers "
                        "only. Register the tensor with register_buffer, or change a copy of it."
                    )

    def register(self, tensor: Tensor, value: TracedValue) -> int:
        """Add a value, make the tensor stand for it from now on, and return its index."""
        value_index = len(self.values)
        self.values.append(value)
        if id(tensor) not in self._value_by_tensor:
            self._kept_alive.append(tensor)
            storage_key = _get_storage_key(tensor)
            if storage_key is not None:
                self._tensors_by_storage.setdefault(storage_key, []).append(tensor)
        self._value_by_tensor[id(tensor)] = value_index
        return value_index

    def make_unique_name(self, stem: str) -> str:
        """Return a name that no other value has and that is the same on every rank.

        A name contains the names of the values it was computed from. Beyond 200 characters the end
        is replaced by a hash, or the names of a deep model would grow without bound.
        """
        if len(stem) > 200:
            stem = f"{stem[:180]}~{hashlib.sha256(stem.encode()).hexdigest()[:12]}"
        self._name_counts[stem] += 1
        return f"{stem} #{self._name_counts[stem]}"

    def get_fake(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that stands for a tensor.

        All tensors of one storage get their fakes at once, before any of them is changed in place.
        The fake mode keeps their aliasing, so that an in-place change of one fake reaches the
        fakes of the others.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        for alias in (tensor, *self._tensors_by_storage.get(_get_storage_key(tensor) or 0, ())):
            value = self.value_of(alias)
            if not isinstance(alias, FakeTensor) and value not in self._fake_by_value:
                self._fake_by_value[value] = fake = self.fake_factory.from_tensor(alias)
                self._value_by_fake.setdefault(id(fake), value)
                # Views that the forward makes from now on are views of the fake. Listing the real
                # tensor under the fake's storage makes it an alias of those views.
                self._tensors_by_storage.setdefault(_get_storage_key(fake) or 0, []).append(alias)
        return self._fake_by_value[self.value_of(tensor)]

    def record_mutation(
        self, node_index: int, input_only: bool, mutated: Sequence[Tensor]
    ) -> dict[int, int]:
        """Give new values to all tensors in the memory that a node changed in place.

        Returns the new value of each old one.
        """
        mutations: dict[int, int] = {}
        aliases: dict[int, Tensor] = {}
        for tensor in mutated:
            for alias in (tensor, *self._iter_aliases(tensor)):
                aliases[id(alias)] = alias
        for alias in aliases.values():
            self._check_not_kept(alias)
            before = self.value_of(alias)
            value = self.values[before]
            # The change was executed on fakes, unless the node is input-only. Then the real tensor
            # no longer has the contents of its value, and only the fake may be used.
            fake = None if input_only else self.get_fake(alias)
            name = self.make_unique_name(f"{value.name} changed")
            after = replace(
                value, input_only=input_only, producer=node_index, name=name, input_index=None
            )
            mutations[before] = self.register(alias, after)
            if fake is not None:
                self._fake_by_value[mutations[before]] = fake
                self._value_by_fake[id(fake)] = mutations[before]
        return mutations

    def _iter_aliases(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensors that share memory with a tensor, or with the fake of one of these."""
        storage_keys, visited = [_get_storage_key(tensor) or 0], set[int]()
        for storage_key in storage_keys:
            if not storage_key or storage_key in visited:
                continue
            visited.add(storage_key)
            aliases = list(self._tensors_by_storage.get(storage_key, ()))
            for alias in (tensor, *aliases):
                fake = self._fake_by_value.get(self.value_of(alias), alias)
                storage_keys.append(_get_storage_key(fake) or 0)
            yield from aliases

    def collect_constants(self) -> dict[int, Tensor]:
        """Return the constants, by value.

        A constant existed before the forward and is not an input, a parameter or a buffer.
        """
        return {
            index: tensor
            for tensor in self._kept_alive
            if (index := self._value_by_tensor.get(id(tensor))) is not None
            and (value := self.values[index]).producer is None
            and not (value.parameter_name or value.buffer_name or value.input_index is not None)
        }


def _get_storage_key(tensor: Tensor) -> int | None:
    """Return a number that identifies the memory of a tensor, or None for one without storage."""
    try:
        return get_storage_address(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
