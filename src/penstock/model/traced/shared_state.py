"""Variables and objects that the layers of one stage change and the code of another stage reads.

A layer may leave something in a global variable, in an attribute of a class, in a variable of a
closure or in an object that others hold, for a layer that comes later. If that is on another stage,
it finds what another micro-batch has left there. Whether this can happen shows in the compiled
code, of the layers' methods and hooks and of the functions that they call:

    reads          BOX["n"], COUNT, STATE.scale, BOX.pop("n")
    changes        COUNT = n, BOX["n"] = n, STATE.scale = n, BOX.update(n=n)
    changes only   these, and COUNT += 1: nothing else depends on it, as in a log

`find_shared_state` returns what each stage has to watch, which is usually nothing. A stage compares
it around each micro-batch, and raises if it has changed. It may fill what was empty, such as a
cache. Functions of libraries are not followed.
"""

from __future__ import annotations

import copy
import dis
import sys
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.errors import RunError
from penstock.model.traced.containers import (
    HOOK_TABLES,
    MODULE_ATTRIBUTES,
    copy_attributes,
    copy_container,
    find_held_objects,
    has_same_state,
    is_state_object,
)
from penstock.model.traced.settings import is_of_library, iter_classes

# ---- what code does with variables ---------------------------------------------------------------


class Use(NamedTuple):
    """One use of a variable or attribute in code.

    `kind` is "read", "rebind", "update" (changed on the basis of its old value alone), "item" (an
    item is set), or "attribute": one of its attributes is used in the way `inner`.
    """

    kind: str
    attribute: str = ""
    inner: str = ""


class Accesses(NamedTuple):
    """The uses of variables, and of attributes of other objects, in a function, by name.

    `changes_items` is whether it sets an item of anything, or changes anything by `x += y`.
    """

    variables: Mapping[str, set[Use]]
    attributes: Mapping[str, set[Use]]
    changes_items: bool


_VARIABLE_LOADS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
_VARIABLE_STORES = frozenset(
    ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_DEREF")
)
_ATTRIBUTE_LOADS = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_ITEM_STORES = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR"))
_IGNORED = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"))


