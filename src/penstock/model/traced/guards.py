"""Guards: the conditions under which an earlier trace holds for a new micro-batch.

A trace holds for every micro-batch on which the forward takes the same path. The path can depend on

    | what                                     | compared by                                      |
    |------------------------------------------|--------------------------------------------------|
    | shapes, dtypes, non-tensor arguments     | the cache key (`TracedPartition`)                |
    | `training`, attributes, global variables | `settings.SettingsReader`, in that key           |
    | `requires_grad`, tensors in attributes   | `TracedPartition`, if the forward asks for them  |
    | grad mode, autocast, default dtype       | `read_torch_state`, in that key                  |
    | values of input tensors                  | `InputGuards`: `mask.all()`, `int(lengths.max())`|

`InputGuards` runs the few nodes again that lead from the inputs to a host read, and compares what
the host reads. `TraceReplay` does the running. It also computes the targets of the model's own
loss, so that the weight of each micro-batch is known before it runs; see `find_loss_targets`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.device.accelerator import list_autocast_types
from penstock.model.traced.torch_functions import get_function_name
from penstock.model.traced.trace import Trace, TraceNode, ValueLeaf, ValueRef
from penstock.nested_values import flatten, iter_tensors, map_tensors, unflatten
from penstock.stage.loss import DEFAULT_IGNORE_INDEX, find_loss_tensor
from penstock.torch_compat import pytree

# ---- modes of PyTorch: a part of the cache key ---------------------------------------------------


def read_torch_state() -> tuple[Any, ...]:
    """Return the state of PyTorch that a forward may depend on: grad mode, dtype, autocast."""
    autocast_dtypes = tuple(
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        for device_type in list_autocast_types()
    )
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, torch.get_default_dtype(), *autocast_dtypes


# ---- replay: input-only nodes, run again ---------------------------------------------------------


class TraceReplay:
    """A replay of the nodes of a trace that some goal nodes depend on, with other inputs.

    Args:
        trace: The trace.
        constants: Tensors that the forward took from elsewhere, by value index.
        get_buffer: Returns a buffer of the model by its name.
        goal_nodes: The nodes to compute.
    """

    def __init__(
        self,
        trace: Trace,
        constants: Mapping[int, Tensor],
        get_buffer: Callable[[str], Tensor],
        goal_nodes: Iterable[int],
    ) -> None:
        self._trace, self._constants, self._get_buffer = trace, constants, get_buffer
        self._node_indices = find_dependencies(trace, goal_nodes)
        # A node that works in place would change the caller's batch or the model's buffers.
        self._clones_inputs = any(trace.nodes[index].mutations for index in self._node_indices)

    @property
    def loaded_values(self) -> set[int]:
        """The values that the nodes take from the inputs, from buffers and from constants."""
        used = {value for index in self._node_indices for value in self._trace.nodes[index].inputs}
        return {value for value in used if self._trace.values[value].producer is None}

    def run_nodes(self, inputs: Sequence[Tensor]) -> Iterator[tuple[TraceNode, Any]]:
        """Run the nodes one by one, and yield each with its result."""
        return self._run_nodes(self._make_resolver(inputs, {}))

    def compute_values(
        self, inputs: Sequence[Tensor], value_indices: Sequence[int]
    ) -> list[Tensor]:
        """Run all nodes and return some values."""
        resolver = self._make_resolver(inputs, {})
        for _ in self._run_nodes(resolver):
            pass
        return [resolver(value) for value in value_indices]

    def _make_resolver(
        self, inputs: Sequence[Tensor], computed: dict[int, Tensor]
    ) -> _ValueResolver:
        values = self._trace.values

        def load_tensor(value: int) -> Tensor:
            input_index, buffer_name = values[value].input_index, values[value].buffer_name
            # The output of a unit, as the argument of `zeros_like` and its kin. Only its shape
            # matters, and that is known from the trace.
            if not values[value].input_only:
                spec, device = values[value].tensor_spec, inputs[0].device if inputs else None
                return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            if input_index is not None:
                tensor = inputs[input_index]
            else:
                tensor = self._get_buffer(buffer_name) if buffer_name else self._constants[value]
            # The nodes run where the batch is; buffers may already be on the devices of stages.
            if inputs and tensor.device != inputs[0].device:
                return tensor.detach().to(inputs[0].device)
            return tensor.detach().clone() if self._clones_inputs else tensor

        return _ValueResolver(load_tensor, computed)

    def _run_nodes(self, resolver: _ValueResolver) -> Iterator[tuple[TraceNode, Any]]:
        with torch.no_grad():
            for index in self._node_indices:
                node = self._trace.nodes[index]
                args, kwargs = map_tensors(
                    node.arg_template, lambda ref: resolver(ref.value), ValueRef
                )
                result = node.call(*args, **kwargs)
                for old, new in node.mutations.items():
                    resolver.computed[new] = resolver(old)
                if node.output is not None:
                    for leaf, tensor in zip(node.output.leaves, flatten(result)[0], strict=True):
                        if isinstance(leaf, ValueLeaf):
                            resolver.computed[leaf.value] = tensor
                yield node, result


@dataclass
class _ValueResolver:
    """Returns the tensor of a value: computed by a node, or loaded once."""

    load: Callable[[int], Tensor]
    computed: dict[int, Tensor]

    def __call__(self, value: int) -> Tensor:
        if value not in self.computed:
            self.computed[value] = self.load(value)
        return self.computed[value]


def find_dependencies(trace: Trace, goal_nodes: Iterable[int]) -> list[int]:
    """Return the goal nodes and all input-only nodes that they depend on, in order."""
    pending = list(goal_nodes)
    node_indices: set[int] = set()
    while pending:
        index = pending.pop()
        if index in node_indices:
            continue
        node_indices.add(index)
        inputs = [trace.values[value] for value in trace.nodes[index].inputs]
        pending += [v.producer for v in inputs if v.producer is not None and v.input_only]
    return sorted(node_indices)


# ---- guards on the values of inputs --------------------------------------------------------------


class InputGuards:
    """The host reads of a traced forward, with the results they had in the trace."""

    def __init__(
        self, trace: Trace, constants: Mapping[int, Tensor], get_buffer: Callable[[str], Tensor]
    ) -> None:
        guard_nodes = [index for index, node in enumerate(trace.nodes) if node.is_guard]
        self._replay = TraceReplay(trace, constants, get_buffer, guard_nodes)
        self.has_reads = any(trace.nodes[index].output is None for index in guard_nodes)
        self.is_empty = not guard_nodes
        loaded = self._replay.loaded_values
        self.depend_on_constants = not constants.keys().isdisjoint(loaded)
        self.buffer_names = {trace.values[value].buffer_name for value in loaded} - {""}

    def matches(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether the forward would take the traced path with these inputs.

        The nodes run lazily: the first guard that fails ends the comparison.
        """
        return all(
            _same_outcome(node.output is None, result, node.recorded_result)
            for node, result in self._replay.run_nodes(inputs)
            if node.is_guard
        )

    def find_other_reads(self, inputs: Sequence[Tensor]) -> set[str]:
        """Return what the host would read differently from these inputs, of other sizes.

        "numbers", or "contents" such as lists, which are nearly always others. Operations whose
        output shapes depend on data are left out. If the nodes do not run on these sizes, nothing
        is known of what follows.
        """
        others = set()
        try:
            for node, result in self._replay.run_nodes(inputs):
                if node.is_guard and node.output is None:
                    is_number = isinstance(result, bool | int | float)
                    if not _same_outcome(True, result, node.recorded_result):
                        others.add("numbers" if is_number else "contents")
        except Exception:  # such as that of a view with the number of rows
            others.add("contents")
        return others


