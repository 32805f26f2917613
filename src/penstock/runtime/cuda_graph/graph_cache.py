"""The captured steps of a pipe: when a step runs eagerly, is captured, or is replayed.

Steps with equal graph keys are steps of one kind. For each kind:

    step 1   runs eagerly, in the caller's thread. It shows what the layers do (which parameters get
             gradients, which cells draw random numbers), and libraries allocate what they cannot
             allocate during a capture.
    step 2   is captured as a CUDA graph, which computes nothing, and then replayed.
    step 3+  is replayed.

A step that cannot be captured raises `CaptureError`. The reason is remembered by its key, so the
same step is not attempted forever.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.device.device import Device, GraphTimestamp, Timestamp
from penstock.device.nvidia import GraphTimestamps, ReplayTimestamps
from penstock.device.recorded_graph import (
    GraphMemoryPools,
    RecordedCudaGraph,
    RecordedGraph,
)
from penstock.fingerprint import fingerprint_attributes
from penstock.model.isolation import StateSnapshot
from penstock.model.partition import Partition
from penstock.runtime.cuda_graph.capture_guard import (
    CaptureError,
    CaptureGuard,
    build_constant_fill_mode,
    locate_capture_errors,
)
from penstock.runtime.cuda_graph.capture_transport import CaptureTransport
from penstock.runtime.cuda_graph.graph_key import (
    GraphKey,
    PreparedStep,
    StepModules,
    build_graph_key,
    check_attributes_unchanged,
    check_optimizer_numbers_unchanged,
    get_optimizer_numbers,
)
from penstock.runtime.cuda_graph.graph_rng import GraphGenerators, HostRngGuard, RngUsage
from penstock.runtime.cuda_graph.static_buffers import (
    FlatInputs,
    GradBufferMap,
    GradBufferPool,
    GradUpdateDetector,
    ReassignedTensors,
    StaticInputs,
    check_dense_grads,
    collect_module_tensors,
    find_viewed_grads,
    flatten_inputs,
    redirect_grads_for_replay,
)
from penstock.runtime.execution import CaptureOverrides, InlineExecutor, LaneExecutor, MeasuredRun
from penstock.runtime.step import StepResult
from penstock.runtime.transport import Mailboxes
from penstock.schedules.timeline import Timeline
from penstock.torch_compat import pytree

# ---- one captured step ----------------------------------------------------------------------


@dataclass
class CapturedStep:
    """A captured step: the graph, and the tensors that it reads and writes at fixed addresses."""

    graph: RecordedGraph
    static_inputs: StaticInputs
    grad_buffers: GradBufferMap
    generators: GraphGenerators
    timestamps: GraphTimestamps  # the graph writes its timestamps here
    result: StepResult  # the graph writes the loss, outputs and metrics into its tensors
    measured: MeasuredRun
    keep_alive: Any  # the bound inputs: their tensors must live as long as the graph
    replay_count: int = 0

    def replay(self, tensors: Sequence[Tensor]) -> StepResult:
        """Run the step on the caller's tensors, and return copies of its results."""
        # Everything here is enqueued on the caller's streams, in this order. Nothing waits for the
        # device.
        self.static_inputs.copy_from(tensors)
        self.generators.seed_generators()
        with redirect_grads_for_replay(self.grad_buffers):
            self.graph.replay()
        self.static_inputs.write_back(tensors)
        self.replay_count += 1
        if self.result._check_terms is not None:  # it waits for the device
            self.result._check_terms()
        loss = self.result.loss.clone()
        measured = _ReplayMeasurement(self.measured, self.timestamps.snapshot())
        metrics = _clone_tensors(self.result.combined_metrics)
        return replace(
            self.result,
            loss=loss,
            outputs=_clone_tensors(self.result.outputs),
            combined_metrics=metrics,
            measured=measured,
        )


def _clone_tensors(value: Any) -> Any:
    """Return a value with copies of its tensors, because the next replay overwrites them."""
    # In most steps there are none, and walking an empty tree would cost more than this test.
    if value is None or (isinstance(value, dict) and not value):
        return value
    with torch.no_grad():
        return pytree.tree_map_only(Tensor, Tensor.clone, value)


