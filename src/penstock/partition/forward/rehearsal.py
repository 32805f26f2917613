"""The forward as a stage would see it that runs none of it: does it come to the same end?

A tensor may leave a unit twice: as its result, and sideways, through a hook inside or an attribute.
Where the unit does not run, the second one is not there, and the forward would go on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.absent import RemoteTensor
from penstock.partition.forward.boxes import get_forward_hooks
from penstock.partition.forward.filled import apply_container_updates
from penstock.partition.forward.ledger import EscapedTensor
from penstock.partition.forward.skeleton import ProxyModel
from penstock.partition.forward.tables import (
    HOOK_REGISTRATION,
    REFLECTED_COMPARISONS,
    is_metadata_only,
)
from penstock.partition.forward.trace import ArgumentLeaf, NodeKind, Trace, TraceNode, ValueLeaf
from penstock.partition.forward.trees import flatten, iter_tensors, unflatten
from penstock.partition.forward.watching import HookSkipped, NullHookHandle, OpInterceptor


class _PathDiverged(Exception):
    """The forward does something else. A stage that runs tells of it better."""


def is_reproducible(
    trace: Trace, skeleton: ProxyModel, leaves: Sequence[Any], tree_spec: Any
) -> bool:
    """Does it take the same path? A Leak, where a result of a unit is missed that came sideways."""
    device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
    watcher = _ConsistencyChecker(trace, device)
    watcher.unit_hooks = skeleton.unit_hooks
    given = iter(trace.inputs)
    stand_ins = [
        watcher.get_remote_tensor(next(given)) if isinstance(x, Tensor) else x for x in leaves
    ]
    args, kwargs = unflatten(stand_ins, tree_spec)
    try:
        with watcher:
            output = skeleton.model(*args, **kwargs)
    except EscapedTensor:
        raise
    except _PathDiverged:
        return False
    except Exception:  # whatever comes of values that are not there
        return True
    found = {x.value_index for x in flatten(output)[0] if isinstance(x, RemoteTensor)}
    for value in trace.output.value_indices:
        if value not in found:
            watcher.check_unit_output(value, None, "its end")
    return True


class _ConsistencyChecker(OpInterceptor):
    def __init__(self, trace: Trace, device: torch.device) -> None:
        super().__init__()
        self._trace, self._device = trace, device
        self._remote_tensors: dict[int, RemoteTensor] = {}
        self._node_index, self._in_hook = 0, False
        self._unit_by_value = {
            value: str(step.func.unit)
            for step in trace.nodes
            if step.kind is NodeKind.UNIT and step.output is not None
            for value in step.output.value_indices
        }

    def get_remote_tensor(self, value: int) -> RemoteTensor:
        """What stands for it."""
        if value not in self._remote_tensors:
            look = self._trace.values[value].tensor_spec
            self._remote_tensors[value] = RemoteTensor.from_spec(look, self._device, value)
        return self._remote_tensors[value]

    def check_unit_output(self, value: int, tensor: Tensor | None, location: str) -> None:
        """A result of a unit must come from the unit's call."""
        if value in self._unit_by_value and not (
            isinstance(tensor, RemoteTensor) and tensor.value_index == value
        ):
            raise EscapedTensor(self._unit_by_value[value], location)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Passed over, unless it only looks."""
        if is_metadata_only(func, args):
            return func(*args, **(kwargs or {}))
        return self.intercept_op(func, args, kwargs or {}, func)

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """What it gave."""
        step = self._next_node(func)
        if step.kind is NodeKind.NON_TENSOR:
            return call(*args, **kwargs)
        tensors = list(iter_tensors((args, kwargs)))
        turned = step.func is not func and REFLECTED_COMPARISONS.get(func) is step.func
        return self._replay_output(step, tensors[::-1] if turned else tensors)

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """What it gave; its own hooks see it."""
        step = self._next_node(name)
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        found = apply_container_updates(self._replay_output(step, tensors), args, kwargs)
        for key, hook in get_forward_hooks(target, self.unit_hooks.get(name)).items():
            more = (kwargs,) if key in target._forward_hooks_with_kwargs else ()
            self._in_hook = True
            try:
                hook(target, args, *more, found)
            except HookSkipped:
                pass
            finally:
                self._in_hook = False
        return found

    def _next_node(self, func: Any) -> TraceNode:
        if self._in_hook:
            raise HookSkipped
        if self._node_index >= len(self._trace.nodes):
            raise _PathDiverged
        step = self._trace.nodes[self._node_index]
        known = step.func.unit if step.kind is NodeKind.UNIT else step.func
        if known is not func and known != func and REFLECTED_COMPARISONS.get(func) is not known:
            raise _PathDiverged
        self._node_index += 1
        return step

    def _replay_output(self, node: TraceNode, tensors: Sequence[Tensor]) -> Any:
        if len(tensors) == len(node.inputs):
            for value, tensor in zip(node.inputs, tensors, strict=True):
                self.check_unit_output(value, tensor, node.location)
        if node.kind is NodeKind.HOST_READ:
            return node.recorded_result
        if node.output is None:
            return NullHookHandle() if node.func in HOOK_REGISTRATION else None
        leaves = [
            self.get_remote_tensor(leaf.value)
            if isinstance(leaf, ValueLeaf)
            else tensors[leaf.argument_index]
            if isinstance(leaf, ArgumentLeaf)
            else leaf
            for leaf in node.output.leaves
        ]
        return unflatten(leaves, node.output.tree_spec)