def _same_outcome(is_read: bool, actual: Any, expected: Any) -> bool:
    """Return whether a guard has the result of the trace.

    A host read compares its result. Any other guard is an operation whose output shape depends on
    data (`nonzero`), and compares shapes.
    """
    if not is_read:
        return bool([tuple(t.shape) for t in iter_tensors(actual)] == expected)
    if hasattr(actual, "tobytes"):  # a NumPy array; `==` would compare element by element
        return bool(actual.shape == expected.shape and actual.tobytes() == expected.tobytes())
    return bool(actual == expected)


# ---- the targets of the model's own loss ---------------------------------------------------------
#
# A model may compute its loss itself, as most models of transformers do. The mean of PyTorch's
# cross-entropy is one over the targets that are not `ignore_index`, so micro-batches with different
# numbers of such targets must not count the same. The targets depend on the inputs alone (labels,
# shifted by one), so a replay counts them before the micro-batch runs.

CROSS_ENTROPY_FUNCTIONS = frozenset([functional.cross_entropy, functional.nll_loss])

# Functions of one tensor, and perhaps a number, that scale or reshape it. A loss that has gone
# through these is still a mean over the same targets.
_SCALING_FUNCTIONS = frozenset(
    getattr(namespace, name)
    for namespace in (torch, Tensor)
    for name in (
        *("mul", "div", "neg", "clone", "squeeze", "reshape", "__mul__", "__rmul__", "__neg__"),
        *("__truediv__", "float", "double", "half", "bfloat16", "to", "type", "contiguous", "view"),
    )
    if hasattr(namespace, name)
)


