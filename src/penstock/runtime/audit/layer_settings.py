"""The settings of layers: what users change between calls, and what a layer may go by.

    what is changed                       what makes it another setting
    ------------------------------------  --------------------------------------------------------
    an attribute: a flag, a name, None    its value, also in dicts, lists and plain objects
    an attribute: a number                whether it is 0; other changes are counted
    a buffer, a tensor in an attribute,   whether all of it is 0, if it is small and on the CPU;
    a frozen parameter                    other changes are counted
    a variable of a class, of a module    a flag, a name or None by its value, in objects and dicts,
    of Python, or in a closure            too; other changes are counted
    a method, a function, a hook          the code that runs, and what `functools.partial` binds
    an inner layer, its mode              its class, its `training`

The audit of the first step says nothing about a layer that computes something else since then. So a
call with other settings is audited, once for each of them. A number may change in every step, as a
temperature does. It is looked at each time that the number of changes has doubled.

What is changed anywhere else, such as an environment variable, shows if the layers record more or
fewer operations for their backward (`GraphSizes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, call, methodcaller
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.fingerprint import CachedHash, Fingerprinter, ModuleSnapshot, are_same_objects
from penstock.model.traced.settings import CodeVariables
from penstock.state_copy import (
    LIBRARY_PACKAGES,
    MODULE_INTERNALS,
    SCALAR_TYPES,
    get_attributes,
    get_package,
    is_of_numpy,
)
from penstock.torch_compat import NormBase

_PLAIN_TYPES = frozenset((bool, str, type(None)))
# Not unions, which Python would build for each of the many values that it looks at.
_FUNCTION_TYPES = (FunctionType, MethodType, partial)
_OPAQUE_TYPES = (Tensor, nn.Module, type)
_SEQUENCE_TYPES = (list, tuple, set, frozenset, deque)
_MAX_DEPTH, _MAX_ENTRIES = 5, 64
# So many other settings are audited one by one. If there are more, something in the attributes is
# another one in every step, and every doubling is.
_MAX_SETTINGS = 16
_SMALL_SIZE = 16  # of tensors whose numbers are read


class MovedBuffer(NamedTuple):
    """A small buffer that a call has changed.

    Attributes:
        module: The module that has it.
        name: Its name.
        before: Its numbers before the call.
        after: Those after it.
    """

    module: nn.Module
    name: str
    before: Tensor
    after: Tensor


class SettingsWatch:
    """Tells whether the settings of layers have changed since the last call.

    Args:
        list_modules: Returns the modules as they are now.
    """

    def __init__(self, list_modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._list_modules = list_modules
        self._snapshot: ModuleSnapshot | None = None
        self._tensors = _TensorVersions(())
        self._small_buffers: list[tuple[nn.Module, str, Tensor, Any]] = []
        self._variables = _Variables(())
        self._numbers: list[Any] = []
        self._setting_count = self._change_count = 0
        # Attributes that forwards change themselves, such as a counter of calls.
        self._own_attributes: set[tuple[nn.Module, str]] = set()
        self.key = CachedHash(())

    @property
    def snapshot(self) -> ModuleSnapshot | None:
        """The state of the modules at the last call of `read`. It is another one if they differ."""
        return self._snapshot

    def ignore(self, attributes: Iterable[tuple[nn.Module, str]]) -> None:
        """Leave out attributes and buffers that a forward changes."""
        self._own_attributes.update(attributes)

    def find_moved_buffers(self) -> list[MovedBuffer]:
        """Return the small buffers that have changed since the last call of `read`.

        Each of them is returned once. It is no setting then.
        """
        moved = []
        for module, name, buffer, numbers in self._small_buffers:
            now = module._buffers.get(name)
            if (now is buffer and now.tolist() == numbers) or (
                module,
                name,
            ) in self._own_attributes:
                continue
            if now is not None and not now.is_meta and str(now.tolist()) != str(numbers):
                before = torch.tensor(numbers, dtype=buffer.dtype)
                moved.append(MovedBuffer(module, name, before, now.detach().clone()))
        self.ignore([(buffer.module, buffer.name) for buffer in moved])
        return moved

    def read(self) -> bool:
        """Read the settings. Return whether numbers have changed that are looked at now."""
        if (
            self._snapshot is not None
            and self._snapshot.is_unchanged()
            and self._tensors.are_unchanged()
            and self._variables.are_unchanged()
        ):
            return False
        is_first = self._snapshot is None
        modules = list(self._list_modules())
        self._snapshot = ModuleSnapshot(modules)
        self._tensors = _TensorVersions(_list_constant_tensors(modules, self._own_attributes))
        self._small_buffers = _list_small_buffers(modules, self._own_attributes)
        if are_same_objects(modules, self._variables.modules):
            self._variables.note()
        else:
            self._variables = _Variables(modules)
        description = _Description()
        key = CachedHash(
            (
                *[description.describe_module(m, self._own_attributes) for m in modules],
                description.describe_tensors(self._tensors),
                self._variables.describe(description),
            )
        )
        has_other_numbers = description.numbers != self._numbers
        self._numbers = description.numbers
        if key != self.key:
            self._setting_count += 1
            if self._setting_count <= _MAX_SETTINGS or _is_power_of_two(self._setting_count):
                self.key = key
            return False
        if is_first or not has_other_numbers:
            return False
        self._change_count += 1
        return _is_power_of_two(self._change_count)


class _Description:
    """Describes the settings of modules, and collects the numbers in them."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []

    def describe_module(self, module: nn.Module, left_out: set[tuple[nn.Module, str]]) -> Hashable:
        """Return the settings of a module, without those of its children."""
        attributes = vars(module)
        values = tuple(
            [
                (name, self.describe(value))
                for name, value in attributes.items()
                if name not in MODULE_INTERNALS and (module, name) not in left_out
            ]
        )
        tables = [attributes[name] for name in _HOOK_TABLES]
        hooks = tuple([tuple([_find_code(hook) for hook in t.values()]) for t in tables if t])
        return type(module), module.training, values, hooks

    def describe(self, value: Any, depth: int = _MAX_DEPTH) -> Any:
        """Return what makes a value another setting."""
        kind: Any = type(value)
        if kind in _PLAIN_TYPES:
            return value
        if kind is int or kind is float:
            self.numbers.append(value)
            return kind, value == 0
        if isinstance(value, partial) and depth:
            return _find_code(value), self.describe((value.args, value.keywords), depth - 1)
        if isinstance(value, _FUNCTION_TYPES):
            return _find_code(value)
        if not depth or isinstance(value, _OPAQUE_TYPES):
            return kind
        if isinstance(value, _SEQUENCE_TYPES):
            if len(value) > _MAX_ENTRIES:
                return kind, self._describe_many(value)
            return kind, tuple([self.describe(item, depth - 1) for item in value])
        if is_of_numpy(value):
            self.numbers.append(Fingerprinter()(value))
            return kind
        if not isinstance(value, Mapping):
            if get_package(kind) in LIBRARY_PACKAGES and kind is not SimpleNamespace:
                return kind
            value = get_attributes(value)
        if len(value) > _MAX_ENTRIES:
            return kind, self._describe_many(value.values())
        return kind, tuple([(str(key), self.describe(v, depth - 1)) for key, v in value.items()])

    def _describe_many(self, values: Iterable[Any]) -> Hashable:
        """Return the flags and names among many values. The rest of them counts as one number."""
        self.numbers.append(Fingerprinter()(tuple(values)))
        return tuple([value for value in values if type(value) in _PLAIN_TYPES])

    def describe_tensors(self, tensors: _TensorVersions) -> Hashable:
        """Return which small tensors are 0. Other numbers in tensors are counted."""
        self.numbers += tensors.versions
        self.numbers += tensors.small_values
        return tuple(map(_has_number, tensors.small_values))


