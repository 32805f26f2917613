"""How a dry run leaves everything as it was, and computes without numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ArgumentError
from penstock.model.meta_init import (
    MetaTensorSlot,
    allocate_like,
    find_initializers,
    has_meta_tensors,
    initialize_module,
)
from penstock.model.traced.containers import call_tracking_containers, preserve_containers
from penstock.model.traced.pytrees import FunctionCall, flatten, unflatten
from penstock.model.traced.torch_functions import find_unversioned_writes, is_in_place
from penstock.model.traced.trace import Trace

# -------------------------------------------------------------------------------------------------
# Tensors without numbers, all on one device, wherever a model's own are.
# -------------------------------------------------------------------------------------------------


class FakeTensorFactory:
    """Makes them, one for each tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._moved_fakes: dict[int, tuple[Tensor, Tensor]] = {}  # with what they were made of

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """The same without numbers."""
        if isinstance(tensor, FakeTensor) and tensor.device == self.device:
            return tensor
        if tensor.device == self.device:
            if tensor.is_leaf:
                return self.mode.from_tensor(tensor)
            return self.mode.from_tensor(tensor.detach()).requires_grad_()  # else it would warn
        if id(tensor) not in self._moved_fakes:
            with self.mode:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._moved_fakes[id(tensor)] = made.requires_grad_(tensor.requires_grad), tensor
        return self._moved_fakes[id(tensor)][0]


# -------------------------------------------------------------------------------------------------

# What comes next, or its shape, depends on numbers.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)

# A fake tensor cannot tell what an operation gives, or is refused for what a real one may be.
_FAKE_TENSOR_ERRORS = (
    *DATA_DEPENDENT_ERRORS,
    UnsupportedOperatorException,
    NotImplementedError,
    RuntimeError,
)


@contextmanager
def preserve_model_state(model: nn.Module, parents: Sequence[nn.Module]) -> Iterator[None]:
    """Within, whatever is set on modules, drawn, or written to the parents' buffers is undone."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    parts = [[dict(m.__dict__), dict(m._parameters), dict(m._buffers)] for m in modules]
    held_by = [*parents, *(m for m in modules if any(map(_is_scalar, m._buffers.values())))]
    buffers = list(
        dict.fromkeys(
            b for m in held_by for b in m._buffers.values() if b is not None and not b.is_meta
        )
    )
    copies = [buffer.detach().clone() for buffer in buffers]
    with (
        _preserve_rng_state(),
        _preserve_grads(model),
        _force_eager(),
        preserve_containers(modules),
    ):
        try:
            yield
        finally:
            for module, (attributes, parameters, held) in zip(modules, parts, strict=True):
                attributes["_parameters"].clear()
                attributes["_parameters"].update(parameters)
                attributes["_buffers"].clear()
                attributes["_buffers"].update(held)
                _restore_attributes(module, attributes)
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    if not torch.equal(buffer, copy):
                        buffer.copy_(copy)


def _is_scalar(buffer: Tensor | None) -> bool:
    """One number: that is changed also without numbers, as the count of a BatchNorm is."""
    return buffer is not None and buffer.numel() == 1


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """If anything was set; what may be tensors, alone or in lists, is not compared by value."""
    now = module.__dict__
    if now.keys() != attributes.keys() or any(now[key] is not attributes[key] for key in now):
        now.clear()
        now.update(attributes)


@contextmanager
def _preserve_grads(model: nn.Module) -> Iterator[None]:
    before = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def _preserve_rng_state() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


@contextmanager
def _force_eager() -> Iterator[None]:
    """Within, what is compiled runs as it was written: else the compiler would give it up."""
    if "torch._dynamo" not in sys.modules:  # it takes seconds to load
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class UnitOriginMode(TorchDispatchMode):
    """Marks every tensor that is made while a unit computes, so that one that gets out is known."""

    def __init__(self, unit: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit = unit
        self.used_rng = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ever."""
        self.used_rng |= torch.Tag.nondeterministic_seeded in func.tags
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, FakeTensor):
                one.made_in = self._unit  # type: ignore[attr-defined]
        return found


def run_on_fakes(
    fake_factory: FakeTensorFactory,
    unit: str,
    target: Callable[..., Any],
    args: Any,
    kwargs: Any,
    known_tensors: Mapping[int, Tensor],
) -> tuple[Any, bool]:
    """What a unit or a function gives, of fake arguments, and whether it draws random numbers.

    Where a unit needs numbers, it gets some: those that are `known`, by fake arguments, and any
    others. A function between units does not, if what it gives depends on them.
    """
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    before = [dict(module.__dict__) for module in modules]
    try:
        with (
            fake_factory.mode,
            UnitOriginMode(unit) as marking,
            _replace_module_tensors(modules, fake_factory.from_tensor),
        ):
            return _call_target(target, args, kwargs), marking.used_rng
    except _FAKE_TENSOR_ERRORS as error:
        if not unit and isinstance(error, DATA_DEPENDENT_ERRORS):
            raise
    for module, attributes in zip(modules, before, strict=True):
        _restore_attributes(module, attributes)  # what it keeps for the next time has no numbers
    return run_on_dummy_data(fake_factory, unit, target, args, kwargs, known_tensors), True


