"""What a value is, as far as it can be told: two that are told alike lead Python the same way.

Of a tensor its place and its kind count, and not its numbers. An object that cannot be taken apart
is like no other, and is not kept alive by being told.
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
_INSPECTED_TYPES = (
    Tensor,
    ForwardRequest,
    *_CONTAINERS,
    dict,
    MethodType,
    partial,
    FunctionType,
)  # told inside
_MAX_ENTRIES = 256  # entries: a longer list is told by its length
_MAX_DEPTH = 5
_MAX_OBJECTS = 20_000


class ObjectIdentity:
    """An object that is like no other."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, target: Any) -> None:
        self._hash = id(target)
        try:
            self._ref: Any = weakref.ref(target)
        except TypeError:  # as a number of some library's: kept
            self._ref = lambda: target

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ObjectIdentity)
            and (mine := self._ref()) is not None
            and mine is other._ref()
        )

    def __hash__(self) -> int:
        return self._hash


class CachedHash:
    """Something whose hash is reckoned once, and which is compared if it is not the same."""

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
    """Of the values of one step: what several of them hold is told once."""

    def __init__(self) -> None:
        self._index_by_id: dict[int, int] = {}
        self._visited: list[Any] = []  # so that no id is another's

    def __call__(self, value: Any, depth: int = _MAX_DEPTH) -> Hashable:
        """Something that can be compared."""
        if isinstance(value, float):
            return float, value
        if isinstance(value, _VALUE_TYPES):
            return value
        if isinstance(value, Tensor):
            return fingerprint_tensor(value)
        if isinstance(value, ForwardRequest):
            told = self(value.plain_leaves, depth)
            return (
                ObjectIdentity(value.programs),
                told,
                value.tensor_positions,
                str(value.tree_spec),
                value.settings,
            )
        if id(value) in self._index_by_id:
            return "again", self._index_by_id[id(value)]
        self._index_by_id[id(value)] = len(self._visited)
        self._visited.append(value)
        far = not depth or len(self._visited) > _MAX_OBJECTS
        return ObjectIdentity(value) if far else self._fingerprint_contents(value, depth - 1)

    def _fingerprint_contents(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _CONTAINERS):
            if len(value) > _MAX_ENTRIES:
                return ObjectIdentity(value), len(value)
            return type(value), tuple([self(one, depth) for one in value])
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
        which = type(value) if is_dataclass(value) else ObjectIdentity(value)
        return which, self(vars(value), depth)


def has_constant_fingerprint(value: Any) -> bool:
    """Is the same object told alike at all times? Of some it is told which they are, and no more.

    >>> has_constant_fingerprint((1, "a")), has_constant_fingerprint([1]), has_constant_fingerprint(len)
    (True, False, True)
    """
    if isinstance(value, tuple | frozenset):
        return len(value) > _MAX_ENTRIES or all(map(has_constant_fingerprint, value))
    if isinstance(value, (*_VALUE_TYPES, float)):
        return True
    return not isinstance(value, _INSPECTED_TYPES) and _is_opaque(value)


def _is_opaque(value: Any) -> bool:
    """It is like no other, whatever is inside."""
    ours = type(value).__module__.partition(".")[0] in ("penstock", "torch")
    return ours or isinstance(value, nn.Module) or not hasattr(value, "__dict__")


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # nothing was put into it yet
        return False