_HOOK_TABLES = tuple(
    sorted(name for name, table in vars(nn.Module()).items() if name.endswith("_hooks"))
)


def _find_code(function: Any) -> Any:
    """Return the code of a function, which is the same for each lambda of one line."""
    while isinstance(function, partial | MethodType | staticmethod | classmethod):
        function = function.func if isinstance(function, partial) else function.__func__
    return getattr(function, "__code__", type(function))


# ---- tensors -------------------------------------------------------------------------------------


def _list_constant_tensors(
    modules: Iterable[nn.Module], left_out: set[tuple[nn.Module, str]]
) -> list[Tensor]:
    """Return the tensors of modules that neither an optimizer nor a forward changes."""
    tensors: dict[int, Tensor] = {}
    for module in modules:
        members: list[tuple[str, Tensor | None]] = [*module._parameters.items()]
        if not isinstance(module, NormBase):  # they write their running statistics
            members += module._buffers.items()
        constants = [(name, t) for name, t in members if t is not None and not t.requires_grad]
        others = (
            (name, value)
            for name, value in vars(module).items()
            if type(value) not in SCALAR_TYPES and name not in MODULE_INTERNALS
        )
        for name, value in (*constants, *others):
            if (module, name) not in left_out:
                items = [value, *value] if isinstance(value, (list, tuple)) else [value]
                possible = (item for item in items if type(item) not in SCALAR_TYPES)
                tensors.update({id(t): t for t in possible if isinstance(t, Tensor)})
    return [tensor for tensor in tensors.values() if not tensor.requires_grad]


