"""Variables that the layers of one stage change and the code of another stage reads.

A layer may leave something in a global variable, in an attribute of a class or in a variable of a
closure, for a layer that comes later. If that is on another stage, it finds what another
micro-batch has left there. Whether this can happen shows in the compiled code, of the layers'
methods and hooks and of the functions that they call:

    reads          BOX["n"], COUNT, STATE.scale, BOX.pop("n")
    changes        COUNT = n, BOX["n"] = n, STATE.scale = n, BOX.update(n=n)
    changes only   these, and COUNT += 1: nothing else depends on it, as in a log

`find_shared_variables` returns the variables that each stage has to watch, which are usually none.
A stage compares them around each micro-batch, and raises if they have changed. It may fill what was
empty, such as a cache. Functions of libraries are not followed.
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.errors import RunError
from penstock.model.traced.containers import (
    HOOK_TABLES,
    copy_container,
    has_same_state,
    is_state_object,
)
from penstock.model.traced.settings import is_of_library, iter_classes, iter_methods

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
    """The uses of variables, and of attributes of other objects, in a function, by name."""

    variables: Mapping[str, set[Use]]
    attributes: Mapping[str, set[Use]]


_VARIABLE_LOADS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
_VARIABLE_STORES = frozenset(
    ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_DEREF")
)
_ATTRIBUTE_LOADS = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_ITEM_STORES = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR"))
_IGNORED = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"))


@lru_cache(4096)
def find_accesses(code: CodeType) -> Accesses:
    """Return what a function does with variables and attributes, also in functions inside it.

    The instructions are read one after the other. Where it is not clear what becomes of a value, it
    counts as read.
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

    first_argument = code.co_varnames[0] if code.co_argcount else ""
    for index, instruction in enumerate(instructions):
        previous = names[index - 1] if index else ""
        is_self = (
            previous.startswith("LOAD_FAST")
            and first_argument != "cls"
            and instructions[index - 1].argval == first_argument
        )
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
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for table, found in zip((variables, attributes), find_accesses(inner), strict=True):
                for name, uses in found.items():
                    table[name] |= uses
    return Accesses(dict(variables), dict(attributes))


# ---- the variables of a stage --------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
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


# Methods of lists, dicts, sets and deques that change them. Those of the first kind return None.
_CHANGING_METHODS = frozenset(
    (
        *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "clear"),
        *("remove", "discard", "sort", "reverse", "rotate"),
    )
)
_READING_METHODS = frozenset(("pop", "popleft", "popitem", "setdefault"))
_CONTAINER_TYPES = (list, dict, set, deque)
_MAX_UNSURE_ITEMS = 256


