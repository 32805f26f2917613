"""Fingerprints: what makes two values, or two modules, equal for the purpose of reuse.

| reused | if | see |
|---|---|---|
| a CUDA graph | Python would launch the same kernels at the same addresses | `Fingerprinter` |
| a measured cost | the call would take as long, whatever the numbers | `build_cost_key` |

A replay of a CUDA graph does not run Python code again, so everything that this code may depend on
is part of the first kind of fingerprint:

| value | fingerprint |
|---|---|
| number, string, enum, dtype, device, class | the value itself |
| tensor | address, shape, stride, dtype, `requires_grad`; not the numbers in it |
| list, tuple, set, deque, dict | type and the fingerprints of the entries |
| small NumPy array | its dtype, shape and numbers |
| function, method, partial | code, closure, default values, bound arguments |
| dataclass | type and the fingerprints of the fields |
| object with a method `fingerprint_by` | what that method returns |
| another object with attributes or slots | identity, and the fingerprints of the attributes |
| module, object of PyTorch or Penstock, anything else | identity |
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from penstock.nested_values import iter_captured_values
from penstock.state_copy import LIBRARY_PACKAGES, get_attributes, get_package, is_of_numpy
from penstock.tensor_spec import TensorSpec

T = TypeVar("T")

_VALUE_TYPES = (str, int, type(None), Enum, torch.dtype, torch.device, type)
# Types whose contents are part of the fingerprint.
_CONTAINERS = (tuple, list, set, frozenset, deque, dict)
_INSPECTED_TYPES = (Tensor, *_CONTAINERS, MethodType, partial, FunctionType)

# Limits that keep a fingerprint cheap. Beyond them an object counts by its identity, and a long
# container also by its length. A change inside such an object is not noticed. A container of plain
# values is taken as a whole, which is fast, so it may be longer.
_MAX_ENTRIES = 256
_MAX_PLAIN_ENTRIES = 4096
_MAX_ARRAY_BYTES = 4096
_PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
_CONSTANT_VALUE_TYPES = (*_VALUE_TYPES, float)
_CONSTANT_TYPES = frozenset((*_PLAIN_TYPES, Tensor, nn.Parameter))  # of most members of modules
_MAX_DEPTH = 5


# ---- values ---------------------------------------------------------------------------------


def are_same_objects(first: Collection[Any], second: Collection[Any]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


class ObjectIdentity:
    """A fingerprint that equals only fingerprints of the same object.

    It holds a weak reference: a cached key does not keep the caller's objects alive. Once the
    object is gone, the fingerprint equals nothing. A later object at the same address is not taken
    for it.
    """

    __slots__ = ("_hash", "_ref")

    def __init__(self, target: Any) -> None:
        self._hash = id(target)
        try:
            self._ref: Any = weakref.ref(target)
        except TypeError:  # the class has no weak references (a NumPy scalar, say): keep the object
            self._ref = lambda: target

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ObjectIdentity)
            and (target := self._ref()) is not None
            and target is other._ref()
        )

    def __hash__(self) -> int:
        return self._hash


class CachedHash:
    """A value whose hash is computed once.

    A graph key is looked up in every step, and the hash of a nested tuple is not cached by Python.
    """

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CachedHash)
            and self._hash == other._hash
            and self._value == other._value
        )

    def __hash__(self) -> int:
        return self._hash


class Fingerprinter:
    """Computes the fingerprints of the values of one step.

    An object that several values hold is inspected once. Later occurrences count by the position
    of the first, which also ends cycles.
    """

    max_objects = 20_000

    def __init__(self) -> None:
        self._index_by_id: dict[int, int] = {}
        self._visited: list[Any] = []  # keeps the objects alive, so that no id is used twice

    def __call__(self, value: Any, depth: int = _MAX_DEPTH) -> Hashable:
        """Return the fingerprint of a value, inspecting at most `depth` levels of objects."""
        if isinstance(value, float):
            return self._of_float(value)
        if isinstance(value, _VALUE_TYPES):
            return value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if id(value) in self._index_by_id:
            return "again", self._index_by_id[id(value)]
        self._index_by_id[id(value)] = len(self._visited)
        self._visited.append(value)
        if not depth or len(self._visited) > self.max_objects:
            return ObjectIdentity(value)
        return self._of_contents(value, depth - 1)

    def _of_contents(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _CONTAINERS):
            if len(value) > _MAX_ENTRIES:
                return _fingerprint_long_container(value)
            return type(value), self._of_entries(value, depth)
        if is_of_numpy(value) and isinstance(getattr(value, "nbytes", None), int):
            return _fingerprint_array(value)
        if isinstance(value, partial):
            return self(value.func, depth), self(value.args, depth), self(value.keywords, depth)
        if isinstance(value, FunctionType | MethodType):
            return self._of_function(value, depth)
        if fingerprint_by := getattr(type(value), "fingerprint_by", None):
            result: Hashable = fingerprint_by(value, self)
            return result
        if _is_opaque(value):
            return ObjectIdentity(value)
        # Dataclasses are values: two equal ones are alike. Other objects may have more state than
        # their attributes show.
        return (type(value) if is_dataclass(value) else ObjectIdentity(value)), self(
            get_attributes(value), depth
        )

    def _of_entries(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, dict):
            return tuple([(self(k, depth), self(v, depth)) for k, v in value.items()])
        return tuple([self(entry, depth) for entry in value])

    def _of_float(self, value: float) -> Hashable:
        return float, value  # 1.0 == 1 in Python, but an operation may treat them apart

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        return fingerprint_tensor(tensor)

    def _of_function(self, value: FunctionType | MethodType, depth: int) -> Hashable:
        if isinstance(value, MethodType):
            return value.__func__, self(value.__self__, depth)
        return value.__code__, self(_list_captured(value), depth)


def _fingerprint_long_container(value: Any) -> Hashable:
    is_table = isinstance(value, dict)
    entries = value.values() if is_table else value
    if len(value) > _MAX_PLAIN_ENTRIES or not _PLAIN_TYPES.issuperset(map(type, entries)):
        return ObjectIdentity(value), len(value)
    if isinstance(value, set):
        return set, frozenset(value)
    return type(value), CachedHash((*value, *entries) if is_table else tuple(value))


def _fingerprint_array(array: Any) -> Hashable:
    if array.nbytes > _MAX_ARRAY_BYTES or array.dtype.hasobject:
        return ObjectIdentity(array)
    return str(array.dtype), array.shape, array.tobytes()


def _has_constant_fingerprint(value: Any) -> bool:
    """Return whether the fingerprint of an object can never change while the object lives.

    Such an object is immutable, or counts by its identity alone.

    >>> _has_constant_fingerprint((1, "a")), _has_constant_fingerprint([1])
    (True, False)
    >>> _has_constant_fingerprint(len)
    True
    """
    if isinstance(value, tuple | frozenset):
        return len(value) > _MAX_ENTRIES or all(map(_has_constant_fingerprint, value))
    if isinstance(value, _CONSTANT_VALUE_TYPES):
        return True
    return not isinstance(value, _INSPECTED_TYPES) and _is_opaque(value)


def _is_opaque(value: Any) -> bool:
    """Return whether an object counts by its identity, whatever is inside.

    Modules are fingerprinted one by one below, and objects of PyTorch and Penstock do not show
    their state in attributes.
    """
    package = get_package(type(value))
    if package in ("penstock", "torch") or isinstance(value, nn.Module):
        return True
    if hasattr(value, "__dict__"):
        return False
    # An object with slots has no table, and most objects of libraries are in C.
    return package in LIBRARY_PACKAGES and not is_of_numpy(value)


def fingerprint_tensor(tensor: Tensor) -> Hashable:
    """Return the address and the layout of a tensor. Its numbers may change between replays."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # the tensor has no memory of its own, for example a sparse one
        return ObjectIdentity(tensor)
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def fingerprint_tensors_by_column(tensors: Sequence[Tensor]) -> Any:
    """Return the same facts as `fingerprint_tensor` for many tensors, one list per fact.

    This takes half the time, because no tuple is built for each tensor.
    """
    try:
        addresses = [*map(_get_address, tensors)]
    except RuntimeError:  # one of them has no memory of its own
        return [*map(fingerprint_tensor, tensors)]
    return (
        addresses,
        [*map(_get_shape, tensors)],
        [*map(_get_stride, tensors)],
        [*map(_get_dtype, tensors)],
        [*map(_get_requires_grad, tensors)],
    )


