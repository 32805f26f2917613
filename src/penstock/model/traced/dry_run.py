"""Run a model without computing it.

A dry run executes units and operations on fake tensors, which have a shape and no contents. It is
isolated (`model/isolation.py`), so it leaves no trace. This module has the parts that the tracer
needs for it:

- `FakeTensorFactory` makes the fake tensors.
- `run_on_fakes` executes a unit or a function, and falls back to `run_on_dummy_data` where PyTorch
  has no fake implementation.
- `find_mutated` and its helpers find in-place changes.
- `replace_meta_tensors` lets a model that was built on the meta device run.
- `PackedSequenceLengths` follows the lengths of packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.device.device import read_rng_states
from penstock.errors import ArgumentError
from penstock.model.isolation import StateSnapshot, build_tensor_copier
from penstock.model.meta_init import (
    MetaTensorSlot,
    allocate_like,
    find_initializers,
    has_meta_tensors,
    initialize_module,
    replace_tensor_attributes,
)
from penstock.model.traced.containers import call_tracking_containers
from penstock.model.traced.interception import (
    EscapedTensor,
    FunctionCall,
    get_source_location,
)
from penstock.model.traced.torch_functions import find_unversioned_writes, is_in_place
from penstock.model.traced.trace import Trace
from penstock.nested_values import flatten, iter_tensors, unflatten
from penstock.tensor_spec import TensorSpec, is_dense
from penstock.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    pytree,
)

# ---- fake tensors ------------------------------------------------------------------------------


class FakeTensorFactory:
    """A factory that makes one fake tensor for each tensor, all of them on one device.

    The stages of a model may be on several devices, and PyTorch refuses operations between devices
    even for fake tensors.
    """

    def __init__(self, device: torch.device, mode: FakeTensorMode | None = None) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode
        # Keys are `id(tensor)`. The tensor itself is kept as well, so that its id is not reused.
        self._moved_fakes: dict[int, tuple[Tensor, Tensor]] = {}

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor of a tensor: the same metadata, on the device of the factory."""
        if isinstance(tensor, FakeTensor) and tensor.device == self.device:
            return tensor
        if tensor.device == self.device:
            if not tensor.requires_grad or _is_leaf(tensor):
                return self.mode.from_tensor(tensor)
            # Without `detach`, PyTorch may warn that the `.grad` of a non-leaf is read.
            fake = self.mode.from_tensor(tensor.detach()).requires_grad_()
            with self.mode:
                return _make_non_leaf(fake)
        if id(tensor) not in self._moved_fakes:
            with self.mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            # It is made while a unit runs, and yet is not a tensor of that unit: a tied weight is
            # used by other units, too.
            fake.made_in = ""  # type: ignore[attr-defined]
            self._moved_fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad), tensor
        return self._moved_fakes[id(tensor)][0]


def _is_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf of its graph.

    PyTorch cannot tell for an output of `unbind` whose base was changed in place since.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


# The fake mode raises these where a result, or its shape, depends on tensor contents.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)

# The fake mode raises these where it cannot execute an operation, or where the operation refuses a
# fake tensor that would accept a real one.
_FAKE_TENSOR_ERRORS = (
    *DATA_DEPENDENT_ERRORS,
    UnsupportedOperatorException,
    NotImplementedError,
    RuntimeError,
)


class Write(NamedTuple):
    """A parameter or buffer that a unit changes: in place, or by assigning another tensor."""

    tensor: Tensor
    is_assigned: bool


# ---- executing on fake tensors -----------------------------------------------------------------