def _call_target(target: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives; of a unit, also what it puts into the lists and dicts it is given."""
    if isinstance(target, nn.Module):
        return call_tracking_containers(target, args, kwargs)
    return target(*args, **kwargs)


@contextmanager
def _replace_module_tensors(
    modules: Sequence[nn.Module], transform: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Within, the modules' own parameters and buffers are what they are changed to."""
    own = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]  # that has no dicts
    homes: list[dict[str, Any]] = [h for m in own for h in (m._parameters, m._buffers) if h]
    before = [dict(home) for home in homes]
    for home in homes:
        for name, tensor in home.items():
            if tensor is not None:
                home[name] = transform(tensor)
    try:
        yield
    finally:
        for home, held in zip(homes, before, strict=True):
            home.clear()
            home.update(held)


def make_fake_output(fake_factory: FakeTensorFactory, leaf: Any, unit: str) -> Any:
    """The same without numbers, if it is a tensor, made in the unit of that name."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = fake_factory.from_tensor(leaf.detach())
    made.requires_grad_(leaf.requires_grad)
    made.made_in = unit  # type: ignore[attr-defined]
    return made


def run_on_dummy_data(
    fake_factory: FakeTensorFactory,
    unit: str,
    target: Any,
    args: Any,
    kwargs: Any,
    known_tensors: Mapping[int, Tensor],
) -> Any:
    """The same, on numbers that are there for their shapes alone, but for those that are known."""
    leaves, spec = flatten((args, kwargs))
    some = [
        known_tensors[id(x)].clone() if id(x) in known_tensors else make_dummy_tensor(x)
        for x in leaves
    ]
    same = {id(real): x for real, x in zip(some, leaves, strict=True) if isinstance(x, Tensor)}
    leaves, spec = flatten(_run_on_real_tensors(target, *unflatten(some, spec)))
    return unflatten(
        [same[id(x)] if id(x) in same else make_fake_output(fake_factory, x, unit) for x in leaves],
        spec,
    )


def _run_on_real_tensors(target: Any, real_args: Any, real_kwargs: Any) -> Any:
    """The unit's own buffers are as before, after it."""
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    with _replace_module_tensors(
        modules, lambda t: make_dummy_tensor(t) if isinstance(t, FakeTensor) else t
    ):
        buffers = [b for m in modules for b in m.buffers(recurse=False)]
        copies = [buffer.detach().clone() for buffer in buffers]
        try:
            return _call_target(target, real_args, real_kwargs)
        finally:
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    buffer.copy_(copy)


def make_dummy_tensor(leaf: Any) -> Any:
    """Of a tensor's shape and kind."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        made = torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device) * 0.1
        return made.requires_grad_(leaf.requires_grad)
    if leaf.dtype is torch.bool:
        return torch.ones(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def make_shape_placeholder(tensor: Tensor) -> Tensor:
    """The same to look at, in next to no memory."""
    if tensor.layout is not torch.strided:
        return tensor
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def get_versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place; -1 where nobody counts."""
    return [-1 if t.is_inference() else t._version for t in tensors]


def find_mutated(
    func: Any,
    tensors: Sequence[Tensor],
    versions_before: Sequence[int],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> list[Tensor]:
    """Those that were changed in place since, by a function called with these arguments."""
    now = get_versions(tensors)
    found = [t for t, a, b in zip(tensors, now, versions_before, strict=True) if a != b]
    found += find_unversioned_writes(func, args, kwargs)
    if not found and -1 in versions_before and func is not None and is_in_place(func):
        return list(tensors[:1])  # in inference mode
    return found


def select_originals(
    tensors: Sequence[Tensor], fake_tensors: Sequence[Tensor], mutated: Sequence[Tensor]
) -> list[Tensor]:
    """The arguments for which those stood that were changed."""
    ids = set(map(id, mutated))
    return [t for t, one in zip(tensors, fake_tensors, strict=True) if id(one) in ids]


def get_rng_state(device: torch.device) -> Tensor:
    """Of the generators that a forward there draws from."""
    if device.type != "cuda":
        return torch.get_rng_state()
    return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])


# -------------------------------------------------------------------------------------------------
# A dry run of a model that was built on meta: what stands in for tensors that have no memory.
#
# For a parameter, and for what units have, a fake one on the device of the inputs. The buffers of the
# parents are small, and the forward may decide by them: they are set as the model sets them.
# -------------------------------------------------------------------------------------------------


