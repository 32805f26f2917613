"""Inputs of a captured step: tensors that stay in their places, filled before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.run.capture.watching import Uncapturable
from penstock.run.feed import Fed, Given


@dataclass(frozen=True)
class Inputs:
    """What a step is given, taken apart: its tensors, each once, and the rest."""

    tensors: tuple[Tensor, ...]
    places: tuple[int | None, ...]  # which of them each leaf is
    memory: tuple[int, ...]  # for each tensor, the first that is just there in memory, too
    overlap: bool  # do some have a part of their memory in common?
    rest: tuple[Any, ...]  # the leaves that are no tensors, and None
    spec: Any

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The same with others."""
        pairs = zip(self.places, self.rest, strict=True)
        leaves = [rest if at is None else tensors[at] for at, rest in pairs]
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
    classes = None if fed.counting is None else fed.counting.classes
    leaves, spec = _flat(fed.given, classes, scale)
    seen: dict[int, int] = {}
    tensors: list[Tensor] = []
    places: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            places.append(None)
            continue
        if id(leaf) not in seen:
            seen[id(leaf)] = len(tensors)
            tensors.append(leaf)
        places.append(seen[id(leaf)])
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    memory, overlap = _memory(tensors)
    return Inputs(tuple(tensors), tuple(places), memory, overlap, rest, spec)


class _Plain(NamedTuple):
    """How many tensors each stage is given for each micro-batch, and nothing else."""

    sizes: tuple[tuple[int, tuple[int, ...]], ...]


def _flat(given: Given, classes: Tensor | None, scale: Tensor | None) -> tuple[list[Any], Any]:
    leaves = [leaf for pieces in given.values() for values in pieces for leaf in values]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return pytree.tree_flatten((dict(given), classes, scale))
    sizes = tuple([(stage, tuple(map(len, pieces))) for stage, pieces in given.items()])
    return [*leaves, classes, scale], _Plain(sizes)


def _memory(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], bool]:
    """If the target is the input itself, say, a layer that changes the one has changed both."""
    first: dict[Any, int] = {}
    spans: list[tuple[int, int]] = []
    memory: list[int] = []
    for at, t in enumerate(tensors):
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided:
            raise Uncapturable(
                f"an input is a {type(t).__name__} with layout {t.layout}: give a plain tensor"
            )
        where, stride = t.data_ptr(), t.stride()
        memory.append(first.setdefault((where, t.shape, stride, t.dtype), at))
        if memory[-1] == at and t.numel():
            steps = zip(t.shape, stride, strict=True)
            last = sum([(size - 1) * step for size, step in steps])
            spans.append((where, where + (last + 1) * t.element_size()))
    spans.sort()
    return tuple(memory), any(a[1] > b[0] for a, b in pairwise(spans))


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

    def fed(self, fed: Fed, inputs: Inputs) -> tuple[Fed, Tensor | None]:
        """What was fed, and the scale, with these in the places of the caller's."""
        given, classes, scale = inputs.with_tensors(self._tensors)
        counting = fed.counting
        if counting is not None:
            counting = replace(counting, classes=classes)
        self._versions = [tensor._version for tensor in self._tensors]
        static = replace(fed, given=given, counting=counting, shares=(), labels=())
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
            for at in self._changed:
                tensors[at].detach().copy_(self._tensors[at])
        if self._learning:
            gradients = [self._tensors[at].grad for at in self._learning]
            torch.autograd.backward(
                [tensors[at] for at in self._learning],
                [gradient.clone() for gradient in gradients if gradient is not None],
            )
