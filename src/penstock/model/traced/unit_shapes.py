"""The shapes of what units return, as functions of the shapes that they are called with.

To run every unit on fake tensors is nearly all that a trace costs. A unit that does nothing that
depends on a size need not be run again for each size. So when the inputs of a model have come in
two sizes, each unit runs once more, on fake tensors whose sizes are symbols (`SymbolicSizes`):

    sizes in earlier traces      symbol     the unit returns
    (16, 20) (1, 1) (32, 32)     (a, 1, 32) (a, 1, 32), and conditions on a, such as a < 512

From then on a micro-batch with other sizes is traced without its units. The forward around them
runs as always, on copies of the inputs, so what it asks about sizes gets its true answer. Only the
calls of units are looked up (`SizeBinding`). Three things have to hold, or the micro-batch is
traced with its units as before, and nothing was computed yet:

1. Each call has the arguments of the earlier traces, up to numbers in place of symbols.
2. The conditions hold for these numbers.
3. Units and parents have the members and attributes that they had when the units ran on symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.fingerprint import are_same_objects
from penstock.model.isolation import isolated
from penstock.model.meta_init import has_meta_tensors
from penstock.model.traced.containers import HOOK_TABLES, OutputWithContainerUpdates
from penstock.model.traced.dry_run import FakeTensorFactory, call_with_fakes, get_versions
from penstock.model.traced.local_model import fake_remote_tensors
from penstock.model.traced.proxies import ProxyModel, build_unit_proxy
from penstock.model.traced.trace import (
    ArgumentLeaf,
    NodeKind,
    Trace,
    TraceNode,
    UnitCall,
    ValueLeaf,
    ValueRef,
)
from penstock.nested_values import flatten, map_tensors, unflatten
from penstock.stage.rng import suspend_cell_rng
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import (
    SymbolicSizes,
    force_eager,
    get_storage_address,
    without_fake_tensor_log,
)


class SizesDiffer(Exception):
    """A micro-batch is not like earlier ones up to its sizes, and has to be traced with its units.

    It does not reach the user.
    """


# ---- what is known of a call ---------------------------------------------------------------------


@dataclass(frozen=True)
class _SymbolicSpec:
    """A `TensorSpec` with expressions for sizes and strides."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _SymbolicInt:
    """A Python number that depends on sizes."""

    expression: Any


@dataclass(frozen=True)
class _ArgumentTensor:
    """The properties of a tensor among the arguments of a unit.

    Attributes:
        shape: For each dim its size, or a symbol.
        strides: For each dim its stride, or the dims whose sizes are multiplied to get it.
        dtype: The dtype.
        requires_grad: Whether it requires grad.
        first_use: The position among the leaves at which the same tensor came first.
    """

    shape: tuple[Any, ...]
    strides: tuple[int | tuple[int, ...], ...]
    dtype: torch.dtype
    requires_grad: bool
    first_use: int


@dataclass(frozen=True)
class CallShapes:
    """The arguments and the output of one call of a unit or operation, with symbols for sizes.

    Attributes:
        func: The function, or for a unit its `UnitCall`.
        arguments: The leaves: an `_ArgumentTensor`, a symbol for a number, or a plain value.
        argument_tree: The structure of the arguments.
        outputs: The leaves: a `_SymbolicSpec`, `ArgumentLeaf`, `_SymbolicInt` or plain value.
        output_tree: The structure of the output.
        changed_attributes: Attributes of the unit that the call changes, as a trace has them.
        uses_rng: Whether an operation draws random numbers, as a trace has it.
    """

    func: Any
    arguments: tuple[Any, ...]
    argument_tree: Any
    outputs: tuple[Any, ...]
    output_tree: Any
    changed_attributes: tuple[str, ...]
    uses_rng: bool


@dataclass(frozen=True, eq=False)
class UnitShapes:
    """The calls of the units in one kind of forward, for any sizes that fulfil the conditions.

    Those operations between units are here as well that return new tensors: to run one on fake
    tensors of sizes that PyTorch has not seen takes milliseconds.
    """

    calls: Mapping[int, CallShapes]  # by the index of the node
    num_units: int
    sizes: SymbolicSizes
    symbols: frozenset[Any]
    modules: tuple[nn.Module, ...]  # of the units
    members: _Members  # of these modules, when the units ran on symbols
    written_buffers: frozenset[str]

    def is_current(self) -> bool:
        """Return whether the units are as they were."""
        return self.members.is_same_as(_Members.of(self.modules))


