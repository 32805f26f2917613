"""The forward as a stage would see it that runs none of it: does it come to the same end?

A tensor may leave a unit twice: as its result, and sideways, through a hook inside or an attribute.
Where the unit does not run, the second one is not there, and the forward would go on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.absent import Absent
from penstock.partition.forward.boxes import hooks_after
from penstock.partition.forward.filled import taken_over
from penstock.partition.forward.ledger import Leak
from penstock.partition.forward.skeleton import Skeleton
from penstock.partition.forward.tables import MIRRORED, TYING, only_looks
from penstock.partition.forward.trace import Kind, New, Same, Step, Trace
from penstock.partition.forward.trees import flatten, tensors_in, unflatten
from penstock.partition.forward.watching import Handle, Muted, Watcher


class _Lost(Exception):
    """The forward does something else. A stage that runs tells of it better."""


def rehearse(trace: Trace, skeleton: Skeleton, leaves: Sequence[Any], spec: Any) -> bool:
    """Does it take the same path? A Leak, where a result of a unit is missed that came sideways."""
    device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
    watcher = _Passing(trace, device)
    watcher.hooks = skeleton.hooks
    given = iter(trace.inputs)
    stand_ins = [watcher.absent(next(given)) if isinstance(x, Tensor) else x for x in leaves]
    args, kwargs = unflatten(stand_ins, spec)
    try:
        with watcher:
            output = skeleton.model(*args, **kwargs)
    except Leak:
        raise
    except _Lost:
        return False
    except Exception:  # whatever comes of values that are not there
        return True
    found = {x.value for x in flatten(output)[0] if isinstance(x, Absent)}
    for value in trace.output.made:
        if value not in found:
            watcher.check(value, None, "its end")
    return True


class _Passing(Watcher):
    def __init__(self, trace: Trace, device: torch.device) -> None:
        super().__init__()
        self._trace, self._device = trace, device
        self._absent: dict[int, Absent] = {}
        self._at, self._mute = 0, False
        self._units = {
            value: str(step.func.unit)
            for step in trace.steps
            if step.kind is Kind.UNIT and step.result is not None
            for value in step.result.made
        }

    def absent(self, value: int) -> Absent:
        """What stands for it."""
        if value not in self._absent:
            look = self._trace.values[value].look
            self._absent[value] = Absent.of(look, self._device, value)
        return self._absent[value]

    def check(self, value: int, tensor: Tensor | None, where: str) -> None:
        """A result of a unit must come from the unit's call."""
        if value in self._units and not (isinstance(tensor, Absent) and tensor.value == value):
            raise Leak(self._units[value], where)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Passed over, unless it only looks."""
        if only_looks(func, args):
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, kwargs or {}, func)

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """What it gave."""
        step = self._next(func)
        if step.kind is Kind.CALL:
            return call(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        turned = step.func is not func and MIRRORED.get(func) is step.func
        return self._given(step, tensors[::-1] if turned else tensors)

    def unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What it gave; its own hooks see it."""
        step = self._next(name)
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        found = taken_over(self._given(step, tensors), args, kwargs)
        for key, hook in hooks_after(target, self.hooks.get(name)).items():
            more = (kwargs,) if key in target._forward_hooks_with_kwargs else ()
            self._mute = True
            try:
                hook(target, args, *more, found)
            except Muted:
                pass
            finally:
                self._mute = False
        return found

    def _next(self, func: Any) -> Step:
        if self._mute:
            raise Muted
        if self._at >= len(self._trace.steps):
            raise _Lost
        step = self._trace.steps[self._at]
        known = step.func.unit if step.kind is Kind.UNIT else step.func
        if known is not func and known != func and MIRRORED.get(func) is not known:
            raise _Lost
        self._at += 1
        return step

    def _given(self, step: Step, tensors: Sequence[Tensor]) -> Any:
        if len(tensors) == len(step.takes):
            for value, tensor in zip(step.takes, tensors, strict=True):
                self.check(value, tensor, step.where)
        if step.kind is Kind.READ:
            return step.outcome
        if step.result is None:
            return Handle() if step.func in TYING else None
        leaves = [
            self.absent(leaf.value)
            if isinstance(leaf, New)
            else tensors[leaf.argument]
            if isinstance(leaf, Same)
            else leaf
            for leaf in step.result.leaves
        ]
        return unflatten(leaves, step.result.spec)
