"""Static buffers: the fixed addresses at which a captured step reads and writes.

A graph repeats its kernels at the addresses of the capture. Three kinds of tensors would move from
step to step, and each has a static place:

| tensors | place | section |
|---|---|---|
| the batch and the loss scale | `StaticInputs`, filled before each replay | inputs |
| gradients | `GradBuffer`, which becomes `.grad` | gradients |
| attributes that a layer reassigns | `ReassignedTensors` | reassigned tensors |

Random numbers are in `graph_rng.py`. Messages between ranks live in the graph's own memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.model.stage_inputs import InputsByStage, StageInputs
from penstock.runtime.cuda_graph.capture_guard import CaptureError
from penstock.tensor_spec import TensorSpec, is_replaceable_by
from penstock.torch_compat import foreach_copy_, foreach_zero_, get_storage_use_count, pytree

# ---- inputs ---------------------------------------------------------------------------------
#
#     caller's batch ── flatten_inputs ──> FlatInputs: its tensors, and their structure
#     FlatInputs     ── StaticInputs ────> tensors of the same shapes, which the graph reads
#     each replay       copy_from(caller's tensors), replay, write_back(caller's tensors)
#
# Inputs may share memory: the target of an autoencoder is its input. If a layer changes the input
# in place, the target changes with it. So the static tensors share memory in the same way.

InputSpec = tuple[TensorSpec, torch.device]


@dataclass(frozen=True)
class FlatInputs:
    """The inputs of a step, taken apart: tensors without duplicates, other leaves, structure.

    If the batch was split into micro-batches by rows and by nothing else, `tensors` are the unsplit
    tensors of the batch (`is_unsplit`). A replay then needs one copy for each of them, instead of
    one for each micro-batch.
    """

    tensors: tuple[Tensor, ...]
    specs: tuple[InputSpec, ...]  # one per tensor
    tensor_indices: tuple[int | None, ...]  # for each leaf its index in `tensors`; None: no tensor
    alias_indices: tuple[int, ...]  # for each tensor, the first one with the same memory and layout
    has_overlap: bool  # do some tensors share a part of their memory?
    other_leaves: tuple[Any, ...]  # the leaves that are not tensors
    tree_spec: Any
    is_unsplit: bool = False

    @property
    def structure(self) -> Hashable:
        """Return the structure of the inputs, for the graph key."""
        return self.tree_spec if isinstance(self.tree_spec, _TensorCounts) else str(self.tree_spec)

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the inputs with other tensors in the places of these."""
        other_leaves = iter(self.other_leaves)
        leaves = [
            next(other_leaves) if index is None else tensors[index] for index in self.tensor_indices
        ]
        if not isinstance(self.tree_spec, _TensorCounts):
            return pytree.tree_unflatten(leaves, self.tree_spec)
        remaining = iter(leaves)
        by_stage = {
            stage: [tuple([next(remaining) for _ in range(count)]) for count in counts]
            for stage, counts in self.tree_spec.counts
        }
        return by_stage, next(remaining), next(remaining)


def flatten_inputs(stage_inputs: StageInputs, scale: Tensor | None) -> FlatInputs:
    """Take apart the inputs of all stages, the class weights of the loss and the loss scale."""
    if stage_inputs.unsplit_tensors and scale is None and stage_inputs.target_count is None:
        unsplit = _flatten_unsplit(stage_inputs.unsplit_tensors)
        if unsplit is not None:
            return unsplit
    classes = None if stage_inputs.target_count is None else stage_inputs.target_count.class_weights
    leaves, tree_spec = _flatten(stage_inputs.by_stage, classes, scale)
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    index_by_id = {id(tensor): index for index, tensor in enumerate(tensors)}
    indices = tuple([index_by_id.get(id(leaf)) for leaf in leaves])
    others = tuple([leaf for leaf, index in zip(leaves, indices, strict=True) if index is None])
    specs = tuple(map(_build_input_spec, tensors))
    aliases = _find_aliases(tensors, specs)
    return FlatInputs(tuple(tensors), specs, indices, *aliases, others, tree_spec)