class SizeBinding:
    """The numbers that stand in place of the symbols in one micro-batch."""

    def __init__(self, shapes: UnitShapes) -> None:
        self.shapes = shapes
        self._unit_count = 0
        self._values: dict[Any, int] = {}
        self._known: dict[Any, int] = {}  # expressions with their values

    def take_call(
        self, node_index: int, func: Any, leaves: Sequence[Any], keys: Sequence[int], tree: Any
    ) -> CallShapes:
        """Return what is known of a call. Raise SizesDiffer if it is another one.

        Args:
            node_index: The index of its node.
            func: The function, or for a unit its `UnitCall`.
            leaves: Its arguments, with a `TensorSpec` for each tensor.
            keys: For each leaf a number that tells tensors apart.
            tree: The structure of the arguments.
        """
        expected = self.shapes.calls.get(node_index)
        if expected is None or expected.func != func or len(leaves) != len(expected.arguments):
            raise SizesDiffer
        self._unit_count += isinstance(func, UnitCall)
        if tree is not expected.argument_tree and tree != expected.argument_tree:
            raise SizesDiffer
        first_uses = {key: index for index, key in reversed(list(enumerate(keys)))}
        for leaf, key, argument in zip(leaves, keys, expected.arguments, strict=True):
            if isinstance(argument, _ArgumentTensor):
                self._bind_tensor(leaf, first_uses[key], argument)
            elif isinstance(argument, _SymbolicInt) and type(leaf) is int:
                self._bind(argument.expression, leaf)
            elif not _is_same_plain(leaf, argument):
                raise SizesDiffer
        return expected

    def _bind_tensor(self, spec: Any, first_use: int, expected: _ArgumentTensor) -> None:
        if (
            not isinstance(spec, TensorSpec)
            or (spec.dtype, spec.requires_grad) != (expected.dtype, expected.requires_grad)
            or spec.layout is not torch.strided
            or len(spec.shape) != len(expected.shape)
            or first_use != expected.first_use
        ):
            raise SizesDiffer
        for size, symbol in zip(spec.shape, expected.shape, strict=True):
            self._bind(symbol, size)
        for stride, dims in zip(spec.strides, expected.strides, strict=True):
            if not isinstance(dims, int):
                dims = prod([spec.shape[d] for d in dims])
            if stride != dims:
                raise SizesDiffer

    def _bind(self, symbol: Any, size: int) -> None:
        if isinstance(symbol, int):
            if symbol != size:
                raise SizesDiffer
        elif self._values.setdefault(symbol, size) != size:
            raise SizesDiffer

    def build_outputs(self, call: CallShapes) -> list[Any]:
        """Return the leaves of the output of a call, with a `TensorSpec` for each new tensor."""
        return [
            TensorSpec(
                tuple([self._evaluate(size) for size in leaf.shape]),
                tuple([self._evaluate(stride) for stride in leaf.strides]),
                leaf.dtype,
                leaf.requires_grad,
            )
            if isinstance(leaf, _SymbolicSpec)
            else self._evaluate(leaf.expression)
            if isinstance(leaf, _SymbolicInt)
            else leaf
            for leaf in call.outputs
        ]

    def _evaluate(self, expression: Any) -> int:
        if isinstance(expression, int):
            return expression
        if expression not in self._known:
            try:
                value = self.shapes.sizes.evaluate(expression, self._values)
            except ValueError:
                raise SizesDiffer from None
            self._known[expression] = value
        return self._known[expression]

    def finish(self) -> None:
        """Raise SizesDiffer unless all calls came and all conditions hold."""
        is_complete = self._unit_count == self.shapes.num_units
        is_bound = self._values.keys() == self.shapes.symbols
        if not (is_complete and is_bound and self.shapes.sizes.holds(self._values)):
            raise SizesDiffer


_PLAIN_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _is_same_plain(first: Any, second: Any) -> bool:
    if first is second:
        return True
    return type(first) is type(second) and type(first) in _PLAIN_TYPES and bool(first == second)