@dataclass(frozen=True)
class LossTargets:
    """The values of a trace that decide what each target counts in the model's own loss."""

    target: int
    class_weights: int | None
    ignore_index: int
    label_smoothing: float


def find_loss_targets(trace: Trace) -> LossTargets | None:
    """Return the targets of the model's own loss.

    None means that the model returns no loss, that it is not a mean cross-entropy, or that the
    targets depend on more than the inputs.
    """
    node = _find_loss_node(trace)
    while node is not None and node.func in _SCALING_FUNCTIONS and len(node.inputs) == 1:
        producer = trace.values[node.inputs[0]].producer
        node = None if producer is None else trace.nodes[producer]
    if node is None or node.func not in CROSS_ENTROPY_FUNCTIONS or node.arg_template is None:
        return None
    args, kwargs = node.arg_template
    arguments = inspect.signature(node.func).bind(*args, **kwargs).arguments
    if arguments.get("reduction", "mean") != "mean" or arguments.get("reduce") is not None:
        return None
    target, class_weights = arguments["target"], arguments.get("weight")
    if arguments.get("size_average") is not None or not isinstance(target, ValueRef):
        return None
    values = [ref.value for ref in (target, class_weights) if isinstance(ref, ValueRef)]
    if not all(trace.values[value].input_only for value in values):
        return None
    ignore_index = arguments.get("ignore_index", DEFAULT_IGNORE_INDEX)
    return LossTargets(
        target.value,
        class_weights.value if isinstance(class_weights, ValueRef) else None,
        ignore_index,
        arguments.get("label_smoothing", 0.0),
    )


# ---- how the model's own loss combines ----------------------------------------------------------
#
# Losses of micro-batches are averaged, as most losses are means over rows. The last operations of
# the forward show some that are not.

_RESCALING_FUNCTIONS = frozenset(
    getattr(namespace, name)
    for namespace in (torch, Tensor)
    for name in ("mul", "div", "__mul__", "__rmul__", "__truediv__")
    if hasattr(namespace, name)
)
_SUMS = frozenset([torch.sum, Tensor.sum])
# Functions of all numbers of a tensor whose result for a batch cannot be computed from the results
# for its parts.
_UNCOMBINABLE_FUNCTIONS = frozenset(
    getattr(namespace, name)
    for namespace in (torch, Tensor)
    for name in (
        *("max", "min", "amax", "amin", "argmax", "argmin", "norm", "prod", "std", "var", "median"),
        *("logsumexp", "quantile", "any", "all"),
    )
    if hasattr(namespace, name)
) | {torch.linalg.norm, torch.linalg.vector_norm}