@lru_cache(4096)
def find_accesses(code: CodeType, is_method: bool) -> Accesses:
    """Return what a function does with variables and attributes, also in functions inside it.

    What a method sets on its first argument, `self`, is left out. The instructions are read one
    after the other. Where it is not clear what becomes of a value, it counts as read.
    """
    variables, attributes = defaultdict[str, set[Use]](set), defaultdict[str, set[Use]](set)
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _IGNORED]
    names = [i.opname for i in instructions] + [""] * 4

    def is_updated(index: int) -> bool:
        """Return whether a variable is loaded to compute its own next value, as by `X += 1`."""
        name = instructions[index].argval
        for position in range(index + 1, len(instructions)):
            if names[position] in _VARIABLE_STORES:
                is_same = instructions[position].argval == name
                return is_same and names[position - 1] == "BINARY_OP"
            if names[position].startswith(("STORE", "RETURN", "POP", "JUMP", "YIELD")):
                return False
        return False

    def find_kind(index: int) -> str:
        """Return the use of the object that an instruction has loaded."""
        # The key of `X[key] = value` is one variable or constant, and perhaps one attribute of it.
        after_key = index + 2 if names[index + 1].startswith("LOAD_") else index + 1
        after_key += names[after_key] == "LOAD_ATTR"
        if after_key > index + 1 and (
            names[after_key] in _ITEM_STORES or names[after_key : after_key + 2] == ["COPY"] * 2
        ):
            return "item"
        # `X[key].append(value)` logs, too.
        is_item = names[after_key] == "BINARY_SUBSCR" and names[after_key + 1] in _ATTRIBUTE_LOADS
        if is_item and instructions[after_key + 1].argval in _WRITING_METHODS:
            return "item"
        return "update" if names[index] in _VARIABLE_LOADS and is_updated(index) else "read"

    def add_use(uses: set[Use], index: int) -> None:
        following = names[index + 1]
        if following in ("STORE_ATTR", "DELETE_ATTR"):
            uses.add(Use("attribute", instructions[index + 1].argval, "rebind"))
        elif following in _ATTRIBUTE_LOADS:
            kind = find_kind(index + 1)
            uses.add(Use("attribute", instructions[index + 1].argval, kind))
        elif following == "COPY" and names[index + 2] == "LOAD_ATTR":  # X.n += 1
            uses.add(Use("attribute", instructions[index + 2].argval, "update"))
        else:
            uses.add(Use(find_kind(index)))

    first_argument = code.co_varnames[0] if code.co_argcount and is_method else None
    for index, instruction in enumerate(instructions):
        previous = names[index - 1] if index else ""
        # One instruction may load two local variables (Python 3.13).
        loaded = instructions[index - 1].argval if previous.startswith("LOAD_FAST") else None
        loaded = loaded[-1] if isinstance(loaded, tuple) else loaded
        is_self = loaded is not None and loaded == first_argument
        if instruction.opname in _VARIABLE_LOADS:
            add_use(variables[instruction.argval], index)
        elif instruction.opname in _VARIABLE_STORES:
            variables[instruction.argval].add(Use("rebind"))
        elif instruction.opname in _ATTRIBUTE_LOADS and previous != "COPY":
            if previous not in _VARIABLE_LOADS:
                add_use(attributes[instruction.argval], index)
        elif instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            if not is_self and previous not in (*_VARIABLE_LOADS, "SWAP"):
                attributes[instruction.argval].add(Use("rebind"))
        elif instruction.opname == "COPY" and names[index + 1] == "LOAD_ATTR":  # y.n += 1
            is_noted = is_self or previous in _VARIABLE_LOADS
            attributes[instructions[index + 1].argval].update(() if is_noted else [Use("update")])
    changes_items = any(
        i.opname in _ITEM_STORES or (i.opname == "BINARY_OP" and i.argrepr.endswith("="))
        for i in instructions
    )
    for inner in (find_accesses(c, False) for c in code.co_consts if isinstance(c, CodeType)):
        changes_items |= inner.changes_items
        for table, inner_table in ((variables, inner.variables), (attributes, inner.attributes)):
            for name, uses in inner_table.items():
                table[name] |= uses
    return Accesses(dict(variables), dict(attributes), changes_items)


# ---- the variables of a stage --------------------------------------------------------------------


@dataclass(frozen=True)
class SharedVariable:
    """A global variable, an attribute of a class or a module, or a variable of a closure."""

    name: str
    namespace: dict[str, Any] | type | CellType
    owner: str = ""  # the module or class that has it, as "module:class"; empty for a closure

    @property
    def key(self) -> tuple[int, str]:
        """A key that is the same wherever the variable is found."""
        return id(self.namespace), self.name

    def read(self) -> Any:
        """Return the current value; None if it has none yet."""
        if isinstance(self.namespace, dict):
            return self.namespace.get(self.name)
        if isinstance(self.namespace, type):
            return vars(self.namespace).get(self.name)
        try:
            return self.namespace.cell_contents
        except ValueError:  # an empty cell
            return None


# Methods that change lists, dicts, sets, deques and arrays and return None, and those that also
# read them.
_WRITING_METHODS = frozenset(
    (
        *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "clear"),
        *("remove", "discard", "sort", "reverse", "rotate", "fill", "put", "partition"),
        *("__setitem__", "__delitem__", "__setattr__"),
    )
)
_CHANGING_METHODS = _WRITING_METHODS | {"pop", "popleft", "popitem", "setdefault"}
_CONTAINER_TYPES = (list, dict, set, deque)
_MAX_UNSURE_ITEMS = 256
_DUNDER_NAMES = frozenset(name for name in dir(Tensor) if name.startswith("__"))


