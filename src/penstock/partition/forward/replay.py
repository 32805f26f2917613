"""Which way a forward will go with other numbers: only what it looks at is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.partition.forward.trace import New, Ref, Trace
from penstock.partition.forward.trees import flatten, tensors_in


class Questions:
    """All that a traced forward asked about numbers, and the answers it got."""

    def __init__(
        self, trace: Trace, constants: Mapping[int, Tensor], buffer: Callable[[str], Tensor]
    ) -> None:
        self._trace, self._constants, self._buffer = trace, constants, buffer
        self._steps = _needed(trace)
        changed = {old for at in self._steps for old in trace.steps[at].changes}
        self._copies = bool(changed)

    def __bool__(self) -> bool:
        return bool(self._steps)

    def same_answers(self, inputs: Sequence[Tensor]) -> bool:
        """Would the forward go the same way with these?"""
        steps, values = self._trace.steps, self._trace.values
        made: dict[int, Any] = {}

        def real(value: int) -> Tensor:
            if value not in made:
                given, buffer = values[value].given, values[value].buffer
                if given is not None:
                    found = inputs[given]
                else:
                    found = self._buffer(buffer) if buffer else self._constants[value]
                made[value] = found.detach().clone() if self._copies else found
            tensor: Tensor = made[value]
            return tensor

        with torch.no_grad():
            for at in self._steps:
                step = steps[at]
                args, kwargs = _with_values(step.arguments, real)
                found = step.func(*args, **kwargs)
                if step.asks and not _same(step.result is None, found, step.outcome):
                    return False
                for old, new in step.changes.items():
                    made[new] = real(old)
                if step.result is not None:
                    for leaf, tensor in zip(step.result.leaves, flatten(found)[0], strict=True):
                        if isinstance(leaf, New):
                            made[leaf.value] = tensor
        return True


def _needed(trace: Trace) -> list[int]:
    """The steps that lead to a question, in order."""
    waiting = [at for at, step in enumerate(trace.steps) if step.asks]
    found: set[int] = set()
    while waiting:
        at = waiting.pop()
        if at in found:
            continue
        found.add(at)
        makers = [trace.values[value].maker for value in trace.steps[at].takes]
        waiting += [maker for maker in makers if maker is not None]
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