def _flatten_unsplit(tensors: tuple[Tensor, ...]) -> FlatInputs | None:
    """Return the unsplit tensors as inputs, or None if some share memory or require grad."""
    specs = tuple(map(_build_input_spec, tensors))
    indices = tuple(range(len(tensors)))
    aliases, has_overlap = _find_aliases(tensors, specs)
    if has_overlap or aliases != indices or any(spec.requires_grad for spec, _ in specs):
        return None
    return FlatInputs(
        tensors, specs, indices, aliases, False, (), _TensorCounts(()), is_unsplit=True
    )


class _TensorCounts(NamedTuple):
    """The structure of inputs that are all tensors: their number per stage and micro-batch.

    It is much cheaper to build and to compare than a tree spec of `pytree`.
    """

    counts: tuple[tuple[int, tuple[int, ...]], ...]


def _flatten(
    inputs_by_stage: InputsByStage, classes: Tensor | None, scale: Tensor | None
) -> tuple[list[Any], Any]:
    leaves = _list_values(inputs_by_stage)
    # Usually all are tensors. The inputs of a traced stage also hold a `ForwardRequest`.
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return pytree.tree_flatten((dict(inputs_by_stage), classes, scale))
    counts = tuple([(stage, tuple(map(len, pieces))) for stage, pieces in inputs_by_stage.items()])
    return [*leaves, classes, scale], _TensorCounts(counts)


def _list_values(inputs_by_stage: InputsByStage) -> list[Any]:
    return [tensor for parts in inputs_by_stage.values() for values in parts for tensor in values]


def _build_input_spec(tensor: Tensor) -> InputSpec:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise CaptureError(
            f"an input is a {type(tensor).__name__} with layout {tensor.layout}. Pass a plain, "
            "dense tensor"
        )
    return TensorSpec.from_tensor(tensor), tensor.device


def _find_aliases(
    tensors: Sequence[Tensor], specs: Sequence[InputSpec]
) -> tuple[tuple[int, ...], bool]:
    """Return the index of each tensor's first exact alias, and whether any overlap in part.

    Overlap is found by the address ranges of the tensors that are not exact aliases.
    """
    first_index: dict[Any, int] = {}
    spans: list[tuple[int, int]] = []
    aliases: list[int] = []
    # Most micro-batches have the same spec: compute the size once per spec, not per tensor.
    sizes = {spec: spec.spanned_bytes for spec, _ in set(specs)}
    for index, (tensor, (spec, device)) in enumerate(zip(tensors, specs, strict=True)):
        address = tensor.data_ptr()
        # A conjugate or negative view has the same memory and other numbers.
        lazy_bits = tensor.is_conj(), tensor.is_neg()
        aliases.append(first_index.setdefault((address, device, *spec[:3], *lazy_bits), index))
        if aliases[-1] == index and (size := sizes[spec]):
            spans.append((address, address + size))
    spans.sort()
    return tuple(aliases), any(a[1] > b[0] for a, b in pairwise(spans))


