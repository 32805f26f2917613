"""The autograd graph of one cell: its inputs, its outputs and its backward.

A cell is one stage on one micro-batch. Its graph starts at the tensors that arrived from other
stages and ends at the tensors that are sent on. Nothing in it is connected to the graph of another
cell: the runtime carries gradients from cell to cell as messages.

    payload -> detached tensors -> [ layers ] -> outputs -> payload
               inputs                            roots (GradientEdge)

A `CellGraph` keeps gradient edges of its outputs, not the outputs themselves, so that their memory
can be freed while the graph waits for its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import RunError
from penstock.stage.payload import Payload
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import PythonNode, is_reentrant_checkpoint, run_backward

Gradients = tuple[Tensor | None, ...]
TensorOrEdge = Tensor | GradientEdge

# The globals of the frames that run the backward of a cell. A hook finds them on the stack.
BACKWARD_GLOBALS = globals()


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

    PyTorch refuses in-place operations on a leaf that requires grad. The output of this function is
    a detached tensor with a `grad_fn`, so it is not a leaf. Its backward writes the gradient into a
    list instead of passing it on.

    Each input has a node of its own. PyTorch calls the hooks on all outputs of a node, with None
    for those that the loss does not depend on.
    """

    @staticmethod
    def forward(ctx: Any, received_grads: list[Any], index: int, anchor: Tensor, x: Tensor) -> Any:
        ctx.inbox, ctx.index = received_grads, index
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (ctx.inbox[ctx.index],) = gradients
        return None, None, None, None


# An empty leaf that requires grad. PyTorch gives the outputs of a `torch.autograd.Function` a
# `grad_fn` only if one of the inputs requires grad; the anchor is that input.
GRAPH_ANCHOR = torch.empty(0, requires_grad=True)


def enter_graph(
    tensors: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], tuple[GradientEdge, ...], list[Tensor | None]]:
    """Return tensors at the start of a graph, which layers may change in place.

    With them come their gradient edges, and a list into which a backward writes their gradients.
    """
    received_grads: list[Tensor | None] = [None] * len(tensors)
    apply: Any = _GraphEntry.apply
    entries = enumerate(tensors)
    inside = tuple([apply(received_grads, i, GRAPH_ANCHOR, tensor) for i, tensor in entries])
    edges = [GradientEdge(t.grad_fn, t.output_nr, _find_node_owner(t)) for t in inside]
    return inside, tuple(edges), received_grads


_ENTRY_NODE: Any = _GraphEntry._backward_cls


# ---- outputs -----------------------------------------------------------------------------------


def find_gradient_edge(tensor: Tensor) -> GradientEdge | None:
    """Return the edge at which the tensor's gradient enters its graph, or None without a graph."""
    if not tensor.requires_grad:
        return None
    node: Any = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    owner = _find_node_owner(tensor) if isinstance(node, PythonNode) else None
    # For each cell, so without the constructor of a named tuple, which is a Python function.
    return tuple.__new__(GradientEdge, (node, tensor.output_nr, owner))


def _find_node_owner(tensor: Tensor) -> Any:
    """Return an object that keeps the tensor's `torch.autograd.Function` node and its graph alive.

    The Python object of such a node does not own the C++ node behind it. If only the Python object
    is kept, PyTorch frees the graph with the tensor. A C++ node that follows it in the graph does
    own it, so a view of the tensor is made for the sake of its `grad_fn`. `get_gradient_edge` does
    the same; it fails for sparse tensors, which have no `view_as`, and there the tensor itself is
    kept.
    """
    if tensor.layout is not torch.strided:
        return tensor
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn


# ---- backward ----------------------------------------------------------------------------------


def find_graph_leaves(roots: Iterable[Any]) -> list[Tensor]:
    """Return the leaves of a graph, each once, from the autograd nodes of its outputs."""
    leaves = (getattr(node, "variable", None) for node in iter_nodes(roots))
    return [leaf for leaf in leaves if leaf is not None]  # only AccumulateGrad nodes have one


def has_python_nodes(roots: Iterable[Any]) -> bool:
    """Return whether a graph has nodes of an `autograd.Function`."""
    return any(isinstance(node, PythonNode) for node in iter_nodes(roots))


