"""Modules tried out, and left as they were.

While a module is tried, copies stand in for its tensors and for what its Python attributes hold:
what the trial changes are those. The module itself is not copied: some cannot be, and some have a
hook or an attribute that leads to the whole model.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

DeviceLike = torch.device | str | None  # None: where each tensor is


class StructureCopier:
    """The same value once more, with other tensors; what was one thing in two places stays one.

    Containers and plain objects are rebuilt, generators copied. Modules and whatever can be called
    stay themselves.
    """

    def __init__(self, map_tensor: Callable[[Tensor], Tensor]) -> None:
        self._map_tensor = map_tensor
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id; the original, to keep that in use

    def __call__(self, value: Any) -> Any:
        """The value once more."""
        if id(value) not in self._copies:
            self._copies[id(value)] = value, self._copy_value(value)
        return self._copies[id(value)][1]

    def keep_original(self, value: Any) -> None:
        """This one stays itself, too."""
        self._copies[id(value)] = value, value

    def _copy_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._map_tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, torch.jit.ScriptModule):
            with torch.no_grad():  # or its parameters would be computed from the original's
                return copy.deepcopy(value)  # its state is not in Python
        if type(value).__module__.partition(".")[0] == "numpy":
            return copy.deepcopy(value)  # an array, or a generator
        if callable(value) or isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple | frozenset):
            found = map(self, value)
            return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
        if isinstance(value, dict | list | set) or is_plain_object(value):
            return self._copy_container(value)
        return value

    def _copy_container(self, value: Any) -> Any:
        try:
            new = copy.copy(value)
        except Exception:
            return value  # it has reasons to be the only one
        if new is value or type(new) is not type(value):
            return value
        self._copies[id(value)] = value, new  # it may contain itself
        if isinstance(value, dict):
            for key, entry in value.items():
                dict.__setitem__(new, key, self(entry))
        elif isinstance(value, list):
            new[:] = map(self, value)
        elif isinstance(value, set):
            new.clear()
            new.update(map(self, value))
        own = getattr(value, "__dict__", None)
        if own:
            new.__dict__.update({name: self(entry) for name, entry in own.items()})
        return new


def is_plain_object(value: Any) -> bool:
    """Is it an object that is no more than its attributes, or Python's own random numbers?"""
    if isinstance(value, random.Random):
        return True
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(type(value), "__del__"):
        return False  # to let go of a copy may let go of more
    return isinstance(getattr(value, "__dict__", None), dict)


def build_tensor_copier(device: DeviceLike) -> Callable[[Tensor], Tensor]:
    """Copies tensors to the device. For what has no memory they make some up."""

    def copy_tensor(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
            kind: Tensor = copy.deepcopy(tensor)
            return kind if device is None else kind.to(device)
        there = not tensor.is_meta
        new = tensor.detach().to(device, copy=True) if there else _synthesize_tensor(tensor, device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(new, tensor.requires_grad)
        return new.requires_grad_(tensor.requires_grad)

    return copy_tensor


def _synthesize_tensor(tensor: Tensor, device: DeviceLike) -> Tensor:
    """Small numbers; zeros where they could be an index."""
    new = torch.zeros_like(tensor, device=device or "cpu", requires_grad=False)
    return new.normal_(std=0.02) if new.is_floating_point() or new.is_complex() else new


@contextmanager
def isolated_module(module: nn.Module, device: DeviceLike) -> Iterator[nn.Module]:
    """Within, the module computes with copies of what it has, on the device; it may be run."""
    again = StructureCopier(build_tensor_copier(device))
    if isinstance(module, torch.jit.ScriptModule):
        yield again(module).to(device)
        return
    parts = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(part, part.__class__, part.__dict__) for part in parts]
    hooks = [(found, dict(found)) for part in parts for found in _iter_hook_dicts(part)]
    for found, _ in hooks:
        again.keep_original(found)  # whoever removes a hook does it there
    copies = [again(part.__dict__) for part in parts]
    try:
        for part, state in zip(parts, copies, strict=True):
            object.__setattr__(part, "__dict__", state)
        for part in parts:
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()
        yield module
    finally:
        for part, kind, state in before:
            object.__setattr__(part, "__class__", kind)  # one that was lazy has another now
            object.__setattr__(part, "__dict__", state)
        for found, were in hooks:
            found.clear()
            found.update(were)


def _iter_hook_dicts(module: nn.Module) -> Iterator[dict[Any, Any]]:
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            yield value


@contextmanager
def preserve_global_state(
    tensors: Iterable[Any], device: DeviceLike
) -> Iterator[Callable[[], None]]:
    """Random states kept, gradients on (which `inference_mode(False)` does under no_grad, too).

    Gives a function that waits for the devices: the one named, and those of the tensors.
    """
    devices = {found.device for found in tensors if isinstance(found, Tensor)}
    if device is not None:
        devices.add(torch.device(device))
    gpus = [found for found in devices if found.type == "cuda"]

    def synchronize() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    with (
        torch.random.fork_rng(gpus),
        _preserve_host_rng(),
        torch.inference_mode(False),
        torch.autograd.set_multithreading_enabled(False),  # as a pipe's workers do
    ):
        yield synchronize


@contextmanager
def _preserve_host_rng() -> Iterator[None]:
    """Python's, and NumPy's if anybody uses it."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(of_numpy)


def iter_module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Its parameters and buffers, each once."""
    return chain(module.parameters(), module.buffers())


# -------------------------------------------------------------------------------------------------
# Modules that take a step as they are, with everything undone that it does to them.
#
# Nothing stands in for anything: what others know of the modules, and of their tensors, stays true
# while they compute. So what they hold is noted before, and put back after. Most parameters are not
# copied: a step gives them gradients, and no other numbers.
# -------------------------------------------------------------------------------------------------

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