class StaticInputs:
    """The static input tensors of one graph."""

    def __init__(self, inputs: FlatInputs) -> None:
        self._tensors: list[Tensor] = []
        for index, (tensor, alias_index) in enumerate(
            zip(inputs.tensors, inputs.alias_indices, strict=True)
        ):
            if alias_index == index:
                static_tensor = torch.empty_like(tensor, requires_grad=False)
            else:
                # `.data` shares the memory and has a version counter of its own, which tells
                # through which of the aliases a layer writes.
                static_tensor = self._tensors[alias_index].data
            self._tensors.append(static_tensor.requires_grad_(tensor.requires_grad))
        self._has_overlap = inputs.has_overlap
        self._detached = [tensor.detach() for tensor in self._tensors]
        self._versions: list[int] = []
        self._unsplit_inputs: StageInputs | None = None  # the split of unsplit tensors

    def bind(
        self, stage_inputs: StageInputs, inputs: FlatInputs
    ) -> tuple[StageInputs, Tensor | None]:
        """Return the inputs of the stages and the loss scale, made of the static tensors."""
        if inputs.is_unsplit:
            parts = stage_inputs.split_alike(self._tensors)
            # `.data`: each micro-batch counts its versions by itself.
            by_stage = {s: [tuple(t.data for t in piece) for piece in parts[s]] for s in parts}
            self._tensors, classes, scale = _list_values(by_stage), None, None
        else:
            by_stage, classes, scale = inputs.unflatten(self._tensors)
        target_count = stage_inputs.target_count
        if target_count is not None:
            target_count = replace(target_count, class_weights=classes)
        self._versions = [tensor._version for tensor in self._tensors]
        bound_inputs = replace(
            stage_inputs,
            by_stage=by_stage,
            target_count=target_count,
            loss_shares=(),
            unsplit_tensors=(),
        )
        self._unsplit_inputs = bound_inputs if inputs.is_unsplit else None
        return bound_inputs, scale

    @torch.no_grad()
    def copy_from(self, tensors: Sequence[Tensor]) -> None:
        """Fill the static tensors with the caller's numbers."""
        if tensors:
            foreach_copy_(self._detached, tensors, non_blocking=True)

    def finish_capture(self) -> None:
        """Find out, after the capture, which inputs the layers change or give gradients to."""
        versions_before = zip(self._tensors, self._versions, strict=True)
        self._mutated_indices = [
            index for index, (t, version) in enumerate(versions_before) if t._version != version
        ]
        # Static tensors share memory only if they are exact aliases. A write that should show in a
        # partly overlapping input would be lost.
        if self._mutated_indices and self._has_overlap:
            raise CaptureError(
                "a layer changes an input in place while several inputs share memory. Clone the "
                "inputs before the step"
            )
        self._grad_indices = [index for index, t in enumerate(self._tensors) if t.grad is not None]

    def write_back(self, tensors: Sequence[Tensor]) -> None:
        """Pass the effects of a replay on the inputs to the caller.

        This copies in-place changes into the caller's tensors, and runs a backward through the
        caller's own graph with the gradients of the inputs.
        """
        with torch.no_grad():
            if self._mutated_indices and self._unsplit_inputs is not None:
                tensors = _list_values(self._unsplit_inputs.split_alike(tensors))
            for index in self._mutated_indices:
                tensors[index].detach().copy_(self._tensors[index])
        if self._grad_indices:
            # Cloned: the caller's graph may keep a gradient, and the next replay overwrites it.
            gradients = [self._tensors[index].grad for index in self._grad_indices]
            torch.autograd.backward(
                [tensors[index] for index in self._grad_indices],
                [gradient.clone() for gradient in gradients if gradient is not None],
            )


# ---- gradients ------------------------------------------------------------------------------
#
# A CUDA graph adds gradients at fixed addresses. So each parameter has one `GradBuffer` that stays
# in its place, and all graphs of a pipe add to it. The caller may use `.grad` as usual:
#
# | `.grad` before the step | the replay | `.grad` after the step |
# |---|---|---|
# | the buffer | adds to the buffer | the buffer |
# | None | zeroes the buffer and adds to it | the buffer |
# | another tensor | starts from a copy of its numbers | that tensor, with the sum copied back |
#
# The caller may also have kept the buffer of an earlier step (`g = p.grad`, then `zero_grad()`) and
# does not expect `g` to change. The tensor object `g` then gets memory of its own, with the same
# numbers (`GradBuffer.detach_caller`). A view of `g` cannot be moved like that. In this case the
# buffer is left to the caller, and the graphs that add to it are captured again with a new buffer
# (`find_viewed_grads`).

DescribeParameter = Callable[[nn.Parameter], str]


