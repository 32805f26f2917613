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

from penstock.partition.aside import StructureCopier, is_plain_object, preserve_global_state

InputT = TypeVar("InputT")

_MUTABLE_CONTAINERS = (dict, list, set, deque)


class ObjectSnapshot:
    """What values hold, down to tensors, lists and plain objects; to be put back."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id, to keep that in use
        self._restorers: list[Callable[[], object]] = []

    def record(self, value: Any) -> None:
        """Of a value, and of all that is in it. Modules and functions are not looked into."""
        if id(value) in self._seen or isinstance(value, nn.Parameter | nn.Module | torch.Size):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.record_tensor(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._restorers.append(partial(value.set_state, state))
        elif isinstance(value, _MUTABLE_CONTAINERS):
            self._record_container(value)
        elif isinstance(value, tuple | frozenset):
            for one in value:
                self.record(one)
        elif not callable(value) and is_plain_object(value):
            self._record_container(value.__dict__)

    def record_tensor(self, tensor: Tensor) -> None:
        """Of any tensor, a parameter too."""
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_inference():
            return
        before = tensor.detach().clone()

        def restore_tensor() -> None:
            if not torch.equal(tensor, before):  # running statistics change without a new version
                tensor.detach().copy_(before)

        self._restorers.append(restore_tensor)

    def _record_container(self, container: Any) -> None:
        try:
            before = copy.copy(container)
        except Exception:
            return  # it has reasons to be the only one
        for one in list(container.values() if isinstance(container, dict) else container):
            self.record(one)

        def restore_container() -> None:
            if not _has_same_items(container, before):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(
                    before
                )

        self._restorers.append(restore_container)

    def restore(self) -> None:
        """As it was."""
        with torch.no_grad():
            for undo in self._restorers:
                undo()


def _has_same_items(container: Any, before: Any) -> bool:
    """By identity: there may be tensors."""
    if isinstance(container, set):
        return bool(container == before)
    if isinstance(container, dict):
        return container.keys() == before.keys() and all(
            container[key] is before[key] for key in container
        )
    return len(container) == len(before) and all(
        a is b for a, b in zip(container, before, strict=True)
    )


@contextmanager
def isolated_step(modules: Sequence[nn.Module], inputs: InputT) -> Iterator[InputT]:
    """Within, the modules may take steps that leave no trace. Gives what they may be given.

    It has the numbers and the memory of what is given, and leads to nothing else that learns.
    """
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    with preserve_global_state(tensors, None), restored_after(modules, inputs):
        yield StructureCopier(lambda t: t.detach().requires_grad_(t.requires_grad))(inputs)


@contextmanager
def restored_after(modules: Sequence[nn.Module], inputs: object = None) -> Iterator[None]:
    """Within, the modules may take steps; after, they and what is given are as they were.

    Gradients begin anew. Who wants to be told that one is there, as an optimizer that takes its
    step in the backward does, is not.
    """
    notes = ObjectSnapshot()
    notes.record(inputs)
    for module in modules:
        notes.record(module.__dict__)
        if getattr(module, "max_norm", None) is not None:  # an embedding that shortens its rows
            for parameter in module.parameters(recurse=False):
                notes.record_tensor(parameter)
    with _isolate_gradients(dict.fromkeys(p for m in modules for p in m._parameters.values())):
        try:
            yield
        finally:
            notes.restore()


@contextmanager
def _isolate_gradients(parameters: Iterable[nn.Parameter | None]) -> Iterator[None]:
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