@dataclass(frozen=True)
class _ReplayMeasurement:
    """The measured times of one replay."""

    capture: MeasuredRun
    timestamps: ReplayTimestamps

    @cached_property
    def timeline(self) -> Timeline:
        """Return when each action ran. This waits until the replay has ended."""
        nanoseconds = self.timestamps.read()

        def to_seconds(moment: Timestamp) -> Timestamp:
            if isinstance(moment, GraphTimestamp):
                return nanoseconds[moment.device][moment.slot] / 1e9
            return moment

        timed_actions = [
            [(action, to_seconds(start), to_seconds(end)) for action, start, end in lane]
            for lane in self.capture.timed_actions
        ]
        origins = list(map(to_seconds, self.capture.time_origins))
        return MeasuredRun(self.capture.program, timed_actions, origins).timeline


# ---- the cache ------------------------------------------------------------------------------

MAX_GRAPHS = 8  # graphs of one pipe; the least recently used one is dropped
MAX_REMEMBERED_KEYS = 64  # keys of steps that ran eagerly once, or could not be captured
WARN_AFTER_MISSES = 16  # consecutive first steps: something changes that should stay the same
MAX_CAPTURE_ATTEMPTS = 2  # failures after which a key is refused without another attempt

RunStepEagerly = Callable[[PreparedStep, LaneExecutor, CaptureOverrides], StepResult]
GraphFactory = Callable[[Sequence[torch.device], GraphMemoryPools], RecordedGraph]


class FirstStepObservations(NamedTuple):
    """Facts that the first step of a kind has shown, and that its capture relies on."""

    rng_usage: RngUsage
    updated_parameters: list[nn.Parameter]


@dataclass
class _CaptureHistory:
    """The graphs of a pipe, and records of steps without a graph. The newest entry is last."""

    graphs: OrderedDict[GraphKey, CapturedStep] = field(default_factory=OrderedDict)
    observations: OrderedDict[GraphKey, FirstStepObservations] = field(default_factory=OrderedDict)
    # The message and the reason of the error.
    refusals: OrderedDict[GraphKey, tuple[str, str]] = field(default_factory=OrderedDict)
    failure_counts: OrderedDict[GraphKey, int] = field(default_factory=OrderedDict)


