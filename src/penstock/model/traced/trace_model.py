"""Trace a model on a micro-batch.

`trace_expanding_units` is the entry point when a pipe is made, `trace_model` when a new kind of
micro-batch arrives. They work in this order:

1. Copy the parents (`ProxyModel`) and put a proxy in place of each unit.
2. Run the model's forward on the copy under a `Tracer`.
3. Run it again under a `_ConsistencyChecker`, which executes no unit and no operation. This is the
   view of a stage that runs nothing. It must take the same path.
4. If 2 or 3 finds a tensor that left a unit without being returned, expand that unit (its
   submodules become units) and start again. `trace_model` raises `EscapedTensor` instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.fingerprint import are_same_objects
from penstock.model.isolation import isolated
from penstock.model.traced.containers import (
    MODULE_ATTRIBUTES,
    apply_container_updates,
    find_shared_containers,
    has_same_state,
)
from penstock.model.traced.dry_run import FakeTensorFactory, replace_meta_tensors
from penstock.model.traced.interception import (
    EscapedTensor,
    HookSkipped,
    NullHookHandle,
    OpInterceptor,
    StaleUnit,
    get_current_interceptor,
)
from penstock.model.traced.local_model import fake_remote_tensors, is_remote_unit
from penstock.model.traced.proxies import ProxyModel, UnitStateTracker, build_unit_proxy
from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.model.traced.settings import SettingsReader, find_attribute_names
from penstock.model.traced.torch_functions import (
    HOOK_REGISTRATION,
    REFLECTED_COMPARISONS,
)
from penstock.model.traced.trace import (
    ArgumentLeaf,
    AttributeRead,
    NodeKind,
    Trace,
    TraceNode,
    ValueLeaf,
)
from penstock.model.traced.tracer import Tracer
from penstock.model.traced.unit_shapes import SizeBinding, SizesDiffer, UnitShapes
from penstock.model.traced.units import UnitSelector, find_units, is_expandable
from penstock.nested_values import flatten, iter_tensors, unflatten
from penstock.stage.rng import suspend_cell_rng
from penstock.state_copy import SCALAR_TYPES, describe_iterator, find_reachable
from penstock.torch_compat import FakeTensor, force_eager, without_fake_tensor_log

_NUMBER_TYPES = (int, float)
_PLAIN_TYPES = (str, bytes, complex, Fraction, Decimal, Enum, date, time, timedelta, frozenset)

# ---- the consistency check ---------------------------------------------------------------------
#
# A tensor may leave a unit twice: as its return value, and through a hook or an attribute. Where
# the unit does not run, the second way is missing, and the forward would silently continue without
# the tensor. The tracer cannot see that, because it runs all units. So the forward is run once
# more, on remote tensors, with the recorded output for every node.


class _PathDiverged(Exception):
    """The forward calls a function or unit that differs from the trace.

    It does not reach the user: a stage that runs raises an error with more detail.
    """


def is_reproducible(
    trace: Trace, proxy_model: ProxyModel, leaves: Sequence[Any], tree_spec: Any
) -> bool:
    """Return whether the forward takes the traced path when no unit is executed.

    Raises `EscapedTensor` if an output of a unit is used that did not come from the unit's call.
    """
    device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
    checker = _ConsistencyChecker(trace, device)
    checker.unit_hooks = proxy_model.unit_hooks
    input_values = iter(trace.inputs)
    remote_leaves = [
        checker.get_remote_tensor(next(input_values)) if isinstance(x, Tensor) else x
        for x in leaves
    ]
    args, kwargs = unflatten(remote_leaves, tree_spec)
    try:
        with checker:
            output = proxy_model.model(*args, **kwargs)
    except EscapedTensor:
        raise
    except _PathDiverged:
        return False
    except Exception:  # code of the model that fails on remote tensors says nothing about the path
        return True
    returned_values = {x.value_index for x in flatten(output)[0] if isinstance(x, RemoteTensor)}
    for value in trace.output.value_indices:
        if value not in returned_values:
            checker.check_unit_output(value, None, "its end")
    return True


class _ConsistencyChecker(OpInterceptor):
    """Walks through a trace while the forward runs, and returns remote tensors for all values."""

    def __init__(self, trace: Trace, device: torch.device) -> None:
        super().__init__()
        self._trace = trace
        self.get_remote_tensor = trace.make_remote_tensors(device)
        self._node_index = 0
        self._unit_by_value = {
            value: str(node.func.unit)
            for node in trace.nodes
            if node.kind is NodeKind.UNIT and node.output is not None
            for value in node.output.value_indices
        }

    def check_unit_output(self, value: int, tensor: Tensor | None, location: str) -> None:
        """Raise `EscapedTensor` if a value is an output of a unit and the tensor is not.

        `tensor` is what the forward uses now in place of the value.
        """
        if value in self._unit_by_value and not (
            isinstance(tensor, RemoteTensor) and tensor.value_index == value
        ):
            raise EscapedTensor(self._unit_by_value[value], location)

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Return the recorded output of an operation without executing it."""
        node = self._next_node(func)
        if node.kind is NodeKind.NON_TENSOR:
            return call(*args, **kwargs)
        tensors = list(iter_tensors((args, kwargs)))
        is_reflected = node.func is not func and REFLECTED_COMPARISONS.get(func) is node.func
        return self._replay_output(node, tensors[::-1] if is_reflected else tensors)

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return the recorded output of a unit, and call its forward hooks with it."""
        node = self._next_node(name)
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        output = apply_container_updates(self._replay_output(node, tensors), args, kwargs)
        self.notify_hooks(name, target, args, kwargs, output)
        return output

    def _next_node(self, func: Any) -> TraceNode:
        """Return the next node of the trace. Raise if the forward calls something else."""
        if self.in_hook:
            raise HookSkipped
        if self._node_index >= len(self._trace.nodes):
            raise _PathDiverged
        node = self._trace.nodes[self._node_index]
        recorded = node.func.unit if node.kind is NodeKind.UNIT else node.func
        if (
            recorded is not func
            and recorded != func
            and REFLECTED_COMPARISONS.get(func) is not recorded
        ):
            raise _PathDiverged
        self._node_index += 1
        return node

    def _replay_output(self, node: TraceNode, tensors: Sequence[Tensor]) -> Any:
        """Return the recorded output of a node, with remote tensors for its values."""
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


# ---- tracing -----------------------------------------------------------------------------------


def trace_model(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
) -> tuple[Trace, dict[int, Tensor]]:
    """Trace the forward for these inputs. Return the trace and the constants by value.

    The model is traced as if all of it were on `device`. Raises `EscapedTensor` if a tensor leaves
    a unit without being returned.
    """
    input_leaves, spec = flatten((args, kwargs))
    # A process has units of other processes that are not in its local model.
    unit_modules = (module for unit in units.values() for module in unit.modules())
    modules = list(dict.fromkeys([*model.modules(), *unit_modules]))
    # A forward may call functions that cache their results (`functools.cache` on a mask). They
    # compute in the first run only, so the check after it finds another path. The second trace sees
    # the filled caches, as every later run does.
    iterator = find_reachable([model]).find_uncopyable()
    iterator_before = None if iterator is None else describe_iterator(iterator)
    for is_rerun in (False, True):
        leaves = [
            _copy_input(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in input_leaves
        ]
        fake_factory = FakeTensorFactory(device)
        with (
            # Parameters are not written: operations get fake tensors in their place. The forward
            # runs on copies of the input tensors, but on the very objects among the inputs.
            isolated(
                modules,
                inputs=[leaf for leaf in input_leaves if not isinstance(leaf, Tensor)],
                copy_value=lambda tensor: not isinstance(tensor, nn.Parameter),
            ),
            force_eager(),  # otherwise the compiler gives up on compiled modules under a mode
            suspend_cell_rng(),
            without_fake_tensor_log(),
        ):
            uninitialized = replace_meta_tensors(model, units.values(), fake_factory)
            trace, constants, is_stable = _trace_once(
                model, units, leaves, spec, fake_factory, is_rerun
            )
        if is_stable:
            break
    uninitialized.check_not_read(trace)
    if iterator is not None and describe_iterator(iterator) != iterator_before:
        raise CutError(
            f"the forward advances an iterator ({type(iterator).__name__}), which cannot be copied "
            "or set back. Tracing the model advances it, too, and so does every stage that runs "
            "the code around the units. Advance it outside of the forward, and pass the value as "
            "an input."
        )
    return trace, constants


def derive_trace(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    parents: Collection[nn.Module],
    shapes: UnitShapes,
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
) -> tuple[Trace, dict[int, Tensor]]:
    """Trace the forward for inputs of other sizes without running its units.

    It returns what `trace_model` would. Raises `SizesDiffer` where that is not certain.
    """
    input_leaves, spec = flatten((args, kwargs))
    leaves = [
        _copy_input(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in input_leaves
    ]
    with (
        # No unit runs, and the parents run as copies.
        isolated(
            list(parents), inputs=[leaf for leaf in input_leaves if not isinstance(leaf, Tensor)]
        ),
        force_eager(),
        suspend_cell_rng(),
        without_fake_tensor_log(),
    ):
        fake_factory, binding = FakeTensorFactory(device), SizeBinding(shapes)
        try:
            trace, constants, is_stable = _trace_once(
                model, units, leaves, spec, fake_factory, is_rerun=False, binding=binding
            )
        except SizesDiffer:
            raise
        except Exception as error:  # the full trace will say what is wrong
            raise SizesDiffer from error
        binding.finish()
    # At the end, because the forward itself may have changed a unit.
    if not is_stable or not shapes.is_current():
        raise SizesDiffer
    return trace, constants


def _trace_once(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    leaves: list[Any],
    tree_spec: Any,
    fake_factory: FakeTensorFactory,
    is_rerun: bool,
    binding: SizeBinding | None = None,
) -> tuple[Trace, dict[int, Tensor], bool]:
    """Trace the forward, then check it.

    With a `binding`, the outputs of units are looked up. Then the forward must change nothing: the
    units that might see a change do not run.

    Returns the trace, the constants, and whether a second run takes the same path.
    """
    reads: dict[tuple[str, str], int] = {}  # by unit and attribute, the next node

    def record_read(unit: str, key: str) -> None:
        if (unit, key) not in reads:
            interceptor = get_current_interceptor()
            if isinstance(interceptor, Tracer):
                reads[unit, key] = len(interceptor.nodes)

    proxies = {
        id(module): build_unit_proxy(name, module, record_read) for name, module in units.items()
    }
    proxy_model = ProxyModel(model, proxies)
    _check_no_backward_hooks(proxy_model)
    proxy_model.refresh_buffers(fake_factory.device)
    args, kwargs = unflatten(leaves, tree_spec)
    parents = [original for original, _ in proxy_model.parent_copies.values()]
    copies = [copy for _, copy in proxy_model.parent_copies.values()]
    fake_remote_tensors([*copies, *_find_remote_modules(units)], fake_factory)
    tracer = Tracer([model, proxy_model.model], fake_factory)
    tracer.unit_hooks = proxy_model.unit_hooks
    tracer.size_binding = binding
    attributes_before = [dict(vars(copy)) for copy in copies]
    if binding is None:
        tracer.shared_containers = find_shared_containers(parents, units)
        tracer.unit_state = UnitStateTracker(proxy_model, units, tracer.shared_containers)
    shared_state = SettingsReader(parents)
    state_before = shared_state.read_by_name()
    inputs = tracer.value_table.register_inputs(
        [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    )
    buffers_before = {
        name: dict(copy._buffers) for name, (_, copy) in proxy_model.parent_copies.items()
    }
    with tracer:
        output = proxy_model.model(*args, **kwargs)
    lost = _find_lost_attributes(proxy_model)
    if binding is not None:
        is_unchanged = all(
            before.keys() == vars(copy).keys()
            and are_same_objects(before.values(), vars(copy).values())
            for before, copy in zip(attributes_before, copies, strict=True)
        )
        if lost or not is_unchanged or proxy_model.unit_hooks:
            raise SizesDiffer
    reassigned_buffers = {
        f"{name}.{key}" if name else key: buffer
        for name, (_, copy) in proxy_model.parent_copies.items()
        for key, buffer in copy._buffers.items()
        if buffer is not None and buffer is not buffers_before[name].get(key)
    }
    attribute_reads = tuple(_find_attribute_reads(reads, units, shared_state.code_names))
    trace = tracer.build_trace(inputs, output, reassigned_buffers, attribute_reads)
    state_after = shared_state.read_by_name()
    changed = [name for name, key in state_after.items() if state_before.get(name) != key]
    # A new ProxyModel: the forward may have set attributes on the copies of the first one.
    next_model = proxy_model if binding is not None else ProxyModel(model, proxies)
    is_stable = is_reproducible(trace, next_model, leaves, tree_spec)
    if lost:
        assert tracer.unit_state is not None
        next_call = ProxyModel(model, proxies)
        next_call.take_state(proxy_model)
        _check_lost_attributes(
            lost, trace, next_call, tracer.unit_state, args, kwargs, fake_factory
        )
    # A cache is filled in the first run only. Python values that follow from data may be the same
    # in a second run, because the data are.
    if changed and (is_rerun or any(node.is_guard for node in trace.nodes)):
        raise CutError(
            f"the forward changes {', '.join(changed)}, which all stages share: a global variable, "
            "an attribute of a class, or an object that Penstock does not copy. Stages that run at "
            "the same time would overwrite it. Pass the value as an argument, or keep it in an "
            "attribute of the model, a dict, a list or a plain object that the model holds."
        )
    return trace, tracer.value_table.collect_constants(), is_stable and not changed


def _find_attribute_reads(
    reads: Mapping[tuple[str, str], int], units: Mapping[str, nn.Module], names: Collection[str]
) -> Iterator[AttributeRead]:
    """Yield the attributes of units that the forward reads, given what it reads of their proxies.

    A read of a submodule goes on where no proxy sees it. Its attributes count as read if their
    names are among the `names` in the forward's code, or in a method of the unit that it calls.
    """
    methods = [getattr(type(units[unit]), key, None) for unit, key in reads]
    names = set(names).union(*map(find_attribute_names, methods))
    for (unit, key), node_index in reads.items():
        module = units[unit]
        if key in vars(module) and key not in MODULE_ATTRIBUTES:
            yield AttributeRead(unit, "", key, node_index)
        elif key in module._modules or key == "_modules":
            for path, submodule in module.named_modules():
                for inner in vars(submodule).keys() & names - MODULE_ATTRIBUTES if path else ():
                    yield AttributeRead(unit, path, inner, node_index)


def _check_no_backward_hooks(proxy_model: ProxyModel) -> None:
    """Raise if a parent has a backward hook.

    Its inputs and its outputs may be on different stages, and each stage runs its forward.
    """
    for name, (parent, _) in proxy_model.parent_copies.items():
        if torch.is_grad_enabled() and (parent._backward_hooks or parent._backward_pre_hooks):
            module = f"'{name}'" if name else "the model"
            raise CutError(
                f"{module} ({type(parent).__name__}) has a backward hook, and its forward is "
                "divided among stages, each of which has a part of the gradients. Register the "
                "hook on units, or make the module a unit with units=."
            )


def _find_remote_modules(units: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return all modules of the units that belong to another process."""
    return [m for unit in units.values() if is_remote_unit(unit) for m in unit.modules()]


