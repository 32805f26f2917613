"""The state that a forward changes, with which the next forward may compute."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.isolation import (
    StateSnapshot,
)
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

# How far the state that has changed is moved, to see whether a forward computes with it.
_FAR_AHEAD = 1_000_000
_LONGER = 100_000  # entries of a list
_LARGER = 1_000.0
_MAX_STATE = 1 << 20  # numbers of a buffer

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
        self._buffers = {
            (module, name): float(buffer)
            for module in names
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_counter(buffer)
        }
        self._float_buffers = {
            (module, name): buffer.detach().clone()
            for module in names
            if not has_write_only_buffers(module)
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_float_state(buffer)
        }
        for _, value in self._before.values():
            self._copier(value)
        self._host_generators = StateSnapshot(())
        for value in self._copier.list_originals():
            if type(value) not in _NO_GENERATORS and _is_host_generator(value):
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
        return any(_is_host_generator(v) and self._copier.has_changed(v) for v in values)

    def advance_counters(self) -> bool:
        """Let the counters that a forward has changed be far ahead. Return whether there are any.

        A counter is a whole number in an attribute, a buffer, a variable or an object, a list that
        grows, or an `itertools.count`. Other numbers in buffers grow, too: a running maximum may be
        read only where it is above a limit.
        """
        has_counters = False
        for module in self._names:
            if has_write_only_buffers(module):
                continue
            tables: tuple[dict[str, Any], ...] = vars(module), module._buffers
            for table in tables:
                for name, value in list(table.items()):
                    if name in MODULE_INTERNALS:
                        continue
                    _, old = self._before.get(
                        (module, name), ("", self._buffers.get((module, name)))
                    )
                    before = self._float_buffers.get((module, name))
                    if _is_counter(value) and isinstance(old, int | float) and float(value) != old:
                        value.add_(_FAR_AHEAD)
                        has_counters = True
                    elif before is not None and _is_float_state(value):
                        has_counters |= _let_changes_grow(value, before)
                    else:
                        old = getattr(type(module), name, None) if old is None else old
                        has_counters |= self._advance(table, name, value, old)
        for index, variable in enumerate(self._variables):
            value, (_, old) = variable.read(), self._before.get(index, ("", None))
            if variable.namespace is not None:
                slot = {"": value}
                if self._advance(slot, "", value, old):
                    variable.set(slot[""])
                    has_counters = True
            if self._copier.has_changed(value) and not isinstance(value, Tensor | nn.Module):
                has_counters |= self._advance_entries(value)
        return has_counters

    def _advance_entries(self, value: Any) -> bool:
        """Let the counters in a dict, or in the attributes of an object, be far ahead."""
        before = self._copier(value)
        table, old_table = (
            (value, before)
            if isinstance(value, dict)
            else (getattr(value, "__dict__", {}), getattr(before, "__dict__", {}))
        )
        has_counters = False
        for name, entry in list(table.items()):
            # A counter of a class becomes one of the object when it is first raised.
            old = old_table.get(name, 0 if type(entry) is int and entry == 1 else None)
            has_counters |= self._advance(table, name, entry, old)
        return has_counters

    def _advance(self, table: dict[Any, Any], name: Any, value: Any, old: Any) -> bool:
        """Let one value be far ahead, if it is a counter that has changed. Return whether it is."""
        if type(value) is int and type(old) is int:
            if value == old:
                return False
            table[name] = value + _FAR_AHEAD
            return True
        if old is value:  # it has been copied before
            old = self._copier(value)
        if type(value) is list and len(value) > (len(old) if isinstance(old, list) else 0):
            value.extend([value[-1]] * _LONGER)
            return True
        if isinstance(value, itertools.count) and repr(value) != repr(old):
            table[name] = itertools.count(next(copy.copy(value)) + _FAR_AHEAD)
            return True
        return False

    def find_changes(self, changed_buffers: Iterable[BufferKey]) -> list[str]:
        """Return the names of the state that has changed, if a later forward may compute with it.

        BatchNorm in training writes its running statistics, and does not compute with them.
        """
        names = sorted(
            f"{self._names[module]}.{name}".lstrip(".")
            for module, name in changed_buffers
            if not (has_write_only_buffers(module) and name in _RUNNING_STATISTICS)
        )
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
                isinstance(value, torch.Generator) or _is_host_generator(value)
            ):
                continue
            if id(value) not in have_changed:
                have_changed[id(value)] = self._copier.has_changed(value)
            if not is_same or have_changed[id(value)]:
                names.append(name or old_name)
        if self._measure_tables() != self._table_sizes:  # the forward has registered a hook, say
            names.append(UNNAMED_VARIABLE)
        return list(dict.fromkeys(name for name in names if name != UNNAMED_VARIABLE)) or names[:1]


def _is_float_state(value: Any) -> bool:
    """Return whether a tensor has numbers that a forward may let grow, and is not large."""
    if type(value) is not Tensor or value.is_meta or value.is_inference():
        return False
    is_plain = value.layout is torch.strided and value.numel() <= _MAX_STATE
    return is_plain and value.is_floating_point() and not value.requires_grad


def _let_changes_grow(value: Tensor, before: Tensor) -> bool:
    """Multiply the numbers that have changed. Return whether there are any.

    The others may belong to rows with other ids.
    """
    if value.shape != before.shape or value.device != before.device:
        return False
    has_changed = value.detach() != before
    with torch.no_grad():
        value.copy_(torch.where(has_changed, value * _LARGER, value))
    return bool(has_changed.any())


def _is_counter(value: Any) -> bool:
    """Return whether a tensor is a whole number."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_meta or value.is_complex():
        return False
    return value.dtype is not torch.bool and float(value).is_integer()  # no infinite number is


def _is_host_generator(value: Any) -> bool:
    is_of_library = hasattr(value, "bit_generator") or hasattr(value, "set_state")
    return isinstance(value, random.Random) or (is_of_numpy(value) and is_of_library)
