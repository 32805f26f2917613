"""Inputs of a captured step: tensors that stay in their places, filled before each replay."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.run.capture.watching import Uncapturable
from penstock.run.feed import Fed, Given

Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]  # and does it learn?


@dataclass(frozen=True)
class Inputs:
    """What a step is given, taken apart: its tensors, each once, and the rest.

    Of a batch that was cut by its rows alone, it is the tensors that were cut.
    """

    tensors: tuple[Tensor, ...]
    kinds: tuple[Kind, ...]  # theirs
    places: tuple[int | None, ...]  # which of them each leaf is; None: it is none
    memory: tuple[int, ...]  # for each tensor, the first that is just there in memory, too
    overlap: bool  # do some have a part of their memory in common?
    rest: tuple[Any, ...]  # the leaves that are no tensors
    spec: Any
    cut: bool = False

    @property
    def shape(self) -> Hashable:
        """How it was put together."""
        return self.spec if isinstance(self.spec, _Plain) else str(self.spec)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The same with others."""
        rest = iter(self.rest)
        leaves = [next(rest) if at is None else tensors[at] for at in self.places]
        if not isinstance(self.spec, _Plain):
            return pytree.tree_unflatten(leaves, self.spec)
        each = iter(leaves)
        given = {
            stage: [tuple([next(each) for _ in range(size)]) for size in sizes]
            for stage, sizes in self.spec.sizes
        }
        return given, next(each), next(each)


def inputs_of(fed: Fed, scale: Tensor | None) -> Inputs:
    """What stages are given from outside, and what numbers of theirs are multiplied by."""
    if fed.wholes and scale is None and fed.counting is None:
        found = _of_wholes(fed.wholes)
        if found is not None:
            return found
    classes = None if fed.counting is None else fed.counting.classes
    leaves, spec = _flat(fed.given, classes, scale)
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    number = {id(tensor): at for at, tensor in enumerate(tensors)}
    places = tuple([number.get(id(leaf)) for leaf in leaves])
    rest = tuple([leaf for leaf, at in zip(leaves, places, strict=True) if at is None])
    kinds = tuple(map(_kind, tensors))
    return Inputs(tuple(tensors), kinds, places, *_memory(tensors, kinds), rest, spec)


def _of_wholes(wholes: tuple[Tensor, ...]) -> Inputs | None:
    """If they have nothing to do with each other, and none learns."""
    kinds = tuple(map(_kind, wholes))
    apart = tuple(range(len(wholes)))
    memory, overlap = _memory(wholes, kinds)
    if overlap or memory != apart or any(kind[-1] for kind in kinds):
        return None
    return Inputs(wholes, kinds, apart, memory, False, (), _Plain(()), cut=True)


class _Plain(NamedTuple):
    """How many tensors each stage is given for each micro-batch, and nothing else."""

    sizes: tuple[tuple[int, tuple[int, ...]], ...]


def _flat(given: Given, classes: Tensor | None, scale: Tensor | None) -> tuple[list[Any], Any]:
    leaves = _pieces(given)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return pytree.tree_flatten((dict(given), classes, scale))
    sizes = tuple([(stage, tuple(map(len, pieces))) for stage, pieces in given.items()])
    return [*leaves, classes, scale], _Plain(sizes)


def _pieces(given: Given) -> list[Any]:
    return [tensor for parts in given.values() for values in parts for tensor in values]


def _kind(tensor: Tensor) -> Kind:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise Uncapturable(
            f"an input is a {type(tensor).__name__} with layout {tensor.layout}: give a plain "
            "tensor"
        )
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _memory(tensors: Sequence[Tensor], kinds: Sequence[Kind]) -> tuple[tuple[int, ...], bool]:
    """If the target is the input itself, say, a layer that changes the one has changed both."""
    first: dict[Any, int] = {}
    spans: list[tuple[int, int]] = []
    memory: list[int] = []
    sizes = {kind: _bytes(kind) for kind in set(kinds)}  # micro-batches are mostly alike
    for at, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
        where = tensor.data_ptr()
        turned = tensor.is_conj(), tensor.is_neg()  # the same memory, and other numbers
        memory.append(first.setdefault((where, *kind[:4], *turned), at))
        if memory[-1] == at and (size := sizes[kind]):
            spans.append((where, where + size))
    spans.sort()
    return tuple(memory), any(a[1] > b[0] for a, b in pairwise(spans))


def _bytes(kind: Kind) -> int:
    """From the first to the last."""
    shape, stride, dtype, *_ = kind
    if not all(shape):
        return 0
    last = sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])
    return (last + 1) * dtype.itemsize


class Standing:
    """The tensors of one recording."""

    def __init__(self, inputs: Inputs) -> None:
        self._tensors: list[Tensor] = []
        for at, (tensor, first) in enumerate(zip(inputs.tensors, inputs.memory, strict=True)):
            if first == at:
                made = torch.empty_like(tensor, requires_grad=False)
            else:  # changes are counted for each by itself
                made = self._tensors[first].data
            self._tensors.append(made.requires_grad_(tensor.requires_grad))
        self._overlap = inputs.overlap
        self._places = [tensor.detach() for tensor in self._tensors]
        self._versions: list[int] = []
        self._cut: Fed | None = None  # what was cut of them, if they are whole

    def fed(self, fed: Fed, inputs: Inputs) -> tuple[Fed, Tensor | None]:
        """What was fed, and the scale, with these in the places of the caller's."""
        if inputs.cut:  # changes are counted for each piece by itself
            parts = fed.of_others(self._tensors)
            given = {s: [tuple(t.data for t in each) for each in parts[s]] for s in parts}
            self._tensors, classes, scale = _pieces(given), None, None
        else:
            given, classes, scale = inputs.with_tensors(self._tensors)
        counting = fed.counting
        if counting is not None:
            counting = replace(counting, classes=classes)
        self._versions = [tensor._version for tensor in self._tensors]
        static = replace(fed, given=given, counting=counting, shares=(), labels=(), wholes=())
        self._cut = static if inputs.cut else None
        return static, scale

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """From what the caller gives."""
        if tensors:
            torch._foreach_copy_(self._places, list(tensors), non_blocking=True)

    def close(self) -> None:
        """The capture has ended: remember which of them the layers change in place."""
        before = zip(self._tensors, self._versions, strict=True)
        self._changed = [at for at, (t, version) in enumerate(before) if t._version != version]
        if self._changed and self._overlap:
            raise Uncapturable(
                "a layer changes an input in place, and several inputs lie in the same memory: "
                "clone them before the step"
            )
        self._learning = [at for at, t in enumerate(self._tensors) if t.grad is not None]

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        """After a replay: what the layers have changed, and what the caller's own layers learn."""
        with torch.no_grad():
            if self._changed and self._cut is not None:
                tensors = _pieces(self._cut.of_others(tensors))
            for at in self._changed:
                tensors[at].detach().copy_(self._tensors[at])
        if self._learning:
            gradients = [self._tensors[at].grad for at in self._learning]
            torch.autograd.backward(
                [tensors[at] for at in self._learning],
                [gradient.clone() for gradient in gradients if gradient is not None],
            )
