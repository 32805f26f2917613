"""A dry run of a model on a micro-batch: from inputs to a trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.traced.containers import (
    apply_container_updates,
    find_shared_containers,
    get_forward_hooks,
)
from penstock.model.traced.dry_run import (
    FakeTensorFactory,
    preserve_model_state,
    replace_meta_tensors,
)
from penstock.model.traced.interception import (
    HookSkipped,
    NullHookHandle,
    OpInterceptor,
)
from penstock.model.traced.local_model import fake_remote_tensors, is_remote_unit
from penstock.model.traced.proxies import ProxyModel, build_unit_proxy
from penstock.model.traced.pytrees import flatten, iter_tensors, unflatten
from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.model.traced.torch_functions import (
    HOOK_REGISTRATION,
    REFLECTED_COMPARISONS,
    is_metadata_only,
)
from penstock.model.traced.trace import ArgumentLeaf, NodeKind, Trace, TraceNode, ValueLeaf
from penstock.model.traced.tracer import Tracer
from penstock.model.traced.units import UnitSelector, find_units, is_expandable
from penstock.model.traced.value_table import EscapedTensor

# -------------------------------------------------------------------------------------------------
# The forward as a stage would see it that runs none of it: does it come to the same end?
#
# A tensor may leave a unit twice: as its result, and sideways, through a hook inside or an attribute.
# Where the unit does not run, the second one is not there, and the forward would go on without it.
# -------------------------------------------------------------------------------------------------


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


# -------------------------------------------------------------------------------------------------


def trace_model(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
) -> tuple[Trace, dict[int, Tensor]]:
    """What the forward does of these inputs, and the tensors that were there before, by values.

    It is followed as if all were on one device. A value that leaves a unit sideways is a Leak.
    """
    given, spec = flatten((args, kwargs))
    for _ in range(2):  # what functions remember of the first time is not made again
        leaves = [_copy_input(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in given]
        fakes = FakeTensorFactory(device)
        with replace_meta_tensors(model, units.values(), fakes) as unset:
            trace, constants, steady = _trace_once(model, units, leaves, spec, fakes)
        if steady:
            break
    unset.check_not_read(trace)
    return trace, constants


def _trace_once(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    leaves: list[Any],
    tree_spec: Any,
    fake_factory: FakeTensorFactory,
) -> tuple[Trace, dict[int, Tensor], bool]:
    """With whether it takes the same path when it is run again."""
    fronts = {id(module): build_unit_proxy(name, module) for name, module in units.items()}
    skeleton = ProxyModel(model, fronts)
    skeleton.refresh_buffers(fake_factory.device)
    args, kwargs = unflatten(leaves, tree_spec)
    parents = [original for original, _ in skeleton.parent_copies.values()]
    copies = [copy for _, copy in skeleton.parent_copies.values()]
    with (
        preserve_model_state(model, parents),
        fake_remote_tensors([*copies, *_find_remote_modules(units)], fake_factory),
    ):
        recorder = Tracer([model, skeleton.model], fake_factory)
        recorder.unit_hooks = skeleton.unit_hooks
        recorder.shared_containers = find_shared_containers(parents, units)
        inputs = recorder.value_table.register_inputs(
            [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        )
        before = {name: dict(copy._buffers) for name, (_, copy) in skeleton.parent_copies.items()}
        with recorder:
            output = skeleton.model(*args, **kwargs)
        _warn_about_lost_attributes(skeleton)
        lasting = {
            f"{name}.{key}" if name else key: buffer
            for name, (_, copy) in skeleton.parent_copies.items()
            for key, buffer in copy._buffers.items()
            if buffer is not None and buffer is not before[name].get(key)
        }
        trace = recorder.build_trace(inputs, output, lasting)
        steady = is_reproducible(trace, ProxyModel(model, fronts), leaves, tree_spec)
    return trace, recorder.value_table.collect_constants(), steady


def _find_remote_modules(units: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The modules of units that another process has."""
    return [m for unit in units.values() if is_remote_unit(unit) for m in unit.modules()]


def _warn_about_lost_attributes(skeleton: ProxyModel) -> None:
    """What a forward counts on its parents would be counted by every stage: it does not last."""
    found = [
        f"{name}.{key}".lstrip(".")
        for name, (original, own) in skeleton.parent_copies.items()
        for key, value in own.__dict__.items()
        if type(value) in (int, float) and value != original.__dict__.get(key, value)
    ]
    if found:
        warnings.warn(
            f"the forward changes {', '.join(found)}, and every stage runs it for every "
            "micro-batch: what it sets on modules around the units does not last beyond one; keep "
            "such a count inside a unit, or outside of the model",
            stacklevel=2,
        )


def trace_expanding_units(
    model: nn.Module,
    selector: UnitSelector,
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
    expanded: Collection[str] = (),
) -> tuple[Trace, dict[int, Tensor], dict[str, nn.Module]]:
    """The same; units that leak are opened, with all others of their class, until none does.

    So are those that nobody calls, if their parts are called from outside.
    """
    now = set(expanded)
    while True:
        units = find_units(model, selector, now)
        try:
            trace, constants = trace_model(model, units, args, kwargs, device)
        except EscapedTensor as leak:
            now |= _find_units_to_expand(leak, units)
            continue
        reached = _find_bypassed_units(trace, units)
        if not reached:
            return trace, constants, units
        now |= reached


def _find_bypassed_units(trace: Trace, units: Mapping[str, nn.Module]) -> set[str]:
    """As `self.vae.encode(x)` does, and the forward of a graph that torch.fx has made."""
    called = {trace.nodes[at].func.unit for at in trace.unit_call_indices}
    used = [value.parameter_name for value in trace.values if value.parameter_name]
    return {
        name
        for name, unit in units.items()
        if name not in called
        and is_expandable(unit)
        and any(parameter.startswith(f"{name}.") for parameter in used)
    }


def _find_units_to_expand(escaped: EscapedTensor, units: Mapping[str, nn.Module]) -> set[str]:
    module = units.get(escaped.unit)
    if module is None or not is_expandable(module):
        what = f"unit '{escaped.unit}'" if escaped.unit else "a unit"
        raise CutError(
            f"at {escaped.location}, the forward uses a tensor that left {what} sideways (as an "
            "attribute, through a hook or in an object), and the unit has no parts to be opened: "
            "return the tensor from its forward"
        )
    return {name for name, other in units.items() if type(other) is type(module)
            and is_expandable(other)}  # fmt: skip


def _copy_input(tensor: Tensor, device: torch.device) -> Tensor:
    """The forward may change its inputs in place."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
