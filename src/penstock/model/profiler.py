"""Measure calls of modules: seconds of F, I and W, and bytes.

    F  forward
    I  gradient of the inputs
    W  gradient of the weights, where it can be deferred; otherwise it is part of I

There are two ways to get the arguments of the calls. The units of a traced model are called with
arguments of the shapes in the trace. The layers of a Sequential run one after the other on an
example, each with the output of the one before, detached as at the start of a stage:

    example -> [layer 0] -> detach -> [layer 1] -> detach -> ...
                backward of 0 alone    backward of 1 alone

The measurement is the same. A module runs a few times, isolated (`model/isolation.py`), on copies
of its tensors. Afterwards every parameter, gradient, buffer, attribute, mode, random state and
stashed value is what it was before.

On an accelerator the seconds are those of its kernels, on the current stream: inside `activate()`
of a virtual GPU, on its multiprocessors. See `time_work`.

Blocks of a model are mostly equal, so calls of units with equal cost keys are measured once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.device.accelerator import TimedWork, is_accelerator, time_work
from penstock.device.contention import ContentionMeter, SharedDevice, Slowdowns
from penstock.device.storage_probe import StorageProbe
from penstock.errors import ArgumentError, RunError
from penstock.fingerprint import build_cost_key
from penstock.microbatch import move_to_device, scatter
from penstock.model.isolation import (
    DeviceLike,
    build_tensor_copier,
    enable_backward,
    isolated,
    iter_module_tensors,
    preserve_gradients,
    preserve_rng,
)
from penstock.model.traced.trace_tail import LossModule
from penstock.model.traced.traced_partition import UnitCost
from penstock.nested_values import iter_tensors
from penstock.stage.aux_loss import added_losses
from penstock.stage.cell_graph import CellGraph, enter_graph, find_gradient_edge
from penstock.stage.payload import Payload
from penstock.stage.skip import SkipKey, Skips, use_skips
from penstock.stage.stage import OUTSIDE
from penstock.stage.weight_grad import PendingWeightGrad, accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral
from penstock.state_copy import StructureCopier, TensorMap

# ---- the loss of an example ----------------------------------------------------------------------

# The loss of the model's output on the micro-batch that is measured.
OutputLoss = Callable[[Any], Any]


@dataclass(frozen=True)
class LossWithTarget:
    """The loss of one micro-batch, as a function of its output.

    Attributes:
        loss_fn: The loss of an output and its target, or of the output alone.
        targets: The target of the micro-batch, if there is one.
    """

    loss_fn: Callable[..., Any]
    targets: tuple[Any, ...]

    def __call__(self, output: Any) -> Any:
        """Return the loss."""
        device = next((tensor.device for tensor in iter_tensors(output)), None)
        return self.loss_fn(output, *move_to_device(self.targets, device))


# Returns the loss of the first of so many micro-batches of the example.
ExampleLoss = Callable[[int], LossWithTarget]


def bind_target(loss_fn: Callable[..., Any], target: Any, chunks: int) -> LossWithTarget:
    """Return the loss of the first of `chunks` micro-batches, as a function of its output.

    Args:
        loss_fn: The loss of an output and its target, or of the output alone.
        target: The target of the whole example, or None.
        chunks: The number of micro-batches.
    """
    return LossWithTarget(loss_fn, () if target is None else scatter((target,), chunks)[0][0])


# ---- units of a traced model ---------------------------------------------------------------------

ModuleCall = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]


def profile_calls(
    calls: Iterable[ModuleCall], device: DeviceLike = None, timeout: float = 0.5
) -> list[UnitCost]:
    """Return the cost of each call; calls with equal cost keys are measured once."""
    cost_by_key: dict[Hashable, UnitCost] = {}
    costs = []
    for module, args, kwargs in calls:
        key = build_cost_key(module, args, kwargs)
        if key not in cost_by_key:
            cost_by_key[key] = profile_call(module, args, kwargs, device, timeout=timeout)
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
    tensors = [*_collect_tensors(arguments), *iter_module_tensors(module)]
    resident_bytes = count_training_bytes(module, optimizer_state_scale)
    # Tensors on `meta` get memory on the device of the others, or on the CPU.
    if device is None and any(t.is_meta for t in tensors):
        device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    with preserve_rng(device), enable_backward():
        arguments = StructureCopier(build_tensor_copier(device))(arguments)
        with _profiled_call(f"a {type(module).__name__}", module, arguments, device) as call:
            saved_bytes, seconds = call.measure(runs, timeout)
    return UnitCost(*seconds, saved_bytes, resident_bytes)


# ---- for a planner -------------------------------------------------------------------------------


class UnitMeasurement(NamedTuple):
    """The seconds and bytes of one unit on one micro-batch, for a planner.

    What is saved for the backward is told apart from the inputs and outputs, because a neighbour in
    the same stage may keep these, too.
    """

    forward: float
    input_grad: float
    weight_grad: float
    inner_bytes: int  # saved for the backward, without inputs and outputs
    saves_inputs: bool
    saves_outputs: bool
    output_bytes: int
    # The most that is needed in addition while it computes: values that live during an action only,
    # and the gradient of its outputs. 0 on the CPU, where these are not counted.
    workspace_bytes: int = 0
    has_loss: bool = False
    # By other ranks on the same accelerator. None if there are none, or if it cannot be measured.
    slowdowns: Slowdowns | None = None

    @property
    def seconds(self) -> float:
        """The seconds of F, I and W."""
        return self.forward + self.input_grad + self.weight_grad

    def with_loss(self, loss: UnitMeasurement) -> UnitMeasurement:
        """Return the measurement of the last unit together with the loss of its output."""
        slowdowns = self.slowdowns
        if slowdowns is not None and loss.slowdowns is not None:
            seconds = self.seconds + loss.seconds
            slowdowns = Slowdowns(
                *(
                    (self.seconds * mine + loss.seconds * other) / seconds
                    for mine, other in zip(slowdowns, loss.slowdowns, strict=True)
                )
            )
        kept_output = self.output_bytes if self.saves_outputs or loss.saves_inputs else 0
        return self._replace(
            forward=self.forward + loss.forward,
            input_grad=self.input_grad + loss.input_grad + loss.weight_grad,
            inner_bytes=self.inner_bytes + loss.inner_bytes + kept_output,
            workspace_bytes=max(self.workspace_bytes, loss.workspace_bytes),
            has_loss=True,
            slowdowns=slowdowns,
        )


def measure_unit_calls(
    calls: Iterable[ModuleCall],
    device: DeviceLike,
    runs: int = 5,
    timeout: float = 0.5,
    shared: SharedDevice | None = None,
) -> list[UnitMeasurement]:
    """Measure calls of units of a traced model; equal ones are measured once."""
    units = _UnitMeasurements(runs, timeout, shared)
    for module, args, kwargs in calls:
        key = build_cost_key(module, args, kwargs)
        if not units.has(key):
            with preserve_rng(device), enable_backward():
                arguments = StructureCopier(build_tensor_copier(device))((tuple(args), {**kwargs}))
                name = f"a {type(module).__name__}"
                with _profiled_call(name, module, arguments, device) as call:
                    units.measure(key, call)
        units.append(key)
    with preserve_rng(device):
        return units.finish()


def measure_unit_layers(
    layers: Sequence[nn.Module],
    microbatch: tuple[Any, ...],
    device: DeviceLike,
    unpack: bool,
    runs: int = 5,
    timeout: float = 0.5,
    loss: OutputLoss | None = None,
    shared: SharedDevice | None = None,
) -> list[UnitMeasurement]:
    """Measure the layers of a Sequential on a micro-batch, the last one with the loss.

    Equal layers with equal inputs are measured once.
    """
    units = _UnitMeasurements(runs, timeout, shared)

    def measure(call: _CallProfiler) -> None:
        key = call.cost_key
        if units.has(key):
            call.run_first()  # the next layer needs its output
        else:
            units.measure(key, call)
        units.append(key)

    with preserve_rng(device):
        _measure_layers(layers, microbatch, unpack, device, measure, loss)
        measured = units.finish()
    if loss is not None:
        *measured, last, of_loss = measured
        measured.append(last.with_loss(of_loss))
    return measured


class _UnitMeasurements:
    """The measurements of the units of a model, in order; equal units are measured once."""

    def __init__(self, runs: int, timeout: float, shared: SharedDevice | None) -> None:
        self._runs, self._timeout = runs, timeout
        self._meter = None if shared is None else ContentionMeter(shared)
        self._by_key: dict[Hashable, UnitMeasurement] = {}
        self._keys: list[Hashable] = []

    def has(self, key: Hashable) -> bool:
        """Return whether such a unit was measured."""
        return key in self._by_key

    def measure(self, key: Hashable, call: _CallProfiler) -> None:
        """Measure a unit alone, and capture it for later if devices share an accelerator."""
        unit = call.measure_unit(self._runs, self._timeout)
        self._by_key[key] = unit
        # Work without kernels would be replayed millions of times, to fill the time of one turn.
        if self._meter is not None and unit.seconds:
            self._meter.add(key, call.run_on_copies, unit.seconds, call.count_bytes(unit))

    def append(self, key: Hashable) -> None:
        """Count one more unit like this."""
        self._keys.append(key)

    def finish(self) -> list[UnitMeasurement]:
        """Return the measurements of all units, with their slowdowns."""
        if self._meter is not None:
            for key, slowdowns in self._meter.measure(Counter(self._keys)).items():
                self._by_key[key] = self._by_key[key]._replace(slowdowns=slowdowns)
        return [self._by_key[key] for key in self._keys]


# ---- layers of a Sequential ----------------------------------------------------------------------

ResultT = TypeVar("ResultT")


def measure_layer_times(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    *,
    unpack: bool = False,
    runs: float = inf,
    timeout: float = 1.0,
    device: DeviceLike = None,
) -> list[float]:
    """Return the seconds of each layer's forward and backward: the median of up to `runs` runs.

    The whole takes about `timeout` seconds, of which each layer gets an equal part. With `unpack`,
    a tuple that a layer returns becomes the arguments of the next, as in `PipeSequential`. Without
    it, the tuple stays one value, as in `nn.Sequential`.

    >>> len(measure_layer_times([nn.Linear(4, 4), nn.ReLU()], (torch.ones(8, 4),), timeout=0.0))
    2
    """
    batch = scatter(example, 1)[0][0]
    timeout /= max(len(layers), 1)
    return _measure_layers(
        layers, batch, unpack, device, lambda call: sum(call.measure(runs, timeout)[1])
    )


def measure_layer_bytes(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    *,
    unpack: bool = False,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: DeviceLike = None,
) -> list[float]:
    """Return the bytes of each layer: its parameters, and what one micro-batch keeps.

    The example is split into `chunks` micro-batches, and the first one is measured. If two layers
    keep the same tensor (one as its output, the next as its input), it counts for the first.
    Parameters count `param_scale` times: 2 for parameters and gradients, more with the state of an
    optimizer.

    >>> measure_layer_bytes([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], (torch.ones(8, 4),))
    [288.0, 128.0, 160.0]
    """
    if chunks < 1:
        raise ArgumentError(f"chunks={chunks}: a batch is split into at least one micro-batch")
    microbatch = scatter(example, chunks)[0][0]
    saved_bytes = _measure_layers(
        layers, microbatch, unpack, device, lambda call: call.measure_saved_bytes()
    )
    return [
        saved + param_scale * sum(p.nbytes for p in layer.parameters())
        for layer, saved in zip(layers, saved_bytes, strict=True)
    ]


def profile_layers(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    *,
    unpack: bool = False,
    chunks: int = 1,
    device: DeviceLike = None,
    runs: float = 5,
    timeout: float = 1.0,
    loss: OutputLoss | None = None,
) -> list[UnitCost]:
    """Return the cost of each layer on the first of `chunks` micro-batches of the example.

    The last layer counts with the loss of its output, if there is one.

    >>> [cost.activation_bytes for cost in profile_layers([nn.Linear(4, 8)], (torch.ones(8, 4),))]
    [128]
    """
    microbatch = scatter(example, chunks)[0][0]
    timeout /= max(len(layers), 1)
    measured = _measure_layers(
        layers, microbatch, unpack, device, lambda call: call.measure(runs, timeout), loss
    )
    costs = [
        UnitCost(*seconds, saved_bytes, count_training_bytes(layer))
        for layer, (saved_bytes, seconds) in zip(layers, measured, strict=False)
    ]
    if loss is not None:
        _, (forward, input_grad, _) = measured[-1]
        costs[-1] = costs[-1].with_loss(forward, input_grad)
    return costs


def count_training_bytes(module: nn.Module, optimizer_state_scale: float = 2) -> int:
    """Return the bytes of parameters, gradients, optimizer state and buffers of a module.

    The state of an optimizer is `optimizer_state_scale` times the size of a gradient: 2 for Adam.
    """
    return int(
        sum(
            _count_bytes(t) * (2 + optimizer_state_scale if t.requires_grad else 1)
            for t in iter_module_tensors(module)
        )
    )


def _count_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return tensor.nbytes


def _measure_layers(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    unpack: bool,
    device: DeviceLike,
    measure: Callable[[_CallProfiler], ResultT],
    loss: OutputLoss | None = None,
) -> list[ResultT]:
    """Run the layers one after the other, and return a measurement of each, then of the loss."""
    results = []
    # Weak references: a storage that nothing keeps is freed, and its memory may be used again by a
    # storage that has to be counted.
    counted: WeakSet[torch.UntypedStorage] = WeakSet()
    skips = Skips()
    with preserve_rng(device), enable_backward():
        values = StructureCopier(build_tensor_copier(device))(example)
        for index, layer in enumerate(layers):
            name = f"layer {index} ({type(layer).__name__})"
            with _profiled_call(name, layer, (values, {}), device, skips, counted) as call:
                results.append(measure(call))
                output = call.output
            values = output if unpack and isinstance(output, tuple) else (output,)
            del call  # frees the layer's activations
        if loss is not None:
            with _profiled_call("loss_fn", _Loss(loss), ((output,), {}), device) as call:
                results.append(measure(call))
    return results


class _Loss(LossModule):
    """The loss of an output. It runs on the last stage, and may take as long as several blocks."""

    def forward(self, output: Any) -> Tensor:
        return self.compute_loss(output)


# ---- one call ------------------------------------------------------------------------------------


@contextmanager
def _profiled_call(
    name: str,
    module: nn.Module,
    arguments: Any,
    device: DeviceLike,
    skips: Skips | None = None,
    counted: WeakSet[torch.UntypedStorage] | None = None,
) -> Iterator[_CallProfiler]:
    """Isolate a module on the device, and yield the profiler of a call of it."""
    copy_tensor = build_tensor_copier(device)
    parts = list(module.modules())
    try:
        with isolated(parts, map_tensor=copy_tensor):
            if isinstance(module, torch.jit.ScriptModule):
                module = StructureCopier(copy_tensor)(module).to(device)
            _flatten_weights(parts)
            yield _CallProfiler(module, arguments, copy_tensor, skips, counted)
    except Exception as error:
        error.add_note(f"This happened while Penstock measured {name} on the example.")
        raise


def _flatten_weights(modules: Iterable[nn.Module]) -> None:
    """Let the copied weights of recurrent layers be one block, which cuDNN needs."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


