"""Copies of values that hold state: nested containers, plain objects, random generators, iterators.

`StructureCopier` copies a value so that code may change the copy in place of the original. Its
`is_unchanged` tells afterwards whether the original still is what was copied. `find_reachable`
finds the state that the code of modules can reach besides their own attributes.

    a dry run or an audit      modules compute with copies, and then get the originals back
    a recomputation            finds a copy that was made before its forward
"""

from __future__ import annotations

import copy
import io
import itertools
import random
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TensorMap = Callable[[Tensor], Tensor]

# Packages whose objects and functions are not the work of the model's author. Those of trainers
# refer to thousands of objects, which an audit would put aside for each forward.
LIBRARY_PACKAGES = frozenset(
    (
        *sys.stdlib_module_names,
        *("accelerate", "lightning", "lightning_fabric", "lightning_utilities", "matplotlib"),
        *("numpy", "peft", "pytorch_lightning", "torch", "transformers"),
    )
)
# Iterators whose copy goes on where the original is. Others, such as generators, have no copy.
COPYABLE_ITERATORS: tuple[type, ...] = (
    itertools.count,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter("")),
)
# Streams in memory. A copy is read from where the original is.
STREAMS = (io.StringIO, io.BytesIO)
SCALARS = (bool, int, float, complex, str, bytes, type(None))
SCALAR_TYPES = frozenset(SCALARS)
# What models consist of, for the most part. None of these is an iterator.
_COMMON_TYPES = frozenset(
    (dict, OrderedDict, list, tuple, set, FunctionType, type, property, Tensor, nn.Parameter)
)

# The attributes that every module has: training, hooks, tables of members.
MODULE_INTERNALS = frozenset(vars(nn.Module()))


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
        if type(value) in SCALAR_TYPES:
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value, self._copy_value(value)
        return self._copies[id(value)][1]

    def _copy_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._map_tensor(value)
        if type(value) is tuple and SCALAR_TYPES.issuperset(map(type, value)):
            return value  # such as the stride of a convolution
        if isinstance(value, dict | list):
            return self._copy_container(value)
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
        if isinstance(value, (*COPYABLE_ITERATORS, *STREAMS)):
            return _try_copy(value)
        if isinstance(value, set | deque) or _is_plain_object(value):
            return self._copy_container(value)
        return value

    def _copy_container(self, value: Any) -> Any:
        new = _try_copy(value)
        if new is value or type(new) is not type(value):
            return value
        self._copies[id(value)] = value, new  # before the items, because it may contain itself
        items = value.values() if isinstance(value, dict) else value
        is_container = isinstance(value, dict | list | set | deque)
        if is_container and SCALAR_TYPES.issuperset(map(type, items)):
            pass  # a list of a million numbers is copied already
        elif isinstance(value, dict):
            for key, entry in value.items():
                dict.__setitem__(new, key, self(entry))
        elif isinstance(value, list):
            new[:] = map(self, value)
        elif isinstance(value, set | deque):
            copies = [self(item) for item in value]
            new.clear()
            (new.update if isinstance(new, set) else new.extend)(copies)
        if not isinstance(value, random.Random):
            attributes = getattr(value, "__dict__", None)
            if attributes:
                new.__dict__.update({name: self(entry) for name, entry in attributes.items()})
            for name, entry in _get_slots(value).items():
                object.__setattr__(new, name, self(entry))
        return new

    def find_copy(self, value: Any) -> Any:
        """Return the copy of a value that was copied, or the value itself."""
        return self._copies[id(value)][1] if id(value) in self._copies else value

    def list_originals(self) -> list[Any]:
        """Return the values that were copied, with everything in them."""
        return [original for original, _ in self._copies.values()]

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
        if isinstance(value, itertools.count):
            return repr(value) == repr(before)
        if isinstance(value, (*COPYABLE_ITERATORS, random.Random)):
            return repr(value.__reduce__()) == repr(before.__reduce__())
        if isinstance(value, STREAMS):
            return _describe_stream(value) == _describe_stream(before)
        if isinstance(value, set):
            return bool(value == before)
        if isinstance(value, dict) and [*value] != [*before]:
            return False
        items, items_before = _list_items(value), _list_items(before)
        return len(items) == len(items_before) and all(
            self._equals(item, other, visited)
            for item, other in zip(items, items_before, strict=True)
        )


_PLAIN_CONTAINERS = frozenset((tuple, list, dict, deque))


