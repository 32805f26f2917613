"""The autograd graph of one cell: where it begins, where it ends, and its backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import RunError
from penstock.stage.stage import OUTSIDE

Gradients = tuple[Tensor | None, ...]
TensorOrEdge = Tensor | GradientEdge

# What `torch.autograd.backward` and `grad` call, without checks that cost as much as a small layer.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


def accumulate_grads(roots: Sequence[Any], gradients: Sequence[Tensor], retain_graph: bool) -> None:
    """Backward from the roots, with these gradients; what leaves get is added to their `.grad`."""
    _run_backward(
        tuple(roots),
        tuple(gradients),
        retain_graph,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _GraphEntry(torch.autograd.Function):
    """Where a graph begins if its first layer works in place: not a leaf, which none may change."""

    @staticmethod
    def forward(ctx: Any, received_grads: list[Any], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.inbox = received_grads
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.inbox[:] = gradients
        return None, None, *(None for _ in gradients)


GRAPH_ANCHOR = torch.empty(0, requires_grad=True)  # what makes an output part of a graph


@dataclass(slots=True)
class GraphInputs:
    """The inputs of a graph: the tensors inside, and how to get at their gradients."""

    tensors: Sequence[Tensor]
    inputs: tuple[TensorOrEdge, ...]
    received_grads: list[Tensor | None] | None = (
        None  # what an entry's backward caught, if there is one
    )

    @staticmethod
    def from_leaves(tensors: Iterable[Tensor]) -> GraphInputs:
        """The tensors themselves, for layers that do not change their input in place: cheap."""
        leaves = tuple([tensor.requires_grad_() for tensor in tensors])
        return GraphInputs(leaves, leaves)

    @staticmethod
    def from_entry(tensors: Sequence[Tensor]) -> GraphInputs:
        """For any layers."""
        inbox: list[Tensor | None] = [None] * len(tensors)
        inside = _GraphEntry.apply(inbox, GRAPH_ANCHOR, *tensors)  # type: ignore[no-untyped-call]
        return GraphInputs(
            inside,
            tuple(
                GradientEdge(t.grad_fn, t.output_nr, _find_node_owner(t, t.grad_fn)) for t in inside
            ),
            inbox,
        )

    def take_gradients(self) -> Sequence[Tensor | None]:
        """The gradients that a backward has left; they are taken away."""
        if self.received_grads is not None:
            found = self.received_grads[:]
            self.received_grads[:] = [None] * len(found)
            return found
        found = []
        for leaf in self.inputs:
            assert isinstance(leaf, Tensor)
            found.append(leaf.grad)
            leaf.grad = None
        return found


def find_gradient_edge(tensor: Tensor) -> GradientEdge | None:
    """Where its gradient enters the graph; None if it has no part in one."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr, _find_node_owner(tensor, node))


def _find_node_owner(tensor: Tensor, node: Any) -> Any:
    """What keeps a node alive that was written in Python: the object of it here does not.

    A node that follows it does; a sparse tensor has no view to make one, and is kept itself.
    """
    if not isinstance(node, torch._C._FunctionBase):
        return None
    if tensor.layout is not torch.strided:
        return tensor
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn


@dataclass(slots=True)
class CellGraph:
    """Both ends: outputs by destination, inputs by source."""

    roots: dict[int, tuple[GradientEdge | None, ...]]
    inputs_need_grad: dict[int, tuple[bool, ...]]  # which of each source's tensors are inputs
    graph_inputs: GraphInputs

    def match_gradients(
        self, gradients: Mapping[int, Gradients]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """The outputs that got a gradient, and those gradients.

        Those of later stages come first, as they do in the unsplit model: where several meet,
        they are added in the same order.
        """
        order: Iterable[int] = self.roots
        if len(self.roots) > 1:
            order = sorted(self.roots, key=lambda dst: (dst == OUTSIDE, dst), reverse=True)
        roots, given = [], []
        for dst in order:
            for root, gradient in zip(self.roots[dst], gradients[dst], strict=True):
                if root is not None and gradient is not None:
                    roots.append(root)
                    given.append(gradient)
        return tuple(roots), tuple(given)

    def find_leaves(self) -> list[Tensor]:
        """What it learns by, besides its inputs: parameters, registered or not."""
        inner = {id(leaf) for leaf in (*self.graph_inputs.inputs, GRAPH_ANCHOR)}
        todo = [root.node for roots in self.roots.values() for root in roots if root is not None]
        seen = set(todo)
        found = []
        while todo:
            node = todo.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in inner:
                found.append(leaf)
            new = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= new
            todo += new
        return found

    def check_leaves_are_parameters(self, parameters: Collection[Tensor]) -> None:
        """Every leaf is an input or a parameter: no other would get its gradient."""
        known = {id(leaf) for leaf in parameters}
        for leaf in self.find_leaves():
            if id(leaf) not in known:
                raise RunError(
                    f"a layer learns by a tensor of shape {tuple(leaf.shape)} that is no parameter "
                    "of the pipe's, so that it would get no gradient through pipe(x), nor in a "
                    "captured step: register it in its layer as an nn.Parameter, or as a part of a "
                    "module that is registered"
                )

    def group_by_source(self, gradients: Sequence[Tensor | None]) -> dict[int, Gradients]:
        """The gradients of the inputs, for those who sent them."""
        each = iter(gradients)
        return {
            source: tuple([next(each) if need else None for need in needs])
            for source, needs in self.inputs_need_grad.items()
        }

    def backward_accumulate(
        self, gradients: Mapping[int, Gradients], retain_graph: bool
    ) -> dict[int, Gradients]:
        """Backward; gradients of parameters are added to `.grad`."""
        roots, given = self.match_gradients(gradients)
        if not roots:
            return self.group_by_source([None] * len(self.graph_inputs.inputs))
        accumulate_grads(roots, given, retain_graph)
        return self.group_by_source(self.graph_inputs.take_gradients())

    def backward_collect(
        self, gradients: Mapping[int, Gradients], parameters: Sequence[Tensor], retain_graph: bool
    ) -> tuple[dict[int, Gradients], Gradients]:
        """Backward; gradients of parameters are given, too."""
        inputs = self.graph_inputs.inputs
        wanted = (*inputs, *parameters)
        roots, given = self.match_gradients(gradients)
        found: Gradients = (None,) * len(wanted)
        if roots and wanted:
            found = _run_backward(
                roots,
                given,
                retain_graph,
                False,
                wanted,
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return self.group_by_source(found[: len(inputs)]), found[len(inputs) :]