class _StageCode:
    """The variables outside of modules that their code reads and changes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.variables: dict[tuple[int, str], Variable] = {}
        self.read, self.changed = set[tuple[int, str]](), set[tuple[int, str]]()
        self._unsure, self._changes_objects = set[tuple[int, str]](), False
        self._visited: set[tuple[CodeType, tuple[type, ...]]] = set()
        for module in modules:
            classes = tuple(iter_classes(module))
            for function in (*iter_methods(module), *_iter_hooks(module)):
                self._visit(function, classes)
        # A container that is read may be changed under another name.
        if self._changes_objects:
            self.changed |= self._unsure

    def _visit(self, function: Any, classes: tuple[type, ...] = ()) -> None:
        """Note the uses of variables in a function, and of attributes of classes."""
        if not isinstance(function, FunctionType) or is_of_library(function):
            return
        code = function.__code__
        if (code, classes) in self._visited:
            return
        self._visited.add((code, classes))
        accesses = find_accesses(code)
        uses = [use for found in accesses for items in found.values() for use in items]
        self._changes_objects |= any(_changes_object(use) for use in uses) or any(
            instruction.opname in _ITEM_STORES for instruction in dis.get_instructions(code)
        )
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        owner = function.__globals__.get("__name__", "")
        for name, found in accesses.variables.items():
            if name in cells:
                self._note(Variable(name, cells[name]), found)
            elif name in function.__globals__:
                self._note(Variable(name, function.__globals__, f"{owner}:"), found)
        for name, found in accesses.attributes.items():
            for kind in classes:
                if name in vars(kind) and not name.startswith("__"):
                    self._note(_get_attribute(kind, name), found, (kind,))

    def _note(
        self, variable: Variable, uses: Iterable[Use], classes: tuple[type, ...] = ()
    ) -> None:
        """Note whether uses of a variable read or change it, and follow functions and classes."""
        value = variable.read()
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(function, FunctionType):
            self._visit(function, classes)
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


def _changes_object(use: Use) -> bool:
    is_method = use.attribute in _CHANGING_METHODS | _READING_METHODS
    return use.kind == "item" or use.inner in ("item", "rebind", "update") or is_method


def _judge_use(use: Use, value: Any) -> tuple[bool, bool]:
    """Return whether a use reads a value, and whether it changes it."""
    if use.kind == "read":
        return True, False
    if use.kind != "attribute":
        return False, True
    if isinstance(value, _CONTAINER_TYPES):
        if use.attribute in _CHANGING_METHODS:
            return False, True
        return True, use.attribute in _READING_METHODS
    if isinstance(value, Tensor):
        return True, use.attribute.endswith("_") and not use.attribute.endswith("__")
    if use.inner != "read":
        return False, True
    # A method of an object of one's own may do anything.
    is_method = isinstance(getattr(type(value), use.attribute, None), FunctionType)
    return True, is_method and not is_of_library(type(value))


def _get_attribute(owner: type | ModuleType, name: str) -> Variable:
    if isinstance(owner, ModuleType):
        return Variable(name, vars(owner), f"{owner.__name__}:")
    return Variable(name, owner, f"{owner.__module__}:{owner.__qualname__}")


def _iter_hooks(module: nn.Module) -> Iterator[Any]:
    for table in HOOK_TABLES:
        for hook in vars(module).get(table, {}).values():
            yield hook.__func__ if isinstance(hook, MethodType) else hook


class SharedVariables:
    """Variables that a stage changes and the code of another stage reads."""

    def __init__(self, variables: Sequence[Variable] = ()) -> None:
        self._variables = variables

    def __bool__(self) -> bool:
        return bool(self._variables)

    def __deepcopy__(self, memo: Any) -> SharedVariables:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # By name: the namespace of a module cannot be pickled. Closures are not found again.
        names = [(v.owner, v.name) for v in self._variables if v.owner]
        return _restore_shared_variables, (names,)

    def take_snapshot(self) -> list[Any]:
        """Return copies of the values."""
        return [_copy_value(variable.read()) for variable in self._variables]

    def check(self, before: Sequence[Any]) -> None:
        """Raise if a variable is not as in a snapshot. What was empty may have been filled."""
        for variable, old in zip(self._variables, before, strict=True):
            if not _is_kept(old, _copy_value(variable.read())):
                raise RunError(
                    f"the layers of a stage change the variable '{variable.name}', which the code "
                    "of another stage reads. It would see what another micro-batch has left there. "
                    "Pass the value from layer to layer, as a part of their inputs and outputs, or "
                    "put the layers into one child of the Sequential or one unit."
                )


def _restore_shared_variables(names: Sequence[tuple[str, str]]) -> SharedVariables:
    variables = []
    for owner, name in names:
        module, _, path = owner.partition(":")
        value: Any = sys.modules.get(module)
        if value is not None and "<" not in path:
            variables.append(_get_attribute(attrgetter(path)(value) if path else value, name))
    return SharedVariables(variables)


class _ObjectState(dict[str, Any]):
    """The attributes of an object, or the identity and the version of a tensor."""


def _copy_value(value: Any) -> Any:
    """Return a copy of what code can change in a value without assigning another one."""
    if isinstance(value, Tensor):
        return _ObjectState(tensor=value, version=0 if value.is_inference() else value._version)
    copied = copy_container(value)
    if copied is not value:
        return copied
    if isinstance(value, dict):  # of a class of its own
        return dict(value)
    if isinstance(value, list | set | deque):
        return list(value)
    is_plain = not hasattr(value, "__dict__") or callable(value) or is_of_library(type(value))
    return value if is_plain else _ObjectState(copy_container(dict(vars(value)), 2))


def _is_kept(old: Any, new: Any) -> bool:
    """Return whether a copy of a value holds what an older one did, and perhaps more."""
    if old is None:
        return True
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            key in new and (item is None or has_same_state(new[key], item))
            for key, item in old.items()
        )
    return has_same_state(new, old)


def find_shared_variables(
    stages: Sequence[Iterable[nn.Module]], others: Iterable[nn.Module] = ()
) -> list[SharedVariables]:
    """Return, by stage, the variables that its modules change and that other code reads.

    That is the code of other stages, and of the `others`, which runs on all stages.
    """
    codes, other_code = [_StageCode(modules) for modules in stages], _StageCode(others)
    shared = []
    for index, code in enumerate(codes):
        read_elsewhere = set(other_code.read)
        for other in (*codes[:index], *codes[index + 1 :]):
            read_elsewhere |= other.read
        keys = [key for key in code.variables if key in code.changed & read_elsewhere]
        shared.append(SharedVariables([code.variables[key] for key in keys]))
    return shared
