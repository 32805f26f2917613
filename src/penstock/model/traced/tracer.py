"""The dry run: follows a forward, and writes down what it does.

What follows from the inputs alone is computed with its numbers, as the forward may decide by them.
Units, and what follows from them, are computed without.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributions
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.errors import CutError
from penstock.model.traced.containers import (
    apply_container_updates,
    install_hooks,
    track_container_changes,
)
from penstock.model.traced.dry_run import (
    DATA_DEPENDENT_ERRORS,
    PACK_PADDED,
    PAD_PACKED,
    FakeTensorFactory,
    PackedSequenceLengths,
    find_mutated,
    get_rng_state,
    get_versions,
    make_shape_placeholder,
    run_on_dummy_data,
    run_on_fakes,
    select_originals,
)
from penstock.model.traced.guards import CROSS_ENTROPY_FUNCTIONS
from penstock.model.traced.interception import (
    NullHookHandle,
    OpInterceptor,
    get_source_location,
    without_interception,
)
from penstock.model.traced.pytrees import (
    FunctionCall,
    flatten,
    format_literals,
    iter_hidden_tensors,
    iter_tensors,
    map_tensors,
    unflatten,
)
from penstock.model.traced.remote_tensor import TensorSpec
from penstock.model.traced.torch_functions import (
    ASSERTIONS,
    BINCOUNT,
    COMPARISONS,
    HOOK_REGISTRATION,
    MODE_DEPENDENT,
    SHAPE_ONLY,
    UNIFORM_RANDOM,
    get_function_name,
    is_metadata_only,
)
from penstock.model.traced.trace import (
    ArgumentLeaf,
    NodeKind,
    Trace,
    TracedOutput,
    TracedValue,
    TraceNode,
    UnitCall,
    ValueLeaf,
    ValueRef,
)
from penstock.model.traced.value_table import EscapedTensor, RandomRange, ValueTable

# -------------------------------------------------------------------------------------------------
# What a value came of, and what that means: for the host, and where it cannot be followed.
# -------------------------------------------------------------------------------------------------

_DISTRIBUTIONS_PATH = str(Path(torch.distributions.__file__).parent)
_ALL_TRUE_FUNCTIONS = (getattr(torch, "_is_all_true", None), torch.all, Tensor.all)


def build_host_read_error(
    node: TraceNode, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> CutError:
    """The host wanted to look at numbers that only one stage has."""
    makers = (s for v in node.inputs for s in _iter_ancestor_nodes(v, nodes, values))
    unit = next((str(s.func) for s in makers if s.kind is NodeKind.UNIT), "")
    whose = f"unit '{unit}'" if unit else "a parameter"
    return CutError(
        f"at {node.location}, {get_function_name(node.func)} looks at the numbers of a value that follows "
        f"from {whose}, which only one stage has, and what the forward does next, or the "
        "shape of it, depends on them: compute it inside a unit, on tensors (torch.where), or "
        "put all that depends on it into one unit with units="
    )


def is_persistent_update(
    buffer_name: str, value: int, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> bool:
    """Is a buffer's new value more than what was kept for the next time, and can be made again?"""
    if not values[value].input_only or values[value].buffer_name == buffer_name:
        return True
    before = _iter_ancestor_nodes(value, nodes, values)
    return any(values[taken].buffer_name == buffer_name for step in before for taken in step.inputs)


def is_distribution_check(value: TracedValue, nodes: Sequence[TraceNode]) -> bool:
    """Does the host look whether all is well, as distributions do with what they are given?"""
    if value.producer is None or nodes[value.producer].func not in _ALL_TRUE_FUNCTIONS:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS_PATH):
            return True
        frame = frame.f_back
    return False