class GradBuffer:
    """A persistent buffer for one gradient. It becomes `.grad`, so the caller may keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._expected_storage_uses = self._count_storage_uses()

    def record_storage_uses(self) -> None:
        """Count the references that a captured graph holds as expected from now on."""
        self._expected_storage_uses = self._count_storage_uses()

    @property
    def has_external_views(self) -> bool:
        """Return whether the caller holds a view of the buffer, whose numbers must not change."""
        return self._count_storage_uses() > self._expected_storage_uses

    def _count_storage_uses(self) -> int:
        return get_storage_use_count(self.tensor.untyped_storage())

    @property
    def ref_count(self) -> int:
        """Return how many references there are to the tensor object."""
        return sys.getrefcount(self.tensor)

    def detach_caller(self) -> None:
        """Give the tensor that the caller holds memory of its own, and keep the buffer's memory."""
        caller_tensor, self.tensor = self.tensor, self.tensor.detach()
        caller_tensor.data = caller_tensor.clone()


# Reference counts of a buffer that only Penstock holds. They are measured, not written as numbers:
# they depend on the releases of Python and PyTorch. In some releases of PyTorch a parameter counts
# as one more reference to its gradient.


@cache
def _count_unshared() -> tuple[int, int, int]:
    """Return the references to a buffer, to its memory, and to a buffer that is a `.grad`."""
    parameter, buffer = nn.Parameter(torch.empty(0)), GradBuffer(torch.empty(0))
    parameter.grad = torch.empty(0)
    grad_references = GradBuffer(parameter.grad).ref_count
    return buffer.ref_count, buffer._expected_storage_uses, grad_references


GradBufferMap = dict[nn.Parameter, GradBuffer]


class GradBufferPool:
    """The gradient buffers of one pipe, shared by all its graphs."""

    def __init__(self) -> None:
        self._buffers: GradBufferMap = {}

    @contextmanager
    def redirect_grads_for_capture(
        self, parameters: Iterable[nn.Parameter], describe: DescribeParameter
    ) -> Iterator[GradBufferMap]:
        """Set `.grad` of the parameters to their buffers for a capture, and restore it afterwards.

        Yields a dict that is empty at first. When the context ends, it holds the buffers that the
        capture adds to.
        """
        buffers = {p: self._get_or_create(p) for p in parameters}
        grads_before = {p: p.grad for p in buffers}
        touched: GradBufferMap = {}
        try:
            for parameter, buffer in buffers.items():
                parameter.grad = buffer.tensor
            versions = {p: buffer.tensor._version for p, buffer in buffers.items()}
            yield touched
            for parameter, buffer in buffers.items():
                if parameter.grad is not buffer.tensor:
                    raise CaptureError(
                        f"the gradient of {describe(parameter)} is replaced instead of being added "
                        "to .grad. Remove the hook that replaces it, or use a dense gradient if it "
                        "is sparse"
                    )
                # The version counter counts in-place writes, in a capture, too.
                if buffer.tensor._version != versions[parameter]:
                    touched[parameter] = buffer
        finally:
            for parameter, gradient in grads_before.items():
                parameter.grad = gradient
        for buffer in touched.values():
            buffer.record_storage_uses()

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the buffers of some parameters to the caller. The next capture makes new ones."""
        for parameter in parameters:
            self._buffers.pop(parameter, None)

    def _get_or_create(self, parameter: nn.Parameter) -> GradBuffer:
        """Return the parameter's buffer. An unshared `.grad` becomes one."""
        buffer = self._buffers.get(parameter)
        if buffer is None or not is_replaceable_by(buffer.tensor, parameter):
            buffer = _adopt_existing_grad(parameter) or GradBuffer(torch.zeros_like(parameter))
            self._buffers[parameter] = buffer
        return buffer


def _adopt_existing_grad(parameter: nn.Parameter) -> GradBuffer | None:
    """Return `.grad` as a buffer, or None if something else refers to it or to its memory."""
    if parameter.grad is None or not is_replaceable_by(parameter.grad, parameter):
        return None
    buffer = GradBuffer(parameter.grad)
    _, storage_uses, references = _count_unshared()
    is_unshared = buffer.ref_count <= references and buffer._expected_storage_uses <= storage_uses
    return buffer if is_unshared and not _is_partial_view(buffer.tensor) else None


