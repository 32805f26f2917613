"""What follows from the inputs alone, computed again for other inputs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.model.traced.pytrees import flatten, iter_tensors, unflatten
from penstock.model.traced.trace import Trace, TraceNode, ValueLeaf, ValueRef
from penstock.stage.loss import DEFAULT_IGNORE_INDEX, extract_model_loss

# -------------------------------------------------------------------------------------------------
# How a model is set: what its parents' forwards may go by, beside the inputs.
# -------------------------------------------------------------------------------------------------

_SETTING_TYPES = (
    *(bool, int, float, str, type(None), Enum, torch.dtype, torch.device),
    *(type, FunctionType, BuiltinFunctionType),
)

ModelSettings = tuple[Any, ...]


def read_model_settings(parents: Iterable[nn.Module]) -> ModelSettings:
    """Whether they train, and their plain attributes, with those of their configurations.

    Tensors and other objects are left out: what follows from these is not what is done next.
    """
    seen: set[int] = set()
    found: list[Any] = []
    for module in parents:
        found.append(tuple(_find_settings(module.__dict__)))
        config = module.__dict__.get("config")
        if config is not None and id(config) not in seen and hasattr(config, "__dict__"):
            seen.add(id(config))
            found.append(tuple(_find_settings(vars(config))))
    return tuple(found)


def _find_settings(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in attributes.items():
        if isinstance(value, _SETTING_TYPES):
            yield key, value
        elif isinstance(value, tuple | list) and all(
            isinstance(one, _SETTING_TYPES) for one in value
        ):
            yield key, tuple(value)


def read_torch_state() -> tuple[Any, ...]:
    """What of PyTorch's own state a forward may go by."""
    autocasts = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, torch.get_default_dtype(), *autocasts


# -------------------------------------------------------------------------------------------------
# A loss that a model computes itself: what of its targets counts in it.
#
# If the loss is PyTorch's own cross-entropy, and a mean, then it is one over the targets that are not
# ignored. They follow from the inputs, so what each micro-batch counts for is known before it runs.
# -------------------------------------------------------------------------------------------------

_CROSS_ENTROPY_PARAMETERS = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
)
CROSS_ENTROPY_FUNCTIONS = frozenset([functional.cross_entropy, functional.nll_loss])

# Of one tensor, and perhaps a number: what they give is as many times as large.
_SCALING_FUNCTIONS = frozenset(
    getattr(home, name)
    for home in (torch, Tensor)
    for name in (
        *("mul", "div", "neg", "clone", "squeeze", "reshape", "__mul__", "__rmul__", "__neg__"),
        *("__truediv__", "float", "double", "half", "bfloat16", "to", "type", "contiguous", "view"),
    )
    if hasattr(home, name)
)


@dataclass(frozen=True)
class LossTargets:
    """Values of a trace: the targets, and the weights of the classes, if there are any."""

    target: int
    class_weights: int | None
    ignore_index: int


def find_loss_targets(trace: Trace) -> LossTargets | None:
    """None, if the model's loss is another, or it has none."""
    step = _find_loss_node(trace)
    while step is not None and step.func in _SCALING_FUNCTIONS and len(step.inputs) == 1:
        maker = trace.values[step.inputs[0]].producer
        step = None if maker is None else trace.nodes[maker]
    if step is None or step.func not in CROSS_ENTROPY_FUNCTIONS or step.arg_template is None:
        return None
    args, kwargs = step.arg_template
    given = {**dict(zip(_CROSS_ENTROPY_PARAMETERS, args, strict=False)), **kwargs}
    if given.get("reduction", "mean") != "mean" or given.get("reduce") is not None:
        return None
    target, classes = given["target"], given.get("weight")
    if given.get("size_average") is not None or not isinstance(target, ValueRef):
        return None
    known = [ref.value for ref in (target, classes) if isinstance(ref, ValueRef)]
    if not all(trace.values[value].input_only for value in known):
        return None
    ignored = given.get("ignore_index", DEFAULT_IGNORE_INDEX)
    return LossTargets(
        target.value, classes.value if isinstance(classes, ValueRef) else None, ignored
    )


def _find_loss_node(trace: Trace) -> TraceNode | None:
    """The step that makes the loss: it is found in a copy of the output, as a step finds it."""
    marks = {at: torch.empty(0) for at, leaf in enumerate(trace.output.leaves) if _is_value(leaf)}
    leaves = [marks.get(at, leaf) for at, leaf in enumerate(trace.output.leaves)]
    loss = extract_model_loss(unflatten(leaves, trace.output.tree_spec))
    loss = loss["loss"] if isinstance(loss, dict) and "loss" in loss else loss
    for at, mark in marks.items():
        if mark is loss:
            maker = trace.values[trace.output.leaves[at].value].producer
            return None if maker is None else trace.nodes[maker]
    return None


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, ValueLeaf)


# -------------------------------------------------------------------------------------------------