def _list_small_buffers(
    modules: Iterable[nn.Module], left_out: set[tuple[nn.Module, str]]
) -> list[tuple[nn.Module, str, Tensor, Any]]:
    """Return the small buffers that no forward was seen to change, with their numbers."""
    return [
        (module, name, buffer, buffer.tolist())
        for module in modules
        if not isinstance(module, NormBase)
        for name, buffer in module._buffers.items()
        if type(buffer) is Tensor
        and buffer.is_cpu
        and buffer.layout is torch.strided
        and buffer.numel() <= _SMALL_SIZE
        and (buffer.is_floating_point() or buffer.dtype is torch.int64)
        and (module, name) not in left_out
    ]


class _TensorVersions:
    """The versions of tensors, which operations in place raise, and the numbers in small ones.

    A write through `.data` raises no version, so only the numbers show it.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [t for t in tensors if not (t.is_inference() or t.is_meta)]
        self._small = [
            t
            for t in self._tensors
            if t.is_cpu and t.layout is torch.strided and t.numel() <= _SMALL_SIZE
        ]
        self.versions, self.small_values = self._read()

    def _read(self) -> tuple[list[int], list[Any]]:
        # In every step, so without a call of Python for each tensor.
        return [*map(_get_version, self._tensors)], [*map(_get_numbers, self._small)]

    def are_unchanged(self) -> bool:
        versions, values = self._read()
        return versions == self.versions and (
            values == self.small_values or str(values) == str(self.small_values)  # a nan
        )


_get_version, _get_numbers = attrgetter("_version"), methodcaller("tolist")


def _has_number(values: Any) -> bool:
    """Return whether a nested list has a number that is not 0."""
    return any(map(_has_number, values)) if isinstance(values, list) else bool(values)


# ---- variables -----------------------------------------------------------------------------------


class _Variables:
    """The variables that the code of modules reads: of classes, of Python modules, in closures."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        variables = CodeVariables(modules)
        # In every step, so without a call of Python for each variable.
        self._getters = [table.get for table, _ in variables.slots]
        self._names = [name for _, name in variables.slots]
        self._cells = list(variables.cells.values())
        self.note()

    def _read(self) -> list[Any]:
        values = [*map(call, self._getters, self._names)]
        for cell in self._cells:
            try:
                values.append(cell.cell_contents)
            except ValueError:  # it is empty
                values.append(None)
        return values

    def note(self) -> None:
        """Note what the variables are now."""
        self._values = self._read()
        self._mutable_values = [
            value
            for value in self._values
            if not isinstance(value, _IMMUTABLE_TYPES)
            and (not callable(value) or isinstance(value, partial))
        ]
        self._contents = self._fingerprint()

    def are_unchanged(self) -> bool:
        """Return whether the variables are what was noted."""
        return (
            are_same_objects(self._read(), self._values) and self._fingerprint() == self._contents
        )

    def _fingerprint(self) -> Hashable:
        fingerprint = _ContentFingerprinter()
        return tuple([fingerprint(value) for value in self._mutable_values])

    def describe(self, description: _Description) -> Hashable:
        """Return what makes the variables other settings. Numbers are added to the description.

        Entries of lists, and whatever else is in objects, count as one number: they may be logs.
        """
        description.numbers.append(self._contents)
        flags: list[Hashable] = []
        for value in self._values:
            if isinstance(value, int | float) and type(value) is not bool:
                description.numbers.append(value)
                flags.append(value == 0)
            elif isinstance(
                value, FunctionType | MethodType | staticmethod | classmethod | partial
            ):
                flags.append(_find_code(value))
            elif type(value) in _PLAIN_TYPES:
                flags.append(value)
            elif not isinstance(value, _IMMUTABLE_TYPES) and not callable(value):
                table = value if isinstance(value, Mapping) else get_attributes(value)
                flags.append(tuple([v for v in table.values() if type(v) is bool]))
        return tuple(flags)


_IMMUTABLE_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), type, ModuleType, nn.Module, torch.dtype),
    *(torch.device, FunctionType, MethodType, staticmethod, classmethod, property),
)


class _ContentFingerprinter(Fingerprinter):
    """Computes fingerprints with the versions of tensors, and the numbers in small ones."""

    max_objects = 200

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        if tensor.requires_grad or tensor.is_inference():
            return id(tensor)
        (version,), values = (state := _TensorVersions([tensor])).versions, state.small_values
        return id(tensor), version, str(values)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)
