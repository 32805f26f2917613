"""Measure one call of a module: seconds of F, I and W, and bytes.

    F  forward
    I  gradient of the inputs
    W  gradient of the weights, where it can be deferred; otherwise it is part of I

The call runs a few times with copies of its arguments (see `model/isolation.py`). Afterwards every
parameter, gradient, buffer, attribute, mode and random state is what it was before.

Blocks of a model are mostly equal, so calls with equal cost keys are measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RunError
from penstock.fingerprint import build_cost_key
from penstock.model.isolation import (
    DeviceLike,
    StructureCopier,
    build_tensor_copier,
    isolated_module,
    iter_module_tensors,
    preserve_global_state,
)
from penstock.model.traced.traced_partition import UnitCost
from penstock.stage.aux_loss import added_losses
from penstock.stage.cell_graph import CellGraph, GraphInputs, find_gradient_edge
from penstock.stage.stage import OUTSIDE
from penstock.stage.weight_grad import PendingWeightGrad, accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral
from penstock.torch_compat import get_storage_address

# ---- measuring -----------------------------------------------------------------------------------

ModuleCall = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]
StorageSizes = dict[int, int]  # bytes, by address of the storage


def profile_calls(calls: Iterable[ModuleCall], device: DeviceLike = None) -> list[UnitCost]:
    """Return the cost of each call; calls with equal cost keys are measured once."""
    cost_by_key: dict[Hashable, UnitCost] = {}
    costs = []
    for module, args, kwargs in calls:
        key = build_cost_key(module, args, kwargs)
        if key not in cost_by_key:
            cost_by_key[key] = profile_call(module, args, kwargs, device)
        costs.append(cost_by_key[key])
    return costs


def profile_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    device: DeviceLike = None,
    *,
    runs: int = 5,
    timeout: float = 0.5,
    optimizer_state_scale: int = 2,
) -> UnitCost:
    """Measure the call `module(*args, **kwargs)` on the device, or where its tensors are.

    A first run warms up and measures bytes. The times are medians of up to `runs` further runs; no
    run starts after `timeout` seconds. Tensors on `meta` get memory for the duration. A parameter
    that requires grad counts with its gradient and the optimizer's state, which is
    `optimizer_state_scale` times its size: 2 for Adam.

    >>> profile_call(nn.Linear(4, 8), (torch.ones(10, 4),)).resident_bytes
    640
    >>> profile_call(nn.Linear(4, 8), (torch.ones(10, 4),)).activation_bytes
    160
    """
    arguments = tuple(args), dict(kwargs or {})
    tensors: list[Tensor] = []
    StructureCopier(_append_to(tensors))(arguments)
    tensors += iter_module_tensors(module)
    resident_bytes = sum(
        t.nbytes * (2 + optimizer_state_scale if t.requires_grad else 1)
        for t in iter_module_tensors(module)
    )
    # Tensors on `meta` get memory on the device of the others, or on the CPU.
    if device is None and any(t.is_meta for t in tensors):
        device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    end = perf_counter() + timeout
    try:
        with (
            preserve_global_state(tensors, device) as synchronize,
            isolated_module(module, device) as isolated,
        ):
            profiler = _CallProfiler(isolated, arguments, build_tensor_copier(device), synchronize)
            saved_bytes = profiler.measure_saved_bytes()
            seconds: list[tuple[float, float, float]] = []
            while not seconds or (len(seconds) < runs and perf_counter() < end):
                seconds.append(profiler.measure_seconds())
    except Exception as error:
        error.add_note(
            f"This happened while Penstock measured a {type(module).__name__} on the example."
        )
        raise
    forward, input_grad, weight_grad = map(median, zip(*seconds, strict=True))
    return UnitCost(forward, input_grad, weight_grad, saved_bytes, resident_bytes)


def time_call(function: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Return the seconds that a function takes, including its work on the devices."""
    synchronize()
    start = perf_counter()
    function()
    synchronize()
    return perf_counter() - start


