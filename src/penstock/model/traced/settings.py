"""The settings of a model: Python values that the path of its forward may depend on.

The answers that a forward gets (`if x.mean() > self.args.thr`) come from its trace. So a trace
holds only as long as the Python values are the same that the forward reads between units. They are
read once per step, and are a part of the cache key of traces:

    where a value may be                          found by
    --------------------------------------------  ----------------------------------------------
    attributes of parents, `training`             the module's `__dict__`, and its class
    dicts, lists, NumPy arrays, objects in these  following them, a few levels deep
    global variables, attributes of classes and   the names in the code of the parents' methods,
    imported modules, variables of closures       and of functions that they call

What is out of reach (attributes of units, objects of libraries in C, the environment) is checked
where it is used: a stage compares the arguments of each operation that a guard depends on with
those of the trace (`stage_forward`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.fingerprint import CachedHash, ObjectIdentity, are_same_objects
from penstock.model.traced.containers import HOOK_TABLES
from penstock.state_copy import LIBRARY_PACKAGES

_PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}

# Limits that keep a reading within microseconds. What is deeper or longer is not followed.
_MAX_DEPTH = 4
_MAX_ENTRIES = 256


@dataclass(frozen=True, eq=False)
class ModelSettings:
    """The settings of a model at one moment.

    Two of them are equal if all values are. Tensors are kept apart: a trace depends on one only if
    the forward reads its contents on the host.
    """

    values: CachedHash
    tensors: tuple[ObjectIdentity, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelSettings) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)


class SettingsReader:
    """Reads the settings of modules, again and again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._variables = CodeVariables(self._modules)
        self._hook_tables = [vars(m).get(name, {}) for m in self._modules for name in HOOK_TABLES]
        self._leaves, self._tensors = list[Any](), list[Tensor]()
        self._values, self._identities = CachedHash(()), tuple[ObjectIdentity, ...]()

    def read(self) -> ModelSettings:
        """Return the current settings, as a new object."""
        flattener = _StateFlattener()
        for module in self._modules:
            attributes = vars(module).items()
            flattener.add_items({k: v for k, v in attributes if k not in _MODULE_INTERNALS})
        for value in self._variables.read():
            flattener.add(value)
        if any(self._hook_tables):
            flattener.leaves += (key for table in self._hook_tables for key in table)
        # In nearly all steps the values are the same objects as before, and no hash is computed.
        if not are_same_objects(flattener.leaves, self._leaves):
            self._leaves = flattener.leaves
            self._values = CachedHash(flattener.build_key())
        if not are_same_objects(flattener.tensors, self._tensors):
            self._tensors = flattener.tensors
            self._identities = tuple(map(ObjectIdentity, flattener.tensors))
        return ModelSettings(self._values, self._identities)

    @property
    def code_names(self) -> frozenset[str]:
        """The names of attributes that the code of the modules may read."""
        return frozenset(self._variables.code_names)

    def read_by_name(self) -> dict[str, Any]:
        """Return a key for each attribute and each variable, by name."""
        keys = {
            f"self.{name} ({type(module).__name__})": read_state_key(value)
            for module in self._modules
            for name, value in vars(module).items()
            if name not in _MODULE_INTERNALS
        }
        names = self._variables.names
        values = zip(names, self._variables.read(), strict=True)
        return keys | {name: read_state_key(value) for name, value in values}


def read_state_key(value: Any) -> Any:
    """Return a key of one Python value: equal keys mean equal contents, as far as they are seen."""
    flattener = _StateFlattener()
    flattener.add(value)
    identities = tuple(map(ObjectIdentity, flattener.tensors))
    return flattener.build_key(), identities


class _StateFlattener:
    """Collects values, and the values and tensors inside them, in a fixed order.

    Most of what it sees are dicts of plain values, which take a few nanoseconds per entry.
    """

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.tensors: list[Tensor] = []
        self._visited: set[int] = set()

    def add(self, value: Any, depth: int = _MAX_DEPTH) -> None:
        """Add a value and what is inside it."""
        self.leaves.append(value)
        if type(value) not in _PLAIN_TYPES:
            self._follow(value, depth)

    def add_items(self, items: Mapping[Any, Any], depth: int = _MAX_DEPTH) -> None:
        """Add the keys and the values of a dict."""
        self.leaves += items
        self.leaves += items.values()
        for value in items.values():
            if type(value) not in _PLAIN_TYPES:
                self._follow(value, depth)

    def _follow(self, value: Any, depth: int) -> None:
        value_type: Any = type(value)
        kind = _classify(value_type)
        if kind is _Kind.TENSOR:
            self.tensors.append(value)
        if kind in _UNFOLLOWED or not depth or id(value) in self._visited:
            return
        self._visited.add(id(value))
        if kind is _Kind.ARRAY:
            self.leaves += value.dtype.str, value.shape
            if value.size <= _MAX_ENTRIES and not value.dtype.hasobject:
                self.leaves.append(value.tobytes())
            return
        items = vars(value) if kind is _Kind.OBJECT else value
        self.leaves.append(len(items))
        if len(items) > _MAX_ENTRIES:
            return
        if kind is _Kind.SEQUENCE:
            for item in items:
                self.add(item, depth - 1)
        else:
            self.add_items(items, depth - 1)

    def build_key(self) -> Hashable:
        """Return a key that is equal if all plain values are.

        The contents of other values come after them, so these count by their type. If nothing is
        known of their contents, they count by identity.
        """
        types = tuple(map(type, self.leaves))  # 1 == 1.0 == True
        return tuple(map(_make_leaf_key, self.leaves)), types