# In every step, for all modules. `map` calls these without a frame of Python for each object.
_get_address, _get_stride = methodcaller("data_ptr"), methodcaller("stride")
_get_shape, _get_dtype = attrgetter("shape"), attrgetter("dtype")
_get_requires_grad = attrgetter("requires_grad")
_get_hooks = attrgetter("_backward_hooks")
_get_post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
_get_keys, _get_values = methodcaller("keys"), methodcaller("values")


# ---- modules --------------------------------------------------------------------------------
#
# The state of a module is in its `__dict__`: PyTorch's own tables (`_parameters`, `_buffers`,
# `_modules`, several tables of hooks), `training`, and the attributes that the user's code assigns.

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_HOOK_TABLES = tuple(sorted(name for name in _MODULE_INTERNALS if name.endswith("_hooks")))
_MODULE_TABLES = ("_parameters", "_buffers", "_modules", *_HOOK_TABLES)
_IMMUTABLE_TYPES = frozenset((bool, int, str, type(None)))

AttributeFingerprints = Mapping[nn.Module, Mapping[str, Hashable]]


def fingerprint_tensors_and_hooks(modules: Iterable[nn.Module]) -> Hashable:
    """Return the fingerprint of all tensors of the modules, and of all hooks on both."""
    fingerprint = Fingerprinter()
    parts: list[Hashable] = []
    for module in modules:
        attributes = vars(module)
        tables = [attributes[name] for name in _HOOK_TABLES]
        for name, value in (*attributes["_parameters"].items(), *attributes["_buffers"].items()):
            if value is not None:
                parts.append((name, fingerprint_tensor(value)))
                tables += [value._backward_hooks, value._post_accumulate_grad_hooks]
        parts += [fingerprint_tensor(v) for v in attributes.values() if isinstance(v, Tensor)]
        # With the position of the table: moving a hook to another table is a change.
        parts += [
            (index, tuple([(key, fingerprint(hook)) for key, hook in table.items()]))
            for index, table in enumerate(tables)
            if table
        ]
    return tuple(parts)