def fingerprint_tensor(tensor: Tensor) -> Hashable:
    """Where it is in memory, and how it lies there."""
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return ObjectIdentity(tensor)
    return where, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def fingerprint_tensors_by_column(tensors: Sequence[Tensor]) -> Any:
    """What `place_of` tells of each, one kind of fact after the other: in half the time."""
    try:
        where = [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:  # one has no memory of its own
        return [*map(fingerprint_tensor, tensors)]
    return (
        where,
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
    )


# -------------------------------------------------------------------------------------------------
# What layers are and have, as far as a replay depends on it: told, and seen again at a glance.
#
# To tell it anew takes the host as long as all else of a replayed step together. So what was told in
# one step is kept with the objects that it was told of, and holds while they are the same.
# -------------------------------------------------------------------------------------------------

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_HOOK_TABLES = tuple(sorted(name for name in _MODULE_INTERNALS if name.endswith("_hooks")))
_MODULE_TABLES = ("_parameters", "_buffers", "_modules", *_HOOK_TABLES)
_IMMUTABLE_TYPES = frozenset((bool, int, str, type(None)))

AttributeFingerprints = Mapping[nn.Module, Mapping[str, Hashable]]

# ---- places --------------------------------------------------------------------------------


def fingerprint_tensors_and_hooks(modules: Iterable[nn.Module]) -> Hashable:
    """Of all tensors of the layers; and hooks."""
    return tuple(_iter_tensor_and_hook_fingerprints(modules, Fingerprinter()))


def _iter_tensor_and_hook_fingerprints(
    modules: Iterable[nn.Module], fingerprint: Fingerprinter
) -> Iterator[Hashable]:
    for module in modules:
        own = vars(module)
        for table in (own["_parameters"], own["_buffers"]):
            for value in table.values():
                if value is not None:
                    yield fingerprint_tensor(value)
                    yield from [
                        _fingerprint_hooks(table, fingerprint)
                        for table in _get_hook_tables(value)
                        if table
                    ]
        for name, value in own.items():
            if name not in _MODULE_INTERNALS:
                if isinstance(value, Tensor):
                    yield fingerprint_tensor(value)
            elif value and name in _HOOK_TABLES:
                yield _fingerprint_hooks(value, fingerprint)


def _fingerprint_hooks(table: Mapping[Any, Any], fingerprint: Fingerprinter) -> Hashable:
    return tuple([(key, fingerprint(hook)) for key, hook in table.items()])


def _get_hook_tables(tensor: Tensor) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


# ---- attributes ----------------------------------------------------------------------------


def fingerprint_attributes(modules: Iterable[nn.Module]) -> AttributeFingerprints:
    """What layers have that is no tensor, and that Python could go by."""
    tell = Fingerprinter()
    return {module: dict(_fingerprint_module_attributes(module, tell)) for module in modules}


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
    """No layer has changed an attribute: a replay would not."""
    for module, own in now.items():
        was = before.get(module, own)
        if was == own:
            continue
        names = [name for name in (*was, *own) if was.get(name, was) != own.get(name, own)]
        raise CaptureError(
            f"{describe(module)}: it changes its attribute '{names[0]}' in every step, and a replay "
            "would not: keep the number in a buffer, as a tensor"
        )


# ---- at a glance ---------------------------------------------------------------------------


class ModuleSnapshot:
    """Modules as they are now, and whether they are so still.

    They are if they have the same objects by the same names: what these are can change no more, or
    is looked at again, as the places of tensors, and what is in a list.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._attribute_names, self._attribute_values = _list_attributes(modules)
        self._tensors = _collect_tensors(modules)
        self._tensor_hooks = _list_tensor_hooks(self._tensors)
        tables = [vars(module)[name] for module in modules for name in _MODULE_TABLES] + [
            table for table in self._tensor_hooks if table is not None
        ]
        self._empty_tables = [table for table in tables if not table]
        self._filled_tables = [table for table in tables if table]
        self._table_entries = _list_entries(self._filled_tables)
        pairs = zip(self._attribute_names, self._attribute_values, strict=True)
        given = [value for name, value in pairs if name not in _MODULE_INTERNALS]
        self._mutable_values = [  # of each of both, what may change inside
            [v for v in values if not isinstance(v, Tensor) and not has_constant_fingerprint(v)]
            for values in (given, self._table_entries)
        ]
        self._tensor_fingerprints, self._mutable_fingerprints = self._fingerprint_mutable_state()

    def is_unchanged(self) -> bool:
        """Is all as it was?"""
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
        told = [
            tell(v) for values in self._mutable_values for tell in [Fingerprinter()] for v in values
        ]
        return fingerprint_tensors_by_column(self._tensors), told


def _list_tensor_hooks(tensors: Sequence[Tensor]) -> list[Any]:
    others = [tensor._post_accumulate_grad_hooks for tensor in tensors]
    return [tensor._backward_hooks for tensor in tensors] + others


def _list_attributes(modules: Iterable[nn.Module]) -> tuple[list[str], list[Any]]:
    """What each has, and by which names, one after the other."""
    names: list[str] = []
    values: list[Any] = []
    for module in modules:
        own = vars(module)
        names += own
        values += own.values()
    return names, values


def _list_entries(tables: Iterable[Mapping[Any, Any]]) -> list[Any]:
    found: list[Any] = []
    for table in tables:
        found += table.keys()
        found += table.values()
    return found


def _collect_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters, buffers and others, each once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        own = vars(module)
        for table in (own["_parameters"], own["_buffers"], own):
            found.update((id(v), v) for v in table.values() if isinstance(v, Tensor))
    return list(found.values())


def are_same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Are they the same objects?"""
    return len(first) == len(second) and all(map(is_, first, second))
