"""The tracer: runs a model's forward once and records its nodes and values.

The tracer is a function mode. It sees every operation between units, and the proxies of the units
report their calls to it. Each operation is executed in one of two ways:

                          arguments                           executed on     result is
    input-only            inputs, buffers, constants          real tensors    known to every stage
    everything else       parameters, outputs of units, ...   fake tensors    shape and dtype only

Values that depend on the inputs alone are computed with their contents, because the forward may
branch on them (`if mask.all()`). Such a branch becomes a guard: it is evaluated again for every
micro-batch, and another outcome leads to another trace. The outputs of units, and everything
computed from them, exist on one stage only. If Python reads their contents, the other stages could
not follow, and the tracer raises a `CutError` that names the line.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import (
    BuiltinFunctionType,
    FrameType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.traced.containers import (
    NO_REBOUND_HOOKS,
    apply_container_updates,
    track_container_changes,
)
from penstock.model.traced.dry_run import (
    DATA_DEPENDENT_ERRORS,
    FakeTensorFactory,
    PackedSequenceLengths,
    Write,
    find_mutated,
    get_rng_state,
    get_versions,
    make_fake_tensor,
    make_shape_placeholder,
    run_on_dummy_data,
    run_on_fakes,
    select_originals,
)
from penstock.model.traced.interception import (
    EscapedTensor,
    FunctionCall,
    HookSkipped,
    NullHookHandle,
    OpInterceptor,
    StaleUnit,
    get_source_location,
    without_interception,
)
from penstock.model.traced.proxies import UnitStateTracker
from penstock.model.traced.torch_functions import (
    ASSERTIONS,
    BINCOUNT,
    COMPARISONS,
    HOOK_REGISTRATION,
    IS_LEAF,
    MODE_DEPENDENT,
    SHAPE_ONLY,
    UNIFORM_RANDOM,
    VALUE_CHECKS,
    get_function_name,
    is_metadata_only,
)
from penstock.model.traced.trace import (
    ArgumentLeaf,
    AttributeRead,
    NodeKind,
    Trace,
    TracedOutput,
    TracedValue,
    TraceNode,
    UnitCall,
    ValueLeaf,
    ValueRef,
)
from penstock.model.traced.unit_shapes import SizeBinding, SizesDiffer
from penstock.model.traced.value_table import ValueTable
from penstock.nested_values import (
    flatten,
    iter_hidden_tensors,
    iter_tensors,
    map_tensors,
    unflatten,
)
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import (
    DISTRIBUTIONS_DIRECTORY,
    IS_ALL_TRUE,
    PACK_PADDED_SEQUENCE,
    PAD_PACKED_SEQUENCE,
    REGISTER_PYTREE_NODE,
    FakeTensor,
    is_functorch_active,
    pytree,
)

# ---- checks: operations that cannot be divided among stages ------------------------------------

_ALL_TRUE_FUNCTIONS = (IS_ALL_TRUE, torch.all, Tensor.all)


def build_host_read_error(
    node: TraceNode, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> CutError:
    """Return the error for a read of tensor contents that only one stage has."""
    ancestors = [s for v in node.inputs for s in _iter_ancestor_nodes(v, nodes, values)]
    unit = next((str(s.func) for s in ancestors if s.kind is NodeKind.UNIT), "")
    origin = f"unit '{unit}'" if unit else "a parameter"
    if not unit and any(s.uses_rng for s in ancestors):
        origin = "random numbers"
    return CutError(
        f"at {node.location}, {get_function_name(node.func)} reads a value that was computed from "
        f"{origin}. Only one stage has that value, and the path of the forward or the shape of a "
        "tensor depends on it. Compute it inside a unit or on tensors (torch.where), or put "
        "everything that depends on it into one unit with units=."
    )


def is_persistent_update(
    buffer_name: str, value: int, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> bool:
    """Return whether the assignment of a value to a buffer must outlive the forward.

    A forward may keep a value in a buffer only to reuse it, for example a mask. Every stage can
    compute such a value again, so the assignment is dropped. It must be kept if the value depends
    on a unit or a parameter, or on the former content of the same buffer (a running sum).
    """
    if not values[value].input_only or values[value].buffer_name == buffer_name:
        return True
    ancestors = _iter_ancestor_nodes(value, nodes, values)
    return any(values[v].buffer_name == buffer_name for node in ancestors for v in node.inputs)


def is_distribution_check(value: TracedValue, nodes: Sequence[TraceNode]) -> bool:
    """Return whether `torch.distributions` is validating its arguments with this value.

    Distributions evaluate `if not valid.all(): raise`. That reads contents of one stage only, but
    nothing else depends on the outcome. So the stage that has the value checks it, and the others
    assume that it holds.
    """
    if value.producer is None or nodes[value.producer].func not in _ALL_TRUE_FUNCTIONS:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(DISTRIBUTIONS_DIRECTORY):
            return True
        frame = frame.f_back
    return False


def _iter_ancestor_nodes(
    value: int, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> Iterator[TraceNode]:
    """Yield the nodes that a value depends on, starting with its producer."""
    pending, visited = [values[value].producer], set[int | None]({None})
    while pending:
        index = pending.pop()
        if index is None or index in visited:
            continue
        visited.add(index)
        yield nodes[index]
        pending += [values[v].producer for v in nodes[index].inputs]


def format_literals(arguments: Any) -> str:
    """Return the numbers, strings and booleans among the arguments of an operation as text.

    The text is the same on every rank. It is part of the names of values.

    >>> format_literals((("x", 2), {"dim": -1}))
    "'x' 2 -1"
    """
    leaves = pytree.tree_leaves(arguments)
    parts = [(v.start, v.stop, v.step) if isinstance(v, slice) else (v,) for v in leaves]
    plain = (bool, int, float, str)
    return " ".join(repr(item) for part in parts for item in part if isinstance(item, plain))


def check_no_hidden_fakes(leaf: Any, description: str, location: str) -> None:
    """Raise if an object that is not a pytree node contains a tensor of a unit.

    The tensors in such an object cannot be replaced by those of another stage. `description` begins
    the message, for example "the model returns".
    """
    if isinstance(leaf, Tensor | nn.Module):
        return
    for tensor in iter_hidden_tensors(leaf):
        if isinstance(tensor, FakeTensor):
            raise CutError(
                f"at {location}, {description} a {type(leaf).__name__} that contains a tensor of a "
                "unit, and Penstock cannot look inside this class. Pass tuples, lists, dicts or "
                f"dataclasses, or register the class with {REGISTER_PYTREE_NODE}. For a key-value "
                "cache, set use_cache=False."
            )


def check_no_transform(node: TraceNode) -> None:
    """Raise if the forward is inside a transform of `torch.func`.

    A transform may contain units, and its intermediate tensors cannot be sent to another stage. A
    `vmap` does not get here: `OpInterceptor.handle_vmap` runs it as one operation.
    """
    if is_functorch_active():
        raise CutError(
            f"at {node.location}, the forward computes inside a transform of torch.func (grad, "
            "jvp, ...), which cannot be divided among stages. Put everything that is transformed "
            "into one unit with units=."
        )


def check_not_nested(tensor: Tensor, location: str) -> None:
    """Raise for a nested tensor: it has no single shape to allocate on another stage."""
    if tensor.is_nested:
        raise CutError(
            f"at {location}, the forward makes a nested tensor, which cannot be passed between "
            "units. Pad it, or put everything that computes with it into one unit with units=."
        )


# ---- the tracer --------------------------------------------------------------------------------


def _read_values(unit: nn.Module) -> dict[str, bool | int | float | str]:
    """Return the plain values among the attributes of a unit and of its submodules, by name."""
    return {
        f"{path}.{key}".lstrip("."): value
        for path, module in unit.named_modules()
        for key, value in vars(module).items()
        if type(value) in (bool, int, float, str)
    }


def _find_assigned_buffers(unit: nn.Module, writes: Sequence[Write]) -> list[str]:
    """Return the names of buffers that a call of a unit has assigned anew."""
    assigned = {id(write.tensor) for write in writes if write.is_assigned}
    return [name for name, buffer in unit.named_buffers() if id(buffer) in assigned]


# Functions of PyTorch, with the types of arguments for which the contents of tensors do not decide
# the shape of the result. Other functions are left out: a model may make them anew each time.
_FIXED_SHAPE_CALLS: set[Any] = set()
_C_FUNCTION_TYPES = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


def _is_pytorch_function(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return type(func) in _C_FUNCTION_TYPES or getattr(nn.functional, name, None) is func


def _describe_argument_types(func: Any, function_call: FunctionCall) -> Any:
    """Return the function, the structure of its arguments, and their types, dims and dtypes."""
    leaves, spec = flatten((function_call.args, function_call.kwargs))
    types = [(t.dtype, t.ndim) if isinstance(t, Tensor) else type(t) for t in leaves]
    return func, str(spec), tuple(types)


def _count_hooks(tensor: Tensor) -> int:
    return len(tensor._backward_hooks or ())


class Tracer(OpInterceptor):
    """Records the nodes and values of one forward.

    Enter the tracer as a context, run the forward on a `ProxyModel`, then call `build_trace`.
    """

    def __init__(self, models: Sequence[nn.Module], fake_factory: FakeTensorFactory) -> None:
        super().__init__()
        self.value_table = ValueTable(models, fake_factory)
        self.nodes: list[TraceNode] = []
        # By unit: lists, dicts and attributes through which a tensor could leave the unit.
        self.shared_containers: Mapping[str, Sequence[Any]] = {}
        self.unit_state: UnitStateTracker | None = None
        # The shapes of what units return, if they are known. Then no unit is run.
        self.size_binding: SizeBinding | None = None
        self._random_ranges, self._call_counts = dict[int, tuple[Any, Any]](), Counter[str]()
        self._packed_lengths = PackedSequenceLengths(fake_factory)
        self._unit_integer_inputs: dict[int, Tensor] = {}
        self._written_in_units: list[Write] = []

    # ---- operations ---------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record an operation as a node, unless it reads metadata only."""
        if is_metadata_only(func, args):
            self.value_table.record_metadata_read(func, args)
            return func(*args, **(kwargs or {}))
        return self.intercept_op(func, args, kwargs or {}, func)

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Execute an operation, on real or fake tensors, and record it.

        The cases are tried in this order:

        1. `requires_grad`, `is_leaf`: the answer is recorded, and stages repeat it.
        2. Functions that need only a shape: every stage can run them.
        3. Assertions and hook registration: nothing is executed.
        4. All tensors are input-only: execute on real tensors.
        5. A check by `torch.distributions`: assume that it holds.
        6. A comparison with random values: allowed if its outcome is certain.
        7. Packed sequences: execute on dummy data with the real lengths.
        8. Everything else: execute on fake tensors.
        """
        if self.in_hook:
            raise HookSkipped
        function_call = FunctionCall(args, kwargs, call, list(iter_tensors((args, kwargs))))
        inputs = tuple(map(self.value_table.value_of, function_call.tensors))
        literals, location = format_literals((args, kwargs)), get_source_location()
        node = TraceNode(
            NodeKind.OPERATION, func, inputs, None, location, literals=literals, call=call
        )
        check_no_transform(node)
        if func in MODE_DEPENDENT:
            if self.size_binding is not None and func == IS_LEAF:
                raise SizesDiffer  # outputs that were looked up are leaves
            # Not of the real tensor: it does not see what was written into its fake.
            result, _ = function_call.call_with_mapped_tensors(
                lambda t: t if self._is_input_only(t) else self.value_table.get_fake(t)
            )
            self.nodes.append(
                replace(node, kind=NodeKind.HOST_READ, inputs=(), recorded_result=result)
            )
            return result
        # With a second tensor, as in `x.new_full(size, fill_value)`, its contents are needed.
        if func in SHAPE_ONLY and len(inputs) == 1:
            result, placeholders = function_call.call_with_mapped_tensors(make_shape_placeholder)
            arguments = map_tensors((args, kwargs), lambda t: placeholders.pop(0))
            for kind in ("shape", "dtype"):
                self.value_table.metadata_reads[kind].update(inputs)
            node = replace(node, inputs=(), input_only=True, arg_template=arguments)
            return self._append_node(node, result, ())
        if func in ASSERTIONS or func in HOOK_REGISTRATION:
            self._append_without_result(node, function_call.tensors)
            return NullHookHandle() if func in HOOK_REGISTRATION else None
        if all(map(self.value_table.is_input_only, inputs)):
            return self._trace_on_real_tensors(node, function_call)
        if func is Tensor.__bool__ and is_distribution_check(
            self.value_table.values[inputs[0]], self.nodes
        ):
            self.nodes.append(
                replace(node, kind=NodeKind.HOST_READ, has_side_effect=True, recorded_result=True)
            )
            return True
        if func in COMPARISONS and any(value in self._random_ranges for value in inputs):
            outcome = self._trace_random_comparison(node, function_call)
            if outcome is not None:
                return outcome[0]
        if func is PACK_PADDED_SEQUENCE or func is PAD_PACKED_SEQUENCE:
            return self._trace_packed_sequence(node, function_call)
        return self._trace_on_fakes(node, function_call)

    def _append_without_result(self, node: TraceNode, tensors: Sequence[Tensor]) -> None:
        """Append an assertion or the registration of a hook."""
        node = replace(node, has_side_effect=True)
        hooked = tensors[:1] if node.func is Tensor.register_hook else ()
        users = [n for n in self.nodes if node.inputs[0] in n.inputs] if hooked else []
        is_used = any(user.func is not Tensor.requires_grad_ for user in users)
        if any(map(self._is_input_only, hooked)) and not is_used:
            # As if the hook changed the tensor: from here on one stage has it and sends it to the
            # others, so that the hook sees the whole gradient.
            self._append_node(node, None, tensors, hooked)
            return
        self.nodes.append(replace(node, hooked_values=node.inputs[: len(hooked)]))

    def _trace_packed_sequence(self, node: TraceNode, function_call: FunctionCall) -> Any:
        """Record the packing or padding of a sequence whose lengths follow from the inputs."""
        input_only = {id(t): t for t in function_call.tensors if self._is_input_only(t)}
        result = self._packed_lengths.compute(function_call, input_only)
        if result is None:
            raise build_host_read_error(node, self.nodes, self.value_table.values)
        # The number of packed rows depends on the lengths. The shapes of the recurrent layers'
        # outputs follow from it, so one guard on the packing is enough.
        if node.func is PACK_PADDED_SEQUENCE:
            node = self._add_shape_guard(node, function_call, result)
        return self._append_node(node, result, function_call.tensors)

    def _trace_on_real_tensors(self, node: TraceNode, function_call: FunctionCall) -> Any:
        """Execute and record an operation whose tensors are all input-only.

        What happened decides how the node is recorded:

            no tensors at all           NON_TENSOR: every stage runs it
            random numbers were drawn   one stage runs it and sends the result
            a parameter or buffer was   one stage runs it
            changed
            an output of a unit was     one stage runs it
            changed with the tensor
            no tensor came out          HOST_READ: Python reads contents, which becomes a guard
            the shape of the result     a guard on the shape
            depends on contents
            otherwise                   every stage that needs the result runs it
        """
        versions = get_versions(function_call.tensors)
        arguments = function_call.args, function_call.kwargs
        rng_state = get_rng_state(self.value_table.fake_factory.device, arguments)
        # Before the call: an in-place operation turns its arguments into other values.
        arg_template = self._build_arg_template(function_call)
        result = function_call.call(*function_call.args, **function_call.kwargs)
        mutated = find_mutated(
            node.func, function_call.tensors, versions, function_call.args, function_call.kwargs
        )
        returns_tensor = any(True for _ in iter_tensors(result))
        if not function_call.tensors and not returns_tensor:
            self.nodes.append(replace(node, kind=NodeKind.NON_TENSOR))
            return result
        if not torch.equal(
            rng_state, get_rng_state(self.value_table.fake_factory.device, arguments)
        ):
            return self._trace_random(node, function_call, result, mutated)
        if any(map(self.value_table.is_persistent, mutated)):
            return self._append_node(
                replace(node, has_side_effect=True), result, function_call.tensors, mutated
            )
        if any(map(self.value_table.shares_memory_with_units, mutated)):
            return self._append_node(node, result, function_call.tensors, mutated)
        node = replace(node, input_only=True, arg_template=arg_template)
        if not mutated and not returns_tensor:
            self.nodes.append(
                replace(node, kind=NodeKind.HOST_READ, is_guard=True, recorded_result=result)
            )
            return result
        if (
            function_call.tensors
            and not mutated
            and self._has_data_dependent_shape(node.func, function_call)
        ):
            shapes = [tuple(t.shape) for t in iter_tensors(result)]
            node = replace(node, is_guard=True, recorded_result=shapes)
        return self._append_node(node, result, function_call.tensors, mutated)

    def _has_data_dependent_shape(self, func: Any, function_call: FunctionCall) -> bool:
        """Return whether the output shape of an operation depends on tensor contents.

        PyTorch's fake tensors raise a specific error for such an operation. Whether they do depends
        on the types of the arguments, not on sizes, and for other sizes it is looked up.
        """
        key = _describe_argument_types(func, function_call)
        if self.size_binding is not None and key in _FIXED_SHAPE_CALLS:
            return False
        try:
            with self.value_table.fake_factory.mode:
                function_call.call_with_mapped_tensors(self.value_table.get_fake)
        except DATA_DEPENDENT_ERRORS:
            return True
        except Exception:  # fake tensors do not support the operation for another reason
            return False
        if _is_pytorch_function(func):
            _FIXED_SHAPE_CALLS.add(key)
        return False

    def _trace_on_fakes(self, node: TraceNode, function_call: FunctionCall) -> Any:
        """Execute and record an operation of which at least one tensor has no contents here."""
        if self.size_binding is not None and len(self.nodes) in self.size_binding.shapes.calls:
            arguments = function_call.args, function_call.kwargs
            node = replace(node, arg_template=self._build_arg_template(function_call))
            return self._look_up_call(self.size_binding, node, *flatten(arguments))
        fakes = {id(t): self.value_table.get_fake(t) for t in function_call.tensors}
        fake_tensors = [fakes[id(t)] for t in function_call.tensors]
        versions = get_versions(fake_tensors)
        args, kwargs = map_tensors(
            (function_call.args, function_call.kwargs), lambda t: fakes[id(t)]
        )
        known_tensors = {
            id(fakes[id(t)]): t for t in function_call.tensors if self._is_input_only(t)
        }
        factory, request = self.value_table.fake_factory, (args, kwargs, known_tensors)
        try:
            result, uses_rng = run_on_fakes(factory, "", function_call.call, *request)
        except DATA_DEPENDENT_ERRORS as error:
            if not self._is_decided_by_inputs(node, function_call):
                raise build_host_read_error(node, self.nodes, self.value_table.values) from error
            uses_rng = False
            result = run_on_dummy_data(factory, "", function_call.call, *request)
            node = self._add_shape_guard(node, function_call, result)
        mutated = find_mutated(node.func, fake_tensors, versions, args, kwargs)
        mutated = select_originals(function_call.tensors, fake_tensors, mutated)
        if not mutated and not any(True for _ in iter_tensors(result)):
            if result is not None:
                raise build_host_read_error(node, self.nodes, self.value_table.values)
            self.nodes.append(replace(node, has_side_effect=True))
            return None
        node = replace(
            node,
            has_side_effect=any(map(self.value_table.is_persistent, mutated)),
            uses_rng=uses_rng,
            # For `guards.find_loss_targets`, `unit_shapes` and `trace_tail`.
            arg_template=self._build_arg_template(function_call),
        )
        return self._append_node(node, result, function_call.tensors, mutated, fake_tensors)

    def _is_input_only(self, tensor: Tensor) -> bool:
        return self.value_table.is_input_only(self.value_table.value_of(tensor))

    def _is_decided_by_inputs(self, node: TraceNode, function_call: FunctionCall) -> bool:
        """Return whether input-only tensors alone decide the shape of the result.

        An example is `x[mask]` where the mask follows from the inputs. Shapes are taken to depend
        on integer and boolean tensors, so all tensors of unknown content must be floating-point.
        """
        # The usual case counts tokens per expert: `bincount(experts, minlength=num_experts)`.
        if node.func in BINCOUNT:
            return bool(function_call.kwargs.get("minlength"))
        if node.func in VALUE_CHECKS:
            return True
        unknown = [t for t in function_call.tensors if not self._is_input_only(t)]
        return len(unknown) < len(function_call.tensors) and all(
            t.is_floating_point() for t in unknown
        )

    def _add_shape_guard(
        self, node: TraceNode, function_call: FunctionCall, output: Any
    ) -> TraceNode:
        """Return the node as a guard: its output shapes must be the same for other inputs."""
        shapes = [tuple(t.shape) for t in iter_tensors(output)]
        if node.func in BINCOUNT or node.func in VALUE_CHECKS or not any(shapes):
            return node
        return replace(
            node,
            is_guard=True,
            recorded_result=shapes,
            arg_template=self._build_arg_template(function_call),
        )

    def _build_arg_template(self, function_call: FunctionCall) -> Any:
        """Return the arguments with a `ValueRef` in place of each tensor."""
        return map_tensors(
            (function_call.args, function_call.kwargs),
            lambda t: ValueRef(self.value_table.value_of(t)),
        )

    # ---- random numbers -----------------------------------------------------------------------
    #
    # One stage draws a random tensor and sends it to the others. Python must not branch on it, as
    # the other stages do not have it. One branch is common and harmless: layerdrop or stochastic
    # depth with probability 0, `if torch.rand(()) < 0.0`. So the tracer keeps the bounds of uniform
    # random values, evaluates comparisons at both bounds, and refuses a branch only if the two
    # outcomes differ.

    def _trace_random(
        self,
        node: TraceNode,
        function_call: FunctionCall,
        output: Any,
        mutated: Sequence[Tensor],
    ) -> Any:
        """Record a random operation. For a uniform one, remember the bounds of its values.

        A draw in place, such as `mask.bernoulli_(p)`, makes new values of the tensors that it
        fills. Their former values stay input-only.
        """
        node = replace(node, has_side_effect=True, uses_rng=True)
        output = self._append_node(node, output, function_call.tensors, mutated)
        if node.func in UNIFORM_RANDOM and isinstance(output, Tensor):
            largest = torch.nextafter(torch.ones_like(output), torch.zeros_like(output))
            value = self.value_table.value_of(output)
            self._random_ranges[value] = torch.zeros_like(output), largest
        return output

    def _trace_random_comparison(
        self, node: TraceNode, function_call: FunctionCall
    ) -> tuple[Any] | None:
        """Evaluate a comparison with random values at their bounds.

        Returns the result in a tuple, or None if other values of a stage take part. Raises
        `CutError` if Python would branch on a random outcome.
        """
        value_of = self.value_table.value_of
        if not all(
            value in self._random_ranges or self.value_table.is_input_only(value)
            for value in node.inputs
        ):
            return None

        def evaluate_at_bound(bound: int) -> Any:
            def replace_random(tensor: Tensor) -> Tensor:
                random_range = self._random_ranges.get(value_of(tensor))
                return tensor if random_range is None else random_range[bound]

            return function_call.call_with_mapped_tensors(replace_random)[0]

        least, largest = evaluate_at_bound(0), evaluate_at_bound(1)
        if isinstance(least, Tensor):
            result = self._append_node(
                replace(node, has_side_effect=True), least.clone(), function_call.tensors
            )
            self._random_ranges[value_of(result)] = least, largest
            return (result,)
        if least != largest:
            raise CutError(
                f"at {node.location}, random numbers decide what the forward does next, and every "
                "stage would draw its own. Switch this off (layerdrop=0 or a similar option)."
            )
        self.nodes.append(replace(node, kind=NodeKind.HOST_READ, inputs=(), recorded_result=least))
        return (least,)

    # ---- units --------------------------------------------------------------------------------

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a unit on fake tensors, or look up what it returns, and record its call as a node."""
        if self.size_binding is not None:
            with without_interception(self):
                output = self._look_up_unit(self.size_binding, name, args, kwargs)
            self.notify_hooks(name, target, args, kwargs, output)
            return output
        # A tensor may leave a unit through a list that others hold as well. Where the unit does not
        # run, the list would stay empty.
        has_changed = track_container_changes(self.shared_containers.get(name, ()))
        if self.unit_state is not None and self.unit_state.is_stale(name):
            raise StaleUnit(name, get_source_location())
        with without_interception(self):
            output = self._trace_unit(name, target, args, kwargs)
        has_left_state = self.unit_state is not None and self.unit_state.has_left_state(name)
        if has_changed() or has_left_state:
            raise EscapedTensor(name, get_source_location())
        return output

    def _trace_unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a unit on fake tensors, check its arguments and its output, and append the node."""
        location = get_source_location()
        self.value_table.check_own_parameters(name, target)
        leaves, spec = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for leaf in leaves:
            check_no_hidden_fakes(leaf, f"unit '{name}' receives", location)
        inputs = tuple(map(self.value_table.value_of, tensors))
        fakes = [
            self.value_table.get_fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        fake_tensors = [leaf for leaf in fakes if isinstance(leaf, Tensor)]
        versions, hooks = get_versions(fake_tensors), [_count_hooks(t) for t in fake_tensors]
        # Fake tensors cannot run every unit. For these there is real data: the input-only arguments
        # and the lengths of packed sequences.
        known_tensors = {
            id(f): t for f, t in zip(fake_tensors, tensors, strict=True) if self._is_input_only(t)
        }
        known_tensors |= self._packed_lengths.find_known_integers(fake_tensors)
        known_inputs = (
            (value, known_tensors.get(id(fake)))
            for value, fake in zip(inputs, fake_tensors, strict=True)
        )
        self._unit_integer_inputs |= {
            value: t for value, t in known_inputs if t is not None and not t.is_floating_point()
        }
        values, write_count = _read_values(target), len(self._written_in_units)
        with self.unit_hooks.get(name, NO_REBOUND_HOOKS).install(target):
            fake_args, fake_kwargs = unflatten(fakes, spec)
            output, _ = run_on_fakes(
                self.value_table.fake_factory,
                name,
                target,
                fake_args,
                fake_kwargs,
                known_tensors,
                self._written_in_units,
            )
        mutated = select_originals(
            tensors, fake_tensors, find_mutated(None, fake_tensors, versions)
        )
        call = UnitCall(name, self._call_counts[name])
        self._call_counts[name] += 1
        # A tensor in an object that is not a pytree node cannot be sent. Raising EscapedTensor
        # makes the submodules of this unit the units, and the object stays inside the forward.
        for leaf in flatten(output)[0]:
            if not isinstance(leaf, Tensor) and any(True for _ in iter_hidden_tensors(leaf)):
                raise EscapedTensor(name, location)
        remaining = iter(inputs)
        refs = [ValueRef(next(remaining)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        node = TraceNode(NodeKind.UNIT, call, inputs, None, location, arg_template=(refs, spec))
        pairs = zip(inputs, fake_tensors, hooks, strict=True)
        hooked = tuple(value for value, fake, count in pairs if _count_hooks(fake) != count)
        changed = [key for key, v in _read_values(target).items() if v != values.get(key, v)]
        changed += _find_assigned_buffers(target, self._written_in_units[write_count:])
        node = replace(node, hooked_values=hooked, changed_attributes=tuple(changed))
        return apply_container_updates(
            self._append_node(node, output, tensors, mutated, fake_tensors), args, kwargs
        )

    def _look_up_unit(
        self, binding: SizeBinding, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Append the node of a unit's call whose result follows from earlier traces."""
        leaves, spec = flatten((args, kwargs))
        inputs = tuple([self.value_table.value_of(t) for t in leaves if isinstance(t, Tensor)])
        remaining = iter(inputs)
        refs = [ValueRef(next(remaining)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call = UnitCall(name, self._call_counts[name])
        self._call_counts[name] += 1
        location = get_source_location()
        node = TraceNode(NodeKind.UNIT, call, inputs, None, location, arg_template=(refs, spec))
        return self._look_up_call(binding, node, leaves, spec)

    def _look_up_call(
        self, binding: SizeBinding, node: TraceNode, leaves: list[Any], spec: Any
    ) -> Any:
        """Append a node, given its arguments, whose result follows from earlier traces."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call_shapes = binding.take_call(
            len(self.nodes),
            node.func,
            [TensorSpec.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            [self.value_table.value_of(t) if isinstance(t, Tensor) else -1 for t in leaves],
            spec,
        )
        unit = node.func.unit if node.kind is NodeKind.UNIT else ""
        output_leaves = [
            make_fake_tensor(self.value_table.fake_factory, leaf, unit)
            if isinstance(leaf, TensorSpec)
            else tensors[leaf.argument_index]
            if isinstance(leaf, ArgumentLeaf)
            else leaf
            for leaf in binding.build_outputs(call_shapes)
        ]
        if call_shapes.changed_attributes or call_shapes.uses_rng:
            node = replace(
                node,
                changed_attributes=call_shapes.changed_attributes,
                uses_rng=call_shapes.uses_rng,
            )
        return self._append_node(node, unflatten(output_leaves, call_shapes.output_tree), tensors)

    # ---- recording ----------------------------------------------------------------------------

    def _append_node(
        self,
        node: TraceNode,
        output: Any,
        tensors: Sequence[Tensor],
        mutated: Sequence[Tensor] = (),
        fake_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """Append a node that returned or changed tensors, and register the new values.

        `fake_tensors` are the tensor arguments that the operation was executed with, if these are
        not `tensors` themselves. Returns the output in which the forward continues: an argument
        that the operation returned is the forward's own tensor again, not its fake.
        """
        node_index = len(self.nodes)
        mutations = self.value_table.record_mutation(node_index, node.input_only, mutated)
        # Reversed, so that a tensor that was passed twice counts as its first argument.
        argument_indices = {id(t): n for n, t in reversed(list(enumerate(fake_tensors or tensors)))}
        argument_indices |= {id(t): n for n, t in reversed(list(enumerate(tensors)))}
        leaves, spec = flatten(output)
        output_leaves: list[Any] = []
        new_leaves: dict[int, ValueLeaf] = {}  # by id: an output may contain a tensor twice
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                output_leaves.append(leaf)
            elif id(leaf) in new_leaves:
                output_leaves.append(new_leaves[id(leaf)])
            elif id(leaf) in argument_indices:
                output_leaves.append(ArgumentLeaf(argument_indices[id(leaf)]))
                leaves[position] = tensors[argument_indices[id(leaf)]]
            else:
                check_not_nested(leaf, node.location)
                value = TracedValue(
                    TensorSpec.from_tensor(leaf),
                    node.input_only,
                    node_index,
                    self._name_value(node, position),
                )
                new_leaves[id(leaf)] = ValueLeaf(self.value_table.register(leaf, value))
                output_leaves.append(new_leaves[id(leaf)])
        self.nodes.append(
            replace(node, output=TracedOutput(tuple(output_leaves), spec), mutations=mutations)
        )
        return unflatten(leaves, spec)

    def _name_value(self, node: TraceNode, position: int) -> str:
        """Return a name that is the same on every rank.

        The name is made from the operation and its arguments and not from a sequence number: some
        models iterate over sets, whose order differs between processes.
        """
        if node.kind is NodeKind.UNIT:
            return f"{node.func}.{position}"
        arguments = ", ".join(self.value_table.values[value].name for value in node.inputs)
        return self.value_table.make_unique_name(
            f"{get_function_name(node.func)}({arguments}){node.literals}"
        )

    def build_trace(
        self,
        inputs: tuple[int, ...],
        output: Any,
        reassigned_buffers: Mapping[str, Tensor],
        attribute_reads: tuple[AttributeRead, ...] = (),
    ) -> Trace:
        """Return the finished trace.

        `reassigned_buffers` are buffers of parents to which the forward assigned another tensor.
        """
        leaves, spec = flatten(output)
        for leaf in leaves:
            check_no_hidden_fakes(leaf, "the model returns", "its end")
        value_of = self.value_table.value_of
        output_leaves = [
            ValueLeaf(value_of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        reassigned = {name: value_of(tensor) for name, tensor in reassigned_buffers.items()}
        values = self.value_table.values
        reassigned = {
            name: v
            for name, v in reassigned.items()
            if is_persistent_update(name, v, self.nodes, values)
        }
        written = self.value_table.find_buffer_names([w.tensor for w in self._written_in_units])
        if self.size_binding is not None:
            written = self.size_binding.shapes.written_buffers
        nodes, traced_output = tuple(self.nodes), TracedOutput(tuple(output_leaves), spec)
        reads = {k: frozenset(v) for k, v in self.value_table.metadata_reads.items()}
        return Trace(
            nodes,
            tuple(values),
            inputs,
            traced_output,
            reassigned,
            reads,
            self._unit_integer_inputs,
            written,
            attribute_reads,
        )