class GraphCache:
    """Runs the steps of one pipe: eagerly, by a capture, or by a replay of a cached graph."""

    def __init__(
        self,
        partition: Partition,
        devices: Sequence[Device],
        placement: Sequence[int],
        graph_factory: GraphFactory = RecordedCudaGraph,
    ) -> None:
        self._partition, self._graph_factory = partition, graph_factory
        self._devices_and_placement = devices, placement
        self._device_types = frozenset(place.device.type for place in devices)
        self._memory_pools, self._grad_buffers = GraphMemoryPools(), GradBufferPool()
        self._reassigned_tensors = ReassignedTensors()
        self._history = _CaptureHistory()
        self._step_modules: StepModules | None = None
        self._last_missed_key: GraphKey | None = None
        self._consecutive_misses = 0

    def run_step(self, prepared: PreparedStep, run_eagerly: RunStepEagerly) -> StepResult:
        """Run one step.

        Replay it if there is a graph for its key. Otherwise capture it if an earlier step had the
        same key, and run it eagerly if none had.
        """
        # Static tensors go back into their modules first: the key contains their addresses.
        self._reassigned_tensors.restore_static_tensors()
        step_modules, history = self._current_modules(prepared), self._history
        check_dense_grads(step_modules.parameters, step_modules.describe_parameter)
        inputs = flatten_inputs(prepared.stage_inputs, prepared.loss_scale)
        key = build_graph_key(prepared, inputs, step_modules, self._device_types)
        captured = self._find_replayable(key)
        if captured is None:
            # Captures refuse a full key, first steps a key without the state of the modules.
            for refused_key in (key, key.without_module_state()):
                if refused_key in history.refusals:
                    raise CaptureError(*history.refusals[refused_key])
            if key not in history.observations:
                return self._run_first_step(prepared, run_eagerly, key, step_modules)
            captured = self._try_capture(prepared, run_eagerly, inputs, key, step_modules)
        history.graphs.move_to_end(key)
        self._consecutive_misses = 0
        return captured.replay(inputs.tensors)

    def _find_replayable(self, key: GraphKey) -> CapturedStep | None:
        """Return the graph of the key, unless a replay would overwrite a view the caller keeps.

        In that case the cache drops all graphs that write to this memory. Later steps capture them
        again, with new gradient buffers.
        """
        graphs = self._history.graphs
        captured = graphs.get(key)
        viewed = set() if captured is None else find_viewed_grads(captured.grad_buffers)
        if viewed:
            self._grad_buffers.discard(viewed)
            for stale_key in [k for k, step in graphs.items() if viewed & step.grad_buffers.keys()]:
                del graphs[stale_key]
        return graphs.get(key)

    def _current_modules(self, prepared: PreparedStep) -> StepModules:
        """Return the modules of the step; those of the last step if they have not changed."""
        loss_fn = prepared.request.loss_fn
        if self._step_modules is None or not self._step_modules.is_current(loss_fn):
            self._step_modules = StepModules(self._partition, loss_fn)
        return self._step_modules

    # ---- the first step of a kind ---------------------------------------------------------

    def _run_first_step(
        self,
        prepared: PreparedStep,
        run_eagerly: RunStepEagerly,
        key: GraphKey,
        step_modules: StepModules,
    ) -> StepResult:
        """Run the step eagerly, in this thread, and record what its capture needs to know."""
        self._count_miss(key)
        modules, optimizer = step_modules.modules, prepared.request.optimizer
        rng_usage, host_rng = RngUsage(), HostRngGuard()
        grad_updates = GradUpdateDetector(step_modules.parameters)
        attributes, tensors = fingerprint_attributes(modules), collect_module_tensors(modules)
        optimizer_numbers = get_optimizer_numbers(optimizer)
        result = run_eagerly(
            prepared,
            InlineExecutor(Mailboxes(*self._devices_and_placement)),
            CaptureOverrides(rng_usage.rng_policy),
        )
        rng_usage.finish_step()
        # The step itself was right. The checks decide whether a replay would be right, too.
        try:
            check_attributes_unchanged(
                attributes, fingerprint_attributes(modules), step_modules.describe_module
            )
            host_rng.check_unchanged()
            check_optimizer_numbers_unchanged(optimizer, optimizer_numbers)
            check_dense_grads(step_modules.parameters, step_modules.describe_parameter)
            self._reassigned_tensors.register_reassigned(
                tensors, modules, step_modules.describe_module
            )
        except CaptureError as reason:
            # A layer that counts in an attribute has another key in every step. The refusal is
            # remembered for the key without the state of the modules, or it would never be found.
            self._record_failure(key.without_module_state(), reason)
        else:
            # Reassigned tensors have new addresses now. The next step is looked up with these.
            next_key = key._replace(tensors_and_hooks=step_modules.fingerprint_current_tensors())
            _remember(
                self._history.observations,
                next_key,
                FirstStepObservations(rng_usage, grad_updates.find_updated_parameters()),
            )
        return result

    def _count_miss(self, key: GraphKey) -> None:
        previous_key, self._last_missed_key = self._last_missed_key, key
        self._consecutive_misses += 1
        if self._consecutive_misses == WARN_AFTER_MISSES and previous_key is not None:
            warnings.warn(
                f"{WARN_AFTER_MISSES} steps in a row were each of a new kind, so no CUDA graph was "
                f"replayed. The last two differ in {key.describe_difference(previous_key)}. Keep "
                "these the same from step to step, or use runtime='threads'.",
                stacklevel=9,  # the caller of pipe.step
            )

    # ---- the second step: the capture -----------------------------------------------------

    def _try_capture(
        self,
        prepared: PreparedStep,
        run_eagerly: RunStepEagerly,
        inputs: FlatInputs,
        key: GraphKey,
        step_modules: StepModules,
    ) -> CapturedStep:
        """Capture the step and store its graph. On an error, leave everything as it was."""
        history, host_rng = self._history, HostRngGuard()
        # Without the values of tensors: a capture computes nothing.
        modules_before = StateSnapshot(step_modules.modules, copy_value=lambda _: False)
        # Old graphs go first, so that their memory is free for the new one.
        while len(history.graphs) >= MAX_GRAPHS:
            history.graphs.popitem(last=False)
        try:
            with locate_capture_errors(self._partition.names):
                captured = self._capture(
                    prepared, run_eagerly, inputs, history.observations[key], step_modules
                )
                host_rng.check_unchanged()
        except BaseException as reason:
            modules_before.restore()
            host_rng.restore()
            if isinstance(reason, CaptureError):
                self._record_failure(
                    key, reason, MAX_CAPTURE_ATTEMPTS if reason.is_transient else 1
                )
            raise
        finally:
            # Autocast caches its casts. Those of the capture live in the graph's memory, and hold
            # no numbers until a replay.
            torch.clear_autocast_cache()
        history.graphs[key] = captured
        return captured

    def _capture(
        self,
        prepared: PreparedStep,
        run_eagerly: RunStepEagerly,
        inputs: FlatInputs,
        observations: FirstStepObservations,
        step_modules: StepModules,
    ) -> CapturedStep:
        devices, placement = self._devices_and_placement
        graph = self._graph_factory([place.device for place in devices], self._memory_pools)
        guard = CaptureGuard(self._device_types)
        generators = GraphGenerators(
            graph, guard, observations.rng_usage, lambda stage: devices[placement[stage]].device
        )
        static_inputs = StaticInputs(inputs)
        clocks = GraphTimestamps(devices)
        transport = CaptureTransport(clocks.devices, placement)
        # A library may try out kernels on these tensors before it is captured with one of them:
        # they hold numbers that occur, not uninitialised memory.
        static_inputs.copy_from(inputs.tensors)
        bound_inputs, loss_scale = static_inputs.bind(prepared.stage_inputs, inputs)
        # Without the batch of the first capture, which the graph would keep alive.
        request = replace(prepared.request, inputs=(), keyword_inputs={}, target=(), audit="off")
        static_step = PreparedStep(request, bound_inputs, loss_scale)
        modules = step_modules.modules
        # Parameters without a gradient in the first step have no buffer. If the capture gives them
        # one, it is an error, and `.grad` goes back to what it was.
        other_grads = {
            p: p.grad for p in set(step_modules.parameters) - set(observations.updated_parameters)
        }
        attributes, tensors = fingerprint_attributes(modules), collect_module_tensors(modules)

        def run_step_in_capture() -> StepResult:
            with build_constant_fill_mode(modules, self._device_types), guard:
                result = run_eagerly(
                    static_step,
                    InlineExecutor(transport),
                    CaptureOverrides(generators.rng_policy, True, clocks.devices),
                )
                self._reassigned_tensors.write_back(tensors, modules, step_modules.describe_module)
            return result

        # A cast that autocast made before would not be repeated by a replay, and so the graph would
        # go on using the old weights.
        torch.clear_autocast_cache()
        try:
            with self._grad_buffers.redirect_grads_for_capture(
                observations.updated_parameters, step_modules.describe_parameter
            ) as grad_buffers:
                result = graph.capture(run_step_in_capture)
                for parameter, gradient in other_grads.items():
                    if parameter.grad is not gradient:
                        raise CaptureError(
                            f"{step_modules.describe_parameter(parameter)} gets a gradient, but "
                            "got none in the first step of this kind"
                        )
        except BaseException:
            for parameter, gradient in other_grads.items():
                parameter.grad = gradient
            raise
        # A layer may behave in the capture as it did not in the first step.
        check_attributes_unchanged(
            attributes, fingerprint_attributes(modules), step_modules.describe_module
        )
        generators.finish_capture()
        static_inputs.finish_capture()
        measured = result.measured
        assert isinstance(measured, MeasuredRun)
        return CapturedStep(
            graph, static_inputs, grad_buffers, generators, clocks, result, measured, static_step
        )

    def _record_failure(
        self, key: GraphKey, error: CaptureError, max_attempts: int = MAX_CAPTURE_ATTEMPTS
    ) -> None:
        """Count a failure, and refuse the key from now on if there were `max_attempts` of them.

        The first failure may be the only one: some layers create a cache or a table in their first
        step and keep it.
        """
        count = self._history.failure_counts.get(key, 0) + 1
        _remember(self._history.failure_counts, key, count)
        if count >= max_attempts:
            _remember(self._history.refusals, key, (str(error), error.reason))


def _remember(entries: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Store an entry as the newest one, and drop the oldest if there are too many."""
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > MAX_REMEMBERED_KEYS:
        entries.popitem(last=False)