class _Kind(Enum):
    VALUE = auto()  # compares by value; a function compares by identity
    TENSOR = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    ARRAY = auto()  # an array or a scalar of NumPy, which need not be installed
    OBJECT = auto()  # shows its state in attributes
    OPAQUE = auto()


_UNFOLLOWED = (_Kind.VALUE, _Kind.TENSOR, _Kind.OPAQUE)
_VALUE_TYPES = (
    *(int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType),
)


@lru_cache(1024)
def _classify(kind: Any) -> _Kind:
    if issubclass(kind, _VALUE_TYPES):
        return _Kind.VALUE
    if issubclass(kind, Tensor):
        return _Kind.TENSOR
    if issubclass(kind, dict):
        return _Kind.MAPPING
    if issubclass(kind, list | tuple | deque | set | frozenset):
        return _Kind.SEQUENCE
    if kind.__module__ == "numpy" and hasattr(kind, "tobytes"):
        return _Kind.ARRAY
    has_attributes = any("__dict__" in vars(base) for base in kind.__mro__)
    is_opaque = issubclass(kind, nn.Module | ModuleType) or not has_attributes
    return _Kind.OPAQUE if is_opaque else _Kind.OBJECT


def _make_leaf_key(leaf: Any) -> Any:
    leaf_type: Any = type(leaf)
    kind = _classify(leaf_type)
    if kind is _Kind.VALUE:
        return leaf
    if leaf_type is tuple:
        return tuple(map(_make_leaf_key, leaf))
    return ObjectIdentity(leaf) if kind is _Kind.OPAQUE else leaf_type


# ---- variables that the code of a forward refers to ----------------------------------------------


class CodeVariables:
    """The variables outside of a module that its methods may read.

    The names are taken from the compiled code. Functions of the same program are followed, those of
    libraries are not.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._slots: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self.cells, self._cell_names = dict[int, CellType](), dict[int, str]()
        self._visited, self.code_names = set[CodeType](), set[str]()
        self._methods: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        kinds: set[type] = set()
        for module in modules:
            is_new = type(module) not in kinds
            kinds.add(type(module))
            for kind in iter_classes(module) if is_new else ():
                for name, member in vars(kind).items():
                    if isinstance(member, FunctionType | staticmethod | classmethod):
                        self._methods[id(kind), name] = vars(kind), name
                    elif not name.startswith("__") and not callable(member):
                        self._slots[id(kind), name] = vars(kind), name
            for function in _iter_methods(module) if is_new else _iter_own_functions(module):
                self._visit(function)

    @property
    def names(self) -> list[str]:
        """The names of the variables, in the order of `read`."""
        return [name for _, name in self._slots.values()] + [*self._cell_names.values()]

    def read(self) -> Iterator[Any]:
        """Yield the current values, always in the same order."""
        for namespace, name in self._slots.values():
            yield namespace.get(name)
        for cell in self.cells.values():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell: the variable has no value yet
                yield None

    @property
    def slots(self) -> list[tuple[Mapping[str, Any], str]]:
        """The tables and names of the variables that are not in `cells`, and of methods."""
        return [*self._slots.values(), *self._methods.values()]

    def _visit(self, function: FunctionType) -> None:
        if function.__code__ in self._visited or is_of_library(function):
            return
        self._visited.add(function.__code__)
        names = sorted(_find_names(function.__code__))
        self.code_names |= find_attribute_names(function)
        for name in names:
            if name in function.__globals__:
                self._add(function.__globals__, name, names)
        free_names = function.__code__.co_freevars
        for name, cell in zip(free_names, function.__closure__ or (), strict=True):
            try:
                contents = cell.cell_contents
            except ValueError:
                continue
            self._follow(contents, names)
            if not isinstance(contents, type | FunctionType):
                self.cells[id(cell)], self._cell_names[id(cell)] = cell, name

    def _add(self, namespace: Mapping[str, Any], name: str, names: Sequence[str]) -> None:
        self._slots[id(namespace), name] = namespace, name
        self._follow(namespace[name], names)

    def _follow(self, value: Any, names: Sequence[str]) -> None:
        """Visit a function; look for the names in an imported module or in a class."""
        if isinstance(value, FunctionType):
            self._visit(value)
        elif isinstance(value, ModuleType | type) and not is_of_library(value):
            attributes = vars(value)
            for name in names:
                if name in attributes and type(attributes[name]) is not ModuleType:
                    self._slots[id(value), name] = attributes, name


def iter_classes(module: nn.Module) -> Iterator[type]:
    """Yield the class of a module and its bases, except for those of libraries."""
    return (kind for kind in type(module).__mro__ if not is_of_library(kind))


def _iter_methods(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the functions of a module's classes, and those assigned to the module."""
    for kind in iter_classes(module):
        for member in vars(kind).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield function
    yield from _iter_own_functions(module)


def _iter_own_functions(module: nn.Module) -> Iterator[FunctionType]:
    return (value for value in vars(module).values() if isinstance(value, FunctionType))


def _find_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in the functions inside it."""
    inner = [_find_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


def find_attribute_names(function: Any) -> set[str]:
    """Return the names of attributes that a function may read, also by `getattr(x, "name")`."""
    pending = [getattr(function, "__code__", None)]
    names: set[str] = set()
    for code in pending:
        if isinstance(code, CodeType):
            names.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
            pending += code.co_consts
    return names


def is_of_library(value: Any) -> bool:
    """Return whether a function, class or module is not the work of the model's author."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    package = (name or "").partition(".")[0]
    return package in LIBRARY_PACKAGES or package == "penstock"