def _is_partial_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def check_dense_grads(parameters: Iterable[nn.Parameter], describe: DescribeParameter) -> None:
    """Raise `CaptureError` if a gradient is sparse, or of a tensor subclass."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or (type(gradient) is Tensor and gradient.layout is torch.strided):
            continue
        raise CaptureError(
            f"the gradient of {describe(parameter)} is a {type(gradient).__name__} with layout "
            f"{gradient.layout}, but a replay can add to plain, dense tensors only. Use a dense "
            "gradient, for example nn.Embedding(sparse=False)"
        )


class GradUpdateDetector:
    """Finds the parameters that get a gradient in a step. Create it before the step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._grads_before = {
            p: (p.grad, _grad_version(p.grad)) for p in parameters if p.requires_grad
        }

    def find_updated_parameters(self) -> list[nn.Parameter]:
        """Return, after the step, the parameters whose `.grad` was replaced or added to."""
        return [
            p
            for p, (gradient, version) in self._grads_before.items()
            if p.grad is not gradient or _grad_version(p.grad) != version
        ]


def _grad_version(gradient: Tensor | None) -> int:
    # Tensors of inference mode do not count their versions: reading it raises.
    return -1 if gradient is None or gradient.is_inference() else gradient._version


def find_viewed_grads(grad_buffers: GradBufferMap) -> set[nn.Parameter]:
    """Return the parameters of whose buffer the caller keeps a view.

    A replay would change the numbers in that view.
    """
    return {
        p
        for p, buffer in grad_buffers.items()
        if p.grad is not buffer.tensor and buffer.has_external_views
    }


@contextmanager
def redirect_grads_for_replay(grad_buffers: GradBufferMap) -> Iterator[None]:
    """Set `.grad` to the buffers for a replay, with the numbers that `.grad` had before."""
    redirected = [(p, buffer) for p, buffer in grad_buffers.items() if p.grad is not buffer.tensor]
    # Must come before any write: a caller who keeps the buffer's tensor sees its old numbers.
    unshared_references, _, _ = _count_unshared()
    for _, buffer in redirected:
        if buffer.ref_count > unshared_references:
            buffer.detach_caller()
    caller_grads = [(p, p.grad, buffer.tensor) for p, buffer in redirected if p.grad is not None]
    _zero_tensors([buffer.tensor for p, buffer in redirected if p.grad is None])
    _copy_tensors([(buffer, gradient) for _, gradient, buffer in caller_grads])
    for parameter, buffer in redirected:
        parameter.grad = buffer.tensor
    try:
        yield
        _copy_tensors([(gradient, buffer) for _, gradient, buffer in caller_grads])
    finally:
        for parameter, gradient, _ in caller_grads:
            parameter.grad = gradient


@torch.no_grad()
def _zero_tensors(tensors: list[Tensor]) -> None:
    """Fill all tensors with zeros, in a few kernels."""
    if tensors:
        foreach_zero_(tensors)


@torch.no_grad()
def _copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, in a few kernels."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        foreach_copy_(targets, sources)


# ---- reassigned tensors ---------------------------------------------------------------------
#
# Some layers replace a tensor in every step, such as `self.mean = 0.9 * self.mean + 0.1 * new`. A
# graph reads the tensor that was there when the capture began, and writes a new one. The next
# replay would read the old tensor again, and the running mean would never advance. So such a tensor
# gets a static place:
#
#     first step   the reassignment is noticed, and the attribute gets a static tensor
#     capture      ends with a copy of the new numbers into the static tensor, as part of the graph;
#                  the attribute is the static tensor again
#     replay       reads the static tensor and updates it

DescribeModule = Callable[[nn.Module], str]


class TensorAttribute(NamedTuple):
    """The name of a tensor of a module, which is a buffer or a plain attribute."""

    is_buffer: bool
    name: str

    def get_table(self, module: nn.Module) -> dict[str, Any]:
        """Return the dict in which the module keeps the tensor."""
        return module._buffers if self.is_buffer else vars(module)


