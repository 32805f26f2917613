"""The operations after the last unit of a traced forward, as a module that can be measured.

A model that computes its own loss does so after its last unit, in its own forward. All of that runs
on the last stage. With a large vocabulary it takes as long as several blocks, so a cut that looks
at units alone would make the last stage too long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from penstock.model.traced.dry_run import make_dummy_tensor
from penstock.model.traced.trace import NodeKind, Trace, ValueLeaf, ValueRef
from penstock.nested_values import flatten, map_tensors, unflatten
from penstock.stage.loss import LOSS_FN_ORIGIN, parse_loss


class LossModule(nn.Module):
    """A module that computes a loss, to be measured."""

    def __init__(self, loss: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self._loss = loss

    @property
    def targets(self) -> Any:
        """The targets that the loss compares an output with, where it knows them."""
        return getattr(self._loss, "targets", ())

    def compute_loss(self, output: Any) -> Tensor:
        """Return the loss of an output. `loss_fn` may return more than that."""
        assert self._loss is not None
        return parse_loss(self._loss(output), LOSS_FN_ORIGIN)[0]


class TraceTail(LossModule):
    """The operations after the last unit, and the loss of the output if there is a `loss_fn`.

    Its arguments are the values that it needs: outputs of units, parameters, and what follows from
    the inputs alone.
    """

    def __init__(self, trace: Trace, loss: Callable[[Any], Any] | None) -> None:
        super().__init__(loss)
        self._trace = trace
        after = trace.nodes[trace.unit_call_indices[-1] + 1 :]
        self._nodes = [
            node for node in after if node.kind is NodeKind.OPERATION and not node.input_only
        ]
        computed = {value for node in self._nodes for value in node.produced_values}
        outputs = trace.output.value_indices
        self._losses = [
            value
            for value in outputs
            if value in computed and trace.values[value].tensor_spec.numel == 1
        ]
        used = {value for node in self._nodes for value in node.inputs}
        used.update(outputs if loss is not None else ())
        self._needed = sorted(used - computed)

    @property
    def can_run(self) -> bool:
        """Whether there is a loss, and no operation depends on the values of tensors."""
        if any(node.is_guard or node.arg_template is None for node in self._nodes):
            return False
        return self._loss is not None or bool(self._losses)

    def make_arguments(self) -> tuple[Tensor, ...]:
        """Return tensors of the shapes in the trace."""
        values = self._trace.values
        return tuple(make_dummy_tensor(values[value].tensor_spec) for value in self._needed)

    def forward(self, *tensors: Tensor) -> Any:
        """Return the loss."""
        values = dict(zip(self._needed, tensors, strict=True))
        for node in self._nodes:
            args, kwargs = map_tensors(node.arg_template, lambda ref: values[ref.value], ValueRef)
            result = node.call(*args, **kwargs)
            for old, new in node.mutations.items():
                values[new] = values[old]
            if node.output is not None:
                for leaf, tensor in zip(node.output.leaves, flatten(result)[0], strict=True):
                    if isinstance(leaf, ValueLeaf):
                        values[leaf.value] = tensor
        if self._loss is None:
            return [values[value] for value in self._losses]
        output = self._trace.output
        leaves = [v if not isinstance(v, ValueLeaf) else values[v.value] for v in output.leaves]
        return self.compute_loss(unflatten(leaves, output.tree_spec))