class _StageCode:
    """The variables outside of modules that their code reads and changes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.variables: dict[tuple[int, str], SharedVariable] = {}
        self.read, self.changed = set[tuple[int, str]](), set[tuple[int, str]]()
        self._unsure, self._changes_objects = set[tuple[int, str]](), False
        self._set_attributes: set[str] = set()  # names of attributes that the code sets on objects
        self._methods: set[str] = set()  # names of methods that the code may call
        self._visited: set[tuple[CodeType, tuple[type, ...]]] = set()
        for module in modules:
            classes = tuple(iter_classes(module))
            functions = [v for v in vars(module).values() if isinstance(v, FunctionType)]
            for function in (*functions, *_iter_hooks(module)):
                self._visit(function, classes, is_method=False)
            for member in (m for kind in classes for m in vars(kind).values()):
                self._visit(_get_function(member), classes, isinstance(member, FunctionType))
        # A container that is read may be changed under another name.
        if self._changes_objects:
            self.changed |= self._unsure

    def _visit(self, function: Any, classes: tuple[type, ...], is_method: bool) -> None:
        """Note the uses of variables in a function, and of attributes of classes."""
        if not isinstance(function, FunctionType) or is_of_library(function):
            return
        code = function.__code__
        if (code, classes) in self._visited:
            return
        self._visited.add((code, classes))
        accesses = find_accesses(code, is_method)
        tables = accesses.variables, accesses.attributes
        uses = [use for table in tables for name_uses in table.values() for use in name_uses]
        self._methods.update(*tables, (use.attribute for use in uses))
        self._set_attributes |= {
            use.attribute for use in uses if use.inner in ("item", "rebind", "update")
        }
        self._set_attributes |= {
            name
            for name, name_uses in accesses.attributes.items()
            if any(use.kind in ("item", "rebind", "update") for use in name_uses)
        }
        self._changes_objects |= accesses.changes_items
        self._changes_objects |= not _CHANGING_METHODS.isdisjoint(self._methods)
        self._changes_objects |= any(use.inner in ("rebind", "update") for use in uses)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        owner = function.__globals__.get("__name__", "")
        for name, name_uses in accesses.variables.items():
            if name in cells:
                self._note(SharedVariable(name, cells[name]), name_uses)
            elif name in function.__globals__:
                self._note(SharedVariable(name, function.__globals__, f"{owner}:"), name_uses)
        for name, name_uses in accesses.attributes.items():
            for kind in classes:
                if name in vars(kind) and not name.startswith("__"):
                    self._note(_get_attribute(kind, name), name_uses, (kind,))

    def may_change(self, value: Any) -> bool:
        """Return whether the code may change an object that its modules hold."""
        if isinstance(value, Tensor):
            is_called = any(name.endswith("_") for name in self._methods - _DUNDER_NAMES)
            return self._changes_objects or is_called
        if isinstance(value, _CONTAINER_TYPES) or not _is_own_object(value):
            return self._changes_objects
        # The methods of its class may set its attributes.
        methods = [
            member
            for kind in type(value).__mro__
            for name, member in vars(kind).items()
            if name in self._methods - _DUNDER_NAMES and isinstance(member, FunctionType)
        ]
        names = {name for name, _ in _iter_attributes(value)} & self._set_attributes
        return bool(methods or names) or not self._methods.isdisjoint(("setattr", "__setattr__"))

    def _note(
        self, variable: SharedVariable, uses: Iterable[Use], classes: tuple[type, ...] = ()
    ) -> None:
        """Note whether uses of a variable read or change it, and follow functions and classes."""
        value = variable.read()
        function = _get_function(value)
        if isinstance(function, FunctionType):
            self._visit(function, classes, is_method=bool(classes) and function is value)
            return
        if isinstance(value, type | ModuleType):
            for use in () if is_of_library(value) else uses:
                if use.attribute in vars(value):
                    kind = (value,) if isinstance(value, type) else ()
                    self._note(_get_attribute(value, use.attribute), [Use(use.inner)], kind)
            return
        self.variables[variable.key] = variable
        for use in uses:
            reads, changes = _judge_use(use, value)
            self.read.update([variable.key] if reads else ())
            self.changed.update([variable.key] if changes else ())
        is_small = isinstance(value, _CONTAINER_TYPES) and len(value) <= _MAX_UNSURE_ITEMS
        if is_small or is_state_object(value):
            self._unsure.add(variable.key)


def _judge_use(use: Use, value: Any) -> tuple[bool, bool]:
    """Return whether a use reads a value, and whether it changes it."""
    if use.kind == "read":
        return True, False
    if use.kind != "attribute":
        return False, True
    if isinstance(value, _CONTAINER_TYPES):
        return use.attribute not in _WRITING_METHODS, use.attribute in _CHANGING_METHODS
    if isinstance(value, Tensor):
        return True, use.attribute.endswith("_") and not use.attribute.endswith("__")
    if use.inner != "read":
        return False, True
    # A method of an object of one's own may do anything.
    is_method = isinstance(getattr(type(value), use.attribute, None), FunctionType)
    return True, is_method and not is_of_library(type(value))


def _get_attribute(owner: type | ModuleType, name: str) -> SharedVariable:
    if isinstance(owner, ModuleType):
        return SharedVariable(name, vars(owner), f"{owner.__name__}:")
    return SharedVariable(name, owner, f"{owner.__module__}:{owner.__qualname__}")


def _get_function(member: Any) -> Any:
    """Return the function behind a method of any kind or a property."""
    return getattr(member, "__func__", getattr(member, "fget", member))


def _iter_hooks(module: nn.Module) -> Iterator[Any]:
    for table in HOOK_TABLES:
        for hook in vars(module).get(table, {}).values():
            yield _get_function(hook)


class SharedState:
    """Variables and objects that a stage changes and the code of another stage reads."""

    def __init__(
        self, variables: Sequence[SharedVariable] = (), objects: Sequence[Any] = ()
    ) -> None:
        self._variables, self._objects = variables, objects

    def __bool__(self) -> bool:
        return bool(self._variables or self._objects)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedState:
        return SharedState(self._variables, copy.deepcopy(self._objects, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        # By name: the namespace of a module cannot be pickled. Closures are not found again.
        names = [(v.owner, v.name) for v in self._variables if v.owner]
        return _restore_shared_state, (names, self._objects)

    def take_snapshot(self) -> list[Any]:
        """Return copies of the values."""
        values = (*(variable.read() for variable in self._variables), *self._objects)
        return [_copy_value(value) for value in values]

    def check(self, before: Sequence[Any]) -> None:
        """Raise if something is not as in a snapshot. What was empty may have been filled."""
        after = self.take_snapshot()
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if _is_kept(old, new):
                continue
            if index < len(self._variables):
                problem = f"the variable '{self._variables[index].name}', which the code of another"
                problem += " stage reads. It"
            else:
                held = self._objects[index - len(self._variables)]
                problem = f"a {type(held).__name__} that a layer of another stage holds as well. "
                problem += "That layer"
            raise RunError(
                f"the layers of a stage change {problem} would see what another micro-batch has "
                "left there. Pass the value from layer to layer, as a part of their inputs and "
                "outputs or with skippable, or put the layers into one child of the Sequential or "
                "one unit."
            )


def _restore_shared_state(names: Sequence[tuple[str, str]], objects: Sequence[Any]) -> SharedState:
    variables = []
    for owner, name in names:
        module, _, path = owner.partition(":")
        value: Any = sys.modules.get(module)
        if value is not None and "<" not in path:
            variables.append(_get_attribute(attrgetter(path)(value) if path else value, name))
    return SharedState(variables, objects)


class _ObjectState(dict[str, Any]):
    """The attributes of an object, or the identity and the version of a tensor."""


def _copy_value(value: Any) -> Any:
    """Return a copy of what code can change in a value without assigning another one."""
    if isinstance(value, Tensor):
        return _ObjectState(tensor=value, version=0 if value.is_inference() else value._version)
    if isinstance(value, nn.Module):
        return _ObjectState(copy_attributes(value))
    if hasattr(value, "tobytes"):  # a NumPy array
        return _ObjectState(array=value, contents=value.tobytes())
    copied = copy_container(value)
    if copied is not value:
        return copied
    if isinstance(value, dict):  # of a class of its own
        return dict(value)
    if isinstance(value, list | set | deque | bytearray):
        return list(value)
    if not _is_own_object(value):
        return value
    return _ObjectState((name, copy_container(item, 2)) for name, item in _iter_attributes(value))


def _is_kept(old: Any, new: Any) -> bool:
    """Return whether a copy of a value holds what an older one did, and perhaps more."""
    if old is None:
        return True
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            key in new and (item is None or has_same_state(new[key], item))
            for key, item in old.items()
        )
    if isinstance(old, bytes):
        return bool(old == new)
    return has_same_state(new, old)


# ---- objects that layers hold --------------------------------------------------------------------


def _is_own_object(value: Any) -> bool:
    """Return whether a value is an object with attributes, of a class of the model's author."""
    if isinstance(value, Namespace | SimpleNamespace):
        return True
    is_object = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    kinds = type | FunctionType | MethodType | ModuleType | nn.Module | Tensor | Enum
    return is_object and not isinstance(value, kinds) and not is_of_library(type(value))