def fingerprint_attributes(modules: Iterable[nn.Module]) -> AttributeFingerprints:
    """Return, by module and name, the fingerprints of attributes that are not tensors."""
    fingerprint = Fingerprinter()
    return {
        module: {
            name: value if type(value) in _IMMUTABLE_TYPES else fingerprint(value)
            for name, value in vars(module).items()
            if name not in _MODULE_INTERNALS and not isinstance(value, Tensor)
        }
        for module in modules
    }


class ModuleSnapshot:
    """The state of modules at one moment, to find out cheaply whether it has changed since.

    A full fingerprint of all modules takes the host as long as the rest of a replayed step. The
    state is the same if the modules have the same objects under the same names. Immutable objects
    need no further look. The others are compared by their fingerprints: addresses of tensors,
    contents of lists, attributes of objects.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._module_ids = frozenset(map(id, modules))
        self._module_types = [*map(type, modules)]  # `__class__` can be assigned
        self._attribute_names, self._attribute_values = _list_attributes(modules)
        self._tensors = _collect_tensors(modules)
        self._tensor_hooks = _list_tensor_hooks(self._tensors)
        tables = [vars(module)[name] for module in modules for name in _MODULE_TABLES] + [
            table for table in self._tensor_hooks if table is not None
        ]
        # Most tables are empty: that they still are is one `any` over all of them.
        self._empty_tables = [table for table in tables if not table]
        self._filled_tables = [table for table in tables if table]
        self._table_entries = _list_entries(self._filled_tables)
        pairs = zip(self._attribute_names, self._attribute_values, strict=True)
        user_values = [value for name, value in pairs if name not in _MODULE_INTERNALS]
        # Attributes and table entries that may change inside while they stay the same objects.
        self._mutable_values = [
            value
            for value in (*self._table_entries, *user_values)
            if type(value) not in _CONSTANT_TYPES
            and not isinstance(value, Tensor)
            and not _has_constant_fingerprint(value)
        ]
        self._contents = _Contents(self._mutable_values)
        self._tensor_state = fingerprint_tensors_by_column(self._tensors)
        self._mutable_state = self._fingerprint_mutable_values()

    def covers(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether the snapshot is of all of these modules."""
        return self._module_ids.issuperset(map(id, modules))

    def is_unchanged(self) -> bool:
        """Return whether the modules are as they were when the snapshot was taken."""
        names, values = _list_attributes(self._modules)
        return (
            self._module_types == [*map(type, self._modules)]
            and names == self._attribute_names
            and are_same_objects(values, self._attribute_values)
            and not any(self._empty_tables)
            and are_same_objects(_list_entries(self._filled_tables), self._table_entries)
            and are_same_objects(_list_tensor_hooks(self._tensors), self._tensor_hooks)
            and fingerprint_tensors_by_column(self._tensors) == self._tensor_state
            and (
                self._contents.are_same()
                or self._fingerprint_mutable_values() == self._mutable_state
            )
        )

    def _fingerprint_mutable_values(self) -> list[Hashable]:
        return [*map(Fingerprinter(), self._mutable_values)]


