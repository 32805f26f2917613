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
from penstock.runtime.execution import Execution
from penstock.runtime.program_cache import Phase
from penstock.runtime.stage_inputs import InputsByStage
from penstock.stage.payload import (
    Payload,
    PayloadLayout,
    flatten_values,
    tensor_versions,
    unflatten_values,
)

Cell = tuple[int, int]  # stage, micro-batch


def collect_tensors_by_cell(inputs_by_stage: InputsByStage) -> dict[Cell, list[Tensor]]:
    """The tensors that come from outside into each cell."""
    return {
        (stage, microbatch): flatten_values(values)[0]
        for stage, batches in inputs_by_stage.items()
        for microbatch, values in enumerate(batches)
    }


def build_input_payloads(inputs_by_stage: InputsByStage) -> dict[Cell, Payload]:
    """The parcels that carry it in. Each counts changes in place by itself."""
    apart = {
        (stage, microbatch): flatten_values(values)
        for stage, batches in inputs_by_stage.items()
        for microbatch, values in enumerate(batches)
    }
    seen = Counter(id(tensor) for tensors, _ in apart.values() for tensor in tensors)
    return {
        cell: Payload(
            tuple(tensor.data for tensor in tensors),
            layout,
            tuple(tensor.requires_grad for tensor in tensors),
            frozenset(at for at, t in enumerate(tensors) if t.requires_grad or seen[id(t)] > 1),
        )
        for cell, (tensors, layout) in apart.items()
    }


def propagate_version_bumps(
    caller_tensors: Iterable[Tensor], payload_tensors: Iterable[Tensor | None]
) -> None:
    """What layers have changed in place counts as changed for the caller's autograd, too."""
    for tensor, inside in zip(caller_tensors, payload_tensors, strict=True):
        if inside is not None and not inside.is_inference() and inside._version:
            torch.autograd.graph.increment_version(tensor)


class AutogradCall:
    """One forward through the pipe, and the backwards that may follow it."""

    def __init__(
        self, execution: Execution, phases: tuple[Phase, Phase], inputs_by_stage: InputsByStage
    ) -> None:
        self.execution = execution
        self._forward_phase, self._backward_phase = phases
        self._chunks, self._last_stage = len(inputs_by_stage[0]), len(execution.stage_runners) - 1
        found = collect_tensors_by_cell(inputs_by_stage)
        self._input_cells = list(found)
        self.inputs = [tensor for tensors in found.values() for tensor in tensors]
        execution.cell_io.inputs = build_input_payloads(inputs_by_stage)
        self._output_layouts: list[PayloadLayout | None] = []
        self._output_sizes: list[int] = []
        self._input_versions: list[int] = []

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """The tensors of all outputs, and which of them may want gradients."""
        carried = [t for parcel in self.execution.cell_io.inputs.values() for t in parcel.tensors]
        self.execution.run(self._forward_phase)
        self.execution.cell_io.inputs.clear()
        propagate_version_bumps(self.inputs, carried)
        parcels = [
            self.execution.cell_io.outputs.pop((self._last_stage, i)) for i in range(self._chunks)
        ]
        self._output_layouts = [parcel.layout for parcel in parcels]
        self._output_sizes = [len(parcel.tensors) for parcel in parcels]
        self._input_versions = tensor_versions(self.inputs)
        tensors = [t for parcel in parcels for t in parcel.tensors if t is not None]
        return tensors, [need for parcel in parcels for need in parcel.needs_grad]

    def apply_autograd_function(self) -> Sequence[Tensor]:
        """The tensors of all outputs, as part of the caller's graph."""
        anchors = self.execution.create_grad_accumulators()
        parameters = [p for tape in self.execution.stage_runners for p in tape.parameters]
        tensors: Sequence[Tensor] = PipeFunction.apply(self, *self.inputs, *parameters)  # type: ignore[no-untyped-call]
        del anchors
        return tensors

    def unflatten_outputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The outputs of the micro-batches, of their tensors."""
        pieces = _split_by_sizes(tensors, self._output_sizes)
        pairs = zip(pieces, self._output_layouts, strict=True)
        return [unflatten_values(piece, layout)[0] for piece, layout in pairs]

    def backward(
        self, output_gradients: Sequence[Tensor | None], retain_graph: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the inputs and of the parameters, from those of the outputs."""
        if self.execution.is_cleared:
            raise RunError(
                "trying to backward through a pipe a second time: what the first backward needed "
                "has been freed, also if it failed; use loss.backward(retain_graph=True) for all "
                "but the last"
            )
        if self._input_versions != tensor_versions(self.inputs):
            raise RunError(
                "an input of the pipe has been changed in place after its forward, and the "
                "backward needs it as it was: clone it before you change it"
            )
        desk = self.execution.cell_io
        for microbatch, piece in enumerate(_split_by_sizes(output_gradients, self._output_sizes)):
            desk.output_gradients[self._last_stage, microbatch] = Payload(tuple(piece))
        for tape in self.execution.stage_runners:
            tape.start_collecting_grads()
        try:
            self.execution.run(self._backward_phase, retain_graph)
        except BaseException:
            self.execution.clear()
            raise
        of_inputs = [
            gradient
            for cell in self._input_cells
            for gradient in desk.input_gradients.pop(cell).tensors
        ]
        of_parameters = [
            None if gradient is None else gradient.to(parameter.device)  # which may be its owner's
            for tape in self.execution.stage_runners
            for parameter, gradient in zip(tape.parameters, tape.collected_grads or (), strict=True)
        ]
        desk.output_gradients.clear()
        if not retain_graph:
            self.execution.clear()
            self.inputs.clear()
        return of_inputs, of_parameters


def _split_by_sizes(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    each = iter(items)
    return [[next(each) for _ in range(size)] for size in sizes]


class PipeFunction(torch.autograd.Function):
    """A passage, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, autograd_call: AutogradCall, *tensors: Tensor) -> Any:
        """`tensors` are the passage's inputs and the parameters."""
        ctx.passage = autograd_call
        ctx.set_materialize_grads(False)
        outputs, needs = autograd_call.forward()
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