def _iter_attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object with their names, also those in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in vars(kind).get("__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)


def _iter_changeable(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield what code can change in an attribute: containers, arrays, tensors and objects."""
    if value is None or isinstance(value, bool | int | float | str) or not depth:
        return
    if isinstance(value, Tensor | bytearray) or hasattr(value, "tobytes"):
        yield value
        return
    items: list[Any] = []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, tuple | list | set | deque):
        items = list(value)
    elif _is_own_object(value):
        items = [item for _, item in _iter_attributes(value)]
    else:
        return
    if not isinstance(value, tuple):
        yield value
    for item in items if len(items) <= _MAX_UNSURE_ITEMS else ():
        yield from _iter_changeable(item, depth - 1)


def _find_objects(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return the objects that modules hold in plain attributes, by id."""
    return {
        id(held): held
        for module in modules
        for key, value in vars(module).items()
        if key not in MODULE_ATTRIBUTES
        for held in _iter_changeable(value)
    }


def _find_referred_modules(stages: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Return, by stage, its modules that other stages hold in plain attributes."""
    owners = {id(m): (m, index) for index, modules in enumerate(stages) for m in modules}
    referred: list[dict[int, nn.Module]] = [{} for _ in stages]
    for index, modules in enumerate(stages):
        for key in find_held_objects(modules, owners):
            module, owner = owners[key]
            if owner != index:
                referred[owner][key] = module
    return [list(modules.values()) for modules in referred]


def find_shared_state(
    stages: Sequence[Sequence[nn.Module]], others: Sequence[nn.Module] = ()
) -> list[SharedState]:
    """Return, by stage, what its modules may change and other code reads.

    That is the code of other stages, and of the `others`, which runs on all stages.
    """
    codes, other_code = [_StageCode(modules) for modules in stages], _StageCode(others)
    objects = [_find_objects(modules) for modules in stages]
    referred = _find_referred_modules(stages)
    counts = Counter(key for held in (*objects, _find_objects(others)) for key in held)
    shared = []
    for index, code in enumerate(codes):
        read_elsewhere = set(other_code.read)
        for other in (*codes[:index], *codes[index + 1 :]):
            read_elsewhere |= other.read
        keys = [key for key in code.variables if key in code.changed & read_elsewhere]
        held = [
            value
            for key, value in objects[index].items()
            if counts[key] > 1 and code.may_change(value)
        ]
        shared.append(SharedState([code.variables[key] for key in keys], held + referred[index]))
    return shared