def _iter_ancestor_nodes(
    value: int, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> Iterator[TraceNode]:
    """All that it follows from, the last ones first."""
    waiting, seen = [values[value].producer], set[int | None]({None})
    while waiting:
        at = waiting.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        yield nodes[at]
        waiting += [values[taken].producer for taken in nodes[at].inputs]


def check_no_hidden_fakes(leaf: Any, description: str, location: str) -> None:
    """Tensors of units are not in objects that cannot be taken apart."""
    if isinstance(leaf, Tensor | nn.Module):
        return
    for tensor in iter_hidden_tensors(leaf):
        if isinstance(tensor, FakeTensor):
            raise CutError(
                f"at {location}, {description} a {type(leaf).__name__} with a tensor of a unit inside, where "
                "it cannot be followed: pass tuples, lists, dicts or dataclasses, or register the "
                "class with torch.utils._pytree.register_pytree_node; for a cache, use_cache=False"
            )


def check_no_transform(node: TraceNode) -> None:
    """What `vmap` computes is one step; of other transforms, units may be a part."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CutError(
            f"at {node.location}, the forward computes inside a transform of torch.func (grad, jvp, "
            "...), which cannot be followed between units: put all that is transformed into one "
            "unit with units="
        )


def check_not_nested(tensor: Tensor, location: str) -> None:
    """Can it be told how a tensor looks, and be sent as it is?"""
    if tensor.is_nested:
        raise CutError(
            f"at {location}, the forward makes a nested tensor, which cannot be followed between "
            "units: pad it, or put all that computes with it into one unit with units="
        )


# -------------------------------------------------------------------------------------------------


class Tracer(OpInterceptor):
    """Writes steps and values."""

    def __init__(self, models: Sequence[nn.Module], fake_factory: FakeTensorFactory) -> None:
        super().__init__()
        self.value_table = ValueTable(models, fake_factory)
        self.nodes: list[TraceNode] = []
        self.shared_containers: Mapping[
            str, Sequence[Any]
        ] = {}  # lists and such of units that others have
        self._random_ranges, self._call_counts = dict[int, RandomRange](), Counter[str]()
        self._packed_lengths, self._unit_integer_inputs = (
            PackedSequenceLengths(fake_factory),
            dict[int, Tensor](),
        )

    # ---- operations -----------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One step, unless it only looks."""
        if is_metadata_only(func, args):
            self.value_table.record_metadata_read(func, args)
            return func(*args, **(kwargs or {}))
        return self.intercept_op(func, args, kwargs or {}, func)

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Compute it, with numbers if they are there, and write it down."""
        asked = FunctionCall(args, kwargs, call, list(iter_tensors((args, kwargs))))
        takes = tuple(map(self.value_table.value_of, asked.tensors))
        said, where = format_literals((args, kwargs)), get_source_location()
        step = TraceNode(NodeKind.OPERATION, func, takes, None, where, literals=said, call=call)
        check_no_transform(step)
        if func in MODE_DEPENDENT:
            found = call(*args, **kwargs)
            self.nodes.append(
                replace(step, kind=NodeKind.HOST_READ, inputs=(), recorded_result=found)
            )
            return found
        if func in SHAPE_ONLY and len(takes) == 1:  # else it takes the numbers of the others
            found, plain = asked.call_with_mapped_tensors(make_shape_placeholder)
            arguments = map_tensors((args, kwargs), lambda t: plain.pop(0))
            self.value_table.shape_read_values.update(takes)
            step = replace(step, inputs=(), input_only=True, arg_template=arguments)
            return self._append_node(step, found, ())
        if func in ASSERTIONS or func in HOOK_REGISTRATION:
            self.nodes.append(replace(step, has_side_effect=True))
            return NullHookHandle() if func in HOOK_REGISTRATION else None
        if all(map(self.value_table.is_input_only, takes)):
            return self._trace_on_real_tensors(step, asked)
        if func is Tensor.__bool__ and is_distribution_check(
            self.value_table.values[takes[0]], self.nodes
        ):
            self.nodes.append(
                replace(step, kind=NodeKind.HOST_READ, has_side_effect=True, recorded_result=True)
            )
            return True
        if func in COMPARISONS and any(at in self._random_ranges for at in takes):
            settled = self._trace_random_comparison(step, asked)
            if settled is not None:
                return settled[0]
        if func is PACK_PADDED or func is PAD_PACKED:
            return self._trace_packed_sequence(step, asked)
        return self._trace_on_fakes(step, asked)

    def _trace_packed_sequence(self, node: TraceNode, function_call: FunctionCall) -> Any:
        free = {id(t): t for t in function_call.tensors if self._is_input_only(t)}
        found = self._packed_lengths.compute(function_call, free)
        if found is None:
            raise build_host_read_error(node, self.nodes, self.value_table.values)
        if node.func is PACK_PADDED:  # the rest follows from how much it packs
            node = self._add_shape_guard(node, function_call, found)
        return self._append_node(node, found, function_call.tensors)

    def _trace_on_real_tensors(self, node: TraceNode, function_call: FunctionCall) -> Any:
        before, random = (
            get_versions(function_call.tensors),
            get_rng_state(self.value_table.fake_factory.device),
        )
        refs = self._build_arg_template(function_call)
        found = function_call.call(*function_call.args, **function_call.kwargs)
        changed = find_mutated(
            node.func, function_call.tensors, before, function_call.args, function_call.kwargs
        )
        gives = any(True for _ in iter_tensors(found))
        if not function_call.tensors and not gives:
            self.nodes.append(replace(node, kind=NodeKind.NON_TENSOR))
            return found
        if not torch.equal(random, get_rng_state(self.value_table.fake_factory.device)):
            return self._trace_random(node, function_call, found)
        if any(map(self.value_table.is_persistent, changed)):
            return self._append_node(
                replace(node, has_side_effect=True), found, function_call.tensors, changed
            )
        node = replace(node, input_only=True, arg_template=refs)
        if not changed and not gives:
            self.nodes.append(
                replace(node, kind=NodeKind.HOST_READ, is_guard=True, recorded_result=found)
            )
            return found
        if function_call.tensors and not changed and self._has_data_dependent_shape(function_call):
            shapes = [tuple(t.shape) for t in iter_tensors(found)]
            node = replace(node, is_guard=True, recorded_result=shapes)
        return self._append_node(node, found, function_call.tensors, changed)

    def _has_data_dependent_shape(self, function_call: FunctionCall) -> bool:
        """Does the shape of what it makes depend on numbers?"""
        try:
            with self.value_table.fake_factory.mode:
                function_call.call_with_mapped_tensors(self.value_table.get_fake)
        except DATA_DEPENDENT_ERRORS:
            return True
        except Exception:  # whatever else a fake cannot do
            return False
        return False

    def _trace_on_fakes(self, node: TraceNode, function_call: FunctionCall) -> Any:
        fakes = {id(t): self.value_table.get_fake(t) for t in function_call.tensors}
        inside = [fakes[id(t)] for t in function_call.tensors]
        before = get_versions(inside)
        args, kwargs = map_tensors(
            (function_call.args, function_call.kwargs), lambda t: fakes[id(t)]
        )
        known = {id(fakes[id(t)]): t for t in function_call.tensors if self._is_input_only(t)}
        how = (self.value_table.fake_factory, "", function_call.call, args, kwargs, known)
        try:
            found, drew = run_on_fakes(*how)
        except DATA_DEPENDENT_ERRORS as error:
            if not self._is_decided_by_inputs(node, function_call):
                raise build_host_read_error(node, self.nodes, self.value_table.values) from error
            found, drew = run_on_dummy_data(*how), False
            node = self._add_shape_guard(node, function_call, found)
        changed = find_mutated(node.func, inside, before, args, kwargs)
        changed = select_originals(function_call.tensors, inside, changed)
        if not changed and not any(True for _ in iter_tensors(found)):
            if found is not None:
                raise build_host_read_error(node, self.nodes, self.value_table.values)
            self.nodes.append(replace(node, has_side_effect=True))
            return None
        node = replace(
            node, has_side_effect=any(map(self.value_table.is_persistent, changed)), uses_rng=drew
        )
        if node.func in CROSS_ENTROPY_FUNCTIONS:
            node = replace(node, arg_template=self._build_arg_template(function_call))
        return self._append_node(node, found, function_call.tensors, changed, inside)

    def _is_input_only(self, tensor: Tensor) -> bool:
        return self.value_table.is_input_only(self.value_table.value_of(tensor))

    def _is_decided_by_inputs(self, node: TraceNode, function_call: FunctionCall) -> bool:
        """Is it decided by what is known, as for `x[mask]` with a mask of the inputs'?"""
        if node.func in BINCOUNT:
            return bool(function_call.kwargs.get("minlength"))
        unknown = [t for t in function_call.tensors if not self._is_input_only(t)]
        return len(unknown) < len(function_call.tensors) and all(
            t.is_floating_point() for t in unknown
        )

    def _add_shape_guard(
        self, node: TraceNode, function_call: FunctionCall, output: Any
    ) -> TraceNode:
        shapes = [tuple(t.shape) for t in iter_tensors(output)]
        if node.func in BINCOUNT or not any(shapes):
            return node
        return replace(
            node,
            is_guard=True,
            recorded_result=shapes,
            arg_template=self._build_arg_template(function_call),
        )

    def _build_arg_template(self, function_call: FunctionCall) -> Any:
        return map_tensors(
            (function_call.args, function_call.kwargs),
            lambda t: ValueRef(self.value_table.value_of(t)),
        )

    # ---- random numbers -------------------------------------------------------------------

    def _trace_random(self, node: TraceNode, function_call: FunctionCall, output: Any) -> Any:
        """Drawn on one stage. Of uniform ones it is known how far they reach."""
        output = self._append_node(
            replace(node, has_side_effect=True, uses_rng=True), output, function_call.tensors
        )
        if node.func in UNIFORM_RANDOM and isinstance(output, Tensor):
            largest = torch.nextafter(torch.ones_like(output), torch.zeros_like(output))
            value = self.value_table.value_of(output)
            self._random_ranges[value] = RandomRange(torch.zeros_like(output), largest)
        return output

    def _trace_random_comparison(
        self, node: TraceNode, function_call: FunctionCall
    ) -> tuple[Any] | None:
        """What is decided by chance is refused; `rand() < 0.0` is not decided by chance."""
        value_of = self.value_table.value_of
        if not all(
            at in self._random_ranges or self.value_table.is_input_only(at) for at in node.inputs
        ):
            return None

        def evaluate_at_bound(bound: str) -> Any:
            def replace_random(tensor: Tensor) -> Tensor:
                drawn = self._random_ranges.get(value_of(tensor))
                return tensor if drawn is None else getattr(drawn, bound)

            return function_call.call_with_mapped_tensors(replace_random)[0]

        least, largest = evaluate_at_bound("least"), evaluate_at_bound("largest")
        if isinstance(least, Tensor):
            found = self._append_node(
                replace(node, has_side_effect=True), least.clone(), function_call.tensors
            )
            self._random_ranges[value_of(found)] = RandomRange(least, largest)
            return (found,)
        if least != largest:
            raise CutError(
                f"at {node.location}, random numbers decide what the forward does next, and every "
                "stage would draw its own: switch it off (layerdrop=0, or another such option)"
            )
        self.nodes.append(replace(node, kind=NodeKind.HOST_READ, inputs=(), recorded_result=least))
        return (least,)

    # ---- units ----------------------------------------------------------------------------

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Compute it without numbers, and write it down."""
        filled = track_container_changes(self.shared_containers.get(name, ()))
        with without_interception(self):
            found = self._trace_unit(name, target, args, kwargs)
        if filled():
            raise EscapedTensor(name, get_source_location())
        return found

    def _trace_unit(self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        where = get_source_location()
        self.value_table.check_own_parameters(name, target)
        leaves, spec = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for leaf in leaves:
            check_no_hidden_fakes(leaf, f"unit '{name}' is given", where)
        takes = tuple(map(self.value_table.value_of, tensors))
        fakes = [
            self.value_table.get_fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        inside = [leaf for leaf in fakes if isinstance(leaf, Tensor)]
        before = get_versions(inside)
        known = {id(f): t for f, t in zip(inside, tensors, strict=True) if self._is_input_only(t)}
        known |= self._packed_lengths.find_known_integers(inside)
        told = ((at, known.get(id(fake))) for at, fake in zip(takes, inside, strict=True))
        self._unit_integer_inputs |= {
            at: t for at, t in told if t is not None and not t.is_floating_point()
        }
        with install_hooks(target, self.unit_hooks.get(name)):
            how = (self.value_table.fake_factory, name, target, *unflatten(fakes, spec), known)
            found, _ = run_on_fakes(*how)
        changed = select_originals(tensors, inside, find_mutated(None, inside, before))
        call = UnitCall(name, self._call_counts[name])
        self._call_counts[name] += 1
        for leaf in flatten(found)[0]:
            if not isinstance(leaf, Tensor) and any(True for _ in iter_hidden_tensors(leaf)):
                raise EscapedTensor(name, where)
        numbers = iter(takes)
        refs = [ValueRef(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        step = TraceNode(NodeKind.UNIT, call, takes, None, where, arg_template=(refs, spec))
        return apply_container_updates(
            self._append_node(step, found, tensors, changed, inside), args, kwargs
        )

    # ---- writing --------------------------------------------------------------------------

    def _append_node(
        self,
        node: TraceNode,
        output: Any,
        tensors: Sequence[Tensor],
        mutated: Sequence[Tensor] = (),
        fake_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """A step that gave tensors; `inside` are the arguments as they were computed with."""
        at = len(self.nodes)
        changes = self.value_table.record_mutation(at, node.input_only, mutated)
        places = {id(t): n for n, t in reversed(list(enumerate(fake_tensors or tensors)))}
        places |= {id(t): n for n, t in reversed(list(enumerate(tensors)))}
        leaves, spec = flatten(output)
        written: list[Any] = []
        twice: dict[int, ValueLeaf] = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                written.append(leaf)
            elif id(leaf) in twice:
                written.append(twice[id(leaf)])
            elif id(leaf) in places:
                written.append(ArgumentLeaf(places[id(leaf)]))
                leaves[position] = tensors[places[id(leaf)]]
            else:
                check_not_nested(leaf, node.location)
                made = TracedValue(
                    TensorSpec.from_tensor(leaf),
                    node.input_only,
                    at,
                    self._name_value(node, position),
                )
                twice[id(leaf)] = ValueLeaf(self.value_table.register(leaf, made))
                written.append(twice[id(leaf)])
        self.nodes.append(
            replace(node, output=TracedOutput(tuple(written), spec), mutations=changes)
        )
        return unflatten(leaves, spec)

    def _name_value(self, node: TraceNode, position: int) -> str:
        if node.kind is NodeKind.UNIT:
            return f"{node.func}.{position}"
        taken = ", ".join(self.value_table.values[at].name for at in node.inputs)
        return self.value_table.make_unique_name(
            f"{get_function_name(node.func)}({taken}){node.literals}"
        )

    def build_trace(
        self, inputs: tuple[int, ...], output: Any, reassigned_buffers: Mapping[str, Tensor]
    ) -> Trace:
        """What was seen; `lasting` are buffers that were assigned anew."""
        leaves, spec = flatten(output)
        for leaf in leaves:
            check_no_hidden_fakes(leaf, "the model gives", "its end")
        value_of = self.value_table.value_of
        written = [
            ValueLeaf(value_of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        anew = {name: value_of(tensor) for name, tensor in reassigned_buffers.items()}
        values = self.value_table.values
        anew = {
            name: v for name, v in anew.items() if is_persistent_update(name, v, self.nodes, values)
        }
        steps, gives = tuple(self.nodes), TracedOutput(tuple(written), spec)
        measured = frozenset(self.value_table.shape_read_values)
        return Trace(steps, tuple(values), inputs, gives, anew, measured, self._unit_integer_inputs)
