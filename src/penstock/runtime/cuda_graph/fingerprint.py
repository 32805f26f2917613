"""Fingerprints of Python values and of modules, for the key of a CUDA graph.

If two values have equal fingerprints, Python code that branches on them takes the same path. A
replay does not run that Python code again, so everything it may depend on has to be the same.

| value | fingerprint |
|---|---|
| number, string, enum, dtype, device, class | the value itself |
| tensor | address, shape, stride, dtype, `requires_grad`; not the numbers in it |
| list, tuple, set, dict | type and the fingerprints of the entries |
| function, method, partial | code, closure, default values, bound arguments |
| dataclass | type and the fingerprints of the fields |
| another object with attributes | identity, and the fingerprints of the attributes |
| module, object of PyTorch or Penstock, anything else | identity |

The second half of the file applies this to the modules of a step. A full fingerprint of all modules
takes the host as long as the rest of a replayed step. `ModuleSnapshot` avoids that: it keeps the
objects that were fingerprinted, and the fingerprint holds while they are the same objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.traced.traced_partition import ForwardRequest
from penstock.runtime.cuda_graph.capture_guard import CaptureError

_VALUE_TYPES = (str, int, type(None), Enum, torch.dtype, torch.device, type)
_CONTAINERS = (tuple, list, set, frozenset)
# Types whose contents are part of the fingerprint.
_INSPECTED_TYPES = (
    Tensor,
    ForwardRequest,
    *_CONTAINERS,
    dict,
    MethodType,
    partial,
    FunctionType,
)

# Limits that keep a fingerprint cheap. Beyond them an object counts by its identity, and a long
# container also by its length. A change inside such an object is not noticed.
_MAX_ENTRIES = 256
_MAX_DEPTH = 5
_MAX_OBJECTS = 20_000


class ObjectIdentity:
    """A fingerprint that equals only fingerprints of the same object.

    It holds a weak reference: a cached graph key does not keep the caller's objects alive. Once the
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

    def __init__(self) -> None:
        self._index_by_id: dict[int, int] = {}
        self._visited: list[Any] = []  # keeps the objects alive, so that no id is used twice

    def __call__(self, value: Any, depth: int = _MAX_DEPTH) -> Hashable:
        """Return the fingerprint of a value, inspecting at most `depth` levels of objects."""
        if isinstance(value, float):  # 1.0 == 1 in Python, but an operation may treat them apart
            return float, value
        if isinstance(value, _VALUE_TYPES):
            return value
        if isinstance(value, Tensor):
            return fingerprint_tensor(value)
        if isinstance(value, ForwardRequest):
            plain_leaves = self(value.plain_leaves, depth)
            return (
                ObjectIdentity(value.programs),
                plain_leaves,
                value.tensor_positions,
                str(value.tree_spec),
                value.settings,
            )
        if id(value) in self._index_by_id:
            return "again", self._index_by_id[id(value)]
        self._index_by_id[id(value)] = len(self._visited)
        self._visited.append(value)
        too_deep = not depth or len(self._visited) > _MAX_OBJECTS
        return ObjectIdentity(value) if too_deep else self._fingerprint_contents(value, depth - 1)

    def _fingerprint_contents(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _CONTAINERS):
            if len(value) > _MAX_ENTRIES:
                return ObjectIdentity(value), len(value)
            return type(value), tuple([self(entry, depth) for entry in value])
        if isinstance(value, dict):
            if len(value) > _MAX_ENTRIES:
                return ObjectIdentity(value), len(value)
            pairs = [(self(k, depth), self(v, depth)) for k, v in value.items()]
            return type(value), tuple(pairs)
        if isinstance(value, MethodType):
            return value.__func__, self(value.__self__, depth)
        if isinstance(value, partial):
            return self(value.func, depth), self(value.args, depth), self(value.keywords, depth)
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _has_contents(cell)]
            defaults = value.__defaults__ or (), value.__kwdefaults__ or {}
            return value.__code__, self(cells, depth), self(defaults, depth)
        if _is_opaque(value):
            return ObjectIdentity(value)
        # Dataclasses are values: two equal ones are alike. Other objects may have more state than
        # their attributes show.
        identity = type(value) if is_dataclass(value) else ObjectIdentity(value)
        return identity, self(vars(value), depth)


def has_constant_fingerprint(value: Any) -> bool:
    """Return whether the fingerprint of an object can never change while the object lives.

    Such an object is immutable, or counts by its identity alone.

    >>> has_constant_fingerprint((1, "a")), has_constant_fingerprint([1])
    (True, False)
    >>> has_constant_fingerprint(len)
    True
    """
    if isinstance(value, tuple | frozenset):
        return len(value) > _MAX_ENTRIES or all(map(has_constant_fingerprint, value))
    if isinstance(value, (*_VALUE_TYPES, float)):
        return True
    return not isinstance(value, _INSPECTED_TYPES) and _is_opaque(value)


