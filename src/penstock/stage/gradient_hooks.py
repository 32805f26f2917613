"""Hooks on the gradients of parameters, which run once, at the end of a step.

`register_hook` and `register_post_accumulate_grad_hook` mean: once for each backward, with the
gradient of the whole batch. In a step, a stage has a backward for each micro-batch, and a clipped
sum of clipped gradients is not the clipped sum. So the hooks rest while the lanes run:

    before the lanes   the hooks are taken off, and `.grad` of earlier steps is set aside
    in the lanes       `.grad` becomes the sum over the micro-batches, tied weights included
    at the end         it gets its final scale, the hooks are put back, and one backward from the
                       parameters runs them, and adds what they return to the earlier `.grad`

That is one backward for all parameters: `torch.autograd.graph.register_multi_grad_hook` counts the
calls in a backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.stage.caller_context import no_autocast


class _HookedParameter(NamedTuple):
    """A parameter without its hooks, and what is put back at the end of the step."""

    parameter: nn.Parameter
    earlier: Tensor | None  # its gradient of earlier steps
    tables: list[tuple[dict[int, Any], dict[int, Any]]]  # its tables of hooks, and their entries

    def has_new_hooks(self) -> bool:
        """Return whether a layer has registered hooks since the others were taken off."""
        return any(table for table, _ in self.tables)

    def restore(self) -> Tensor | None:
        """Put the hooks and the earlier gradient back, and return the gradient of this step."""
        for table, entries in self.tables:
            table.clear()
            table.update(entries)
        gradient, self.parameter.grad = self.parameter.grad, self.earlier
        return gradient


class DeferredHooks:
    """The hooks of the parameters of a step, taken off until it ends.

    Args:
        parameters: The parameters that have hooks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._hooked: list[_HookedParameter] = []
        for parameter in dict.fromkeys(parameters):
            # PyTorch calls what is in these tables, so they are emptied and filled again. A handle
            # finds its hook in them.
            hook_tables = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            tables = [(table, dict(table)) for table in hook_tables if table]
            for table, _ in tables:
                table.clear()
            self._hooked.append(_HookedParameter(parameter, parameter.grad, tables))
            parameter.grad = None

    def run(self) -> None:
        """Run the hooks with the gradients of the batch, and add these to the earlier ones."""
        late = next((entry for entry in self._hooked if entry.has_new_hooks()), None)
        pairs = [pair for pair in self.restore() if pair[1] is not None]
        if late is not None:
            raise RunError(
                "a layer has registered a hook on its parameter of shape "
                f"{tuple(late.parameter.shape)} in its forward, where the hook gets the gradient "
                "of one micro-batch. Register hooks before the step."
            )
        if pairs:
            parameters, gradients = zip(*pairs, strict=True)
            # A backward comes to the last layer first, and hooks may go by that: one of several
            # gradients may change one in place that is in `.grad` already. Autograd keeps the order
            # of nodes, and takes leaves in any order.
            with torch.enable_grad():
                roots = [torch.ops.aten.alias(parameter) for parameter in parameters]
            with no_autocast():  # as in the backward of a stage
                torch.autograd.backward(roots, gradients)

    def restore(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Put hooks and earlier gradients back. Return the gradients of this step."""
        hooked, self._hooked = self._hooked, []
        return [(entry.parameter, entry.restore()) for entry in hooked]