def _find_lost_attributes(proxy_model: ProxyModel) -> dict[str, bool]:
    """Return the names of values that the forward leaves on parents, and whether each is a number.

    The others are tensors that were computed from units, containers with other contents, and texts,
    dates and so on.

    Every stage runs the parents' forward for every micro-batch, and would count each of them. So
    changes to attributes of parents are undone after each micro-batch.
    """
    return (
        {
            f"{name}.{key}".lstrip("."): not isinstance(value, FakeTensor)
            for name, (original, parent_copy) in proxy_model.parent_copies.items()
            for key, value in parent_copy.__dict__.items()
            if isinstance(value, FakeTensor)
            or (type(value) in _NUMBER_TYPES and value != original.__dict__.get(key, value))
        }
        | {
            f"{name}.{key}".lstrip("."): False
            for name, (original, parent_copy) in proxy_model.parent_copies.items()
            for key, value in parent_copy.__dict__.items()
            if _is_plain_value(value) and _has_changed(value, original.__dict__.get(key, value))
        }
        | {
            f"{name}.{key}".lstrip("."): False
            for name, (original, _) in proxy_model.parent_copies.items()
            for key, value in vars(original).items()
            if (container := proxy_model.get_container_copy(value)) is not None
            and not has_same_state(container.stage_copy, container.snapshot)
        }
    )