class SnapshotMemo(Generic[T]):
    """A memory of what was read from modules, valid while their state is that of one snapshot.

    The snapshot itself belongs to those who compare it. A copy starts without it.
    """

    def __init__(self) -> None:
        self._snapshot: weakref.ref[ModuleSnapshot] | None = None
        self._value: T | None = None

    def __reduce__(self) -> tuple[type[SnapshotMemo[T]], tuple[()]]:
        return SnapshotMemo, ()

    def get(self, snapshot: ModuleSnapshot | None) -> T | None:
        """Return what was read under this snapshot, or None."""
        is_known = self._snapshot is not None and self._snapshot() is snapshot is not None
        return self._value if is_known else None

    def set(self, snapshot: ModuleSnapshot, value: T) -> None:
        """Remember what was read under this snapshot, in place of what was before."""
        self._snapshot, self._value = weakref.ref(snapshot), value


class _Contents:
    """The objects in containers and plain objects, all of which are known by their identity.

    A fingerprint looks at each entry of a configuration, say. If all entries are the same objects,
    and none of them can change inside, the fingerprint is the same.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._tables: list[Mapping[Any, Any]] = []
        self._lists: list[Iterable[Any]] = []
        self._functions: list[FunctionType] = []
        self._are_known = True  # whether there is nothing else that can change
        visited: dict[int, Any] = {}
        todo = list(values)
        while todo and self._are_known:
            value = todo.pop()
            if id(value) in visited or _has_constant_fingerprint(value):
                continue
            visited[id(value)] = value
            kind = type(value)
            if isinstance(value, _CONTAINERS) and len(value) > _MAX_ENTRIES:
                self._are_known = False
            elif kind in (list, tuple, set, frozenset):
                self._lists.append(value)
                todo += value
            elif kind is dict or _has_attributes_alone(value):
                table = value if kind is dict else vars(value)
                self._tables.append(table)
                todo += table.values()
            elif kind is FunctionType:
                self._functions.append(value)
                todo += _list_captured(value)
            elif kind is MethodType:
                todo.append(value.__self__)  # its function counts by its identity
            else:
                self._are_known = False
        self._objects = self._list_objects()

    def are_same(self) -> bool:
        """Return whether it is certain that nothing has changed."""
        return self._are_known and are_same_objects(self._list_objects(), self._objects)

    def _list_objects(self) -> list[Any]:
        objects = _list_entries(self._tables)
        for values in self._lists:
            objects += values
        for function in self._functions:
            objects += (function.__code__, *_list_captured(function))
        return objects


def _list_captured(function: FunctionType) -> list[Any]:
    return [*iter_captured_values(function), function.__kwdefaults__]


def _has_attributes_alone(value: Any) -> bool:
    """Return whether the fingerprint of an object is made of its table of attributes alone."""
    kind = type(value)
    if isinstance(value, (*_INSPECTED_TYPES, *_VALUE_TYPES)) or hasattr(kind, "fingerprint_by"):
        return False
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return type(getattr(value, "__dict__", None)) is dict and not has_slots


def _list_tensor_hooks(tensors: Sequence[Tensor]) -> list[Any]:
    return [*map(_get_hooks, tensors), *map(_get_post_accumulate_hooks, tensors)]


def _list_attributes(modules: Iterable[nn.Module]) -> tuple[list[str], list[Any]]:
    """Return the names and the values of all attributes, module after module."""
    tables = [*map(vars, modules)]
    return [*chain.from_iterable(tables)], [*chain.from_iterable(map(_get_values, tables))]


def _list_entries(tables: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """Return the keys and the values of each table, table after table."""
    pairs = map(chain, map(_get_keys, tables), map(_get_values, tables))
    return [*chain.from_iterable(pairs)]


# The types of most attributes, none of which is a tensor.
_MEMBER_TYPES = frozenset((*_PLAIN_TYPES, dict, OrderedDict, list, tuple, set))


def _collect_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return parameters, buffers and tensors that are plain attributes, without duplicates."""
    tensors: dict[int, Tensor] = {}
    for module in modules:
        attributes = vars(module)
        for table in (attributes["_parameters"], attributes["_buffers"], attributes):
            # PyTorch asks Python whether something is a tensor, which takes time.
            tensors.update(
                (id(v), v)
                for v in table.values()
                if type(v) not in _MEMBER_TYPES and isinstance(v, Tensor)
            )
    return list(tensors.values())