@dataclass(frozen=True)
class LossCombination:
    """The way in which losses of micro-batches combine, as the end of a forward shows it.

    Attributes:
        is_sum: Whether the loss is a sum, perhaps multiplied or divided by numbers.
        summed_shape: The shape of the tensor that is summed. It may have no rows: `mean(0).sum()`.
        factors: The Python numbers, as text. One may be the number of rows of the micro-batch, and
            then the loss is a mean.
        obstacle: The function and its location that rule out both a sum and a mean, or "".
        has_loss: Whether the forward returns a loss at all.
    """

    is_sum: bool = False
    summed_shape: tuple[int, ...] = ()
    factors: tuple[str, ...] = ()
    obstacle: str = ""
    has_loss: bool = True

    def is_sum_over_rows(self, larger: LossCombination) -> bool:
        """Return whether it is a sum over rows, given that of a micro-batch with one row more."""
        return self.summed_shape != larger.summed_shape and self.factors == larger.factors


def find_loss_combination(trace: Trace) -> LossCombination:
    """Return what the last operations of a forward show about the model's own loss."""
    node = _find_loss_node(trace)
    if node is None or any(trace.values[value].tensor_spec.shape for value in node.produced_values):
        return LossCombination(has_loss=False)
    node, factors = _skip_scaling(trace, node)
    if node is None:
        return LossCombination()
    if node.func in _UNCOMBINABLE_FUNCTIONS:
        return LossCombination(obstacle=f"{get_function_name(node.func)} ({node.location})")
    is_loss_function = getattr(functional, getattr(node.func, "__name__", ""), None) is node.func
    if node.func not in _SUMS and not (is_loss_function and "'sum'" in node.literals):
        return LossCombination()
    summed = trace.values[node.inputs[0]]
    if summed.producer is not None:
        factors += _skip_scaling(trace, trace.nodes[summed.producer])[1]
    return LossCombination(True, summed.tensor_spec.shape, factors)


def _skip_scaling(trace: Trace, node: TraceNode) -> tuple[TraceNode | None, tuple[str, ...]]:
    """Return the node that is then scaled and reshaped until `node`, and the Python factors.

    It is None if the result also depends on another tensor than an input without dims, which is the
    same for all micro-batches.
    """
    factors: tuple[str, ...] = ()
    while node.func in _SCALING_FUNCTIONS:
        sources = [value for value in node.inputs if not _is_whole_number(trace, value)]
        if node.func in _RESCALING_FUNCTIONS:
            factors += (node.literals,)
        producer = trace.values[sources[0]].producer if len(sources) == 1 else None
        if producer is None:
            return None, factors
        node = trace.nodes[producer]
    return node, factors


def _is_whole_number(trace: Trace, value: int) -> bool:
    """Return whether a value is an input without dims, or follows from such inputs alone."""
    traced = trace.values[value]
    if traced.tensor_spec.shape:
        return False
    if traced.producer is None:
        return traced.input_index is not None
    return all(_is_whole_number(trace, source) for source in trace.nodes[traced.producer].inputs)


def _find_loss_node(trace: Trace) -> TraceNode | None:
    """Return the node that produces the model's loss.

    The output is rebuilt with a tensor without memory for each value, and the code that finds the
    loss in a real output is applied to it. The tensor that it returns identifies the value.
    """
    output, markers = _rebuild_output(trace)
    loss = find_loss_tensor(output)
    for index, marker in markers.items():
        if marker is loss:
            producer = trace.values[trace.output.leaves[index].value].producer
            return None if producer is None else trace.nodes[producer]
    return None


def _rebuild_output(trace: Trace) -> tuple[Any, dict[int, Tensor]]:
    """Return the output with a tensor without memory for each value, and these by leaf."""
    markers = {
        index: trace.values[leaf.value].tensor_spec.allocate("meta")
        for index, leaf in enumerate(trace.output.leaves)
        if isinstance(leaf, ValueLeaf)
    }
    leaves = [markers.get(index, leaf) for index, leaf in enumerate(trace.output.leaves)]
    return unflatten(leaves, trace.output.tree_spec), markers


def find_output_shapes(trace: Trace) -> list[tuple[int, ...]]:
    """Return the shape of each leaf of the output. What is not a tensor has the empty shape."""
    leaves = pytree.tree_leaves(_rebuild_output(trace)[0])
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]