def _is_plain_value(value: Any) -> bool:
    """Return whether a value is a text, a date and so on, or a tuple of plain values."""
    if type(value) is tuple:
        return SCALAR_TYPES.issuperset(map(type, value))
    return isinstance(value, _PLAIN_TYPES) and type(value) not in _NUMBER_TYPES


def _has_changed(value: Any, before: Any) -> bool:
    return value is not before and (type(value) is not type(before) or bool(value != before))


def _check_lost_attributes(
    lost: Mapping[str, bool],
    trace: Trace,
    next_call: ProxyModel,
    unit_state: UnitStateTracker,
    args: tuple[Any, ...],
    kwargs: Any,
    fake_factory: FakeTensorFactory,
) -> None:
    """Raise if the forward depends on what an earlier call has left; otherwise warn of numbers.

    The forward is traced once more, in the state that the first call has left. Raises `StaleUnit`
    if a unit may read what was left: what it computes is seen only once it is expanded.
    """
    tracer = Tracer([next_call.model], fake_factory)
    tracer.unit_state = unit_state
    tracer.unit_hooks = next_call.unit_hooks
    tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    tracer.value_table.register_inputs(tensors)
    try:
        with tracer:
            next_call.model(*args, **kwargs)
        is_same = _is_same_path(tracer.nodes, trace.nodes)
    except StaleUnit:
        raise
    except EscapedTensor:
        is_same = False
    except Exception:  # code of the model that fails in this state says nothing about the path
        is_same = True
    if not is_same:
        raise CutError(
            f"the forward changes {', '.join(lost)} on modules around the units, and depends on "
            "what an earlier call has left there. Every stage runs that code for every "
            "micro-batch, so the change is undone after each one. Change it outside of the "
            "forward, once per step, or put all that depends on it into one unit with units=."
        )
    numbers = [name for name, is_number in lost.items() if is_number]
    if numbers:
        warnings.warn(
            f"the forward changes {', '.join(numbers)} on modules around the units. Every stage "
            "runs that code for every micro-batch, so the change is undone after each one. Keep "
            "such a number inside a unit, in a buffer, or outside of the model.",
            stacklevel=2,
        )