# ---- cost keys ------------------------------------------------------------------------------
#
# Two calls have equal keys if their modules have the same structure, classes, attributes and hooks,
# and their arguments the same shapes. Two things are left out, because they differ between blocks
# of one model and do not change the cost:
#
#   numbers and names of blocks     `layer_idx = 3`
#   the exact value of a float      `p = 0.1`; only whether it is zero counts

_IDENTITY_ATTRIBUTE = re.compile(r"(^|_)(idx|index|id|number|name)$")


class _CostFingerprinter(Fingerprinter):
    """Computes fingerprints that are equal if the values cost the same time and memory."""

    def _of_contents(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, (*_CONTAINERS, partial, MethodType)) or is_dataclass(value):
            return super()._of_contents(value, depth)
        # An unknown object is equal to itself only. At worst a call is measured once more.
        return ObjectIdentity(value)

    def _of_entries(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, set | frozenset):
            return frozenset([self(entry, depth) for entry in value])
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if _affects_cost(k, v)}
        return super()._of_entries(value, depth)

    def _of_float(self, value: float) -> Hashable:
        return float, value == 0

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        # Strides count, because kernels for other memory formats take another time.
        return type(tensor), TensorSpec.from_tensor(tensor), tensor.device

    def _of_function(self, value: FunctionType | MethodType, depth: int) -> Hashable:
        return ObjectIdentity(value.__func__ if isinstance(value, MethodType) else value)


def build_cost_key(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Hashable:
    """Return a key that is equal for two calls only if one measurement holds for both.

    >>> x = torch.ones(2, 4)
    >>> build_cost_key(nn.Linear(4, 4), (x,)) == build_cost_key(nn.Linear(4, 4), (x + 1,))
    True
    >>> build_cost_key(nn.Linear(4, 4), (x,)) == build_cost_key(nn.Linear(4, 4, bias=False), (x,))
    False
    """
    fingerprint = _CostFingerprinter()
    # Numbers tensors in the order in which they are found, by id. Tied weights get one number, so
    # a module with tied weights has another key than one without.
    numbers: dict[int, int] = {}
    parts: list[Hashable] = []
    for name, part in module.named_modules():
        attributes = vars(part)
        user_attributes = {k: v for k, v in attributes.items() if k not in _MODULE_INTERNALS}
        tensors = {**part._parameters, **part._buffers}
        shared = tuple([numbers.setdefault(id(t), len(numbers)) for t in tensors.values()])
        # Functions count by their code. A closure that was made for each block, with the block's
        # number in it, is then the same hook in every block.
        hooks = [
            (table, getattr(hook, "__code__", None) or fingerprint(hook))
            for table in _HOOK_TABLES
            for hook in attributes.get(table, {}).values()
        ]
        state = fingerprint(user_attributes), fingerprint(tensors)
        parts.append((name, type(part), state, shared, tuple(hooks)))
    return tuple(parts), fingerprint(tuple(args)), fingerprint(dict(kwargs or {}))


def _affects_cost(name: Any, value: Any) -> bool:
    """Return whether an attribute is more than the number or name of a block."""
    is_identity = isinstance(name, str) and _IDENTITY_ATTRIBUTE.search(name)
    return not (is_identity and isinstance(value, int | str))
