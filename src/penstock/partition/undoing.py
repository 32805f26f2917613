"""Modules that take a step as they are, with everything undone that it does to them.

Nothing stands in for anything: what others know of the modules, and of their tensors, stays true
while they compute. So what they hold is noted before, and put back after. Most parameters are not
copied: a step gives them gradients, and no other numbers.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.partition.aside import Again, is_plain, leaving_no_trace

Given = TypeVar("Given")

_FILLED = (dict, list, set, deque)


class Notes:
    """What values hold, down to tensors, lists and plain objects; to be put back."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # by id, to keep that in use
        self._undo: list[Callable[[], object]] = []

    def take(self, value: Any) -> None:
        """Of a value, and of all that is in it. Modules and functions are not looked into."""
        if id(value) in self._known or isinstance(value, nn.Parameter | nn.Module | torch.Size):
            return
        self._known[id(value)] = value
        if isinstance(value, Tensor):
            self.take_numbers(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(partial(value.set_state, state))
        elif isinstance(value, _FILLED):
            self._take_filled(value)
        elif isinstance(value, tuple | frozenset):
            for one in value:
                self.take(one)
        elif not callable(value) and is_plain(value):
            self._take_filled(value.__dict__)

    def take_numbers(self, tensor: Tensor) -> None:
        """Of any tensor, a parameter too."""
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_inference():
            return
        before = tensor.detach().clone()

        def undo() -> None:
            if not torch.equal(tensor, before):  # running statistics change without a new version
                tensor.detach().copy_(before)

        self._undo.append(undo)

    def _take_filled(self, box: Any) -> None:
        try:
            before = copy.copy(box)
        except Exception:
            return  # it has reasons to be the only one
        for one in list(box.values() if isinstance(box, dict) else box):
            self.take(one)

        def undo() -> None:
            if not _same(box, before):
                box.clear()
                (box.extend if isinstance(box, list | deque) else box.update)(before)

        self._undo.append(undo)

    def put_back(self) -> None:
        """As it was."""
        with torch.no_grad():
            for undo in self._undo:
                undo()


def _same(box: Any, before: Any) -> bool:
    """By identity: there may be tensors."""
    if isinstance(box, set):
        return bool(box == before)
    if isinstance(box, dict):
        return box.keys() == before.keys() and all(box[key] is before[key] for key in box)
    return len(box) == len(before) and all(a is b for a, b in zip(box, before, strict=True))


@contextmanager
def rehearsed(modules: Sequence[nn.Module], given: Given) -> Iterator[Given]:
    """Within, the modules may take steps that leave no trace. Gives what they may be given.

    It has the numbers and the memory of what is given, and leads to nothing else that learns.
    """
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    with leaving_no_trace(tensors, None), undone(modules, given):
        yield Again(lambda t: t.detach().requires_grad_(t.requires_grad))(given)


@contextmanager
def undone(modules: Sequence[nn.Module], given: object = None) -> Iterator[None]:
    """Within, the modules may take steps; after, they and what is given are as they were.

    Gradients begin anew. Who wants to be told that one is there, as an optimizer that takes its
    step in the backward does, is not.
    """
    notes = Notes()
    notes.take(given)
    for module in modules:
        notes.take(module.__dict__)
        if getattr(module, "max_norm", None) is not None:  # an embedding that shortens its rows
            for parameter in module.parameters(recurse=False):
                notes.take_numbers(parameter)
    with _other_gradients(dict.fromkeys(p for m in modules for p in m._parameters.values())):
        try:
            yield
        finally:
            notes.put_back()


@contextmanager
def _other_gradients(parameters: Iterable[nn.Parameter | None]) -> Iterator[None]:
    learning = [p for p in parameters if p is not None]
    before = [(p, p.grad) for p in learning]
    told = [hooks for p in learning if (hooks := p._post_accumulate_grad_hooks)]
    whom = [dict(hooks) for hooks in told]
    for parameter in learning:
        parameter.grad = None
    for hooks in told:
        hooks.clear()
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        for hooks, were in zip(told, whom, strict=True):
            hooks.update(were)
