"""Copies of values that hold state: nested containers, plain objects, random generators, iterators.

`StructureCopier` copies a value so that code may change the copy in place of the original. Its
`is_unchanged` tells afterwards whether the original still is what was copied. `iter_reachable`
finds the state that the code of modules can reach besides their own attributes.

    a dry run or an audit      modules compute with copies, and then get the originals back
    a recomputation            finds a copy that was made before its forward
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

TensorMap = Callable[[Tensor], Tensor]

# Packages whose objects and functions are not the work of the model's author.
LIBRARY_PACKAGES = frozenset((*sys.stdlib_module_names, "numpy", "peft", "torch", "transformers"))
# Iterators whose copy goes on where the original is. Others, such as generators, have no copy.
_COPYABLE_ITERATORS: tuple[type, ...] = (
    itertools.count,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter("")),
)
SCALARS = (bool, int, float, complex, str, bytes, type(None))


def get_package(kind: Any) -> str:
    """Return the package that defines a class or a function."""
    return str(getattr(kind, "__module__", None) or "").partition(".")[0]


def is_of_numpy(value: Any) -> bool:
    """Return whether NumPy defines the type of a value. NumPy need not be installed."""
    return get_package(type(value)) == "numpy"


def get_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in `__slots__` included."""
    return {**_get_slots(value), **getattr(value, "__dict__", {})}


def _get_slots(value: Any) -> dict[str, Any]:
    names = [
        name
        for kind in type(value).__mro__
        for slots in (vars(kind).get("__slots__", ()),)
        for name in ((slots,) if isinstance(slots, str) else slots)
        if name not in ("__dict__", "__weakref__")
    ]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def clone_state(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with values of its own, or the tensor itself.

    A parameter is not copied. Only the class of a wrapper, such as a DTensor, knows how to copy it.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class StructureCopier:
    """A function that copies nested values and maps the tensors in them.

    Containers, plain objects, random generators and some iterators are copied. Modules, functions
    and objects of libraries that can be called are not. An object that occurs in two places is
    copied once, so tied tensors stay tied. `copy.deepcopy` cannot be used: it would also copy
    modules and whatever they refer to.
    """

    def __init__(self, map_tensor: TensorMap) -> None:
        self._map_tensor = map_tensor
        # By id of the original. The original is kept, too, so that its id is not used again.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """Return a copy of the value, the same one each time."""
        if type(value) in SCALARS:
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value, self._copy_value(value)
        return self._copies[id(value)][1]

    def _copy_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._map_tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, torch.jit.ScriptModule):
            # The state of a scripted module is in C++, so its attributes cannot be exchanged.
            # Without `no_grad` the copied parameters are results of the original ones, not leaves.
            with torch.no_grad():
                return copy.deepcopy(value)
        if is_of_numpy(value):
            return copy.deepcopy(value)  # an array or a generator
        if isinstance(value, nn.Module | type | torch.Size | ModuleType):
            return value
        if callable(value) and get_package(type(value)) in LIBRARY_PACKAGES:
            return value
        if isinstance(value, tuple | frozenset):
            items = map(self, value)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, _COPYABLE_ITERATORS):
            return _try_copy(value)
        if isinstance(value, dict | list | set | deque) or _is_plain_object(value):
            return self._copy_container(value)
        return value

    def _copy_container(self, value: Any) -> Any:
        new = _try_copy(value)
        if new is value or type(new) is not type(value):
            return value
        self._copies[id(value)] = value, new  # before the items, because it may contain itself
        if isinstance(value, dict):
            for key, entry in value.items():
                dict.__setitem__(new, key, self(entry))
        elif isinstance(value, list):
            new[:] = map(self, value)
        elif isinstance(value, set | deque):
            items = [self(item) for item in value]
            new.clear()
            (new.update if isinstance(new, set) else new.extend)(items)
        if not isinstance(value, random.Random):
            attributes = getattr(value, "__dict__", None)
            if attributes:
                new.__dict__.update({name: self(entry) for name, entry in attributes.items()})
            for name, entry in _get_slots(value).items():
                object.__setattr__(new, name, self(entry))
        return new

    # ---- comparison with what was copied --------------------------------------------------------

    def is_unchanged(self, value: Any) -> bool:
        """Return whether a value that was copied still holds the same."""
        return id(value) in self._copies and self._equals(value, self(value), set())

    def has_changed(self, value: Any) -> bool:
        """Return whether a value was copied and holds something else now."""
        return id(value) in self._copies and not self.is_unchanged(value)

    def _equals(self, value: Any, before: Any, visited: set[tuple[int, int]]) -> bool:
        key = id(value), id(before)
        if value is before or key in visited:
            return True
        visited.add(key)
        if isinstance(value, Tensor):
            return self(value) is before and torch.equal(value, before)
        if type(value) is not type(before):
            return False
        if isinstance(value, SCALARS):
            return bool(value == before)
        if isinstance(value, torch.Generator):
            return torch.equal(value.get_state(), before.get_state())
        if is_of_numpy(value):
            return bool(_dump_numpy(value) == _dump_numpy(before))
        if isinstance(value, (*_COPYABLE_ITERATORS, random.Random)):
            return repr(value.__reduce__()) == repr(before.__reduce__())
        if isinstance(value, set):
            return bool(value == before)
        if isinstance(value, dict) and [*value] != [*before]:
            return False
        items, items_before = _list_items(value), _list_items(before)
        return len(items) == len(items_before) and all(
            self._equals(item, other, visited)
            for item, other in zip(items, items_before, strict=True)
        )


def _list_items(value: Any) -> list[Any]:
    items = list(value.values()) if isinstance(value, dict) else []
    if isinstance(value, tuple | list | deque):
        items = list(value)
    return [*items, *get_attributes(value).values()]


def _dump_numpy(value: Any) -> Any:
    if hasattr(value, "bit_generator"):
        return str(value.bit_generator.state)
    return str(value.get_state()) if hasattr(value, "get_state") else value.tobytes()


def _try_copy(value: Any) -> Any:
    """Return a shallow copy, or the value itself if it refuses to be copied."""
    try:
        return copy.copy(value)
    except Exception:
        return value


def _is_plain_object(value: Any) -> bool:
    """Return whether an object consists of its attributes alone, or is a `random.Random`.

    Objects of PyTorch have state in C++. An object with a `__del__` may release something, and so
    would its copy.
    """
    if isinstance(value, random.Random):
        return True
    if get_package(type(value)) == "torch" or hasattr(type(value), "__del__"):
        return False
    has_slots = any("__slots__" in vars(kind) for kind in type(value).__mro__[:-1])
    return isinstance(getattr(value, "__dict__", None), dict) or (
        has_slots and get_package(type(value)) not in LIBRARY_PACKAGES
    )
