"""The state that a forward changes, with which the next forward may compute."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.model.isolation import StateSnapshot
from penstock.runtime.audit.counter_probe import CounterProbe, Counters
from penstock.runtime.audit.counters import CounterWalk, Key, MovedValue, is_state
from penstock.runtime.audit.write_log import WriteLog, get_storage_address
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.stage.recompute import has_write_only_buffers
from penstock.state_copy import (
    MODULE_INTERNALS,
    SCALARS,
    StructureCopier,
    Variable,
    clone_state,
    is_of_numpy,
)

BufferKey = tuple[nn.Module, str]
AttributeKey = tuple[nn.Module, str]
UNNAMED_VARIABLE = "a variable outside of the modules"

_NUMBER_TYPES = (int, float)
_SETTLED = 1e-3  # by what part of their size numbers have changed that are settled

_RUNNING_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))


# Types of most attributes, none of which is a random generator.
_NO_GENERATORS = frozenset((*SCALARS, dict, list, tuple, Tensor, nn.Parameter))
_get_tables = itemgetter(*(n for n, table in vars(nn.Module()).items() if isinstance(table, dict)))


def collect_buffers(modules: Iterable[nn.Module]) -> dict[BufferKey, Tensor]:
    """Return the buffers of modules that have numbers."""
    return {
        (module, name): buffer
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    }


def read_plain_attributes(modules: Iterable[nn.Module]) -> dict[AttributeKey, Any]:
    """Return the attributes of modules that are numbers."""
    return {
        (module, name): value
        for module in modules
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


class MovedState(NamedTuple):
    """The descriptions of what a forward has moved, by where it is.

    Attributes:
        counters: What is known to go on: numbers, and what grows.
        opaque: Other values that it has changed: see counters.py.
    """

    counters: dict[Key, Any]
    opaque: dict[Key, Any]


class LeftTensor(NamedTuple):
    """A tensor that a forward has left in an attribute, a variable or a container.

    Attributes:
        owner: The module or the variable that has it.
        name: What a message calls the place.
        value: The tensor.
        set: Gives the place another one.
    """

    owner: nn.Module | Variable
    name: str
    value: Tensor
    set: Callable[[Any], object]

    def disturb(self) -> None:
        """Let the place hold other numbers, in a memory of their own."""
        value = self.value.detach()
        if value.is_floating_point() or value.is_complex():
            self.set(value * 1.5 + 0.25)
        else:
            self.set(~value if value.dtype is torch.bool else torch.zeros_like(value))


class StateWatch:
    """Finds the state that a forward changes, so that the next one may compute with it.

    Args:
        names: The modules, and their names.
        other_modules: Those that are not part of the model: of its loss.
        variables: Variables outside of modules.
        write_log: Tells which parameters were written to.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        other_modules: set[nn.Module],
        variables: Sequence[Variable],
        write_log: WriteLog,
    ) -> None:
        self._names, self._other_modules = names, other_modules
        self._variables, self._write_log = variables, write_log
        self._copier = StructureCopier(clone_state)
        self._before = self._read()
        self._table_sizes = self._measure_tables()
        # With their version counters: a forward may write the numbers that a buffer has already.
        self._buffers = {
            (module, name): (buffer, buffer._version)
            for module in names
            if not has_write_only_buffers(module)
            for name, buffer in module._buffers.items()
            if buffer is not None and is_state(buffer)
        }
        for buffer, _ in self._buffers.values():
            self._copier(buffer)
        for _, value in self._before.values():
            self._copier(value)
        self._host_generators = StateSnapshot(())
        for value in self._copier.list_originals():
            if type(value) not in _NO_GENERATORS and is_host_generator(value):
                self._host_generators.record(value)

    def _read(self) -> dict[Any, tuple[str, Any]]:
        """Return the name and value of each attribute and variable."""
        values: dict[Any, tuple[str, Any]] = {}
        for module, prefix in self._names.items():
            if isinstance(module, DeferredStatsBatchNorm):
                continue  # its attributes are the sums of the micro-batches so far
            attributes = vars(module)
            names = attributes.keys() - MODULE_INTERNALS
            for name in [name for name in attributes if name in names] if names else ():
                values[module, name] = f"{prefix}.{name}".lstrip("."), attributes[name]
            if module in self._other_modules:  # those of the model have digests
                for name, value in module._buffers.items():
                    values[module, name] = f"{prefix}.{name}".lstrip("."), value
        for index, variable in enumerate(self._variables):
            values[index] = variable.name, variable.read()
        return values

    def _measure_tables(self) -> list[int]:
        """Return how many hooks, members and so on the modules have."""
        tables = chain.from_iterable(map(_get_tables, map(vars, self._names)))
        return [*map(len, tables)]

    def rewind_generators(self) -> None:
        """Set the random generators of the model back, so that the next forward draws the same."""
        self._host_generators.restore()
        for generator, state in self._write_log.generators.items():
            generator.set_state(state)

    def has_host_draws(self) -> bool:
        """Return whether a forward has drawn from the model's own generators of Python or NumPy."""
        values = [v for v in self._copier.list_originals() if type(v) not in _NO_GENERATORS]
        return any(is_host_generator(v) and self._copier.has_changed(v) for v in values)

    def describe_moved(self) -> MovedState:
        """Return what a forward has moved, so that it can be compared."""
        state = MovedState({}, {})
        for moved in self._find_moved():
            descriptions = state.opaque if moved.is_opaque else state.counters
            descriptions[moved.key] = moved.describe()
        return state

    def find_name(self, key: Key) -> str:
        """Return the name of the attribute or variable in which a value has been changed."""
        root = key[:2] if isinstance(key[0], nn.Module) else key[0]
        name, _ = self._read().get(root, ("", None))
        return name or UNNAMED_VARIABLE

    def advance_counters(
        self, moving: Collection[Key], constant: Collection[Key], steps_before: int
    ) -> bool:
        """Let the counters that a forward has changed be far ahead. Return whether there are any.

        Args:
            moving: The places of the values that move in each forward.
            constant: The places of the values that are the same whatever rows have run.
            steps_before: By how many steps a counter stays below a multiple of many numbers.
        """
        moved_values = list(self._find_moved())
        advanced = [
            moved.advance(steps_before, moved.key in moving, moved.key in constant)
            for moved in moved_values
        ]
        return any(advanced)

    def find_counters(self, moving: Collection[Key]) -> dict[Key, MovedValue]:
        """Return the plain numbers that move in each forward, by their places.

        Args:
            moving: The places of the values that move in each forward.
        """
        return {
            moved.key: moved
            for moved in self._find_moved()
            if moved.key in moving and type(moved.value) in _NUMBER_TYPES and moved.set is not None
        }

    def probe_counters(
        self, places: Mapping[Key, MovedValue], probe: CounterProbe, run: Callable[[], object]
    ) -> list[Counters]:
        """Return the counters of later calls in which a forward would compare them otherwise.

        Args:
            places: The places of the counters.
            probe: Has the counters, and follows them.
            run: Runs the forward. It may raise, as its counters are of another type.
        """
        set_counters(places, probe.build_numbers())
        run()
        probe.stop()
        after = {moved.key: moved.value for moved in self._find_moved()}
        return probe.find_calls([after.get(key, place.value) for key, place in places.items()])

    def _find_moved(self) -> Iterator[MovedValue]:
        """Yield the numbers, lengths and iterators that a forward has moved."""
        walk = CounterWalk(self._copier)
        for module in self._names:
            if has_write_only_buffers(module):
                continue
            tables: tuple[dict[str, Any], ...] = module._buffers, vars(module)
            for table in tables:
                for name, value in list(table.items()):
                    if name in MODULE_INTERNALS:
                        continue
                    key, is_buffer = (module, name), table is module._buffers
                    _, before = self._before.get(key, ("", None))
                    if is_buffer:
                        before, _ = self._buffers.get(key, (before, 0))
                    elif before is None:
                        before = getattr(type(module), name, None)
                    put: Callable[[Any], object] = partial(table.__setitem__, name)
                    walk.has_copies = module not in self._other_modules
                    yield from walk.find_moved(key, value, before, put, is_buffer=is_buffer)
        for index, variable in enumerate(self._variables):
            value, (_, before) = variable.read(), self._before.get(index, ("", None))
            walk.has_copies = variable.namespace is not None
            put_variable = variable.set if walk.has_copies else None
            yield from walk.find_moved((index, ""), value, before, put_variable)

    def find_left_tensors(self) -> dict[Key, LeftTensor]:
        """Return the tensors that a forward has put somewhere, or has written to."""
        left: dict[Key, LeftTensor] = {}
        for key, (name, value) in self._read().items():
            owner = self._variables[key] if isinstance(key, int) else key[0]
            put = owner.set if isinstance(owner, Variable) else partial(_set_member, *key)
            old = self._before.get(key, ("", None))[1]
            self._add_left(left, (key,), LeftTensor(owner, name, value, put), old)
        for module, prefix in self._names.items():
            if has_write_only_buffers(module) or module in self._other_modules:
                continue
            for name, buffer in module._buffers.items():
                key, path = (module, name), f"{prefix}.{name}".lstrip(".")
                old, _ = self._buffers.get(key, (None, 0))
                if buffer is not None:
                    put = partial(_set_member, *key)
                    self._add_left(left, (key,), LeftTensor(module, path, buffer, put), old)
        return left

    def _add_left(self, left: dict[Key, LeftTensor], key: Key, place: LeftTensor, old: Any) -> None:
        """Add a place that has another tensor than before, or the entries of its container."""
        value: Any = place.value
        if isinstance(value, Tensor):
            is_set = not (isinstance(place.owner, Variable) and place.owner.namespace is None)
            if (is_set or len(key) > 1) and (value is not old or self._copier.has_changed(value)):
                left[key] = place
        elif isinstance(value, dict | list) and len(key) == 1:
            old = self._copier.find_copy(value)
            old_ids = {id(entry) for entry in (old.values() if isinstance(old, dict) else old)}
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for name, entry in entries:
                copied = self._copier.find_copy(entry)
                if isinstance(entry, Tensor) and id(copied) not in old_ids:
                    put = partial(value.__setitem__, name)
                    self._add_left(left, (*key, name), place._replace(value=entry, set=put), None)

    def find_settled_buffers(self) -> list[BufferKey]:
        """Return the buffers that a forward has written without changing their numbers much."""
        return [
            (module, name)
            for (module, name), (buffer, version) in self._buffers.items()
            if (now := module._buffers.get(name)) is not None
            and (now is not buffer or now._version != version)
            and _is_settled(now, self._copier(buffer))
        ]

    @torch.no_grad()
    def disturb(self, buffers: Iterable[BufferKey]) -> None:
        """Change the numbers of buffers by up to a half, but not their signs."""
        for module, name in buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            angles = torch.arange(buffer.numel(), device=buffer.device, dtype=torch.float32) * 2.3
            buffer.mul_((1.0 + 0.5 * torch.cos(angles + 1.0)).reshape(buffer.shape))

    def find_changes(self, changed_buffers: Iterable[BufferKey]) -> list[str]:
        """Return the names of the state that has changed, if a later forward may compute with it.

        BatchNorm in training writes its running statistics, and does not compute with them.
        """
        names = sorted(
            f"{self._names[module]}.{name}".lstrip(".")
            for module, name in changed_buffers
            if not (has_write_only_buffers(module) and name in _RUNNING_STATISTICS)
        )
        names += [
            f"{self._names[module]}.{name}".lstrip(".")
            for module, name in self.find_settled_buffers()
        ]
        written = self._write_log.find_written()
        names += [
            f"{prefix}.{name}".lstrip(".")
            for module, prefix in self._names.items()
            for name, parameter in module._parameters.items()
            if parameter is not None and get_storage_address(parameter) in written
        ]
        now = self._read()
        have_changed: dict[int, bool] = {}  # by id: modules may share a configuration
        for key in {**self._before, **now}:
            name, value = now.get(key, ("", None))
            old_name, old = self._before.get(key, ("", None))
            is_same = value is old or (type(value) in SCALARS and value == old)
            if type(value) not in _NO_GENERATORS and (
                isinstance(value, torch.Generator) or is_host_generator(value)
            ):
                continue
            if id(value) not in have_changed:
                have_changed[id(value)] = self._copier.has_changed(value)
            if not is_same or have_changed[id(value)]:
                names.append(name or old_name)
        if self._measure_tables() != self._table_sizes:  # the forward has registered a hook, say
            names.append(UNNAMED_VARIABLE)
        return list(dict.fromkeys(name for name in names if name != UNNAMED_VARIABLE)) or names[:1]


def _set_member(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute or a buffer of a module, without the checks of PyTorch."""
    table = module._buffers if name in module._buffers else vars(module)
    table[name] = value


def set_counters(places: Mapping[Key, MovedValue], counters: Counters) -> None:
    """Let the places of counters hold these numbers."""
    for place, number in zip(places.values(), counters, strict=True):
        assert place.set is not None
        place.set(number)


def _is_settled(value: Tensor, before: Tensor) -> bool:
    """Return whether numbers have hardly changed."""
    if not is_state(value) or not value.is_floating_point() or value.shape != before.shape:
        return False
    if value.device != before.device:
        return False
    change, size = map(torch.linalg.vector_norm, (value.detach() - before, before))
    return bool((change <= _SETTLED * size) & (size > 0))


def is_host_generator(value: Any) -> bool:
    """Return whether an object is a random generator of Python or NumPy."""
    is_of_library = hasattr(value, "bit_generator") or hasattr(value, "set_state")
    return isinstance(value, random.Random) or (is_of_numpy(value) and is_of_library)
