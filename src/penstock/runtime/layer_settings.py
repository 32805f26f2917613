"""The settings of layers: what users change between calls, and what a layer may go by.

    what is changed                       what makes it another setting
    ------------------------------------  --------------------------------------------------------
    an attribute: a flag, a name, None    its value, also in dicts, lists and plain objects
    an attribute: a number                whether it is 0; other changes are counted
    a method, a hook of a layer, of a     the code that runs
    parameter or of a gradient
    an inner layer, its mode              its class, its `training`

The audit of the first step says nothing about a layer that computes something else since then. So a
call with other settings is audited, once for each of them. A number may change in every step, as a
temperature does. It is looked at each time that the number of changes has doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from penstock.fingerprint import CachedHash, ModuleSnapshot
from penstock.state_copy import LIBRARY_PACKAGES, MODULE_INTERNALS, get_package

_PLAIN_TYPES = frozenset((bool, str, type(None)))
_MAX_DEPTH, _MAX_ENTRIES = 3, 64
# So many other settings are audited one by one. If there are more, something in the attributes is
# another one in every step, and every doubling is.
_MAX_SETTINGS = 16


class SettingsWatch:
    """Tells whether the settings of layers have changed since the last call.

    Args:
        list_modules: Returns the modules as they are now.
    """

    def __init__(self, list_modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._list_modules = list_modules
        self._snapshot: ModuleSnapshot | None = None
        self._numbers: list[int | float] = []
        self._setting_count = self._change_count = 0
        # Attributes that forwards change themselves, such as a counter of calls.
        self._own_attributes: set[tuple[nn.Module, str]] = set()
        self.key = CachedHash(())

    def ignore(self, attributes: Iterable[tuple[nn.Module, str]]) -> None:
        """Leave out attributes that a forward changes."""
        self._own_attributes.update(attributes)

    def read(self) -> bool:
        """Read the settings. Return whether numbers have changed that are looked at now."""
        if self._snapshot is not None and self._snapshot.is_unchanged():
            return False
        is_first = self._snapshot is None
        modules = list(self._list_modules())
        self._snapshot = ModuleSnapshot(modules)
        description = _Description()
        key = CachedHash(
            tuple([description.describe_module(m, self._own_attributes) for m in modules])
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
        self.numbers: list[int | float] = []

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
        for parameter in module._parameters.values():
            if parameter is not None:
                tables += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
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
        if isinstance(value, FunctionType | MethodType | partial):
            return _find_code(value)
        if not depth or isinstance(value, Tensor | nn.Module | type):
            return kind
        if isinstance(value, list | tuple | set | frozenset):
            items: Iterable[Any] = value if len(value) <= _MAX_ENTRIES else ()
            return kind, tuple([self.describe(item, depth - 1) for item in items])
        if not isinstance(value, Mapping):
            is_of_library = get_package(kind) in LIBRARY_PACKAGES and kind is not SimpleNamespace
            if is_of_library or not hasattr(value, "__dict__"):
                return kind
            value = vars(value)
        entries = value.items() if len(value) <= _MAX_ENTRIES else ()
        return kind, tuple([(str(key), self.describe(v, depth - 1)) for key, v in entries])


_HOOK_TABLES = tuple(
    sorted(name for name, table in vars(nn.Module()).items() if name.endswith("_hooks"))
)


def _find_code(function: Any) -> Any:
    """Return the code of a function, which is the same for each lambda of one line."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return getattr(function, "__code__", type(function))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)