TensorsByAttribute = dict[tuple[nn.Module, TensorAttribute], Tensor]


def collect_module_tensors(modules: Sequence[nn.Module]) -> TensorsByAttribute:
    """Return all buffers of the modules, and all tensors that are plain attributes."""
    return {
        (module, TensorAttribute(is_buffer, name)): value
        for module in modules
        for is_buffer, table in ((True, module._buffers), (False, vars(module)))
        for name, value in table.items()
        if isinstance(value, Tensor)
    }


def _iter_reassigned(
    before: TensorsByAttribute, modules: Sequence[nn.Module]
) -> Iterator[tuple[nn.Module, TensorAttribute, Tensor | None, Tensor]]:
    """Yield the attributes that a step has reassigned, each with its old and its new value."""
    for (module, attribute), value in collect_module_tensors(modules).items():
        old_value = before.get((module, attribute))
        if old_value is not value:
            yield module, attribute, old_value, value


class ReassignedTensors:
    """The static tensors of attributes that steps reassign, as long as their modules live."""

    def __init__(self) -> None:
        self._static_tensors: WeakKeyDictionary[nn.Module, dict[TensorAttribute, Tensor]] = (
            WeakKeyDictionary()
        )

    @torch.no_grad()
    def restore_static_tensors(self) -> None:
        """Put the static tensors back into their modules, with the current numbers.

        An eager step (of another kind, or in threads) has replaced them in the meantime. An
        attribute that is not a tensor of the same shape, dtype and device any more is forgotten.
        """
        for module, static_tensors in list(self._static_tensors.items()):
            for attribute, static_tensor in list(static_tensors.items()):
                table = attribute.get_table(module)
                value = table.get(attribute.name)
                if value is static_tensor:
                    continue
                if isinstance(value, Tensor) and is_replaceable_by(value, static_tensor):
                    static_tensor.copy_(value)
                    table[attribute.name] = static_tensor
                else:
                    del static_tensors[attribute]

    def register_reassigned(
        self, before: TensorsByAttribute, modules: Sequence[nn.Module], describe: DescribeModule
    ) -> None:
        """Make static tensors for the attributes that an eager step has reassigned."""
        for module, attribute, old_value, value in _iter_reassigned(before, modules):
            if old_value is not None and not is_replaceable_by(value, old_value):
                raise CaptureError(
                    _describe_reassignment(describe(module), attribute.name, old_value, value)
                )
            if value.requires_grad:
                raise CaptureError(
                    f"{describe(module)}: it stores a tensor with an autograd history in "
                    f"'{attribute.name}' in every step. Store tensor.detach() instead"
                )
            static_tensors = self._static_tensors.setdefault(module, {})
            if attribute not in static_tensors:
                static_tensors[attribute] = value.detach().clone()
        self.restore_static_tensors()

    @torch.no_grad()
    def write_back(
        self, before: TensorsByAttribute, modules: Sequence[nn.Module], describe: DescribeModule
    ) -> None:
        """Copy reassigned values into their static tensors, as the last part of a capture."""
        for module, attribute, old_value, value in _iter_reassigned(before, modules):
            if (
                old_value is None
                or attribute not in self._static_tensors.get(module, ())
                or not is_replaceable_by(value, old_value)
            ):
                raise CaptureError(
                    _describe_reassignment(describe(module), attribute.name, old_value, value)
                )
            # The old value is the static tensor: it was put back into the module before the step.
            old_value.copy_(value)
            attribute.get_table(module)[attribute.name] = old_value


def _describe_reassignment(layer: str, name: str, old: Tensor | None, new: Tensor) -> str:
    before = "none" if old is None else f"{tuple(old.shape)} of {old.dtype} on {old.device}"
    return (
        f"{layer}: its '{name}' is another tensor after the step ({before} before, "
        f"{tuple(new.shape)} of {new.dtype} on {new.device} now), and a replay would not replace "
        "it. Update it in place, or keep its shape, dtype and device"
    )
