"""What follows from the inputs alone, computed again for other inputs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.partition.forward.trace import New, Ref, Step, Trace
from penstock.partition.forward.trees import flatten, tensors_in


class Replay:
    """The steps of a trace that lead to some of its steps and values."""

    def __init__(
        self,
        trace: Trace,
        constants: Mapping[int, Tensor],
        buffer: Callable[[str], Tensor],
        goals: Iterable[int],
    ) -> None:
        self._trace, self._constants, self._buffer = trace, constants, buffer
        self._steps = _needed(trace, goals)
        self._copies = any(trace.steps[at].changes for at in self._steps)

    def run(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Step, Any]]:
        """Each step, and what it gives."""
        return self._run(self._real(inputs, {}))

    def values(self, inputs: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
        """Some of the values that they make, or that were there."""
        real = self._real(inputs, {})
        for _ in self._run(real):
            pass
        return [real(value) for value in wanted]

    def _real(self, inputs: Sequence[Tensor], made: dict[int, Tensor]) -> _Real:
        values = self._trace.values

        def found(value: int) -> Tensor:
            given, buffer = values[value].given, values[value].buffer
            if not values[value].free:  # only its shape counts
                look, device = values[value].look, inputs[0].device if inputs else None
                return torch.zeros(look.shape, dtype=look.dtype, device=device)
            if given is not None:
                tensor = inputs[given]
            else:
                tensor = self._buffer(buffer) if buffer else self._constants[value]
            if inputs and tensor.device != inputs[0].device:
                return tensor.detach().to(inputs[0].device)
            return tensor.detach().clone() if self._copies else tensor

        return _Real(found, made)

    def _run(self, real: _Real) -> Iterator[tuple[Step, Any]]:
        with torch.no_grad():
            for at in self._steps:
                step = self._trace.steps[at]
                args, kwargs = _with_values(step.arguments, real)
                found = step.call(*args, **kwargs)
                for old, new in step.changes.items():
                    real.made[new] = real(old)
                if step.result is not None:
                    for leaf, tensor in zip(step.result.leaves, flatten(found)[0], strict=True):
                        if isinstance(leaf, New):
                            real.made[leaf.value] = tensor
                yield step, found


@dataclass
class _Real:
    """Values with their numbers: made, or found where they were before."""

    find: Callable[[int], Tensor]
    made: dict[int, Tensor]

    def __call__(self, value: int) -> Tensor:
        if value not in self.made:
            self.made[value] = self.find(value)
        return self.made[value]


class Questions:
    """All that a traced forward asked about numbers, and the answers it got."""

    def __init__(
        self, trace: Trace, constants: Mapping[int, Tensor], buffer: Callable[[str], Tensor]
    ) -> None:
        asking = [at for at, step in enumerate(trace.steps) if step.asks]
        self._replay = Replay(trace, constants, buffer, asking)

    def same_answers(self, inputs: Sequence[Tensor]) -> bool:
        """Would the forward go the same way with these?"""
        return all(
            _same(step.result is None, found, step.outcome)
            for step, found in self._replay.run(inputs)
            if step.asks
        )


def _needed(trace: Trace, goals: Iterable[int]) -> list[int]:
    """The steps that lead to others, and those, in order."""
    waiting = list(goals)
    found: set[int] = set()
    while waiting:
        at = waiting.pop()
        if at in found:
            continue
        found.add(at)
        takes = [trace.values[value] for value in trace.steps[at].takes]
        waiting += [v.maker for v in takes if v.maker is not None and v.free]
    return sorted(found)


def _with_values(arguments: Any, real: Callable[[int], Tensor]) -> Any:
    if isinstance(arguments, Ref):
        return real(arguments.value)
    if type(arguments) in (tuple, list):
        return type(arguments)(_with_values(one, real) for one in arguments)
    if type(arguments) is dict:
        return {key: _with_values(one, real) for key, one in arguments.items()}
    if isinstance(arguments, slice):
        return slice(*(_with_values((arguments.start, arguments.stop, arguments.step), real)))
    return arguments


def _same(read: bool, found: Any, outcome: Any) -> bool:
    if not read:
        return bool([tuple(t.shape) for t in tensors_in(found)] == outcome)
    if hasattr(found, "tobytes"):  # an array
        return bool(found.shape == outcome.shape and found.tobytes() == outcome.tobytes())
    return bool(found == outcome)
