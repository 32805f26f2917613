"""The transparent door: a whole pipe as one autograd function.

Its inputs are the micro-batches' tensors and the parameters, its outputs the micro-batches'
outputs, so that `autograd.grad`, hooks and wrappers see ordinary gradients, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.run.call import Call
from penstock.run.feed import Given
from penstock.run.phase import Phase
from penstock.stage.parcel import Layout, Parcel, put_together, taken_apart, versions

Cell = tuple[int, int]  # stage, micro-batch


def tensors_by_cell(given: Given) -> dict[Cell, list[Tensor]]:
    """The tensors that come from outside into each cell."""
    return {
        (stage, microbatch): taken_apart(values)[0]
        for stage, batches in given.items()
        for microbatch, values in enumerate(batches)
    }


def from_outside(given: Given) -> dict[Cell, Parcel]:
    """The parcels that carry it in. Each counts changes in place by itself."""
    apart = {
        (stage, microbatch): taken_apart(values)
        for stage, batches in given.items()
        for microbatch, values in enumerate(batches)
    }
    seen = Counter(id(tensor) for tensors, _ in apart.values() for tensor in tensors)
    return {
        cell: Parcel(
            tuple(tensor.data for tensor in tensors),
            layout,
            tuple(tensor.requires_grad for tensor in tensors),
            frozenset(at for at, t in enumerate(tensors) if t.requires_grad or seen[id(t)] > 1),
        )
        for cell, (tensors, layout) in apart.items()
    }


def pass_changes_on(given: Iterable[Tensor], carried: Iterable[Tensor | None]) -> None:
    """What layers have changed in place counts as changed for the caller's autograd, too."""
    for tensor, inside in zip(given, carried, strict=True):
        if inside is not None and not inside.is_inference() and inside._version:
            torch.autograd.graph.increment_version(tensor)


class Passage:
    """One forward through the pipe, and the backwards that may follow it."""

    def __init__(self, call: Call, phases: tuple[Phase, Phase], given: Given) -> None:
        self.call = call
        self._forward, self._backward = phases
        self._chunks, self._last = len(given[0]), len(call.tapes) - 1
        found = tensors_by_cell(given)
        self._cells = list(found)
        self.inputs = [tensor for tensors in found.values() for tensor in tensors]
        call.desk.inputs = from_outside(given)
        self._layouts: list[Layout | None] = []
        self._sizes: list[int] = []
        self._versions: list[int] = []

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """The tensors of all outputs, and which of them may want gradients."""
        carried = [t for parcel in self.call.desk.inputs.values() for t in parcel.tensors]
        self.call.run(self._forward)
        self.call.desk.inputs.clear()
        pass_changes_on(self.inputs, carried)
        parcels = [self.call.desk.outputs.pop((self._last, i)) for i in range(self._chunks)]
        self._layouts = [parcel.layout for parcel in parcels]
        self._sizes = [len(parcel.tensors) for parcel in parcels]
        self._versions = versions(self.inputs)
        tensors = [t for parcel in parcels for t in parcel.tensors if t is not None]
        return tensors, [need for parcel in parcels for need in parcel.needs]

    def tracked(self) -> Sequence[Tensor]:
        """The tensors of all outputs, as part of the caller's graph."""
        anchors = self.call.anchors()
        parameters = [p for tape in self.call.tapes for p in tape.parameters]
        tensors: Sequence[Tensor] = Through.apply(self, *self.inputs, *parameters)  # type: ignore[no-untyped-call]
        del anchors
        return tensors

    def outputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The outputs of the micro-batches, of their tensors."""
        pieces = _pieces(tensors, self._sizes)
        pairs = zip(pieces, self._layouts, strict=True)
        return [put_together(piece, layout)[0] for piece, layout in pairs]

    def backward(
        self, gradients: Sequence[Tensor | None], retain: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the inputs and of the parameters, from those of the outputs."""
        if self.call.done:
            raise RunError(
                "trying to backward through a pipe a second time: what the first backward needed "
                "has been freed, also if it failed; use loss.backward(retain_graph=True) for all "
                "but the last"
            )
        if self._versions != versions(self.inputs):
            raise RunError(
                "an input of the pipe has been changed in place after its forward, and the "
                "backward needs it as it was: clone it before you change it"
            )
        desk = self.call.desk
        for microbatch, piece in enumerate(_pieces(gradients, self._sizes)):
            desk.gradients[self._last, microbatch] = Parcel(tuple(piece))
        for tape in self.call.tapes:
            tape.collect()
        try:
            self.call.run(self._backward, retain)
        except BaseException:
            self.call.clear()
            raise
        of_inputs = [
            gradient for cell in self._cells for gradient in desk.input_gradients.pop(cell).tensors
        ]
        of_parameters = [
            None if gradient is None else gradient.to(parameter.device)  # which may be its owner's
            for tape in self.call.tapes
            for parameter, gradient in zip(tape.parameters, tape.collected or (), strict=True)
        ]
        desk.gradients.clear()
        if not retain:
            self.call.clear()
            self.inputs.clear()
        return of_inputs, of_parameters


def _pieces(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    each = iter(items)
    return [[next(each) for _ in range(size)] for size in sizes]


class Through(torch.autograd.Function):
    """A passage, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: Tensor) -> Any:
        """`tensors` are the passage's inputs and the parameters."""
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        outputs, needs = passage.forward()
        ctx.mark_non_differentiable(*(t for t, n in zip(outputs, needs, strict=True) if not n))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Autograd tells whether the graph is to be kept."""
        if torch.is_grad_enabled():
            raise RunError(
                "create_graph=True asks for gradients that can be differentiated again, and those "
                "of a pipe cannot: use the unsplit model for second derivatives"
            )
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        of_inputs, of_parameters = ctx.passage.backward(gradients, retain)
        return None, *of_inputs, *of_parameters
