"""The autograd graph of one cell: its inputs, its outputs and its backward.

A cell is one stage on one micro-batch. Its graph starts at the tensors that arrived from other
stages and ends at the tensors that are sent on. Nothing in it is connected to the graph of another
cell: the runtime carries gradients from cell to cell as messages.

    payload -> detached tensors -> [ layers ] -> outputs -> payload
               GraphInputs                       roots (GradientEdge)

A `CellGraph` keeps gradient edges of its outputs, not the outputs themselves, so that their memory
can be freed while the graph waits for its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import RunError
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import PythonNode, run_backward

Gradients = tuple[Tensor | None, ...]
TensorOrEdge = Tensor | GradientEdge


def accumulate_grads(roots: Sequence[Any], gradients: Sequence[Tensor], retain_graph: bool) -> None:
    """Run a backward from the roots with these gradients, and add to the `.grad` of each leaf."""
    run_backward(
        tuple(roots),
        tuple(gradients),
        retain_graph,
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


# ---- inputs ------------------------------------------------------------------------------------


class _GraphEntry(torch.autograd.Function):
    """The start of a graph whose first layer may change its input in place.

    PyTorch refuses in-place operations on a leaf that requires grad. The outputs of this function
    are detached tensors with a `grad_fn`, so they are not leaves. Its backward writes the gradients
    into a list instead of passing them on.
    """

    @staticmethod
    def forward(ctx: Any, received_grads: list[Any], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.inbox = received_grads
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.inbox[:] = gradients
        return None, None, *(None for _ in gradients)


# An empty leaf that requires grad. PyTorch gives the outputs of a `torch.autograd.Function` a
# `grad_fn` only if one of the inputs requires grad; the anchor is that input.
GRAPH_ANCHOR = torch.empty(0, requires_grad=True)


@dataclass(slots=True)
class GraphInputs:
    """The tensors at which a graph starts, and a way to read their gradients after a backward.

    Attributes:
        tensors: The tensors that the layers compute with. The runner drops them after the forward.
        inputs: The same as leaves or gradient edges, to be passed to `torch.autograd.grad`.
        received_grads: The gradients that `_GraphEntry.backward` received, or None if the inputs
            are leaves.
    """

    tensors: Sequence[Tensor]
    inputs: tuple[TensorOrEdge, ...]
    received_grads: list[Tensor | None] | None = None

    @staticmethod
    def from_leaves(tensors: Iterable[Tensor]) -> GraphInputs:
        """Use the tensors themselves as leaves.

        This is cheap, but only valid for layers that do not change their input in place.
        """
        leaves = tuple([tensor.requires_grad_() for tensor in tensors])
        return GraphInputs(leaves, leaves)

    @staticmethod
    def from_entry(tensors: Sequence[Tensor]) -> GraphInputs:
        """Put the tensors behind a `_GraphEntry`, so that layers may change them in place."""
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
        """Return the gradients that a backward has left, and remove them."""
        if self.received_grads is not None:
            gradients = self.received_grads[:]
            self.received_grads[:] = [None] * len(gradients)
            return gradients
        gradients = []
        for leaf in self.inputs:
            assert isinstance(leaf, Tensor)
            gradients.append(leaf.grad)
            leaf.grad = None
        return gradients


# ---- outputs -----------------------------------------------------------------------------------


def find_gradient_edge(tensor: Tensor) -> GradientEdge | None:
    """Return the edge at which the tensor's gradient enters its graph, or None without a graph."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr, _find_node_owner(tensor, node))


def _find_node_owner(tensor: Tensor, node: Any) -> Any:
    """Return an object that keeps the node and its graph alive, or None if the node does so.

    The Python object of a `torch.autograd.Function` node does not own the C++ node behind it. If
    only the Python object is kept, PyTorch frees the graph with the tensor. A C++ node that follows
    it in the graph does own it, so a view of the tensor is made for the sake of its `grad_fn`.
    `get_gradient_edge` does the same; it fails for sparse tensors, which have no `view_as`, and
    there the tensor itself is kept.
    """
    if not isinstance(node, PythonNode):
        return None
    if tensor.layout is not torch.strided:
        return tensor
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn


# ---- backward ----------------------------------------------------------------------------------


