"""Run modules without side effects: two ways, for two purposes.

| | `isolated_module` | `isolated_step` |
|---|---|---|
| used for | timing one unit, maybe on another device | measuring the memory of a whole step |
| the module computes with | copies of its tensors and attributes | its own tensors |
| afterwards | the original attributes are put back | changed values are restored |
| cost | memory for a copy of everything | a snapshot of buffers and attributes only |

Both restore buffers, Python attributes, gradients and random states. `isolated_step` keeps the
identity of all tensors, which the pipe needs: stages, proxies and captured graphs refer to them.
Parameters are not part of its snapshot, because a step without an optimizer does not write them.

In both, a module object itself is never copied. Some modules cannot be copied, and some have a hook
or an attribute that refers to the whole model.
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

from penstock.device.accelerator import fork_rng, synchronize

DeviceLike = torch.device | str | None  # None: each tensor stays on its device


# ---- copies of everything that a module holds ----------------------------------------------------


class StructureCopier:
    """A function that copies nested values and maps the tensors in them.

    Containers, plain objects and random generators are copied. Modules, functions and other
    callables are not. An object that occurs in two places is copied once, so tied tensors stay
    tied. `copy.deepcopy` cannot be used: it would also copy modules and whatever they refer to.
    """

    def __init__(self, map_tensor: Callable[[Tensor], Tensor]) -> None:
        self._map_tensor = map_tensor
        # By id of the original. The original is kept, too, so that its id is not used again.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """Return a copy of the value, the same one each time."""
        if id(value) not in self._copies:
            self._copies[id(value)] = value, self._copy_value(value)
        return self._copies[id(value)][1]

    def keep_original(self, value: Any) -> None:
        """Use this object itself in place of a copy."""
        self._copies[id(value)] = value, value

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
        if type(value).__module__.partition(".")[0] == "numpy":
            return copy.deepcopy(value)  # an array or a generator; numpy need not be installed
        if callable(value) or isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple | frozenset):
            items = map(self, value)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict | list | set) or is_plain_object(value):
            return self._copy_container(value)
        return value

    def _copy_container(self, value: Any) -> Any:
        try:
            new = copy.copy(value)
        except Exception:  # an object that refuses to be copied
            return value
        if new is value or type(new) is not type(value):
            return value
        self._copies[id(value)] = value, new  # before the items, because it may contain itself
        if isinstance(value, dict):
            for key, entry in value.items():
                dict.__setitem__(new, key, self(entry))
        elif isinstance(value, list):
            new[:] = map(self, value)
        elif isinstance(value, set):
            new.clear()
            new.update(map(self, value))
        attributes = getattr(value, "__dict__", None)
        if attributes:
            new.__dict__.update({name: self(entry) for name, entry in attributes.items()})
        return new


def is_plain_object(value: Any) -> bool:
    """Return whether an object consists of its attributes alone, or is a `random.Random`.

    Objects of PyTorch have state in C++. An object with a `__del__` may release something, and so
    would its copy.
    """
    if isinstance(value, random.Random):
        return True
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(type(value), "__del__"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def build_tensor_copier(device: DeviceLike) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to the device.

    A tensor on `meta` has no values, so its copy gets synthetic ones. Parameters stay parameters.
    """

    def copy_tensor(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
            # A subclass of Parameter, such as a lazy one: only it knows how to copy itself.
            clone: Tensor = copy.deepcopy(tensor)
            return clone if device is None else clone.to(device)
        real = not tensor.is_meta
        new = tensor.detach().to(device, copy=True) if real else _synthesize_tensor(tensor, device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(new, tensor.requires_grad)
        return new.requires_grad_(tensor.requires_grad)

    return copy_tensor


def _synthesize_tensor(tensor: Tensor, device: DeviceLike) -> Tensor:
    """Return a tensor with small random floats, or with zeros, which are valid indices."""
    new = torch.zeros_like(tensor, device=device or "cpu", requires_grad=False)
    return new.normal_(std=0.02) if new.is_floating_point() or new.is_complex() else new


@contextmanager
def isolated_module(module: nn.Module, device: DeviceLike) -> Iterator[nn.Module]:
    """Let a module compute with copies of its tensors and attributes, on the device.

    Inside the context the `__dict__` of every submodule is replaced by a copy. Afterwards the
    original ones are put back, so nothing that the module did to itself remains.
    """
    copier = StructureCopier(build_tensor_copier(device))
    if isinstance(module, torch.jit.ScriptModule):
        yield copier(module).to(device)
        return
    parts = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(part, part.__class__, part.__dict__) for part in parts]
    # A hook's handle refers to the dict that the hook is in. A hook that removes itself must find
    # that dict in use. So the dicts are not copied, and their contents are restored.
    hooks = [(hook_dict, dict(hook_dict)) for part in parts for hook_dict in _iter_hook_dicts(part)]
    for hook_dict, _ in hooks:
        copier.keep_original(hook_dict)
    copies = [copier(part.__dict__) for part in parts]
    try:
        for part, state in zip(parts, copies, strict=True):
            object.__setattr__(part, "__dict__", state)  # not through `nn.Module.__setattr__`
        for part in parts:
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()  # cuDNN needs the copied weights in one block, too
        yield module
    finally:
        for part, kind, state in before:
            object.__setattr__(part, "__class__", kind)  # a lazy module changes its class when run
            object.__setattr__(part, "__dict__", state)
        for hook_dict, entries in hooks:
            hook_dict.clear()
            hook_dict.update(entries)


def _iter_hook_dicts(module: nn.Module) -> Iterator[dict[Any, Any]]:
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            yield value


@contextmanager
def preserve_global_state(
    tensors: Iterable[Any], device: DeviceLike
) -> Iterator[Callable[[], None]]:
    """Restore random states afterwards, and compute gradients whatever the caller's mode is.

    `inference_mode(False)` also enables gradients under `no_grad`. Autograd's own threads are off,
    as they are in the workers of a pipe, so a measured backward takes as long as in a run.

    The context yields a function that waits for the device and for those of the tensors.
    """
    devices = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    if device is not None:
        devices.add(torch.device(device))

    def synchronize_all() -> None:
        for used in devices:
            synchronize(used)

    with (
        fork_rng(devices),
        _preserve_host_rng(),
        torch.inference_mode(False),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield synchronize_all


@contextmanager
def _preserve_host_rng() -> Iterator[None]:
    """Restore the global random states of Python, and of NumPy if it is imported."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


def iter_module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Iterate over the parameters and buffers of a module, each once."""
    return chain(module.parameters(), module.buffers())


# ---- a snapshot that is restored -----------------------------------------------------------------
#
# The modules run a step with their own tensors. Their state is recorded before and restored after:
#
#     buffers, tensors in attributes      values copied back where they changed
#     lists, dicts, sets, plain objects   items put back, compared by identity
#     random generators                   state set back
#     gradients, gradient hooks           taken away before, put back after
#     parameters                          not recorded: a step without an optimizer leaves them

InputT = TypeVar("InputT")

_MUTABLE_CONTAINERS = (dict, list, set, deque)


class ObjectSnapshot:
    """A record of what objects hold, down to tensors, lists and plain objects."""

    def __init__(self) -> None:
        self._recorded: dict[int, Any] = {}  # by id; the object is kept so that its id stays taken
        self._restorers: list[Callable[[], object]] = []

    def record(self, value: Any) -> None:
        """Record a value and everything in it, except for modules, parameters and functions."""
        if id(value) in self._recorded or isinstance(value, nn.Parameter | nn.Module | torch.Size):
            return
        self._recorded[id(value)] = value
        if isinstance(value, Tensor):
            self.record_tensor(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._restorers.append(partial(value.set_state, state))
        elif isinstance(value, _MUTABLE_CONTAINERS):
            self._record_container(value)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self.record(item)
        elif not callable(value) and is_plain_object(value):
            self._record_container(value.__dict__)

    def record_tensor(self, tensor: Tensor) -> None:
        """Record the values of a tensor, also of a parameter.

        Tensors on `meta` have no values. Sparse tensors and inference tensors cannot be written
        back, so they are left out.
        """
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_inference():
            return
        before = tensor.detach().clone()

        def restore_tensor() -> None:
            # Compare values: BatchNorm writes its running statistics without raising the version
            # counter. Write only on a change, because a write raises it for every tensor.
            if not torch.equal(tensor, before):
                tensor.detach().copy_(before)

        self._restorers.append(restore_tensor)

    def _record_container(self, container: Any) -> None:
        try:
            before = copy.copy(container)
        except Exception:  # a subclass that refuses to be copied
            return
        for item in list(container.values() if isinstance(container, dict) else container):
            self.record(item)

        def restore_container() -> None:
            if not _has_same_items(container, before):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(
                    before
                )

        self._restorers.append(restore_container)

    def restore(self) -> None:
        """Put back everything that was recorded and has changed."""
        with torch.no_grad():
            for undo in self._restorers:
                undo()


def _has_same_items(container: Any, before: Any) -> bool:
    """Compare items by identity, because `==` of tensors is another tensor."""
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
    """Run steps that leave no trace in the modules; yields the inputs to run them with.

    The yielded inputs share memory with the given ones and are detached from their graph. A
    backward therefore ends there and gives no gradient to the modules that computed them.
    """
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    with preserve_global_state(tensors, None), restored_after(modules, inputs):
        yield StructureCopier(lambda t: t.detach().requires_grad_(t.requires_grad))(inputs)


@contextmanager
def restored_after(modules: Sequence[nn.Module], inputs: object = None) -> Iterator[None]:
    """Restore the modules and the inputs after the context.

    Gradients are None at the start of the context. Hooks on accumulated gradients do not run, since
    they may belong to an optimizer that steps during the backward.
    """
    snapshot = ObjectSnapshot()
    snapshot.record(inputs)
    for module in modules:
        snapshot.record(module.__dict__)
        # `nn.Embedding(max_norm=...)` rescales rows of its weight in place during the forward.
        if getattr(module, "max_norm", None) is not None:
            for parameter in module.parameters(recurse=False):
                snapshot.record_tensor(parameter)
    with _isolate_gradients(dict.fromkeys(p for m in modules for p in m._parameters.values())):
        try:
            yield
        finally:
            snapshot.restore()


@contextmanager
def _isolate_gradients(parameters: Iterable[nn.Parameter | None]) -> Iterator[None]:
    """Take gradients and gradient hooks away from the parameters, and put them back afterwards."""
    present = [p for p in parameters if p is not None]
    before = [(p, p.grad) for p in present]
    hook_dicts = [hooks for p in present if (hooks := p._post_accumulate_grad_hooks)]
    saved_hooks = [dict(hooks) for hooks in hook_dicts]
    for parameter in present:
        parameter.grad = None
    for hooks in hook_dicts:
        hooks.clear()
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        for hooks, entries in zip(hook_dicts, saved_hooks, strict=True):
            hooks.update(entries)