class _CallProfiler:
    """A profiler that runs an isolated module on copies of its arguments.

    Forward and backward run through the same classes as in a pipe (`CellGraph`,
    `WeightGradDeferral`), so that their overhead is part of the measurement.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        copy_tensor: Callable[[Tensor], Tensor],
        synchronize: Callable[[], None],
    ) -> None:
        self._module, self._arguments, self._copy_tensor = module, arguments, copy_tensor
        self._synchronize = synchronize
        self._deferral = WeightGradDeferral(list(module.modules()))
        self._can_split_backward = True

    def measure_saved_bytes(self) -> int:
        """Return the bytes that a forward keeps for its backward, and run the backward once.

        Storages are counted once, however many saved tensors are views of them. Parameters and
        buffers are not counted: they exist anyway.
        """
        saved: StorageSizes = {}

        def pack(tensor: Tensor) -> Tensor:
            _record_storage(saved, tensor)
            return tensor

        args, kwargs, graph_inputs = self._build_graph_inputs()
        inputs: list[Tensor] = []
        StructureCopier(_append_to(inputs))((args, kwargs))
        input_refs = [ref(tensor) for tensor in inputs]
        with saved_tensors_hooks(pack, lambda tensor: tensor), added_losses():
            graph, ones = _build_graph(self._module(*args, **kwargs), graph_inputs)
        # `torch.utils.checkpoint` keeps the inputs of a function for recomputation without calling
        # the hook. So the inputs are let go here, and those that are still alive are counted.
        del args, kwargs
        inputs.clear()
        for tensor in (reference() for reference in input_refs):
            if tensor is not None:
                _record_storage(saved, tensor)
        self._time_backward(graph, ones, [])
        for tensor in iter_module_tensors(self._module):
            saved.pop(_storage_key(tensor), None)
        return sum(saved.values())

    def measure_seconds(self) -> tuple[float, float, float]:
        """Return the seconds of F, I and W.

        Some modules cannot run with a deferred weight gradient, for example if their forward
        computes a gradient itself. Then W is 0 and I is the whole backward.
        """
        if self._can_split_backward:
            try:
                return self._time_run(split_backward=True)
            except RunError:
                self._can_split_backward = False
        return self._time_run(split_backward=False)

    def _time_run(self, split_backward: bool) -> tuple[float, float, float]:
        args, kwargs, graph_inputs = self._build_graph_inputs()
        outputs: list[Any] = []
        pending: list[PendingWeightGrad] = []
        with ExitStack() as stack:
            stack.enter_context(added_losses())
            if split_backward:
                pending = stack.enter_context(self._deferral.activate())
            forward = time_call(
                lambda: outputs.append(self._module(*args, **kwargs)), self._synchronize
            )
        # `pop` lets go of the outputs, so that the backward can free the graph as it goes.
        graph, ones = _build_graph(outputs.pop(), graph_inputs)
        return forward, *self._time_backward(graph, ones, pending)

    def _time_backward(
        self,
        graph: CellGraph,
        output_gradients: tuple[Tensor | None, ...],
        pending_weight_grads: list[PendingWeightGrad],
    ) -> tuple[float, float]:
        with _preserve_gradients(graph.find_leaves()):
            input_grad = time_call(
                lambda: graph.backward_accumulate({OUTSIDE: output_gradients}, False),
                self._synchronize,
            )
            return input_grad, time_call(
                lambda: accumulate_weight_grads(pending_weight_grads), self._synchronize
            )

    def _build_graph_inputs(self) -> tuple[Sequence[Any], Mapping[str, Any], GraphInputs]:
        """Return copies of the arguments, as the inputs of a graph of their own."""
        copies = StructureCopier(self._copy_tensor)(self._arguments)
        tensors: list[Tensor] = []
        StructureCopier(_append_to(tensors))(copies)
        outer = [tensor for tensor in tensors if tensor.requires_grad]
        graph_inputs = GraphInputs.from_entry(outer) if outer else GraphInputs.from_leaves(())
        inner = dict(zip(map(id, outer), graph_inputs.tensors, strict=True))
        args, kwargs = StructureCopier(lambda tensor: inner.get(id(tensor), tensor))(copies)
        graph_inputs.tensors = ()  # or they would stay alive and count as kept for the backward
        return args, kwargs, graph_inputs


def _build_graph(
    output: Any, graph_inputs: GraphInputs
) -> tuple[CellGraph, tuple[Tensor | None, ...]]:
    """Return the graph that ends in the output, and a gradient of ones for each of its ends."""
    tensors: list[Tensor] = []
    StructureCopier(_append_to(tensors))(output)
    ends = [tensor for tensor in tensors if tensor.requires_grad]
    needs_grad = (True,) * len(graph_inputs.inputs)
    graph = CellGraph(
        {OUTSIDE: tuple(map(find_gradient_edge, ends))}, {OUTSIDE: needs_grad}, graph_inputs
    )
    return graph, tuple(map(torch.ones_like, ends))


def _append_to(tensors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def append(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return append


def _record_storage(storages: StorageSizes, tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        storages[_storage_key(tensor)] = tensor.untyped_storage().nbytes()


def _storage_key(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:  # a sparse tensor has no single storage
        return id(tensor)
    return get_storage_address(tensor.untyped_storage())


@contextmanager
def _preserve_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Take the gradients away from leaves, and put them back afterwards.

    Most leaves are copies. A leaf that the module uses through a closure is the user's own.
    """
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient
