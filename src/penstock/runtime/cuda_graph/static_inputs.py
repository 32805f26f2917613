"""Inputs of a captured step: tensors that stay in their places, filled before each replay."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.cuda_graph.capture_guard import CaptureError
from penstock.runtime.stage_inputs import InputsByStage, StageInputs
from penstock.torch_compat import pytree

InputSpec = tuple[
    torch.Size, tuple[int, ...], torch.dtype, torch.device, bool
]  # and does it learn?


@dataclass(frozen=True)
class FlatInputs:
    """What a step is given, taken apart: its tensors, each once, and the rest.

    Of a batch that was cut by its rows alone, it is the tensors that were cut.
    """

    tensors: tuple[Tensor, ...]
    specs: tuple[InputSpec, ...]  # theirs
    tensor_indices: tuple[int | None, ...]  # which of them each leaf is; None: it is none
    alias_indices: tuple[int, ...]  # for each tensor, the first that is just there in memory, too
    has_overlap: bool  # do some have a part of their memory in common?
    other_leaves: tuple[Any, ...]  # the leaves that are no tensors
    tree_spec: Any
    is_unsplit: bool = False

    @property
    def structure(self) -> Hashable:
        """How it was put together."""
        return self.tree_spec if isinstance(self.tree_spec, _TensorCounts) else str(self.tree_spec)

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """The same with others."""
        rest = iter(self.other_leaves)
        leaves = [next(rest) if at is None else tensors[at] for at in self.tensor_indices]
        if not isinstance(self.tree_spec, _TensorCounts):
            return pytree.tree_unflatten(leaves, self.tree_spec)
        each = iter(leaves)
        given = {
            stage: [tuple([next(each) for _ in range(size)]) for size in sizes]
            for stage, sizes in self.tree_spec.counts
        }
        return given, next(each), next(each)


def flatten_inputs(stage_inputs: StageInputs, scale: Tensor | None) -> FlatInputs:
    """What stages are given from outside, and what numbers of theirs are multiplied by."""
    if stage_inputs.unsplit_tensors and scale is None and stage_inputs.target_count is None:
        found = _flatten_unsplit(stage_inputs.unsplit_tensors)
        if found is not None:
            return found
    classes = None if stage_inputs.target_count is None else stage_inputs.target_count.class_weights
    leaves, spec = _flatten(stage_inputs.by_stage, classes, scale)
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    number = {id(tensor): at for at, tensor in enumerate(tensors)}
    places = tuple([number.get(id(leaf)) for leaf in leaves])
    rest = tuple([leaf for leaf, at in zip(leaves, places, strict=True) if at is None])
    kinds = tuple(map(_build_input_spec, tensors))
    return FlatInputs(tuple(tensors), kinds, places, *_find_aliases(tensors, kinds), rest, spec)


def _flatten_unsplit(tensors: tuple[Tensor, ...]) -> FlatInputs | None:
    """If they have nothing to do with each other, and none learns."""
    kinds = tuple(map(_build_input_spec, tensors))
    apart = tuple(range(len(tensors)))
    memory, overlap = _find_aliases(tensors, kinds)
    if overlap or memory != apart or any(kind[-1] for kind in kinds):
        return None
    return FlatInputs(tensors, kinds, apart, memory, False, (), _TensorCounts(()), is_unsplit=True)


class _TensorCounts(NamedTuple):
    """How many tensors each stage is given for each micro-batch, and nothing else."""

    counts: tuple[tuple[int, tuple[int, ...]], ...]


def _flatten(
    inputs_by_stage: InputsByStage, classes: Tensor | None, scale: Tensor | None
) -> tuple[list[Any], Any]:
    leaves = _list_values(inputs_by_stage)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return pytree.tree_flatten((dict(inputs_by_stage), classes, scale))
    sizes = tuple([(stage, tuple(map(len, pieces))) for stage, pieces in inputs_by_stage.items()])
    return [*leaves, classes, scale], _TensorCounts(sizes)


def _list_values(inputs_by_stage: InputsByStage) -> list[Any]:
    return [tensor for parts in inputs_by_stage.values() for values in parts for tensor in values]


def _build_input_spec(tensor: Tensor) -> InputSpec:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise CaptureError(
            f"an input is a {type(tensor).__name__} with layout {tensor.layout}: give a plain "
            "tensor"
        )
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _find_aliases(
    tensors: Sequence[Tensor], specs: Sequence[InputSpec]
) -> tuple[tuple[int, ...], bool]:
    """If the target is the input itself, say, a layer that changes the one has changed both."""
    first: dict[Any, int] = {}
    spans: list[tuple[int, int]] = []
    memory: list[int] = []
    sizes = {
        kind: _count_spanned_bytes(kind) for kind in set(specs)
    }  # micro-batches are mostly alike
    for at, (tensor, kind) in enumerate(zip(tensors, specs, strict=True)):
        where = tensor.data_ptr()
        turned = tensor.is_conj(), tensor.is_neg()  # the same memory, and other numbers
        memory.append(first.setdefault((where, *kind[:4], *turned), at))
        if memory[-1] == at and (size := sizes[kind]):
            spans.append((where, where + size))
    spans.sort()
    return tuple(memory), any(a[1] > b[0] for a, b in pairwise(spans))


def _count_spanned_bytes(spec: InputSpec) -> int:
    """From the first to the last."""
    shape, stride, dtype, *_ = spec
    if not all(shape):
        return 0
    last = sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])
    return (last + 1) * dtype.itemsize


class StaticInputs:
    """The tensors of one recording."""

    def __init__(self, inputs: FlatInputs) -> None:
        self._tensors: list[Tensor] = []
        for at, (tensor, first) in enumerate(
            zip(inputs.tensors, inputs.alias_indices, strict=True)
        ):
            if first == at:
                made = torch.empty_like(tensor, requires_grad=False)
            else:  # changes are counted for each by itself
                made = self._tensors[first].data
            self._tensors.append(made.requires_grad_(tensor.requires_grad))
        self._has_overlap = inputs.has_overlap
        self._detached = [tensor.detach() for tensor in self._tensors]
        self._versions: list[int] = []
        self._unsplit_inputs: StageInputs | None = None  # what was cut of them, if they are whole

    def bind(
        self, stage_inputs: StageInputs, inputs: FlatInputs
    ) -> tuple[StageInputs, Tensor | None]:
        """What was fed, and the scale, with these in the places of the caller's."""
        if inputs.is_unsplit:  # changes are counted for each piece by itself
            parts = stage_inputs.split_alike(self._tensors)
            given = {s: [tuple(t.data for t in each) for each in parts[s]] for s in parts}
            self._tensors, classes, scale = _list_values(given), None, None
        else:
            given, classes, scale = inputs.unflatten(self._tensors)
        counting = stage_inputs.target_count
        if counting is not None:
            counting = replace(counting, class_weights=classes)
        self._versions = [tensor._version for tensor in self._tensors]
        static = replace(
            stage_inputs,
            by_stage=given,
            target_count=counting,
            loss_shares=(),
            label_inputs=(),
            unsplit_tensors=(),
        )
        self._unsplit_inputs = static if inputs.is_unsplit else None
        return static, scale

    @torch.no_grad()
    def copy_from(self, tensors: Sequence[Tensor]) -> None:
        """From what the caller gives."""
        if tensors:
            torch._foreach_copy_(self._detached, list(tensors), non_blocking=True)

    def finish_capture(self) -> None:
        """The capture has ended: remember which of them the layers change in place."""
        before = zip(self._tensors, self._versions, strict=True)
        self._mutated_indices = [
            at for at, (t, version) in enumerate(before) if t._version != version
        ]
        if self._mutated_indices and self._has_overlap:
            raise CaptureError(
                "a layer changes an input in place, and several inputs lie in the same memory: "
                "clone them before the step"
            )
        self._grad_indices = [at for at, t in enumerate(self._tensors) if t.grad is not None]

    def write_back(self, tensors: Sequence[Tensor]) -> None:
        """After a replay: what the layers have changed, and what the caller's own layers learn."""
        with torch.no_grad():
            if self._mutated_indices and self._unsplit_inputs is not None:
                tensors = _list_values(self._unsplit_inputs.split_alike(tensors))
            for at in self._mutated_indices:
                tensors[at].detach().copy_(self._tensors[at])
        if self._grad_indices:
            gradients = [self._tensors[at].grad for at in self._grad_indices]
            torch.autograd.backward(
                [tensors[at] for at in self._grad_indices],
                [gradient.clone() for gradient in gradients if gradient is not None],
            )
