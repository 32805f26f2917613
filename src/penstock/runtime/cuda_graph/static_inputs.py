"""Static input tensors of a captured step. They keep their addresses, and each replay fills them.

    caller's batch ── flatten_inputs ──> FlatInputs: its tensors, and their structure
    FlatInputs     ── StaticInputs ────> tensors of the same shapes, which the graph reads
    each replay       copy_from(caller's tensors), replay, write_back(caller's tensors)

Inputs may share memory: the target of an autoencoder is its input. If a layer changes the input in
place, the target changes with it. So the static tensors share memory in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.model.stage_inputs import InputsByStage, StageInputs
from penstock.runtime.cuda_graph.capture_guard import CaptureError
from penstock.torch_compat import foreach_copy_, pytree

# shape, stride, dtype, device, requires_grad
InputSpec = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


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
    if has_overlap or aliases != indices or any(spec[-1] for spec in specs):
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
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


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
    sizes = {spec: _count_spanned_bytes(spec) for spec in set(specs)}
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        address = tensor.data_ptr()
        # A conjugate or negative view has the same memory and other numbers.
        lazy_bits = tensor.is_conj(), tensor.is_neg()
        aliases.append(first_index.setdefault((address, *spec[:4], *lazy_bits), index))
        if aliases[-1] == index and (size := sizes[spec]):
            spans.append((address, address + size))
    spans.sort()
    return tuple(aliases), any(a[1] > b[0] for a, b in pairwise(spans))


def _count_spanned_bytes(spec: InputSpec) -> int:
    """Return the bytes from the first to the last element, gaps included."""
    shape, stride, dtype, *_ = spec
    if not all(shape):
        return 0
    last = sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])
    return (last + 1) * dtype.itemsize


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
            label_inputs=(),
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
