"""What follows from the inputs alone, computed again for other inputs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.partition.forward.trace import Trace, TraceNode, ValueLeaf, ValueRef
from penstock.partition.forward.trees import flatten, iter_tensors


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
