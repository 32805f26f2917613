"""Weight gradients that the backward of the inputs (I) leaves for a later action (W).

A schedule with a split backward sends input gradients to the previous stage first and computes
weight gradients in idle time. For each use of a weight, one `PendingWeightGrad` travels through
three actions:

    forward   the operation runs, and the pending gradient keeps its input
    I         a hook hands it the gradient of the operation's output
    W         a formula computes the weight's gradient from the two, and it is added to `.grad`

`weight_grad_ops.py` decides which operations take part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.stage.cell_graph import (
    BACKWARD_GLOBALS,
    GRAPH_ANCHOR,
    TensorOrEdge,
    accumulate_grads,
    find_gradient_edge,
)
from penstock.torch_compat import AUTOGRAD_BACKWARD_CODE, AUTOGRAD_GRAD_CODE, run_backward

# From the gradient of an operation's output and from its input to the gradient of its weight.
WeightGradFormula = Callable[[Tensor, Tensor], Tensor]

_AUTOGRAD_CALLS = AUTOGRAD_GRAD_CODE, AUTOGRAD_BACKWARD_CODE
# Where a release of PyTorch lacks the engine's own function, a cell uses the calls above.
_RUN_BACKWARD_CODE = getattr(run_backward, "__code__", None)


class WeightGradRecorder:
    """A collector of the pending gradients of one forward, active while that forward runs.

    Attributes:
        pending: The pending gradients so far, or None if no forward is running.
        autocast_weights: Weights that autocast has converted in this forward, by original weight.
    """

    __slots__ = ("_thread_id", "autocast_weights", "pending")

    def __init__(self) -> None:
        self.pending: list[PendingWeightGrad] | None = None
        self.autocast_weights: dict[Tensor, Tensor] = {}
        self._thread_id = 0

    def start(self) -> list[PendingWeightGrad]:
        """Start to record the forward that runs in this thread; return its list."""
        self.pending, self._thread_id = [], get_ident()
        return self.pending

    def stop(self) -> None:
        """Stop recording. Weights that are used from now on get their gradients in I."""
        self.pending = None
        self.autocast_weights.clear()

    def add(self, pending_grad: PendingWeightGrad) -> None:
        """Add a gradient to be computed in W."""
        assert self.pending is not None
        self.pending.append(pending_grad)

    @property
    def is_recording(self) -> bool:
        """Return whether this thread runs the forward that is recorded.

        Other threads may use the same module at the same time, for other stages.
        """
        return self.pending is not None and self._thread_id == get_ident()

    def check_not_recording(self) -> None:
        """Raise if a forward is recorded: a backward inside it would lack weight gradients."""
        if self.pending is not None:
            raise RunError(
                "a layer computes gradients in its forward, but this schedule defers the gradients "
                "of its weights to W, so they would be incomplete. Use a schedule without W, such "
                "as '1f1b', or run that part of the layer through torch.utils.checkpoint."
            )


class PendingWeightGrad:
    """The gradient of one use of a weight, to be computed in W.

    Attributes:
        parameter: The parameter behind the weight.
        root: The tensor or edge that W runs a backward from: the parameter itself, or the edge of a
            tensor that was computed from it (a transposed weight, a weight cast by autocast).
    """

    __slots__ = (
        "_formula",
        "_input_is_small_view",
        "_op_input",
        "_op_input_version",
        "_output_grad",
        "_output_grad_version",
        "_recorder",
        "parameter",
        "root",
    )  # fmt: skip

    def __init__(
        self,
        parameter: Tensor,
        root: TensorOrEdge,
        op_input: Tensor,
        formula: WeightGradFormula,
        recorder: WeightGradRecorder,
    ) -> None:
        self.parameter, self.root = parameter, root
        self._formula, self._recorder = formula, recorder
        self._input_is_small_view = _is_small_view(op_input)
        self._op_input, self._op_input_version = op_input.detach(), op_input._version
        self._output_grad: Tensor | None = None
        self._output_grad_version = 0

    def receive_output_grad(
        self, _: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """Keep the gradient of the operation's output.

        This is a hook of the operation's autograd node. It runs after the node, and so after all
        tensor hooks that may change the gradient.
        """
        if self._recorder.pending is not None:
            self._recorder.check_not_recording()
        gradient = gradients[0]
        if gradient is None or _is_inside_own_grad():
            return
        # Until now autograd kept the whole base of a view alive. From here on only W needs the
        # view, and a copy of it lets the base be freed.
        if self._input_is_small_view:
            if self._op_input._version != self._op_input_version:
                raise _changed_in_place_error(self._op_input)
            self._op_input, self._op_input_version = self._op_input.clone(), 0
            self._input_is_small_view = False
        if _is_small_view(gradient):
            gradient = gradient.clone()
        self._output_grad, self._output_grad_version = gradient, gradient._version

    def compute_gradient(self) -> Tensor | None:
        """Return the gradient of the weight, or None if the output has received no gradient."""
        output_grad, op_input = self._output_grad, self._op_input
        if output_grad is None:
            return None
        # Autograd makes the same check for the tensors that it saves itself.
        if op_input._version != self._op_input_version:
            raise _changed_in_place_error(op_input)
        if output_grad._version != self._output_grad_version:
            raise _changed_in_place_error(output_grad)
        return self._formula(output_grad, op_input)


def _is_inside_own_grad() -> bool:
    """Return whether a layer's own `torch.autograd.grad`, inside I, called the current hook.

    A deep equilibrium layer solves for its gradient in a hook. The gradients that pass by on the
    way are not those of the loss, and nobody asked for those of the weights: a call that does gets
    an error of PyTorch's, as the weights of deferred operations are not in the graph. Raise if the
    call would get None instead, or if it adds to the weights' `.grad`.
    """
    frame: FrameType | None = sys._getframe(2)
    caller: FrameType | None = None
    while frame is not None and frame.f_globals is not BACKWARD_GLOBALS:
        if caller is None and frame.f_code in _AUTOGRAD_CALLS:
            caller = frame
        elif frame.f_code is _RUN_BACKWARD_CODE:
            caller = None
        frame = frame.f_back
    # The cell's own backward calls neither, and without a cell there is no W.
    if frame is None or caller is None:
        return False
    if caller.f_code is AUTOGRAD_GRAD_CODE and not caller.f_locals["allow_unused"]:
        return True
    raise RunError(
        "a layer computes gradients in its backward, with backward() or "
        "grad(..., allow_unused=True), but this schedule defers the gradients of its weights to W, "
        "so they would be incomplete. Use a schedule without W, such as '1f1b'."
    )


def _is_small_view(tensor: Tensor) -> bool:
    """Return whether the tensor is a view that keeps a base of more than twice its size alive."""
    base = tensor._base
    return base is not None and base.numel() > 2 * tensor.numel()


def _changed_in_place_error(tensor: Tensor) -> RunError:
    return RunError(
        f"a tensor of shape {tuple(tensor.shape)} was changed in place by a later operation, but "
        "the gradient of a weight needs its old value. Clone it before you change it."
    )


class StopBackward(torch.autograd.Function):
    """A gate that ends the backward at the output of an operation, so that W can run the rest."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, output: Tensor, pending_grad: PendingWeightGrad
    ) -> Tensor:
        """Return the output detached. The anchor gives it a `grad_fn`, which is this gate."""
        ctx.pending_grad = pending_grad
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Keep the gradient for W, and pass nothing on."""
        ctx.pending_grad.receive_output_grad((), gradients)
        return None, None, None


_NO_INPUT = torch.empty(0)
# Gradients of this many elements may wait to be added. On a CPU a large one is added while it is
# still in the cache, and the next one is computed in the same memory. On a GPU the fixed cost of a
# backward is the larger one.
_MAX_BATCHED_ELEMENTS = 1 << 20
_MAX_BATCHED_ELEMENTS_ON_CPU = 1 << 16


def stop_backward(
    parameter: Tensor, output: Tensor, recorder: WeightGradRecorder
) -> tuple[Tensor, PendingWeightGrad]:
    """Defer the whole backward of an operation to W.

    Returns:
        The output behind a gate, and the pending gradient that waits there. W starts its backward
        at the operation itself, with the gradient of the output.
    """
    root = find_gradient_edge(output)
    assert root is not None
    pending_grad = PendingWeightGrad(parameter, root, _NO_INPUT, _return_output_grad, recorder)
    gated: Tensor = StopBackward.apply(GRAPH_ANCHOR, output.detach(), pending_grad)  # type: ignore[no-untyped-call]
    return gated, pending_grad


def _return_output_grad(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient


def accumulate_weight_grads(pending: list[PendingWeightGrad]) -> None:
    """Compute all pending gradients, add them to `.grad`, and empty the list: the action W."""
    # Each backward has a fixed cost, so small gradients share one. Large gradients do not wait, as
    # they would occupy memory. Entries are popped in the order of the forward, so that each frees
    # its input as soon as it is done.
    pending.reverse()
    roots: list[TensorOrEdge] = []
    gradients: list[Tensor] = []
    elements, limit = 0, _MAX_BATCHED_ELEMENTS
    with torch.no_grad():
        while pending:
            pending_grad = pending.pop()
            gradient = pending_grad.compute_gradient()
            if gradient is not None:
                roots.append(pending_grad.root)
                gradients.append(gradient)
                elements += gradient.numel()
                limit = _MAX_BATCHED_ELEMENTS_ON_CPU if gradient.is_cpu else _MAX_BATCHED_ELEMENTS
                gradient = None  # or its memory would not be free for the next one
            if elements > limit and not (
                pending and pending[-1].parameter is pending_grad.parameter
            ):
                # Several uses of a weight may share a root, so the graph behind it must stay.
                accumulate_grads(roots, gradients, retain_graph=True)
                roots, gradients, elements = [], [], 0
        if roots:
            accumulate_grads(roots, gradients, retain_graph=True)
