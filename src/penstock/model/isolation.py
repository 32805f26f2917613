"""Run something on modules, and restore everything afterwards.

`isolated` is a context in which modules may do anything to themselves. At its end they are bitwise
what they were, and all tensors and containers are the same objects as before, because stages,
proxies and captured graphs refer to them:

    attributes, training flags, hooks,      the same objects under the same names
    parameters and buffers by name
    lists, dicts, sets, plain objects       the same items
    values of tensors                       copied before, written back where they changed
    requires_grad, `tensor.data = other`    set back
    gradients                               taken away before, put back after
    random generators                       state set back: of Python, NumPy, every device, and
                                            those that attributes and `forward` refer to

With `map_tensor`, the modules compute with other tensors inside the context: with copies on another
device, or with fake tensors. No value has to be saved then.

A module object itself is never copied. Some modules cannot be copied, and some have a hook or an
attribute that refers to the whole model.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.model.traced.containers import has_same_contents, is_state_object, set_contents
from penstock.nested_values import find_referred_values
from penstock.stage.host_rng import HostRngState
from penstock.state_copy import (
    MODULE_INTERNALS,
    StructureCopier,
    TensorMap,
    Variable,
    is_of_numpy,
)

DeviceLike = torch.device | str | None  # None: each tensor stays on its device

# ---- random generators ---------------------------------------------------------------------------


@contextmanager
def preserve_rng(device: DeviceLike = None) -> Iterator[None]:
    """Restore all global random generators afterwards: of Python, NumPy and every device.

    Reading the state of an accelerator starts it. One that nothing has used yet is therefore left
    alone, unless `device`, on which the caller is going to compute, is an accelerator.
    """
    host_state, cpu_state = HostRngState(), torch.get_rng_state()
    accelerator = torch.accelerator.current_accelerator()
    device_module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    # Not every accelerator has these functions: Apple's GPUs do not.
    is_used = getattr(device_module, "is_initialized", lambda: False)() or (
        accelerator is not None
        and device is not None
        and torch.device(device).type == accelerator.type
    )
    device_states = device_module.get_rng_state_all() if is_used else None
    try:
        yield
    finally:
        host_state.restore()
        torch.set_rng_state(cpu_state)
        if device_states is not None:
            device_module.set_rng_state_all(device_states)


# ---- copies of tensors --------------------------------------------------------------------------


def build_tensor_copier(device: DeviceLike) -> TensorMap:
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
            parameter = nn.Parameter(new, tensor.requires_grad)
            for name, value in tensor.__dict__.items():  # of the user's own, as `main_grad`
                setattr(parameter, name, copy_tensor(value) if isinstance(value, Tensor) else value)
            return parameter
        return new.requires_grad_(tensor.requires_grad)

    return copy_tensor


def _synthesize_tensor(tensor: Tensor, device: DeviceLike) -> Tensor:
    """Return a tensor with small random floats, or with zeros, which are valid indices."""
    new = torch.zeros_like(tensor, device=device or "cpu", requires_grad=False)
    return new.normal_(std=0.02) if new.is_floating_point() or new.is_complex() else new


def iter_module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Iterate over the parameters and buffers of a module, each once."""
    return chain(module.parameters(), module.buffers())


# ---- snapshots -----------------------------------------------------------------------------------


_IMMUTABLE_TYPES = frozenset((bool, int, float, str, type(None)))
_TABLE_TYPES = frozenset((dict, OrderedDict))
_UNRECORDED_TYPES = (nn.Module, torch.Size)


