"""`pipe(x)` as a single autograd function.

The caller's graph gets one node for the whole pipe:

    inputs of the micro-batches ─┐                ┌─ outputs of the micro-batches
                                 ├─ PipeFunction ─┤
    parameters of all stages ────┘                └─ (their gradients come back here)

Inside, stages run on detached tensors and build a graph for each cell. So `torch.autograd.grad`,
hooks on parameters and wrappers such as DistributedDataParallel see one ordinary gradient for each
parameter, as they would see it from the unsplit model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.model.stage_inputs import (
    InputsByStage,
    collect_tensors_by_cell,
    propagate_version_bumps,
)
from penstock.runtime.execution import Execution
from penstock.runtime.program_cache import Phase
from penstock.stage.payload import (
    Payload,
    PayloadLayout,
    check_no_hidden_outputs,
    tensor_versions,
    unflatten_values,
)
from penstock.torch_compat import is_batched_gradient, keeps_graph
from penstock.tracebacks import fold_frames


class AutogradCall:
    """One forward through the pipe, and the backwards that may follow it."""

    def __init__(
        self, execution: Execution, phases: tuple[Phase, Phase], inputs_by_stage: InputsByStage
    ) -> None:
        self.execution = execution
        self._forward_phase, self._backward_phase = phases
        self._chunks, self._last_stage = len(inputs_by_stage[0]), len(execution.stage_runners) - 1
        tensors_by_cell = collect_tensors_by_cell(inputs_by_stage)
        self._input_cells = list(tensors_by_cell)
        self.inputs = [tensor for tensors in tensors_by_cell.values() for tensor in tensors]
        self._output_layouts: list[PayloadLayout | None] = []
        self._output_sizes: list[int] = []
        self._input_versions: list[int] = []

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Run all forwards. Return the output tensors and whether each may need a gradient."""
        payload_tensors = [
            t for payload in self.execution.cell_io.inputs.values() for t in payload.tensors
        ]
        self.execution.run(self._forward_phase)
        self.execution.cell_io.inputs.clear()
        propagate_version_bumps(self.inputs, payload_tensors)
        payloads = [
            self.execution.cell_io.outputs.pop((self._last_stage, i)) for i in range(self._chunks)
        ]
        self._output_layouts = [payload.layout for payload in payloads]
        self._output_sizes = [len(payload.tensors) for payload in payloads]
        # Stages save `.data` of the inputs, whose version counter does not see in-place changes
        # that the caller makes. So the backward compares the versions of the caller's tensors.
        self._input_versions = tensor_versions(self.inputs)
        tensors = [t for payload in payloads for t in payload.tensors if t is not None]
        return tensors, [need for payload in payloads for need in payload.needs_grad]

    def apply_autograd_function(self) -> Sequence[Tensor]:
        """Run all forwards. Return the output tensors as part of the caller's graph."""
        # The edges keep the AccumulateGrad nodes alive until `apply` has linked to them. They were
        # created on the streams of their ranks; see `create_grad_accumulators`.
        gradient_edges = self.execution.create_grad_accumulators()
        parameters = [p for runner in self.execution.stage_runners for p in runner.parameters]
        tensors: Sequence[Tensor] = PipeFunction.apply(self, *self.inputs, *parameters)  # type: ignore[no-untyped-call]
        del gradient_edges
        last_runner = self.execution.stage_runners[-1]
        for microbatch, layout in enumerate(self._output_layouts):
            if layout is not None:
                check_no_hidden_outputs(layout, not last_runner.awaits_recompute(microbatch))
        return tensors

    def unflatten_outputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the output of each micro-batch, built from the tensors of all of them."""
        pieces = _split_by_sizes(tensors, self._output_sizes)
        pairs = zip(pieces, self._output_layouts, strict=True)
        return [unflatten_values(piece, layout)[0] for piece, layout in pairs]

    def backward(
        self, output_gradients: Sequence[Tensor | None], retain_graph: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run all backwards. Return the gradients of the inputs and those of the parameters."""
        if self.execution.is_cleared:
            raise RunError(
                "trying to backward through a pipe a second time. The first backward freed the "
                "saved tensors, as it does even if it fails. Use loss.backward(retain_graph=True) "
                "for every backward but the last."
            )
        if any(map(is_batched_gradient, output_gradients)):
            raise RunError(
                "a backward through a pipe got many gradients at once, as with "
                "is_grads_batched=True or jacobian(vectorize=True). The stages cannot compute with "
                "these. Leave the option out: the results are the same."
            )
        if self._input_versions != tensor_versions(self.inputs):
            raise RunError(
                "an input of the pipe has been changed in place after its forward, but the "
                "backward needs its old values. Clone the input before you change it."
            )
        cell_io = self.execution.cell_io
        for microbatch, piece in enumerate(_split_by_sizes(output_gradients, self._output_sizes)):
            cell_io.output_gradients[self._last_stage, microbatch] = Payload(tuple(piece))
        for runner in self.execution.stage_runners:
            runner.start_collecting_grads()
        audits = self.execution.audits
        try:
            self.execution.run(self._backward_phase, retain_graph)
            if audits is not None:
                audits.check_backward(
                    lambda microbatch: (
                        cell_io.output_gradients[self._last_stage, microbatch].tensors
                    )
                )
        except BaseException:
            # Some cells have run their backward and some have not. There is no state to resume.
            self.execution.clear()
            raise
        input_gradients = [
            gradient
            for cell in self._input_cells
            for gradient in cell_io.input_gradients.pop(cell).tensors
        ]
        # A tied parameter may be on the device of another rank, which owns it. Autograd needs the
        # gradient on the parameter's device.
        parameter_gradients = [
            gradient
            if gradient is None or gradient.device == parameter.device
            else gradient.to(parameter.device)
            for runner in self.execution.stage_runners
            for parameter, gradient in zip(
                runner.parameters, runner.collected_grads or (), strict=True
            )
        ]
        cell_io.output_gradients.clear()
        if not retain_graph:
            self.execution.audits = None  # they refer to the batch
        if not retain_graph:
            self.execution.clear()
            self.inputs.clear()
        self._check_hooked_parameters(parameter_gradients)
        return input_gradients, parameter_gradients

    def _check_hooked_parameters(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise if a parameter has a hook and no gradient.

        The hook would be called with None, because the parameter is an argument of `PipeFunction`.
        Autograd does not call it if the unsplit model has not used the parameter.
        """
        if all(gradient is not None for gradient in gradients):
            return
        parameters = (p for runner in self.execution.stage_runners for p in runner.parameters)
        pairs = list(zip(parameters, gradients, strict=True))
        used = {id(p) for p, gradient in pairs if gradient is not None}
        for parameter, _ in pairs:
            if id(parameter) not in used and parameter._backward_hooks:
                raise RunError(
                    f"a parameter of shape {tuple(parameter.shape)} has a hook, but no gradient, "
                    "because the output does not depend on it. PyTorch would call the hook with "
                    "None. Remove the hook, or train with pipe.step."
                )


def _split_by_sizes(items: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(items[start : start + size])
        start += size
    return pieces


class PipeFunction(torch.autograd.Function):
    """The autograd node of one `AutogradCall`."""

    @staticmethod
    def forward(ctx: Any, autograd_call: AutogradCall, *tensors: Tensor) -> Any:
        """Run the forwards of the call.

        `tensors` are the inputs of the call and the parameters. They are arguments only so that
        autograd connects the node to them.
        """
        ctx.autograd_call = autograd_call
        # An output that the loss does not use gets None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        outputs, needs_grad = autograd_call.forward()
        ctx.mark_non_differentiable(
            *(tensor for tensor, need in zip(outputs, needs_grad, strict=True) if not need)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run the backwards of the call. Return the gradients of the arguments of `forward`."""
        # Autograd enables gradients inside a backward only for create_graph=True.
        if torch.is_grad_enabled():
            raise RunError(
                "create_graph=True needs gradients that can be differentiated again, but the "
                "gradients of a pipe cannot. Use the unsplit model for second derivatives."
            )
        try:
            results = ctx.autograd_call.backward(gradients, keeps_graph())
        except Exception as error:
            fold_frames(error)
            raise
        input_gradients, parameter_gradients = results
        return None, *input_gradients, *parameter_gradients