def iter_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph, each once, in an order that depends on the graph alone."""
    todo = list(dict.fromkeys(roots))
    visited = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in visited:
                visited.add(next_node)
                todo.append(next_node)


def has_saved_tensors(node: Any) -> bool:
    """Return whether a node of PyTorch may have saved tensors, which the first backward frees."""
    return any(name.startswith("_raw_saved") for name in dir(type(node)))


def describe_graph(roots: Iterable[Any]) -> int:
    """Return a hash of the operations of a graph, of their dims, and of what they take from where.

    Sizes are left out, and so are numbers, such as the factor of a product. It is computed in each
    step, so nodes are walked through here and not by a generator.
    """
    nodes = list(dict.fromkeys(roots))
    positions = {node: position for position, node in enumerate(nodes)}
    description: list[Any] = []
    for node in nodes:  # it grows
        kind = type(node)
        if kind is _ENTRY_NODE:  # an input is this or a leaf
            description.append("AccumulateGrad")
            continue
        name, dims = _node_kinds.get(kind) or _describe_kind(kind)
        description.append(name)
        for attribute in dims:
            description.append(getattr(node, attribute))
        for next_node, _ in node.next_functions:
            if next_node is None:
                continue
            position = positions.get(next_node)
            if position is None:
                position = positions[next_node] = len(nodes)
                nodes.append(next_node)
            description.append(position)
    return hash(tuple(description))


def _describe_kind(kind: type) -> tuple[str, tuple[str, ...]]:
    """Return the name of a type of node, and its attributes with dims."""
    if issubclass(kind, PythonNode):  # users may make new ones in each forward
        return kind.__name__, ()
    dims = tuple(name for name in dir(kind) if name.startswith("_saved_dim"))
    _node_kinds[kind] = kind.__name__, dims
    return _node_kinds[kind]


_node_kinds: dict[type, tuple[str, tuple[str, ...]]] = {}  # of PyTorch


@dataclass(slots=True)
class CellGraph:
    """The two ends of a cell's graph: output edges by destination, inputs by source.

    Attributes:
        roots: For each destination stage, the gradient edge of each output tensor.
        inputs_need_grad: For each source stage, whether each tensor it sent gets a gradient.
        inputs: The inputs that get a gradient, in the order of `inputs_need_grad`: the tensors
            themselves if they are leaves, else their gradient edges.
        received_grads: The gradients that `_GraphEntry.backward` received, or None if the inputs
            are leaves.
    """

    roots: dict[int, tuple[GradientEdge | None, ...]]
    inputs_need_grad: dict[int, tuple[bool, ...]]
    inputs: tuple[TensorOrEdge, ...] = ()
    received_grads: list[Tensor | None] | None = None

    def match_gradients(
        self, gradients: Mapping[int, Payload]
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
            for root, gradient in zip(self.roots[dst], gradients[dst].tensors, strict=True):
                if root is not None and gradient is not None:
                    roots.append(root)
                    root_grads.append(gradient)
        return tuple(roots), tuple(root_grads)

    def find_leaves(self) -> list[Tensor]:
        """Return all leaves of the graph except its inputs: parameters, registered or not."""
        inner = {id(leaf) for leaf in (*self.inputs, GRAPH_ANCHOR)}
        return [leaf for leaf in find_graph_leaves(self._list_nodes()) if id(leaf) not in inner]

    def _list_nodes(self) -> list[Any]:
        return [root.node for roots in self.roots.values() for root in roots if root is not None]

    def describe(self) -> int:
        """Return a hash of the operations of the graph: see `describe_graph`."""
        return describe_graph(self._list_nodes())

    def hides_parameters(self) -> bool:
        """Return whether a reentrant `torch.utils.checkpoint` keeps parameters out of the graph."""
        return any(map(is_reentrant_checkpoint, iter_nodes(self._list_nodes())))

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

    def take_input_gradients(self, gradients: Iterator[Tensor | None]) -> dict[int, Payload]:
        """Return the next gradients by source, with None for inputs that need none."""
        payloads = {}
        for source, needs_grad in self.inputs_need_grad.items():
            tensors = []
            for need in needs_grad:
                tensors.append(next(gradients) if need else None)
            payloads[source] = Payload(tuple(tensors))
        return payloads

    def _take_received_grads(self) -> Sequence[Tensor | None]:
        """Return the gradients that a backward has left at the inputs, and remove them."""
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

    def backward_accumulate(
        self, gradients: Mapping[int, Payload], retain_graph: bool
    ) -> dict[int, Payload]:
        """Run the backward, add to the `.grad` of parameters, and return the input gradients."""
        roots, root_grads = self.match_gradients(gradients)
        if not roots:
            return self.take_input_gradients(repeat(None))
        accumulate_grads(roots, root_grads, retain_graph)
        return self.take_input_gradients(iter(self._take_received_grads()))

    def backward_collect(
        self,
        gradients: Mapping[int, Payload],
        parameters: Sequence[Tensor],
        retain_graph: bool,
        hides_parameters: bool = False,
    ) -> tuple[dict[int, Payload], Gradients]:
        """Run the backward, and return the gradients of the inputs and of the parameters.

        The `.grad` of the parameters stays as it is. If the graph hides parameters, they cannot be
        asked for, and their gradients are found where the backward adds them.
        """
        if hides_parameters:
            previous = [parameter.grad for parameter in parameters]
            try:
                for parameter in parameters:
                    parameter.grad = None
                input_grads = self.backward_accumulate(gradients, retain_graph)
                return input_grads, tuple([parameter.grad for parameter in parameters])
            finally:
                for parameter, gradient in zip(parameters, previous, strict=True):
                    parameter.grad = gradient
        wanted = (*self.inputs, *parameters)
        roots, root_grads = self.match_gradients(gradients)
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
        else:
            results = (None,) * len(wanted)
        remaining = iter(results)
        return self.take_input_gradients(remaining), tuple(remaining)