def _is_same_path(nodes: Sequence[TraceNode], first_nodes: Sequence[TraceNode]) -> bool:
    """Return whether a second call computes what the first one did.

    It may leave out what the first call has computed from the inputs alone, and cached.
    """
    calls = [n for n in nodes if n.kind is not NodeKind.NON_TENSOR]
    first_calls = [n for n in first_nodes if n.kind is not NodeKind.NON_TENSOR]
    computed, first_computed = (
        [_describe_computation(n) for n in group if not n.input_only]
        for group in (calls, first_calls)
    )
    # An iterator, which `in` consumes: what is left must come in the same order, and as often.
    first_from_inputs = iter([_describe_computation(n) for n in first_calls if n.input_only])
    return computed == first_computed and all(
        _describe_computation(n) in first_from_inputs for n in calls if n.input_only
    )


def _describe_computation(node: TraceNode) -> Any:
    """Return the function or unit of a node, and its plain arguments."""
    return str(node.func), node.literals, _list_plain_arguments(node)


def _list_plain_arguments(node: TraceNode) -> list[Any]:
    if node.kind is not NodeKind.UNIT:
        return []
    return [leaf for leaf in node.arg_template[0] if isinstance(leaf, bool | int | float | str)]


def trace_expanding_units(
    model: nn.Module,
    selector: UnitSelector,
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
    expanded: Collection[str] = (),
) -> tuple[Trace, dict[int, Tensor], dict[str, nn.Module]]:
    """Trace the forward, and expand units until no tensor leaves one without being returned.

    Returns the trace, the constants and the units. A unit that has to be expanded is replaced by
    its submodules, and so are all other units of its class, which would leak in the same way. A
    unit that is never called is expanded as well, if the forward calls its submodules directly.
    """
    expanded_names = set(expanded)
    while True:
        units = find_units(model, selector, expanded_names)
        try:
            trace, constants = trace_model(model, units, args, kwargs, device)
        except EscapedTensor as escaped:
            expanded_names |= _find_units_to_expand(escaped, units)
            continue
        bypassed = _find_bypassed_units(trace, units)
        if not bypassed:
            return trace, constants, units
        expanded_names |= bypassed