class _CallProfiler(Skips):
    """A profiler that runs an isolated module on its arguments.

    Forward and backward run through the same classes as in a pipe (`CellGraph`,
    `WeightGradDeferral`), so that their overhead is part of the measurement.

    It is the store of skips during a forward: what the module pops is an input, and what it
    stashes is an output. `skips` has the values that earlier layers stashed. `counted` are the
    storages that earlier layers keep, which are not counted again.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Any,
        copy_tensor: TensorMap,
        skips: Skips | None = None,
        counted: WeakSet[torch.UntypedStorage] | None = None,
    ) -> None:
        self._module, self._arguments, self._copy_tensor = module, arguments, copy_tensor
        self._skips = Skips() if skips is None else skips
        self._counted = WeakSet() if counted is None else counted
        self._popped: dict[SkipKey, Any] = {}
        self._is_first_run = True
        self._input_refs: list[ReferenceType[Tensor]] = []
        self._stashed: list[Any] = []
        self.output: Any = None  # of the first run, detached
        self._saved_parts = (0, False, False, 0)
        self._gradients: list[Tensor] = []  # of the outputs
        self._shares_inputs = False
        self._first_graphs: list[_BackwardGraph] = []  # of the first run, until its backward
        self._deferral: WeightGradDeferral | None = WeightGradDeferral(list(module.modules()))
        tensors = (*_collect_tensors(arguments), *iter_module_tensors(module))
        self._accelerator = next((t.device for t in tensors if is_accelerator(t.device)), None)
        self._host_seconds: dict[str, float] = {}  # of the last F, I and W

    def measure(self, runs: float, timeout: float) -> tuple[int, tuple[float, float, float]]:
        """Return the bytes, and the median seconds of F, I and W of up to `runs` further runs."""
        end = perf_counter() + timeout
        saved_bytes = self.measure_saved_bytes()
        self._time_backward(self._first_graphs.pop(), [])
        if self._accelerator is not None:
            # The first run has deferred no weight gradients. Kernels that run for the first time
            # are loaded, which may take seconds.
            self._time_run()
            end = perf_counter() + timeout
        timed_runs: list[list[TimedWork]] = []
        while not timed_runs or (len(timed_runs) < runs and perf_counter() < end):
            timed_runs.append(self._time_run())
        forward, input_grad, weight_grad = map(_find_median, zip(*timed_runs, strict=True))
        return saved_bytes, (forward, input_grad, weight_grad)

    @property
    def cost_key(self) -> Hashable:
        """A key that is equal for two calls only if one measurement holds for both."""
        return build_cost_key(self._module, *self._arguments)

    def measure_unit(self, runs: int, timeout: float) -> UnitMeasurement:
        """Return the seconds and bytes of the call."""
        forward, input_grad, weight_grad = self.measure(runs, timeout)[1]
        return UnitMeasurement(
            forward,
            input_grad,
            weight_grad,
            *self._saved_parts,
            workspace_bytes=self.measure_workspace(self._accelerator) if self._accelerator else 0,
        )

    def run_first(self) -> None:
        """Run the first forward, without a measurement, for its output."""
        args, kwargs = self._start_graph(self._arguments)
        self.output = _detach(self._run_module(args, kwargs))

    def measure_workspace(self, device: torch.device) -> int:
        """Return the most bytes that a run needs beside what is known to be there.

        That is: in the forward, beside all that is alive after it; in the backward, beside all that
        was alive before it, without the gradient of the outputs.
        """
        probe = StorageProbe([device])
        rank = 0
        args, kwargs = self._start_graph(self._arguments)
        with probe.track(), probe.attribute_to(rank):
            output = self._run_module(args, kwargs)
        in_forward = probe.read_transient_bytes().get(rank, 0)
        graph, gradients = self._build_graph(output)
        gradient_bytes = sum(_count_bytes(tensor) for tensor in gradients if tensor is not None)
        del args, kwargs, output
        with self._add_to_gradients(graph):
            before = probe.read_live_bytes().get(rank, 0)
            with probe.track(), probe.attribute_to(rank):
                graph.backward_accumulate({OUTSIDE: Payload(gradients)}, False)
        in_backward = probe.read_peak_bytes().get(rank, 0) - before
        return max(in_forward, in_backward + gradient_bytes)

    def measure_saved_bytes(self) -> int:
        """Run the first forward, and return the bytes that it and no earlier layer keeps.

        Storages are counted once, however many saved tensors are views of them. Parameters and
        buffers are not counted: they exist anyway.
        """
        saved: set[torch.UntypedStorage] = set()

        def pack(tensor: Tensor) -> Tensor:
            saved.update(_find_storage(tensor))
            return tensor

        args, kwargs = self._start_graph(self._arguments)
        begin = perf_counter()
        try:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                output = self._run_module(args, kwargs)
        except RuntimeError:
            # `torch.func.grad` refuses to run under such hooks. Without them, what it saves is not
            # counted. An error of the module itself comes again.
            saved.clear()
            args, kwargs = self._start_graph(self._arguments)
            begin = perf_counter()
            output = self._run_module(args, kwargs)
        self._host_seconds["F"] = perf_counter() - begin
        self.output = _detach(output)
        parts = [
            {storage for tensor in tensors for storage in _find_storage(tensor)}
            for tensors in (_collect_tensors((args, kwargs)), _collect_tensors(output))
        ]
        self._first_graphs.append(self._build_graph(output))
        # `torch.utils.checkpoint` keeps the inputs of a function for recomputation without calling
        # the hook. So the inputs are let go here, and those that are still alive are counted.
        del args, kwargs, output
        for tensor in (reference() for reference in self._input_refs):
            if tensor is not None:
                saved.update(_find_storage(tensor))
        self._is_first_run = False
        inputs, outputs = parts
        # The target of a micro-batch is a part of the batch's, which is there anyway.
        targets = self._module.targets if isinstance(self._module, LossModule) else ()
        lasting = (*iter_module_tensors(self._module), *iter_tensors(targets))
        inner = saved - {s for t in lasting for s in _find_storage(t)} - inputs - outputs
        self._saved_parts = (
            sum(storage.nbytes() for storage in inner),
            not inputs.isdisjoint(saved),
            not (outputs - inputs).isdisjoint(saved),
            sum(storage.nbytes() for storage in outputs),
        )
        for tensor in iter_module_tensors(self._module):
            self._counted.update(_find_storage(tensor))
        saved.difference_update(self._counted)
        self._counted.update(saved)
        return sum(storage.nbytes() for storage in saved)

    def _time_run(self) -> list[TimedWork]:
        """Return the times of F, I and W of one run.

        Some modules cannot run with a deferred weight gradient, for example if their forward
        computes a gradient itself. Then W is 0 and I is the whole backward.
        """
        args, kwargs = self._start_graph(self._arguments)
        outputs: list[Any] = []
        deferral: AbstractContextManager[list[PendingWeightGrad]] = (
            nullcontext([]) if self._deferral is None else self._deferral.activate()
        )
        try:
            with deferral as pending:
                forward = self._time("F", lambda: outputs.append(self._run_module(args, kwargs)))
            # `pop` lets go of the outputs, so that the backward can free the graph as it goes.
            return [forward, *self._time_backward(self._build_graph(outputs.pop()), pending)]
        except RunError:
            if self._deferral is None:
                raise
            self._deferral = None
            return self._time_run()

    def count_bytes(self, unit: UnitMeasurement) -> int:
        """Return the bytes that a run on copies needs, roughly."""
        inputs = sum(map(_count_bytes, _collect_tensors((self._arguments, self._popped))))
        values = inputs + unit.inner_bytes + unit.output_bytes + unit.workspace_bytes
        return count_training_bytes(self._module, 0) + values

    @contextmanager
    def run_on_copies(self) -> Iterator[tuple[Callable[[], None], object]]:
        """Yield a function that runs the module on new copies of its tensors, and what it needs.

        It adds to gradients that are there, as after the first micro-batch of a step.
        """
        # It keeps nodes that accumulate gradients alive. They run on the stream on which they were
        # made, so the backwards of other devices would wait for that one.
        self._deferral = None
        parts, inputs = list(self._module.modules()), (self._arguments, self._popped)
        with isolated(parts, map_tensor=self._copy_tensor):
            _flatten_weights(parts)
            weights = [weight for weight in self._module.parameters() if weight.requires_grad]
            self._gradients = []
            try:
                self._arguments, self._popped = StructureCopier(self._copy_tensor)(inputs)
                with preserve_gradients(weights):
                    for weight in weights:
                        weight.grad = torch.zeros_like(weight)
                    self._share_inputs(weights)
                    tables = [
                        dict(table)
                        for part in parts
                        for table in (vars(part), part._parameters, part._buffers)
                    ]
                    sums = [weight.grad for weight in weights]
                    values = tables, sums, self._arguments, self._popped, self._gradients
                    yield partial(self._run, weights), values
            finally:
                self._arguments, self._popped = inputs
                self._shares_inputs = False

    def _share_inputs(self, weights: Sequence[Tensor]) -> None:
        """Let runs use the inputs themselves, if a run leaves them as they are.

        In a step nothing copies the inputs of a stage, and a copy may take as long as a layer.
        """
        before = StructureCopier(self._copy_tensor)((self._arguments, self._popped))
        self._shares_inputs = True
        self._run(weights)
        after = _collect_tensors((self._arguments, self._popped))
        if not all(
            old.layout is torch.strided and torch.equal(old, new)
            for old, new in zip(_collect_tensors(before), after, strict=True)
        ):
            self._shares_inputs = False
            self._arguments, self._popped = before

    def _run(self, weights: Sequence[Tensor]) -> None:
        """Run the forward and the whole backward. The host waits for nothing."""
        args, kwargs = self._start_graph(self._arguments)
        graph, gradients = self._build_graph(self._run_module(args, kwargs))
        mine = set(map(id, weights))
        with preserve_gradients([leaf for leaf in graph.find_leaves() if id(leaf) not in mine]):
            graph.backward_accumulate({OUTSIDE: Payload(gradients)}, False)

    def _time_backward(
        self, graph: _BackwardGraph, pending_weight_grads: list[PendingWeightGrad]
    ) -> tuple[TimedWork, TimedWork]:
        cell_graph, gradients = graph
        # Most leaves are copies. One that the module uses through a closure is the user's own.
        with self._add_to_gradients(cell_graph):
            input_grad = self._time(
                "I", lambda: cell_graph.backward_accumulate({OUTSIDE: Payload(gradients)}, False)
            )
            weight_grad = self._time("W", lambda: accumulate_weight_grads(pending_weight_grads))
            return input_grad, weight_grad

    @contextmanager
    def _add_to_gradients(self, graph: CellGraph) -> Iterator[None]:
        """Let backwards add to gradients that are there, as after the first micro-batch of a step.

        Weights whose gradients are deferred are not in the graph.
        """
        weights = [weight for weight in self._module.parameters() if weight.requires_grad]
        leaves = {id(leaf): leaf for leaf in (*graph.find_leaves(), *weights)}.values()
        with preserve_gradients(leaves):
            for leaf in leaves:
                leaf.grad = torch.zeros_like(leaf)
            yield

    def _time(self, op: str, function: Callable[[], object]) -> TimedWork:
        """Return the time of a function on the accelerator, or on the host without one."""
        timed = time_work(function, self._accelerator, self._host_seconds.get(op, 0.0))
        self._host_seconds[op] = timed.host_seconds
        return timed

    # ---- inputs and outputs -------------------------------------------------------------------

    def _run_module(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._stashed.clear()
        with use_skips(self), added_losses():
            return self._module(*args, **kwargs)

    def stash(self, key: SkipKey, value: Any, shared: bool) -> None:
        """Take a value as an output. Later layers get that of the first run."""
        self._stashed.append(value)
        if self._is_first_run:
            self._skips.stash(key, _detach(value), shared)

    def pop(self, key: SkipKey) -> Any:
        """Return a value that an earlier layer stashed, as an input."""
        if key not in self._popped:
            self._popped[key] = self._skips.pop(key)
        return self._start_graph(self._popped[key])

    def _start_graph(self, values: Any) -> Any:
        """Return copies of values, as the inputs of a graph of their own.

        The copies of the first run share memory with the values, so that a tensor which two layers
        keep is one storage.
        """
        shares_memory = self._is_first_run or self._shares_inputs
        copies = _detach(values) if shares_memory else StructureCopier(self._copy_tensor)(values)
        outer = [tensor for tensor in _collect_tensors(copies) if tensor.requires_grad]
        if outer:
            inner = dict(zip(map(id, outer), enter_graph(outer)[0], strict=True))
            copies = StructureCopier(lambda tensor: inner.get(id(tensor), tensor))(copies)
        self._input_refs += map(ref, _collect_tensors(copies))
        return copies

    def _build_graph(self, output: Any) -> _BackwardGraph:
        """Return the graph of a run, and a gradient for each of its ends."""
        tensors = _collect_tensors((output, self._stashed))
        self._stashed.clear()
        ends = [tensor for tensor in tensors if tensor.requires_grad]
        roots = {OUTSIDE: tuple(map(find_gradient_edge, ends))}
        if [g.shape for g in self._gradients] != [tensor.shape for tensor in ends]:
            self._gradients[:] = map(_make_gradient, ends)
        return CellGraph(roots, {}), tuple(self._gradients)


def _make_gradient(tensor: Tensor) -> Tensor:
    """Return random numbers, with which a GPU draws as much power as in training."""
    if tensor.layout is not torch.strided or tensor.dtype not in _RANDOM_DTYPES:
        return torch.ones_like(tensor)
    return torch.randn_like(tensor)


_RANDOM_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def _find_median(runs: Sequence[TimedWork]) -> float:
    """Return the median seconds of the runs in which the device did not wait for the host.

    If it waited in all of them, as for a module that reads values on the host, all count.
    """
    return median(run.seconds for run in [run for run in runs if run.is_device_time] or runs)


_BackwardGraph = tuple[CellGraph, tuple[Tensor | None, ...]]


def _detach(values: Any) -> Any:
    """Return values that share memory with these and have no graph."""
    return StructureCopier(lambda t: t.detach().requires_grad_(t.requires_grad))(values)


def _collect_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested values, each once."""
    tensors: list[Tensor] = []

    def append(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    StructureCopier(append)(values)
    return tensors


def _find_storage(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storage of a tensor; a sparse tensor has no single one."""
    return [tensor.untyped_storage()] if tensor.layout is torch.strided else []