class StateSnapshot:
    """A record of what modules hold, down to the tensors in lists and plain objects.

    `copy_value` tells for which tensors the values are copied. The values are kept in the memory of
    the host: there is more of it, and a snapshot must not count when GPU memory is measured.
    """

    def __init__(
        self, modules: Iterable[nn.Module], copy_value: Callable[[Tensor], bool] = lambda _: True
    ) -> None:
        self._copy_value = copy_value
        self._recorded: dict[int, Any] = {}  # by id; the object is kept so that its id stays taken
        self._restorers: list[Callable[[], object]] = []
        self._empty_tables: list[dict[Any, Any]] = []  # of hooks; a module has a dozen of them
        modules = list(modules)
        with torch.inference_mode(False), torch.no_grad():
            for module in modules:
                if isinstance(module, torch.jit.ScriptModule):  # its attributes are in C++
                    self.record([*module.parameters(), *module.buffers()])
                    continue
                self._record_module(module)
            for forward in {getattr(type(m), "forward", None) for m in modules}:
                for value in find_referred_values(forward).values():
                    if isinstance(value, torch.Generator | random.Random) or is_of_numpy(value):
                        self.record(value)

    def _record_module(self, module: nn.Module) -> None:
        """Record the attributes of a module. Most are plain values and empty tables."""
        attributes, kind = vars(module), type(module)
        before = attributes.copy()
        self._recorded[id(attributes)] = attributes
        for value in before.values():
            if type(value) in _TABLE_TYPES and not value:
                self._empty_tables.append(value)
            elif type(value) not in _IMMUTABLE_TYPES:
                self.record(value)

        def restore_module() -> None:
            if type(module) is not kind:  # a lazy module changes its class when it is run
                object.__setattr__(module, "__class__", kind)
            if not has_same_contents(attributes, before):
                set_contents(attributes, before)

        self._restorers.append(restore_module)

    def record(self, value: Any) -> None:
        """Record a value and everything in it, except for modules and functions."""
        kind = type(value)
        if kind in _IMMUTABLE_TYPES or id(value) in self._recorded:
            return
        if kind in _TABLE_TYPES:  # first: most values are parameters, buffers and their tables
            self._recorded[id(value)] = value
            if value:
                self._record_container(value)
            else:
                self._empty_tables.append(value)
            return
        is_tensor = kind is Tensor or kind is nn.Parameter
        if not is_tensor and isinstance(value, _UNRECORDED_TYPES):
            return
        if kind is tuple and _IMMUTABLE_TYPES.issuperset(map(type, value)):
            return  # such as the stride of a convolution
        self._recorded[id(value)] = value
        if is_tensor or isinstance(value, Tensor):
            self._record_tensor(value)
        elif isinstance(value, dict | list):  # first: other questions take more time
            self._record_container(value)
        elif isinstance(value, torch.Generator):
            self._restorers.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._restorers.append(partial(value.setstate, value.getstate()))
        elif is_of_numpy(value):
            self._record_numpy(value)
        elif isinstance(value, set | deque):
            self._record_container(value)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self.record(item)
        elif is_state_object(value):
            self._record_container(vars(value))

    def _record_tensor(self, tensor: Tensor) -> None:
        # Only the class of a wrapper, such as a DTensor, knows where its values are.
        is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        if is_wrapper or is_lazy(tensor) or tensor.layout is not torch.strided:
            return
        if tensor.is_inference():
            return
        alias, requires_grad = tensor.detach(), tensor.requires_grad
        value = None
        if self._copy_value(tensor) and not tensor.is_meta:
            value = alias.to("cpu", copy=True)

        def restore_tensor() -> None:
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if _get_memory(tensor) != _get_memory(alias):
                tensor.data = alias
            # Compare values: BatchNorm writes its running statistics without raising the version
            # counter. Write only on a change, because a write raises it for every tensor.
            if value is not None and not torch.equal(alias, value.to(alias.device)):
                alias.copy_(value)

        self._restorers.append(restore_tensor)

    def _record_numpy(self, value: Any) -> None:
        if hasattr(value, "set_state"):  # a RandomState
            self._restorers.append(partial(value.set_state, value.get_state()))
        elif hasattr(value, "bit_generator"):  # a Generator
            bits = value.bit_generator
            self._restorers.append(partial(setattr, bits, "state", bits.state))
        elif hasattr(value, "__setitem__") and value.flags.writeable:  # an array
            self._restorers.append(partial(value.__setitem__, ..., value.copy()))

    def _record_container(self, container: Any) -> None:
        try:
            before = copy.copy(container)
        except Exception:  # a subclass that refuses to be copied
            return
        for item in list(container.values() if isinstance(container, dict) else container):
            self.record(item)

        def restore_container() -> None:
            if not has_same_contents(container, before):
                set_contents(container, before)

        self._restorers.append(restore_container)

    def restore(self) -> None:
        """Put back everything that was recorded and has changed."""
        with torch.inference_mode(False), torch.no_grad():
            for restore in self._restorers:
                restore()
            for table in self._empty_tables:
                if table:
                    table.clear()