def _find_bypassed_units(trace: Trace, units: Mapping[str, nn.Module]) -> set[str]:
    """Return the units that are never called although the forward uses their parameters.

    `self.vae.encode(x)` does that, and so does the forward of a `torch.fx.GraphModule`.
    """
    called_units = {trace.nodes[index].func.unit for index in trace.unit_call_indices}
    parameter_names = [value.parameter_name for value in trace.values if value.parameter_name]
    return {
        name
        for name, unit in units.items()
        if name not in called_units
        and is_expandable(unit)
        and any(parameter.startswith(f"{name}.") for parameter in parameter_names)
    }


def _find_units_to_expand(escaped: EscapedTensor, units: Mapping[str, nn.Module]) -> set[str]:
    """Return the unit that a tensor escaped from, and all others of its class."""
    module = units.get(escaped.unit)
    if module is None or not is_expandable(module):
        raise CutError(
            f"at {escaped.location}, {escaped.problem} (it is in an attribute, captured by a hook "
            "or hidden in an object). The unit has no submodules that could be units instead. Let "
            "the unit take what it reads as an argument, and return what others read."
        )
    return {name for name, other in units.items() if type(other) is type(module)
            and is_expandable(other)}  # fmt: skip


def _copy_input(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device. The forward may change its inputs in place."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
