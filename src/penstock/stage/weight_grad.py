"""What W does: the gradients of weights that a backward (I) has left.

A `Pair` keeps what one use of a weight needs: what went into it, until the backward brings the
gradient of what came out. W makes the weight's gradient of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.stage.cell_graph import (
    GRAPH_ANCHOR,
    TensorOrEdge,
    accumulate_grads,
    find_gradient_edge,
)

WeightGradFormula = Callable[[Tensor, Tensor], Tensor]  # of the output's gradient and the input


class WeightGradRecorder:
    """Where a forward puts what it leaves for W. It is open while that forward runs."""

    __slots__ = ("_thread_id", "autocast_weights", "pending")

    def __init__(self) -> None:
        self.pending: list[PendingWeightGrad] | None = None
        self.autocast_weights: dict[Tensor, Tensor] = {}  # weights under autocast
        self._thread_id = 0

    def start(self) -> list[PendingWeightGrad]:
        """For the forward of this thread."""
        self.pending, self._thread_id = [], get_ident()
        return self.pending

    def stop(self) -> None:
        """What is used from now on is not put off."""
        self.pending = None
        self.autocast_weights.clear()

    def add(self, pending_grad: PendingWeightGrad) -> None:
        """Leave it for W."""
        assert self.pending is not None
        self.pending.append(pending_grad)

    @property
    def is_recording(self) -> bool:
        """To this thread: others may compute with the same module, for other stages."""
        return self.pending is not None and self._thread_id == get_ident()

    def check_not_recording(self) -> None:
        """Gradients that a forward asks for would lack what it has put off."""
        if self.pending is not None:
            raise RunError(
                "a layer computes gradients in its forward, but the part of its weights in them is "
                "put off until W: use a schedule without W, such as '1f1b', or call that part of "
                "the layer by torch.utils.checkpoint"
            )


class PendingWeightGrad:
    """One use of a weight, of which a formula gives a gradient.

    It goes to the `root`: the weight itself, or where the backward goes on from there.
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
        self.parameter, self.root = parameter, root  # the parameter, and what was made of it
        self._formula, self._recorder = formula, recorder
        self._input_is_small_view = _is_small_view(op_input)
        self._op_input, self._op_input_version = op_input.detach(), op_input._version
        self._output_grad: Tensor | None = None
        self._output_grad_version = 0

    def receive_output_grad(
        self, _: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """As a hook of the operation's node: when all that may change the gradient have done so."""
        if self._recorder.pending is not None:
            self._recorder.check_not_recording()
        gradient = gradients[0]
        if gradient is None:
            return
        if self._input_is_small_view:
            if self._op_input._version != self._op_input_version:
                raise _changed_in_place_error(self._op_input)
            self._op_input, self._op_input_version, self._input_is_small_view = (
                self._op_input.clone(),
                0,
                False,
            )
        if _is_small_view(gradient):
            gradient = gradient.clone()
        self._output_grad, self._output_grad_version = gradient, gradient._version

    def compute_gradient(self) -> Tensor | None:
        """The gradient; None if none has come."""
        gradient, given = self._output_grad, self._op_input
        if gradient is None:
            return None
        if given._version != self._op_input_version:
            raise _changed_in_place_error(given)
        if gradient._version != self._output_grad_version:
            raise _changed_in_place_error(gradient)
        return self._formula(gradient, given)


def _is_small_view(tensor: Tensor) -> bool:
    """Of something large, which would stay alive with it?"""
    base = tensor._base
    return base is not None and base.numel() > 2 * tensor.numel()


def _changed_in_place_error(tensor: Tensor) -> RunError:
    return RunError(
        f"a tensor of shape {tuple(tensor.shape)} that the gradient of a weight needs has been "
        "changed in place by a later operation: clone it before you change it"
    )


class StopBackward(torch.autograd.Function):
    """Stops the backward before an operation, whose whole backward is W's."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, output: Tensor, pending_grad: PendingWeightGrad
    ) -> Tensor:
        """The same memory; the root makes it part of a graph, not of the operation's."""
        ctx.pair = pending_grad
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradient goes no further."""
        ctx.pair.receive_output_grad((), gradients)
        return None, None, None


_NO_INPUT = torch.empty(0)
_MAX_BATCHED_ELEMENTS = 1 << 20  # this many numbers may wait to be added


def stop_backward(
    parameter: Tensor, output: Tensor, recorder: WeightGradRecorder
) -> tuple[Tensor, PendingWeightGrad]:
    """An operation's output, behind a gate, and what waits for its gradient."""
    root = find_gradient_edge(output)
    assert root is not None
    pair = PendingWeightGrad(parameter, root, _NO_INPUT, _return_output_grad, recorder)
    gated: Tensor = StopBackward.apply(GRAPH_ANCHOR, output.detach(), pair)  # type: ignore[no-untyped-call]
    return gated, pair


def _return_output_grad(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient


def accumulate_weight_grads(pending: list[PendingWeightGrad]) -> None:
    """W: the gradients that were put off, added to `.grad`; the list is emptied.

    Small ones go in one backward, as each has its price, but large ones do not wait for others.
    """
    pending.reverse()
    roots: list[TensorOrEdge] = []
    gradients: list[Tensor] = []
    numbers = 0
    with torch.no_grad():
        while pending:
            pair = pending.pop()
            gradient = pair.compute_gradient()
            if gradient is not None:
                roots.append(pair.root)
                gradients.append(gradient)
                numbers += gradient.numel()
            if numbers > _MAX_BATCHED_ELEMENTS and not (
                pending and pending[-1].parameter is pair.parameter
            ):
                accumulate_grads(roots, gradients, retain_graph=True)  # a root may come again
                roots, gradients, numbers = [], [], 0
        if roots:
            accumulate_grads(roots, gradients, retain_graph=True)
