"""Inputs of a captured step: tensors that stay in their places, filled before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.run.capture.watching import Uncapturable
from penstock.run.feed import Fed


@dataclass(frozen=True)
class Inputs:
    """What a step is given, taken apart: its tensors, each once, and the rest."""

    tensors: tuple[Tensor, ...]
    places: tuple[int | None, ...]  # which of them each leaf is
    rest: tuple[Any, ...]  # the leaves that are no tensors, and None
    spec: Any

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The same with others."""
        pairs = zip(self.places, self.rest, strict=True)
        leaves = [rest if at is None else tensors[at] for at, rest in pairs]
        return pytree.tree_unflatten(leaves, self.spec)


def inputs_of(fed: Fed, scale: Tensor | None) -> Inputs:
    """What stages are given from outside, and what numbers of theirs are multiplied by."""
    classes = None if fed.counting is None else fed.counting.classes
    leaves, spec = pytree.tree_flatten((dict(fed.given), classes, scale))
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
    return Inputs(tuple(tensors), tuple(places), rest, spec)


class Standing:
    """The tensors of one recording."""

    def __init__(self, inputs: Inputs) -> None:
        odd = [t for t in inputs.tensors if type(t) is not Tensor or t.layout is not torch.strided]
        if odd:
            raise Uncapturable(f"an input is a {type(odd[0]).__name__} with layout {odd[0].layout}")
        self._tensors = [
            torch.empty_like(tensor, requires_grad=tensor.requires_grad)
            for tensor in inputs.tensors
        ]
        self._given = inputs
        self._versions: list[int] = []

    def fed(self, fed: Fed) -> tuple[Fed, Tensor | None]:
        """What was fed, and the scale, with these in the places of the caller's."""
        given, classes, scale = self._given.with_tensors(self._tensors)
        counting = fed.counting
        if counting is not None:
            counting = replace(counting, classes=classes)
        self._versions = [tensor._version for tensor in self._tensors]
        return replace(fed, given=given, counting=counting), scale

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """From what the caller gives."""
        if tensors:
            torch._foreach_copy_(self._tensors, list(tensors), non_blocking=True)

    def close(self) -> None:
        """The capture has ended: remember which of them the layers change in place."""
        before = zip(self._tensors, self._versions, strict=True)
        self._changed = [at for at, (t, version) in enumerate(before) if t._version != version]
        self._learning = [at for at, t in enumerate(self._tensors) if t.grad is not None]

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        """After a replay: what the layers have changed, and what the caller's own layers learn."""
        with torch.no_grad():
            for at in self._changed:
                tensors[at].detach().copy_(self._tensors[at])
                torch.autograd.graph.increment_version(tensors[at])
        if self._learning:
            gradients = [self._tensors[at].grad for at in self._learning]
            torch.autograd.backward(
                [tensors[at] for at in self._learning],
                [gradient.clone() for gradient in gradients if gradient is not None],
            )