@dataclass
class UninitializedBuffers:
    """The buffers of parents that nothing sets before a checkpoint is loaded."""

    names: set[str] = field(default_factory=set)

    def check_not_read(self, trace: Trace) -> None:
        """The forward must not decide by them."""
        if not self.names:
            return
        without = {at for at, value in enumerate(trace.values) if value.buffer_name in self.names}
        for step in trace.nodes:
            if without.isdisjoint(step.inputs):
                continue
            if step.is_guard:
                raise ArgumentError(
                    f"at {step.location}, the forward looks at numbers that follow from a buffer, "
                    f"{', '.join(sorted(self.names))}, and the model was built on meta, where it "
                    "has none: build the buffer under torch.device('cpu'), or let its module's "
                    "reset_parameters() set it"
                )
            without |= {
                *(step.output.value_indices if step.output else ()),
                *step.mutations.values(),
            }


@contextmanager
def replace_meta_tensors(
    model: nn.Module, units: Collection[nn.Module], fake_factory: FakeTensorFactory
) -> Iterator[UninitializedBuffers]:
    """Within, nothing of the model is on meta."""
    unset = UninitializedBuffers()
    if not has_meta_tensors(model):
        yield unset
        return
    device = fake_factory.device
    inside = {module for unit in units for module in unit.modules()}
    before = [(m, dict(m._parameters), dict(m._buffers), dict(m.__dict__)) for m in model.modules()]
    made: dict[Tensor, Tensor] = {}
    blank: list[MetaTensorSlot] = []
    try:
        for path, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for key, old in held.items():
                    if old is None or not old.is_meta:
                        continue
                    real = held is module._buffers and module not in inside
                    if old not in made:
                        made[old] = (
                            allocate_like(old, device) if real else fake_factory.from_tensor(old)
                        )
                        if real:
                            blank.append(
                                MetaTensorSlot(f"{path}.{key}" if path else key, module, key)
                            )
                    held[key] = made[old]
            _replace_meta_attributes(module, made)
        unset.names = set(_find_uninitialized(model, blank))
        yield unset
    finally:
        for module, parameters, buffers, attributes in before:
            module.__dict__.update(attributes)
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _replace_meta_attributes(module: nn.Module, replacements: dict[Tensor, Tensor]) -> None:
    for key, value in module.__dict__.items():
        if isinstance(value, Tensor) and value in replacements:
            module.__dict__[key] = replacements[value]


def _find_uninitialized(model: nn.Module, slots: Sequence[MetaTensorSlot]) -> Iterator[str]:
    """The names of those that their modules do not set."""
    was = [(slot, slot.tensor, slot.tensor._version) for slot in slots if slot.tensor is not None]
    setters = find_initializers(model)
    with torch.random.fork_rng([]):
        for module in dict.fromkeys(slot.module for slot in slots):
            initialize_module(module, setters, run_reset_parameters=True, run_init_weights=True)
    return (slot.name for slot, tensor, version in was if slot.is_uninitialized(tensor, version))


# -------------------------------------------------------------------------------------------------
# Packed sequences between units: how long each one is follows from the inputs.
#
# `pack_padded_sequence` gives the numbers of rows at each place, as a tensor, together with what is
# packed, which follows from units. Recurrent layers and `pad_packed_sequence` need these numbers.
# -------------------------------------------------------------------------------------------------

PACK_PADDED: Any = torch._VF._pack_padded_sequence
PAD_PACKED: Any = torch._VF._pad_packed_sequence


class PackedSequenceLengths:
    """Remembers the numbers of rows."""

    def __init__(self, fake_factory: FakeTensorFactory) -> None:
        self._fake_factory = fake_factory
        self._known_integers: dict[int, Tensor] = {}  # by the identity of what has no numbers

    def find_known_integers(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The numbers of those that have some, by identity."""
        return {
            id(t): self._known_integers[id(t)] for t in tensors if id(t) in self._known_integers
        }

    def compute(
        self, function_call: FunctionCall, input_only_tensors: dict[int, Tensor]
    ) -> Any | None:
        """What it gives, without the numbers of what is packed; None: not all lengths are known."""
        known = {**input_only_tensors, **self.find_known_integers(function_call.tensors)}
        if any(id(t) not in known for t in function_call.tensors if not t.is_floating_point()):
            return None
        found, _ = function_call.call_with_mapped_tensors(
            lambda t: known[id(t)] if id(t) in known else make_dummy_tensor(t)
        )
        leaves, spec = flatten(found)
        made = [make_fake_output(self._fake_factory, leaf, "") for leaf in leaves]
        for fake, real in zip(made, leaves, strict=True):
            if isinstance(real, Tensor) and not real.is_floating_point():
                self._known_integers[id(fake)] = real
        return unflatten(made, spec)
