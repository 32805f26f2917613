"""Put back after a dry run what the code of a model has changed outside of the model.

A forward may count its calls in a closure, draw from a generator of its own, or log to a list. The
Pipe runs parts of a model before the first step: to trace it, and to measure it. Then the first
step must not find other numbers than in the unsplit model.

    numbers in variables, in entries of       those from before
    dicts, and in attributes of objects
    lists, sets and deques                    the same items
    small tensors and arrays of NumPy         the same values
    random generators                         the same state
    an entry that is new or was None, and     kept: they are caches, which the trace has found
    tensors in a list that was empty          filled

If a list that was empty is emptied again, what says that it is filled goes with it: a flag, and
numbers that are new or were None.

State of the modules themselves is not looked at: `isolated` restores it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.isolation import StateSnapshot
from penstock.model.traced.containers import has_same_contents, set_contents
from penstock.stage.aux_loss import added_losses
from penstock.state_copy import Variable, find_reachable, is_of_numpy
from penstock.torch_compat import FakeTensor

_NUMBER_TYPES = frozenset((int, float, complex, Fraction, Decimal))
_NOTE_TYPES = frozenset((bool, str, *_NUMBER_TYPES))
_MAX_BYTES = 1 << 16  # of tensors and arrays: larger ones are data
_MAX_ITEMS = 4096


@contextmanager
def preserve_outside_state(*roots: Any, drops_losses: bool = True) -> Iterator[None]:
    """Restore what code reached from modules and functions changes outside of the modules.

    Args:
        roots: The modules and functions.
        drops_losses: Whether losses that layers add with `penstock.add_loss` are dropped, as no
            step collects them.
    """
    reached = find_reachable(roots)
    modules = reached.find(nn.Module)
    own_ids = {id(value) for module in modules for value in vars(module).values()}
    own_ids |= {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
    snapshot = StateSnapshot(())
    restorers: list[Callable[[], object]] = []
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    empty: list[Any] = []  # containers
    for variable in reached.variables:
        if variable.namespace is not None and type(variable.value) in _NUMBER_TYPES:
            restorers.append(partial(_restore_variable, variable))
        elif variable.namespace is not None and variable.value is None:
            restorers.append(partial(_drop_fake, variable))
    namespaces = [vars(value) for value in reached.find(SimpleNamespace)]
    for container in (*reached.list_containers(), *namespaces):
        if id(container) in own_ids or _count_items(container) > _MAX_ITEMS:
            continue
        if isinstance(container, dict):
            tables.append((container, dict(container)))
            restorers.append(partial(_restore_entries, *tables[-1]))
        elif isinstance(container, list | set | deque) and container:
            restorers.append(partial(_restore_items, container, container.copy()))
        elif isinstance(container, list | set | deque):
            empty.append(container)
    for value in reached.objects.values():
        if id(value) not in own_ids and _has_small_state(value):
            snapshot.record(value)
    try:
        with added_losses() if drops_losses else nullcontext():
            yield
    finally:
        for restore in restorers:
            restore()
        filled = [container for container in empty if container]
        if all(any(isinstance(item, Tensor) for item in container) for container in filled):
            filled = [c for c in filled if any(isinstance(item, FakeTensor) for item in c)]
        else:
            _restore_notes(reached.variables, tables, {id(container) for container in filled})
        for container in filled:
            container.clear()
        snapshot.restore()


def _count_items(container: Any) -> int:
    return len(container) if hasattr(container, "__len__") else 0


def _has_small_state(value: Any) -> bool:
    """Return whether a value is a random generator, or a tensor or array with few numbers."""
    if type(value) is Tensor:
        return not isinstance(value, FakeTensor) and value.nbytes <= _MAX_BYTES
    if is_of_numpy(value):
        return not hasattr(value, "nbytes") or value.nbytes <= _MAX_BYTES
    return isinstance(value, torch.Generator | random.Random)


def _restore_variable(variable: Variable) -> None:
    if not variable.is_set():
        variable.set(variable.value)


def _drop_fake(variable: Variable) -> None:
    """Empty a variable again that the trace has filled with a tensor without numbers."""
    if isinstance(variable.read(), FakeTensor):
        variable.set(None)


def _restore_entries(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key, value in list(table.items()):
        old = before.get(key)
        if isinstance(value, FakeTensor):
            if key in before:
                table[key] = old
            else:
                del table[key]
        elif type(old) in _NUMBER_TYPES and value is not old:
            table[key] = old


def _restore_items(container: Any, before: Any) -> None:
    if not has_same_contents(container, before):
        set_contents(container, before)


def _restore_notes(
    variables: Iterable[Variable],
    tables: Iterable[tuple[dict[Any, Any], dict[Any, Any]]],
    emptied_ids: set[int],
) -> None:
    """Put back what says that containers are filled, which are about to be emptied."""

    def is_note(value: Any) -> bool:
        return type(value) in _NOTE_TYPES or id(value) in emptied_ids

    for variable in variables:
        is_unset = variable.value is None or type(variable.value) is bool
        if variable.namespace is not None and is_unset and is_note(variable.read()):
            _restore_variable(variable)
    for table, before in tables:
        for key, value in list(table.items()):
            if key not in before and is_note(value):
                del table[key]
            elif is_note(value) and (before[key] is None or type(before[key]) is bool):
                table[key] = before[key]