def _list_items(value: Any) -> list[Any]:
    items = list(value.values()) if isinstance(value, dict) else []
    if isinstance(value, tuple | list | deque):
        items = list(value)
    if type(value) in _PLAIN_CONTAINERS:
        return items  # it has no attributes
    return [*items, *get_attributes(value).values()]


def _dump_numpy(value: Any) -> Any:
    if hasattr(value, "bit_generator"):
        return str(value.bit_generator.state)
    return str(value.get_state()) if hasattr(value, "get_state") else value.tobytes()


def _try_copy(value: Any) -> Any:
    """Return a shallow copy, or the value itself if it refuses to be copied."""
    try:
        with _allow_copies_of_counters(value):
            return copy.copy(value)
    except Exception:
        return value


@contextmanager
def _allow_copies_of_counters(value: Any) -> Iterator[None]:
    """Hide the warning of Python 3.12 and 3.13 that 3.14 cannot copy an `itertools.count`."""
    if isinstance(value, itertools.count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    else:
        yield


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


# ---- state that code can reach -----------------------------------------------------------------

_MAX_REACHED = 10_000  # a function may reach a whole data set
_MAX_ITEMS = 1_000


class Variable(NamedTuple):
    """A variable that code can change: in a closure, of a class or function, or a global one."""

    namespace: Any  # a closure cell, a class, or a dict; None if the value is not exchanged
    name: str
    value: Any

    def set(self, value: Any) -> None:
        """Give the variable another value."""
        if isinstance(self.namespace, CellType):
            self.namespace.cell_contents = value
        elif isinstance(self.namespace, type):
            setattr(self.namespace, self.name, value)
        else:
            self.namespace[self.name] = value

    def read(self) -> Any:
        """Return the value that the variable has now; None if it has none."""
        if self.namespace is None:
            return self.value
        if isinstance(self.namespace, CellType):
            try:
                return self.namespace.cell_contents
            except ValueError:  # a cell that was emptied
                return None
        table = vars(self.namespace) if isinstance(self.namespace, type) else self.namespace
        return table.get(self.name)

    def is_set(self) -> bool:
        """Return whether the variable still has its value."""
        return self.read() is self.value


@dataclass
class ReachedState:
    """State that code of modules and functions can reach besides the attributes of the modules.

    Attributes:
        variables: Variables in closures, of classes and functions, and global ones.
        objects: All values, by id: containers, objects, functions.
    """

    variables: list[Variable] = field(default_factory=list)
    objects: dict[int, Any] = field(default_factory=dict)

    def find(self, kind: type | tuple[type, ...]) -> list[Any]:
        """Return the objects of a type."""
        return [value for value in self.objects.values() if isinstance(value, kind)]

    def has_variable(self, variable: Variable) -> bool:
        """Return whether the code can reach a variable, or the container that has no other name."""
        if variable.namespace is None:
            return id(variable.value) in self.objects
        return any(
            other.namespace is variable.namespace and other.name == variable.name
            for other in self.variables
        )

    def list_containers(self) -> list[Any]:
        """Return the containers, random generators, and tables of attributes of objects."""
        tables = [
            value.__dict__
            for value in self.objects.values()
            if (type(value) not in _COMMON_TYPES or type(value) is FunctionType)
            and isinstance(getattr(value, "__dict__", None), dict)
            and not isinstance(value, nn.Module | Tensor | ModuleType)
            and not _is_of_library(value if isinstance(value, FunctionType) else type(value))
        ]
        containers = self.find((list, dict, set, deque))
        # PyTorch asks Python whether something is a generator, which takes time.
        others = (value for value in self.objects.values() if type(value) not in _COMMON_TYPES)
        return tables + containers + [v for v in others if isinstance(v, torch.Generator)]

    def find_uncopyable(self) -> Iterator[Any] | None:
        """Return an iterator that no copy can replace, such as a generator, or None."""
        for value in self.objects.values():
            if type(value) in _COMMON_TYPES or isinstance(value, nn.Module):
                continue
            iterators = [value] if not isinstance(value, COPYABLE_ITERATORS) else []
            if isinstance(value, partial):  # what it is bound to cannot be exchanged
                iterators += value.args
            elif isinstance(value, BuiltinMethodType | MethodWrapperType):
                iterators.append(value.__self__)
            for iterator in iterators:
                is_builtin = get_package(type(iterator)) in sys.stdlib_module_names
                if (
                    is_builtin
                    and isinstance(iterator, Iterator)
                    and not isinstance(iterator, io.IOBase)
                ):
                    return iterator
        return None


def is_read_further(stream: Any, before: Any) -> bool:
    """Return whether a stream in memory has been read since it was copied, and not written to."""
    if not isinstance(stream, STREAMS) or type(stream) is not type(before):
        return False
    position, contents = _describe_stream(stream)
    position_before, contents_before = _describe_stream(before)
    return position != position_before and contents == contents_before


def _describe_stream(stream: Any) -> tuple[int, Any]:
    return (-1, None) if stream.closed else (stream.tell(), stream.getvalue())


def describe_iterator(iterator: Any) -> Any:
    """Return something that is another value once an iterator has gone on, if that can be known.

    >>> numbers = map(int, "123")
    >>> before = describe_iterator(numbers)
    >>> next(numbers), before == describe_iterator(numbers)
    (1, False)
    """
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        # Its variables as objects: a number that has moved is another one.
        return None if frame is None else (frame.f_lasti, [*map(id, frame.f_locals.values())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of those that will not be pickled
        try:
            parts = iterator.__reduce__()
        except (AttributeError, TypeError):
            return None
    return _describe_parts(parts[1:])


def _describe_parts(parts: Any) -> list[Any]:
    descriptions: list[Any] = []
    for part in parts:
        if type(part) in SCALAR_TYPES:
            descriptions.append(part)
        elif isinstance(part, tuple):
            descriptions.append(_describe_parts(part))
        elif isinstance(part, Iterator):
            descriptions.append(describe_iterator(part))
        elif isinstance(part, list | range | str):
            descriptions.append(len(part))
    return descriptions


def find_reachable(roots: Iterable[Any], known: ReachedState | None = None) -> ReachedState:
    """Follow modules, functions and objects to all state that their code can change.

    Code of libraries is not followed. Neither are long lists. The state that is `known` is part of
    the result, and is not followed again.
    """
    reached = ReachedState()
    if known is not None:
        reached = ReachedState(list(known.variables), dict(known.objects))
    todo = list(roots)
    while todo and len(reached.objects) < _MAX_REACHED:
        value = todo.pop()
        if type(value) in SCALAR_TYPES or id(value) in reached.objects:
            continue
        reached.objects[id(value)] = value
        if isinstance(value, Tensor):
            continue
        if isinstance(value, type):
            if not _is_of_library(value):
                todo += _follow_namespace(value, vars(value), reached)
                todo += value.__bases__
        elif isinstance(value, FunctionType):
            if not _is_of_library(value):
                todo += _follow_function(value, reached)
        elif isinstance(value, nn.Module):
            todo.append(type(value))
            # Most tables of a module are empty, such as those of its hooks.
            todo += [v for name, v in vars(value).items() if name not in MODULE_INTERNALS or v]
        else:
            todo += _list_parts(value)
    return reached


def _is_of_library(value: Any) -> bool:
    package = get_package(value)
    return package in LIBRARY_PACKAGES or package == "penstock"


def _follow_namespace(namespace: Any, names: Mapping[str, Any], reached: ReachedState) -> list[Any]:
    """Note the variables of a class or function, and return everything in it."""
    for name, value in names.items():
        is_code = callable(value) or hasattr(value, "__get__")
        if not is_code and not (name.startswith("__") and name.endswith("__")):
            reached.variables.append(Variable(namespace, name, value))
    return list(names.values())


def _follow_function(function: FunctionType, reached: ReachedState) -> list[Any]:
    """Note the variables that a function can change, and return what it refers to."""
    todo = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    todo += _follow_namespace(function.__dict__, dict(function.__dict__), reached)
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell: the variable has no value yet
            continue
        todo += _follow_namespace_item(cell, "", value, reached)
    for name in _list_names(function.__code__):
        if name in function.__globals__:
            value = function.__globals__[name]
            todo += _follow_namespace_item(function.__globals__, name, value, reached)
    return todo


def _follow_namespace_item(
    namespace: Any, name: str, value: Any, reached: ReachedState
) -> list[Any]:
    if not isinstance(value, type | FunctionType | ModuleType | nn.Module):
        reached.variables.append(Variable(namespace, name, value))
    return [value]


def _list_names(code: CodeType) -> list[str]:
    """Return the names in a function's code and in the functions defined inside it."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _list_names(c)]
    return [*code.co_names, *inner]


def _list_parts(value: Any) -> list[Any]:
    """Return the values in a container, in an object, or behind a method."""
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, ModuleType) or _is_of_library(type(value)):
        return []
    return [type(value), *get_attributes(value).values()]