@dataclass(slots=True)
class CellGraph:
    """The two ends of a cell's graph: output edges by destination, inputs by source.

    Attributes:
        roots: For each destination stage, the gradient edge of each output tensor.
        inputs_need_grad: For each source stage, whether each tensor it sent gets a gradient.
        graph_inputs: The tensors that get a gradient, in the order of `inputs_need_grad`.
    """

    roots: dict[int, tuple[GradientEdge | None, ...]]
    inputs_need_grad: dict[int, tuple[bool, ...]]
    graph_inputs: GraphInputs

    def match_gradients(
        self, gradients: Mapping[int, Gradients]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the outputs that received a gradient, and these gradients."""
        # Where gradients of several destinations meet, autograd adds them in the order of the
        # roots. In the unsplit model the backward reaches later layers first, so gradients of
        # later stages come first here. Another order gives other roundings.
        order: Iterable[int] = self.roots
        if len(self.roots) > 1:
            order = sorted(self.roots, key=lambda dst: (dst == OUTSIDE, dst), reverse=True)
        roots, root_grads = [], []
        for dst in order:
            for root, gradient in zip(self.roots[dst], gradients[dst], strict=True):
                if root is not None and gradient is not None:
                    roots.append(root)
                    root_grads.append(gradient)
        return tuple(roots), tuple(root_grads)

    def find_leaves(self) -> list[Tensor]:
        """Return all leaves of the graph except its inputs: parameters, registered or not."""
        inner = {id(leaf) for leaf in (*self.graph_inputs.inputs, GRAPH_ANCHOR)}
        todo = [root.node for roots in self.roots.values() for root in roots if root is not None]
        visited = set(todo)
        leaves = []
        while todo:
            node = todo.pop()
            leaf = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
            if leaf is not None and id(leaf) not in inner:
                leaves.append(leaf)
            new = {n for n, _ in node.next_functions if n is not None} - visited
            visited |= new
            todo += new
        return leaves

    def check_leaves_are_parameters(self, parameters: Collection[Tensor]) -> None:
        """Raise if a leaf is neither an input nor one of the parameters."""
        parameter_ids = {id(leaf) for leaf in parameters}
        for leaf in self.find_leaves():
            if id(leaf) not in parameter_ids:
                raise RunError(
                    f"a layer uses a tensor of shape {tuple(leaf.shape)} that requires grad but is "
                    "not a registered parameter. It would get no gradient through pipe(x) or in a "
                    "captured step. Register it as an nn.Parameter of its layer, or register the "
                    "module that holds it."
                )

    def group_by_source(self, gradients: Sequence[Tensor | None]) -> dict[int, Gradients]:
        """Return the gradients of the inputs by source, with None for tensors that need none."""
        remaining = iter(gradients)
        by_source: dict[int, Gradients] = {}
        for source, needs in self.inputs_need_grad.items():
            by_source[source] = tuple([next(remaining) if need else None for need in needs])
        return by_source

    def backward_accumulate(
        self, gradients: Mapping[int, Gradients], retain_graph: bool
    ) -> dict[int, Gradients]:
        """Run the backward, add to the `.grad` of parameters, and return the input gradients."""
        roots, root_grads = self.match_gradients(gradients)
        if not roots:
            return self.group_by_source([None] * len(self.graph_inputs.inputs))
        accumulate_grads(roots, root_grads, retain_graph)
        return self.group_by_source(self.graph_inputs.take_gradients())

    def backward_collect(
        self, gradients: Mapping[int, Gradients], parameters: Sequence[Tensor], retain_graph: bool
    ) -> tuple[dict[int, Gradients], Gradients]:
        """Run the backward, and return the gradients of the inputs and of the parameters.

        The `.grad` of the parameters stays as it is.
        """
        inputs = self.graph_inputs.inputs
        wanted = (*inputs, *parameters)
        roots, root_grads = self.match_gradients(gradients)
        results: Gradients = (None,) * len(wanted)
        if roots and wanted:
            results = run_backward(
                roots,
                root_grads,
                retain_graph,
                False,  # create_graph
                wanted,
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return self.group_by_source(results[: len(inputs)]), results[len(inputs) :]