class UnitOriginMode(TorchDispatchMode):
    """A dispatch mode that marks each tensor with the unit in which it was made.

    If the forward uses a marked tensor that the unit did not return, the mark tells which unit it
    escaped from. The same holds if another unit uses it that was not called with it: one that is
    not among its `arguments`. The mode also notes whether an operation drew random numbers.
    """

    supports_higher_order_operators = True  # such as `flex_attention`; they have no tags

    def __init__(self, unit: str, arguments: Collection[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A change of a view in place also involves its base. Raising then, inside autograd's own
        # code, would end the process.
        bases = [a._base for a in arguments if isinstance(a, Tensor) and a._base is not None]
        self._arguments = [*arguments, *bases]  # kept alive: an id may be used again
        self._unit, self._argument_ids = unit, set(map(id, self._arguments))
        self.used_rng = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Execute an operation and mark the fake tensors that it returns."""
        self.used_rng |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        for tensor in iter_tensors((args, kwargs)) if self._unit else ():
            maker = getattr(tensor, "made_in", self._unit)
            if maker not in (self._unit, "") and id(tensor) not in self._argument_ids:
                raise EscapedTensor(maker, get_source_location())
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, FakeTensor):
                tensor.made_in = self._unit  # type: ignore[attr-defined]
        return result


def run_on_fakes(
    fake_factory: FakeTensorFactory,
    unit: str,
    target: Callable[..., Any],
    args: Any,
    kwargs: Any,
    known_tensors: Mapping[int, Tensor],
    written: list[Write] | None = None,
) -> tuple[Any, bool]:
    """Execute a unit or a function on fake arguments. Return its output, and whether it used RNG.

    Parameters and buffers of the unit that it writes to are noted in `written`.

    `unit` is the name of the unit, or empty for a function between units. `known_tensors` are real
    tensors, by the id of the fake arguments for which they stand.

    Where the fake mode fails, `target` is executed on dummy data instead. There is one exception: a
    function between units whose result depends on tensor contents raises one of
    `DATA_DEPENDENT_ERRORS`, because all stages need to know that result.
    """
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    before = StateSnapshot(modules, copy_value=lambda _: False)
    try:
        return call_with_fakes(fake_factory, unit, target, args, kwargs, written)
    except _FAKE_TENSOR_ERRORS as error:
        if not unit and isinstance(error, DATA_DEPENDENT_ERRORS):
            raise
    # A unit may have cached a fake tensor in an attribute before it failed. The run on dummy data
    # must not find it.
    before.restore()
    request = target, args, kwargs, known_tensors, written
    return run_on_dummy_data(fake_factory, unit, *request), True


def call_with_fakes(
    fake_factory: FakeTensorFactory,
    unit: str,
    target: Callable[..., Any],
    args: Any,
    kwargs: Any,
    written: list[Write] | None = None,
) -> tuple[Any, bool]:
    """Do what `run_on_fakes` does, but raise PyTorch's error where the fake mode fails."""
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    with (
        fake_factory.mode,
        UnitOriginMode(unit, flatten((args, kwargs))[0]) as origin_mode,
        _replace_module_tensors(modules, fake_factory.from_tensor, written),
    ):
        return _call_target(target, args, kwargs), origin_mode.used_rng


def _call_target(target: Any, args: Any, kwargs: Any) -> Any:
    """Call a unit or a function.

    The output of a unit includes its changes to the lists and dicts that it was called with.
    """
    if isinstance(target, nn.Module):
        return call_tracking_containers(target, args, kwargs)
    return target(*args, **kwargs)


@contextmanager
def _replace_module_tensors(
    modules: Sequence[nn.Module],
    transform: Callable[[Tensor], Tensor],
    written: list[Write] | None = None,
) -> Iterator[None]:
    """Replace the parameters and buffers of modules for the duration of the context.

    Those whose replacement was written to, or replaced once more, are noted in `written`.
    """
    # A ScriptModule keeps its tensors in C++ and has no such dicts.
    python_modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    tensor_dicts: list[dict[str, Any]] = [
        tensors for m in python_modules for tensors in (m._parameters, m._buffers) if tensors
    ]
    before = [dict(tensors) for tensors in tensor_dicts]
    for tensors in tensor_dicts:
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = transform(tensor)
    replaced = [dict(tensors) for tensors in tensor_dicts]
    versions = [get_versions([t for t in r.values() if t is not None]) for r in replaced]
    try:
        yield
    finally:
        for index, (tensors, originals) in enumerate(zip(tensor_dicts, before, strict=True)):
            present = [(name, new) for name, new in replaced[index].items() if new is not None]
            for (name, new), version in zip(present, versions[index], strict=True):
                is_assigned = tensors.get(name) is not new
                if written is not None and (is_assigned or get_versions([new]) != [version]):
                    written.append(Write(originals[name], is_assigned))
            tensors.clear()
            tensors.update(originals)


def make_fake_output(fake_factory: FakeTensorFactory, leaf: Any, unit: str) -> Any:
    """Return a fake tensor for a real output of a unit. Leaves that are not tensors stay."""
    if not isinstance(leaf, Tensor):
        return leaf
    fake = fake_factory.from_tensor(leaf.detach())
    fake.requires_grad_(leaf.requires_grad)
    if not leaf.is_leaf:
        with fake_factory.mode:
            fake = _make_non_leaf(fake)
    fake.made_in = unit  # type: ignore[attr-defined]
    return fake


def make_fake_tensor(fake_factory: FakeTensorFactory, spec: TensorSpec, unit: str) -> Tensor:
    """Return a fake tensor as an output of a unit, but a leaf of autograd's graph.

    To make it without an operation under the mode is twenty times faster.
    """
    fake: Tensor = FakeTensor(fake_factory.mode, spec.allocate("meta"), fake_factory.device)
    fake.requires_grad_(spec.requires_grad)
    fake.made_in = unit  # type: ignore[attr-defined]
    return fake


def run_on_dummy_data(
    fake_factory: FakeTensorFactory,
    unit: str,
    target: Any,
    args: Any,
    kwargs: Any,
    known_tensors: Mapping[int, Tensor],
    written: list[Write] | None = None,
) -> Any:
    """Execute a unit or a function on real tensors, and return its output as fake tensors.

    Fake tensors lack some operations (`grouped_mm`, `ctc_loss`, `nonzero`). Only the shapes of the
    output count, so arguments whose contents are not known are filled with dummy data. Code that
    raises for those, such as `gaussian_nll_loss` for negative variances, gets none below 0.
    """
    arguments = fake_factory, unit, target, args, kwargs, known_tensors
    writes: list[Write] = []  # of the run that does not raise
    try:
        result = _run_on_dummy_data(*arguments, writes)
    except (ValueError, RuntimeError, AssertionError) as error:
        writes.clear()
        try:
            result = _run_on_dummy_data(*arguments, writes, is_positive=True)
        except Exception:  # the first error is the one of usual data
            raise error from None
    if written is not None:
        written += writes
    return result


def _run_on_dummy_data(
    fake_factory: FakeTensorFactory,
    unit: str,
    target: Any,
    args: Any,
    kwargs: Any,
    known_tensors: Mapping[int, Tensor],
    written: list[Write] | None = None,
    is_positive: bool = False,
) -> Any:
    leaves, spec = flatten((args, kwargs))
    real_leaves = [
        known_tensors[id(x)].clone() if id(x) in known_tensors else _make_dummy_leaf(x, is_positive)
        for x in leaves
    ]
    tensors = [
        (real, x) for real, x in zip(real_leaves, leaves, strict=True) if isinstance(x, Tensor)
    ]
    versions = get_versions([real for real, _ in tensors])
    real_args, real_kwargs = unflatten(real_leaves, spec)
    leaves, spec = flatten(_run_on_real_tensors(target, real_args, real_kwargs, written))
    changed = set(map(id, find_mutated(None, [real for real, _ in tensors], versions)))
    # An argument that comes back as an output must be the same fake tensor again: contents of
    # integers may be known. But a unit may return its input for some data only, as in stochastic
    # depth, so that counts as a new tensor, unless it was changed in place.
    fake_by_real = {
        id(real): x
        for real, x in tensors
        if not (unit and real.is_floating_point()) or id(real) in changed
    }
    for real, fake in tensors:
        if id(real) in changed:
            torch.autograd.graph.increment_version(fake)
        if fake.requires_grad and real._backward_hooks:
            fake.register_hook(lambda gradient: None)  # the tracer counts them
    return unflatten(
        [
            fake_by_real[id(x)]
            if id(x) in fake_by_real
            else make_fake_output(fake_factory, x, unit)
            for x in leaves
        ],
        spec,
    )


def _run_on_real_tensors(
    target: Any, real_args: Any, real_kwargs: Any, written: list[Write] | None
) -> Any:
    """Execute a unit or a function on real tensors; a unit computes with copies of its own."""
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    copy_tensor = build_tensor_copier(None)
    with _replace_module_tensors(
        modules,
        lambda t: _make_dummy_leaf(t) if isinstance(t, FakeTensor) else copy_tensor(t),
        written,
    ):
        return _call_target(target, real_args, real_kwargs)


def make_dummy_tensor(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    """Return a real tensor of this shape and dtype, and of these strides if they leave no gaps.

    The contents are chosen so that most code accepts them: small random floats, True, and 0 for
    integers, which is a valid index.
    """
    is_number = spec.dtype.is_floating_point or spec.dtype.is_complex
    if is_number:
        dummy = torch.randn(spec.shape, dtype=spec.dtype, device=device) * 0.1
    else:
        fill = torch.ones if spec.dtype is torch.bool else torch.zeros
        dummy = fill(spec.shape, dtype=spec.dtype, device=device)
    # Strides decide which kernel runs: attention has no fused one for the position bias of T5,
    # whose dims are permuted.
    if dummy.stride() != spec.strides and is_dense(spec.allocate("meta")):
        dummy = spec.allocate(device).copy_(dummy)
    return dummy.requires_grad_(is_number and spec.requires_grad)


def _make_dummy_leaf(leaf: Any, is_positive: bool = False) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    dummy = make_dummy_tensor(TensorSpec.from_tensor(leaf), leaf.device)
    if is_positive and dummy.is_floating_point():
        with torch.no_grad():
            dummy.abs_()
    return dummy if leaf.is_leaf else _make_non_leaf(dummy)


@torch.enable_grad()
def _make_non_leaf(tensor: Tensor) -> Tensor:
    """Return a copy that is not a leaf of autograd's graph: a leaf cannot be changed in place."""
    return tensor.clone()


def make_shape_placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor with the same shape and dtype that takes the memory of one element."""
    if tensor.layout is not torch.strided:
        return tensor
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


# ---- in-place changes --------------------------------------------------------------------------
#
# PyTorch counts the in-place changes of each tensor in `_version`. Views of one storage share the
# counter, so a change of a view is seen on its base. Inference tensors have no counter, and batch
# norm does not increment it: there the function itself tells (`torch_functions`).


def get_versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counter of each tensor, or -1 for inference tensors."""
    return [-1 if t.is_inference() else t._version for t in tensors]


def find_mutated(
    func: Any,
    tensors: Sequence[Tensor],
    versions_before: Sequence[int],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> list[Tensor]:
    """Return the tensors that a call of `func` changed in place.

    `versions_before` is the result of `get_versions` before the call. `func` is None for a unit.
    """
    versions = get_versions(tensors)
    mutated = [t for t, a, b in zip(tensors, versions, versions_before, strict=True) if a != b]
    mutated += find_unversioned_writes(func, args, kwargs)
    if not mutated and -1 in versions_before and func is not None and is_in_place(func):
        return list(tensors[:1])  # in inference mode
    return mutated


def select_originals(
    tensors: Sequence[Tensor], fake_tensors: Sequence[Tensor], mutated: Sequence[Tensor]
) -> list[Tensor]:
    """Return the tensors whose fake tensors are in `mutated`."""
    ids = set(map(id, mutated))
    return [t for t, fake in zip(tensors, fake_tensors, strict=True) if id(fake) in ids]


def get_rng_state(device: torch.device, arguments: Any) -> Tensor:
    """Return the state of the generators that a call on the device may draw from.

    These are the default generators, and those among its arguments (`generator=`).
    """
    generators = (x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Generator))
    return torch.cat([*read_rng_states([device]), *(g.get_state() for g in generators)])


# ---- models on the meta device -----------------------------------------------------------------
#
# A model that was built on the meta device has tensors without memory. For a dry run they are
# replaced:
#
#     parameters, and all tensors of units     fake tensors on the device of the inputs
#     buffers of parents                       real tensors, initialized by the model's own code
#
# The buffers of parents are small, and the forward may branch on their contents.


@dataclass
class UninitializedBuffers:
    """Buffers of parents that have no contents until a checkpoint is loaded."""

    names: set[str] = field(default_factory=set)

    def check_not_read(self, trace: Trace) -> None:
        """Raise if the path of the traced forward depends on the contents of such a buffer."""
        if not self.names:
            return
        tainted = {
            index for index, value in enumerate(trace.values) if value.buffer_name in self.names
        }
        for node in trace.nodes:
            if tainted.isdisjoint(node.inputs):
                continue
            if node.is_guard:
                raise ArgumentError(
                    f"at {node.location}, the forward reads a value that depends on a buffer "
                    f"without contents: {', '.join(sorted(self.names))}. The model was built on "
                    "the meta device, and nothing initializes the buffer. Build it under "
                    "torch.device('cpu'), or set it in the reset_parameters() of its module."
                )
            tainted |= node.produced_values


def replace_meta_tensors(
    model: nn.Module, units: Collection[nn.Module], fake_factory: FakeTensorFactory
) -> UninitializedBuffers:
    """Replace all meta tensors of an isolated model."""
    if not has_meta_tensors(model):
        return UninitializedBuffers()
    unit_modules = {module for unit in units for module in unit.modules()}
    replacements: dict[Tensor, Tensor] = {}
    slots: list[MetaTensorSlot] = []
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, meta_tensor in tensors.items():
                if meta_tensor is None or not meta_tensor.is_meta:
                    continue
                is_real = tensors is module._buffers and module not in unit_modules
                if meta_tensor not in replacements:
                    if not is_real:
                        replacements[meta_tensor] = fake_factory.from_tensor(meta_tensor)
                    else:
                        replacements[meta_tensor] = allocate_like(meta_tensor, fake_factory.device)
                        slots.append(MetaTensorSlot(f"{path}.{key}" if path else key, module, key))
                tensors[key] = replacements[meta_tensor]
        replace_tensor_attributes(module, replacements)
    return UninitializedBuffers(set(_find_uninitialized(model, slots)))


def _find_uninitialized(model: nn.Module, slots: Sequence[MetaTensorSlot]) -> Iterator[str]:
    """Run the initializers of the modules, and return the names of the buffers that none set."""
    before = [
        (slot, slot.tensor, slot.tensor._version) for slot in slots if slot.tensor is not None
    ]
    initializers = find_initializers(model)
    modules = dict.fromkeys(slot.module for slot in slots)
    # A module with a buffer on `meta` may have real parameters, which keep their values.
    parameters = StateSnapshot(())
    parameters.record([p for module in modules for p in module.parameters()])
    for module in modules:
        initialize_module(module, initializers, run_reset_parameters=True, run_init_weights=True)
    parameters.restore()
    return (slot.name for slot, tensor, version in before if slot.is_uninitialized(tensor, version))


# ---- packed sequences --------------------------------------------------------------------------
#
# `pack_padded_sequence` returns the packed rows together with an integer tensor of batch sizes.
# The rows follow from a unit and have no contents in a dry run. The batch sizes follow from the
# lengths, which are an input, and recurrent layers and `pad_packed_sequence` need their contents:
# the fake mode cannot run them without. So both functions are executed on dummy rows and real
# lengths, and the integer outputs are remembered.


class PackedSequenceLengths:
    """Remembers the contents of integer tensors that pack and pad functions return."""

    def __init__(self, fake_factory: FakeTensorFactory) -> None:
        self._fake_factory = fake_factory
        self._known_integers: dict[int, Tensor] = {}  # keys are `id(fake)`

    def find_known_integers(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the remembered contents of fake tensors, by their id."""
        return {
            id(t): self._known_integers[id(t)] for t in tensors if id(t) in self._known_integers
        }

    def compute(
        self, function_call: FunctionCall, input_only_tensors: dict[int, Tensor]
    ) -> Any | None:
        """Return the output of a pack or pad function as fake tensors.

        Returns None if the contents of an integer argument are not known.
        """
        known_tensors = {**input_only_tensors, **self.find_known_integers(function_call.tensors)}
        if any(
            id(t) not in known_tensors for t in function_call.tensors if not t.is_floating_point()
        ):
            return None
        result, _ = function_call.call_with_mapped_tensors(
            lambda t: known_tensors[id(t)] if id(t) in known_tensors else _make_dummy_leaf(t)
        )
        leaves, spec = flatten(result)
        fakes = [make_fake_output(self._fake_factory, leaf, "") for leaf in leaves]
        for fake, real in zip(fakes, leaves, strict=True):
            if isinstance(real, Tensor) and not real.is_floating_point():
                self._known_integers[id(fake)] = real
        return unflatten(fakes, spec)