def _describe_tensor(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


class _Members(NamedTuple):
    """The contents of modules, for comparison: objects by identity, tensors by what a trace sees.

    Tensors are not kept: weights that the user has replaced would stay in memory.
    """

    objects: tuple[Any, ...]
    tensors: tuple[Any, ...]

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> _Members:
        """Return the attributes, members and hooks of modules."""
        objects: list[Any] = []
        tensors: list[Tensor | None] = []
        for module in modules:
            attributes = vars(module)
            objects += attributes.values()
            for table in ("_modules", *HOOK_TABLES):
                if entries := attributes.get(table):
                    objects += entries.values()
            tensors += attributes["_parameters"].values()
            tensors += attributes["_buffers"].values()
        # These are thousands of objects of a few types, and a tensor is seldom among them.
        tensor_types = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
        if tensor_types:
            tensors += [value for value in objects if type(value) in tensor_types]
            objects = [None if type(value) in tensor_types else value for value in objects]
        return _Members(tuple(objects), tuple(map(_describe_tensor, tensors)))

    def is_same_as(self, other: _Members) -> bool:
        """Return whether the modules hold the same."""
        return self.tensors == other.tensors and are_same_objects(self.objects, other.objects)


# ---- units on symbolic sizes ---------------------------------------------------------------------


def learn_unit_shapes(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    traces: Sequence[Trace],
    device: torch.device,
) -> UnitShapes | None:
    """Run the units of a forward on symbolic sizes, and return what they return.

    Args:
        model: The model, or the part of it that this process keeps.
        units: The units by name.
        traces: Traces of one kind of forward, with inputs of different sizes. A size that is not
            the same in all of them becomes a symbol.
        device: The device that the model was traced for.

    Returns:
        None if a unit does something that depends on sizes, cannot run on symbols, or has effects
        beside what it returns.
    """
    modules = tuple(dict.fromkeys(m for unit in units.values() for m in unit.modules()))
    # A ScriptModule keeps its members in C++.
    if has_meta_tensors(model) or any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        return None
    proxies = {id(unit): build_unit_proxy(name, unit) for name, unit in units.items()}
    if ProxyModel(model, proxies).unit_hooks:
        return None  # hooks that fill lists and dicts of the model
    members = _Members.of(modules)
    every_module = list(dict.fromkeys([*model.modules(), *modules]))
    try:
        with (
            isolated(every_module, copy_value=lambda tensor: not isinstance(tensor, nn.Parameter)),
            force_eager(),
            suspend_cell_rng(),
            without_fake_tensor_log(),
        ):
            learner = _Learner(units, traces, device)
            fake_remote_tensors(modules, learner.factory)
            calls = learner.run_calls()
    except Exception:  # of a unit or of PyTorch: not every code can run on symbols
        return None
    shapes = UnitShapes(
        calls,
        len(traces[0].unit_call_indices),
        learner.sizes,
        frozenset(symbol for symbol, _ in learner.symbols.values()),
        modules,
        members,
        traces[-1].unit_written_buffers,
    )
    return shapes if all(_reproduces(shapes, trace) for trace in traces) else None


def _reproduces(shapes: UnitShapes, trace: Trace) -> bool:
    """Return whether the shapes with the sizes of a trace are those of the trace."""
    binding = SizeBinding(shapes)
    try:
        for index in shapes.calls:
            node = trace.nodes[index]
            leaves, tree = _flatten_arguments(node)
            keys = [leaf.value if isinstance(leaf, ValueRef) else -1 for leaf in leaves]
            specs = [_replace_refs(leaf, trace) for leaf in leaves]
            outputs = binding.build_outputs(binding.take_call(index, node.func, specs, keys, tree))
            assert node.output is not None
            for leaf, traced in zip(outputs, node.output.leaves, strict=True):
                if leaf != (
                    trace.values[traced.value].tensor_spec
                    if isinstance(traced, ValueLeaf)
                    else traced
                ):
                    return False
        binding.finish()
    except SizesDiffer:
        return False
    return True


def _is_plain_operation(node: TraceNode) -> bool:
    """Return whether a node was run on fake tensors, and does nothing but return tensors."""
    is_effect = node.has_side_effect or node.is_guard or node.mutations or node.input_only
    is_operation = node.kind is NodeKind.OPERATION and node.arg_template is not None
    return is_operation and node.output is not None and not is_effect


def _replace_refs(leaf: Any, trace: Trace) -> Any:
    return trace.values[leaf.value].tensor_spec if isinstance(leaf, ValueRef) else leaf


def _flatten_arguments(node: TraceNode) -> tuple[list[Any], Any]:
    """Return the arguments of a node with a `ValueRef` for each tensor, and their structure."""
    if node.kind is NodeKind.UNIT:
        return node.arg_template[0], node.arg_template[1]
    leaves, tree = flatten(map_tensors(node.arg_template, _HiddenRef, ValueRef))
    return [leaf.ref if isinstance(leaf, _HiddenRef) else leaf for leaf in leaves], tree


@dataclass(frozen=True)
class _HiddenRef:
    """A `ValueRef`, which is a tuple, as one leaf of nested arguments."""

    ref: ValueRef


class _Learner:
    """Runs the units of several traces of one kind on symbolic sizes."""

    def __init__(
        self, units: Mapping[str, nn.Module], traces: Sequence[Trace], device: torch.device
    ) -> None:
        self.sizes = SymbolicSizes()
        self.factory = FakeTensorFactory(device, self.sizes.mode)
        # By the sizes in the traces: the symbol, and the size to compute with. Dims that have the
        # same sizes in all traces share a symbol; a binding refuses sizes that differ then.
        self.symbols: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._units, self._traces = units, traces

    def run_calls(self) -> dict[int, CallShapes]:
        """Return the calls by node. Raise SizesDiffer if the traces do not have the same units."""
        calls: dict[int, CallShapes] = {}
        for index, nodes in enumerate(zip(*(t.nodes for t in self._traces), strict=True)):
            if any(node.kind is NodeKind.UNIT for node in nodes):
                calls[index] = self._run_call(nodes)
            elif all(map(_is_plain_operation, nodes)):
                with suppress(Exception):  # then it runs on fake tensors of each size
                    calls[index] = self._run_call(nodes)
        return calls

    def _to_symbol(self, sizes: tuple[int, ...]) -> tuple[Any, Any]:
        """Return a symbol, or the size if it is the same in all traces; and what it stands for."""
        if len(set(sizes)) == 1:
            return sizes[0], sizes[0]
        if sizes not in self.symbols:
            # PyTorch treats the sizes 0 and 1 as constants.
            self.symbols[sizes] = self.sizes.create(max(sizes))
        return self.symbols[sizes]

    def _run_call(self, nodes: Sequence[TraceNode]) -> CallShapes:
        first_node = nodes[0]
        columns, trees = zip(*map(_flatten_arguments, nodes), strict=True)
        for node, tree in zip(nodes, trees, strict=True):
            if node.func != first_node.func or tree != trees[0]:
                raise SizesDiffer
            if node.mutations or node.hooked_values or node.output is None:
                raise SizesDiffer
            if node.changed_attributes != first_node.changed_attributes:
                raise SizesDiffer
        assert first_node.output is not None
        if first_node.output.tree_spec.context is OutputWithContainerUpdates:
            raise SizesDiffer
        arguments, leaves = self._make_arguments(columns)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        versions = get_versions(tensors)
        args, kwargs = unflatten(leaves, trees[0])
        unit = first_node.func.unit if first_node.kind is NodeKind.UNIT else ""
        target = self._units[unit] if first_node.kind is NodeKind.UNIT else first_node.call
        output, _ = call_with_fakes(self.factory, unit, target, args, kwargs)
        if get_versions(tensors) != versions:
            raise SizesDiffer
        output_leaves, output_tree = flatten(output)
        if output_tree != first_node.output.tree_spec:
            raise SizesDiffer
        outputs = self._describe_outputs(output_leaves, tensors)
        return CallShapes(
            first_node.func,
            tuple(arguments),
            trees[0],
            outputs,
            output_tree,
            first_node.changed_attributes,
            first_node.uses_rng,
        )

    def _make_arguments(self, traced: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
        """Return what the arguments of a call look like, and arguments of symbolic sizes.

        `traced` are the leaves of the arguments in each trace.
        """
        arguments: list[Any] = []
        leaves: list[Any] = []
        first_uses: dict[int, int] = {}
        for position, column in enumerate(zip(*traced, strict=True)):
            if all(isinstance(leaf, ValueRef) for leaf in column):
                specs = [
                    t.values[r.value].tensor_spec for t, r in zip(self._traces, column, strict=True)
                ]
                first_use = first_uses.setdefault(column[-1].value, position)
                argument, sizes = self._describe_argument(specs, first_use)
                arguments.append(argument)
                is_new = first_use == position
                leaves.append(self._make_tensor(argument, sizes) if is_new else leaves[first_use])
            elif all(type(leaf) is int for leaf in column) and len(set(column)) > 1:
                symbol, number = self._to_symbol(column)
                arguments.append(_SymbolicInt(symbol))
                leaves.append(number)
            elif all(_is_same_plain(leaf, column[0]) for leaf in column):
                arguments.append(column[0])
                leaves.append(column[0])
            else:
                raise SizesDiffer
        return arguments, leaves

    def _describe_argument(
        self, specs: Sequence[TensorSpec], first_use: int
    ) -> tuple[_ArgumentTensor, list[Any]]:
        """Return what a tensor looks like in all traces, and its sizes to compute with."""
        last = specs[-1]
        if len({(s.dtype, s.requires_grad, s.layout, len(s.shape)) for s in specs}) > 1:
            raise SizesDiffer
        pairs = [self._to_symbol(sizes) for sizes in zip(*(s.shape for s in specs), strict=True)]
        strides: list[int | tuple[int, ...]] = []
        for dim, stride in enumerate(last.strides):
            if len({spec.strides[dim] for spec in specs}) == 1:
                strides.append(stride)
                continue
            # In a tensor without gaps, the product of the sizes of all dims inside of this one.
            inner = tuple(d for d, other in enumerate(last.strides) if other < stride)
            if any(s.strides[dim] != prod(s.shape[d] for d in inner) for s in specs):
                raise SizesDiffer
            strides.append(inner)
        shape = tuple(symbol for symbol, _ in pairs)
        argument = _ArgumentTensor(shape, tuple(strides), last.dtype, last.requires_grad, first_use)
        return argument, [size for _, size in pairs]

    def _make_tensor(self, argument: _ArgumentTensor, sizes: Sequence[Any]) -> Tensor:
        strides = [
            stride if isinstance(stride, int) else prod(sizes[d] for d in stride)
            for stride in argument.strides
        ]
        with self.factory.mode, torch.enable_grad():
            tensor = torch.empty_strided(
                sizes, strides, dtype=argument.dtype, device=self.factory.device
            )
            # Not a leaf: autograd's checks of leaves are not those of the output of a unit.
            return tensor.requires_grad_().view_as(tensor) if argument.requires_grad else tensor

    def _describe_outputs(
        self, leaves: Sequence[Any], tensors: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Return the output of a unit with expressions for its sizes."""
        positions = {id(t): n for n, t in reversed(list(enumerate(tensors)))}
        used_memory = {get_storage_address(tensor.untyped_storage()) for tensor in tensors}
        outputs: list[Any] = []
        expression = self.sizes.to_expression
        for leaf in leaves:
            if isinstance(leaf, torch.SymInt):
                outputs.append(_SymbolicInt(expression(leaf)))
            elif not isinstance(leaf, Tensor):
                if leaf is not None and type(leaf) not in _PLAIN_TYPES:
                    raise SizesDiffer
                outputs.append(leaf)
            elif id(leaf) in positions:
                outputs.append(ArgumentLeaf(positions[id(leaf)]))
            else:
                memory = get_storage_address(leaf.untyped_storage())
                if memory in used_memory or leaf.layout is not torch.strided:
                    raise SizesDiffer  # a view, whose memory a trace has to follow
                used_memory.add(memory)
                outputs.append(
                    _SymbolicSpec(
                        tuple(map(expression, leaf.shape)),
                        tuple(map(expression, leaf.stride())),
                        leaf.dtype,
                        leaf.requires_grad,
                    )
                )
        return tuple(outputs)