class TraceReplay:
    """The steps of a trace that lead to some of its steps and values."""

    def __init__(
        self,
        trace: Trace,
        constants: Mapping[int, Tensor],
        get_buffer: Callable[[str], Tensor],
        goal_nodes: Iterable[int],
    ) -> None:
        self._trace, self._constants, self._get_buffer = trace, constants, get_buffer
        self._node_indices = _find_dependencies(trace, goal_nodes)
        self._clones_inputs = any(trace.nodes[at].mutations for at in self._node_indices)

    def run_nodes(self, inputs: Sequence[Tensor]) -> Iterator[tuple[TraceNode, Any]]:
        """Each step, and what it gives."""
        return self._run_nodes(self._make_resolver(inputs, {}))

    def compute_values(
        self, inputs: Sequence[Tensor], value_indices: Sequence[int]
    ) -> list[Tensor]:
        """Some of the values that they make, or that were there."""
        real = self._make_resolver(inputs, {})
        for _ in self._run_nodes(real):
            pass
        return [real(value) for value in value_indices]

    def _make_resolver(
        self, inputs: Sequence[Tensor], computed: dict[int, Tensor]
    ) -> _ValueResolver:
        values = self._trace.values

        def load_tensor(value: int) -> Tensor:
            given, buffer = values[value].input_index, values[value].buffer_name
            if not values[value].input_only:  # only its shape counts
                look, device = values[value].tensor_spec, inputs[0].device if inputs else None
                return torch.zeros(look.shape, dtype=look.dtype, device=device)
            if given is not None:
                tensor = inputs[given]
            else:
                tensor = self._get_buffer(buffer) if buffer else self._constants[value]
            if inputs and tensor.device != inputs[0].device:
                return tensor.detach().to(inputs[0].device)
            return tensor.detach().clone() if self._clones_inputs else tensor

        return _ValueResolver(load_tensor, computed)

    def _run_nodes(self, resolver: _ValueResolver) -> Iterator[tuple[TraceNode, Any]]:
        with torch.no_grad():
            for at in self._node_indices:
                step = self._trace.nodes[at]
                args, kwargs = _substitute_values(step.arg_template, resolver)
                found = step.call(*args, **kwargs)
                for old, new in step.mutations.items():
                    resolver.computed[new] = resolver(old)
                if step.output is not None:
                    for leaf, tensor in zip(step.output.leaves, flatten(found)[0], strict=True):
                        if isinstance(leaf, ValueLeaf):
                            resolver.computed[leaf.value] = tensor
                yield step, found


@dataclass
class _ValueResolver:
    """Values with their numbers: made, or found where they were before."""

    load: Callable[[int], Tensor]
    computed: dict[int, Tensor]

    def __call__(self, value: int) -> Tensor:
        if value not in self.computed:
            self.computed[value] = self.load(value)
        return self.computed[value]


class InputGuards:
    """All that a traced forward asked about numbers, and the answers it got."""

    def __init__(
        self, trace: Trace, constants: Mapping[int, Tensor], get_buffer: Callable[[str], Tensor]
    ) -> None:
        asking = [at for at, step in enumerate(trace.nodes) if step.is_guard]
        self._replay = TraceReplay(trace, constants, get_buffer, asking)

    def matches(self, inputs: Sequence[Tensor]) -> bool:
        """Would the forward go the same way with these?"""
        return all(
            _same_outcome(step.output is None, found, step.recorded_result)
            for step, found in self._replay.run_nodes(inputs)
            if step.is_guard
        )


def _find_dependencies(trace: Trace, goal_nodes: Iterable[int]) -> list[int]:
    """The steps that lead to others, and those, in order."""
    waiting = list(goal_nodes)
    found: set[int] = set()
    while waiting:
        at = waiting.pop()
        if at in found:
            continue
        found.add(at)
        takes = [trace.values[value] for value in trace.nodes[at].inputs]
        waiting += [v.producer for v in takes if v.producer is not None and v.input_only]
    return sorted(found)


def _substitute_values(arguments: Any, resolve: Callable[[int], Tensor]) -> Any:
    if isinstance(arguments, ValueRef):
        return resolve(arguments.value)
    if type(arguments) in (tuple, list):
        return type(arguments)(_substitute_values(one, resolve) for one in arguments)
    if type(arguments) is dict:
        return {key: _substitute_values(one, resolve) for key, one in arguments.items()}
    if isinstance(arguments, slice):
        return slice(
            *(_substitute_values((arguments.start, arguments.stop, arguments.step), resolve))
        )
    return arguments


def _same_outcome(is_read: bool, actual: Any, expected: Any) -> bool:
    if not is_read:
        return bool([tuple(t.shape) for t in iter_tensors(actual)] == expected)
    if hasattr(actual, "tobytes"):  # an array
        return bool(actual.shape == expected.shape and actual.tobytes() == expected.tobytes())
    return bool(actual == expected)