def _get_memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@contextmanager
def preserve_gradients(parameters: Iterable[Tensor | None]) -> Iterator[None]:
    """Take gradients and gradient hooks away from the parameters, and put them back afterwards.

    A hook on an accumulated gradient may belong to an optimizer that steps during the backward.
    """
    present = {id(p): p for p in parameters if p is not None}.values()
    before = [(p, p.grad, dict(p._post_accumulate_grad_hooks or {})) for p in present]
    for parameter, gradient, hooks in before:
        if gradient is not None:
            parameter.grad = None
        if hooks:
            parameter._post_accumulate_grad_hooks.clear()
    try:
        yield
    finally:
        for parameter, gradient, hooks in before:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if hooks:
                parameter._post_accumulate_grad_hooks.update(hooks)


# ---- isolation -----------------------------------------------------------------------------------

InputT = TypeVar("InputT")


@contextmanager
def isolated(
    modules: Sequence[nn.Module],
    *,
    inputs: object = None,
    map_tensor: TensorMap | None = None,
    copy_value: Callable[[Tensor], bool] = lambda _: True,
    variables: Sequence[Variable] = (),
) -> Iterator[None]:
    """Restore modules, their gradients and all random generators afterwards.

    Args:
        modules: The modules, each with its submodules in the list.
        inputs: Values that are restored as well.
        map_tensor: Returns the tensor that a module computes with in place of one of its own.
        copy_value: Tells for which tensors the values are restored, if there is no `map_tensor`.
            A caller leaves out tensors that cannot be written, because copies take memory.
        variables: Variables outside of modules, which also get copies, if there is a `map_tensor`.
    """
    snapshot = StateSnapshot(modules, copy_value if map_tensor is None else lambda _: False)
    snapshot.record(inputs)
    parameters = [p for m in modules if _has_tables(m) for p in m._parameters.values()]
    with preserve_rng(), preserve_gradients(parameters):
        try:
            if map_tensor is not None:
                copier = StructureCopier(map_tensor)
                _replace_state(modules, copier)
                for variable in variables:
                    new = copier(variable.value)
                    if new is not variable.value:
                        variable.set(new)
            yield
        finally:
            snapshot.restore()
            for variable in variables:
                if not variable.is_set():
                    variable.set(variable.value)


def _has_tables(module: nn.Module | None) -> bool:
    """Return whether a module has its members in dicts. A ScriptModule has them in C++."""
    return not isinstance(module, torch.jit.ScriptModule)


def _replace_state(modules: Sequence[nn.Module], copier: StructureCopier) -> None:
    """Replace all tensors and attributes of modules by copies."""
    for module in filter(_has_tables, modules):
        tables: Any = module._parameters, module._buffers
        for table in tables:
            table.update({name: copier(tensor) for name, tensor in table.items()})
        scripted = {k: copier(m) for k, m in module._modules.items() if not _has_tables(m)}
        module._modules.update(scripted)
        attributes = vars(module)
        new = {
            name: copier(value)
            for name, value in attributes.items()
            if name not in MODULE_INTERNALS and type(value) not in _IMMUTABLE_TYPES
        }
        attributes.update(new)


@contextmanager
def enable_backward() -> Iterator[None]:
    """Compute gradients as a worker of a pipe does, whatever the caller's mode is.

    `inference_mode(False)` also enables gradients under `no_grad`. Autograd's own threads are off,
    as they are in the workers, so a measured backward takes as long as in a run.
    """
    with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def isolated_step(modules: Sequence[nn.Module], inputs: InputT) -> Iterator[InputT]:
    """Run steps that leave no trace in the modules; yields the inputs to run them with.

    The yielded inputs share memory with the given ones and are detached from their graph. A
    backward therefore ends there and gives no gradient to the modules that computed them.
    """
    with isolated(modules, inputs=inputs), enable_backward():
        yield StructureCopier(lambda t: t.detach().requires_grad_(t.requires_grad))(inputs)