def _is_opaque(value: Any) -> bool:
    """Return whether an object counts by its identity, whatever is inside.

    Modules are fingerprinted one by one elsewhere, and objects of PyTorch and Penstock do not show
    their state in attributes.
    """
    is_internal = type(value).__module__.partition(".")[0] in ("penstock", "torch")
    return is_internal or isinstance(value, nn.Module) or not hasattr(value, "__dict__")


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable of the enclosing function has no value yet
        return False


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
        addresses = [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:  # one of them has no memory of its own
        return [*map(fingerprint_tensor, tensors)]
    return (
        addresses,
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
    )


# ---- modules: tensors and hooks -------------------------------------------------------------
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
    return tuple(_iter_tensor_and_hook_fingerprints(modules, Fingerprinter()))


def _iter_tensor_and_hook_fingerprints(
    modules: Iterable[nn.Module], fingerprint: Fingerprinter
) -> Iterator[Hashable]:
    for module in modules:
        attributes = vars(module)
        for table in (attributes["_parameters"], attributes["_buffers"]):
            for value in table.values():
                if value is not None:
                    yield fingerprint_tensor(value)
                    yield from [
                        _fingerprint_hooks(table, fingerprint)
                        for table in _get_hook_tables(value)
                        if table
                    ]
        for name, value in attributes.items():
            if name not in _MODULE_INTERNALS:
                if isinstance(value, Tensor):
                    yield fingerprint_tensor(value)
            elif value and name in _HOOK_TABLES:
                yield _fingerprint_hooks(value, fingerprint)


def _fingerprint_hooks(table: Mapping[Any, Any], fingerprint: Fingerprinter) -> Hashable:
    return tuple([(key, fingerprint(hook)) for key, hook in table.items()])


def _get_hook_tables(tensor: Tensor) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


# ---- modules: attributes --------------------------------------------------------------------


def fingerprint_attributes(modules: Iterable[nn.Module]) -> AttributeFingerprints:
    """Return, by module and name, the fingerprints of attributes that are not tensors."""
    fingerprint = Fingerprinter()
    return {module: dict(_fingerprint_module_attributes(module, fingerprint)) for module in modules}


def _fingerprint_module_attributes(
    module: nn.Module, fingerprint: Fingerprinter
) -> list[tuple[str, Hashable]]:
    return [
        (name, value if type(value) in _IMMUTABLE_TYPES else fingerprint(value))
        for name, value in vars(module).items()
        if name not in _MODULE_INTERNALS and not isinstance(value, Tensor)
    ]


def check_attributes_unchanged(
    before: AttributeFingerprints, now: AttributeFingerprints, describe: Callable[[nn.Module], str]
) -> None:
    """Raise `CaptureError` if a step has changed an attribute of a module: a replay would not."""
    for module, attributes in now.items():
        attributes_before = before.get(module, attributes)
        if attributes_before == attributes:
            continue
        names = [
            name
            for name in (*attributes_before, *attributes)
            if attributes_before.get(name, attributes_before) != attributes.get(name, attributes)
        ]
        raise CaptureError(
            f"{describe(module)}: it changes its attribute '{names[0]}' in every step, and a "
            "replay would not. Keep the value in a buffer, as a tensor"
        )


# ---- modules: a cheap check that nothing has changed ----------------------------------------


class ModuleSnapshot:
    """The state of modules at one moment, to find out cheaply whether it has changed since.

    The state is the same if the modules have the same objects under the same names. Immutable
    objects need no further look. The others are compared by their fingerprints: addresses of
    tensors, contents of lists, attributes of objects.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
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
            [v for v in values if not isinstance(v, Tensor) and not has_constant_fingerprint(v)]
            for values in (user_values, self._table_entries)
        ]
        self._tensor_fingerprints, self._mutable_fingerprints = self._fingerprint_mutable_state()

    def is_unchanged(self) -> bool:
        """Return whether the modules are as they were when the snapshot was taken."""
        names, values = _list_attributes(self._modules)
        return (
            names == self._attribute_names
            and are_same_objects(values, self._attribute_values)
            and not any(self._empty_tables)
            and are_same_objects(_list_entries(self._filled_tables), self._table_entries)
            and are_same_objects(_list_tensor_hooks(self._tensors), self._tensor_hooks)
            and self._fingerprint_mutable_state()
            == (self._tensor_fingerprints, self._mutable_fingerprints)
        )

    def _fingerprint_mutable_state(self) -> tuple[Any, list[Hashable]]:
        fingerprints = [
            fingerprint(value)
            for values in self._mutable_values
            for fingerprint in [Fingerprinter()]  # a new one for each of the two lists
            for value in values
        ]
        return fingerprint_tensors_by_column(self._tensors), fingerprints


def _list_tensor_hooks(tensors: Sequence[Tensor]) -> list[Any]:
    post_accumulate_hooks = [tensor._post_accumulate_grad_hooks for tensor in tensors]
    return [tensor._backward_hooks for tensor in tensors] + post_accumulate_hooks


def _list_attributes(modules: Iterable[nn.Module]) -> tuple[list[str], list[Any]]:
    """Return the names and the values of all attributes, module after module."""
    names: list[str] = []
    values: list[Any] = []
    for module in modules:
        attributes = vars(module)
        names += attributes
        values += attributes.values()
    return names, values


def _list_entries(tables: Iterable[Mapping[Any, Any]]) -> list[Any]:
    entries: list[Any] = []
    for table in tables:
        entries += table.keys()
        entries += table.values()
    return entries


def _collect_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return parameters, buffers and tensors that are plain attributes, without duplicates."""
    tensors: dict[int, Tensor] = {}
    for module in modules:
        attributes = vars(module)
        for table in (attributes["_parameters"], attributes["_buffers"], attributes):
            tensors.update((id(v), v) for v in table.values() if isinstance(v, Tensor))
    return list(tensors.values())


def are_same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))
