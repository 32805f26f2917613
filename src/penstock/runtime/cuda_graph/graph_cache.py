"""The captured steps of a pipe: which are there, when one is made, and what stands against it.

The first step of a kind is taken as it comes, in the caller's thread: it shows what layers do, and
lets libraries make what they cannot make during a capture. The second is captured, and replayed.
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
from penstock.device.gpu_timestamps import GraphTimestamps, ReplayTimestamps
from penstock.model.partition import Partition
from penstock.runtime.cuda_graph.capture_guard import (
    CaptureError,
    CaptureGuard,
    build_constant_fill_mode,
    locate_capture_errors,
)
from penstock.runtime.cuda_graph.capture_transport import CaptureTransport
from penstock.runtime.cuda_graph.fingerprint import (
    check_attributes_unchanged,
    fingerprint_attributes,
)
from penstock.runtime.cuda_graph.grad_buffers import (
    GradBufferMap,
    GradBufferPool,
    GradUpdateDetector,
    check_dense_grads,
    find_viewed_grads,
    redirect_grads_for_replay,
)
from penstock.runtime.cuda_graph.graph_key import (
    GraphKey,
    StepModules,
    build_graph_key,
    check_optimizer_numbers_unchanged,
    get_optimizer_numbers,
)
from penstock.runtime.cuda_graph.graph_rng import GraphGenerators, HostRngGuard, RngUsage
from penstock.runtime.cuda_graph.reassigned_tensors import (
    ModuleTablesSnapshot,
    ReassignedTensors,
    collect_module_tensors,
)
from penstock.runtime.cuda_graph.recorded_graph import (
    GraphMemoryPools,
    RecordedCudaGraph,
    RecordedGraph,
)
from penstock.runtime.cuda_graph.static_inputs import FlatInputs, StaticInputs, flatten_inputs
from penstock.runtime.execution import CaptureOverrides, LaneExecutor, MeasuredRun
from penstock.runtime.inline import InlineExecutor
from penstock.runtime.step_request import PreparedStep
from penstock.runtime.train_step import StepResult
from penstock.runtime.transport import Mailboxes
from penstock.runtime.worker import TimedAction
from penstock.schedules.timeline import Timeline
from penstock.torch_compat import pytree

# -------------------------------------------------------------------------------------------------
# One captured step: the recording, where its inputs and gradients are, and what it gives.
# -------------------------------------------------------------------------------------------------


@dataclass
class CapturedStep:
    """It is replayed with other numbers each time."""

    graph: RecordedGraph
    static_inputs: StaticInputs
    grad_buffers: GradBufferMap
    generators: GraphGenerators
    clocks: GraphTimestamps  # which it writes down
    result: StepResult  # whose tensors it writes, too
    measured: MeasuredRun
    keep_alive: Any  # what has to live as long as the recording
    replay_count: int = 0

    def replay(self, tensors: Sequence[Tensor]) -> StepResult:
        """The step, of the caller's tensors."""
        self.static_inputs.copy_from(tensors)
        self.generators.seed_generators()
        with redirect_grads_for_replay(self.grad_buffers):
            self.graph.replay()
        self.static_inputs.write_back(tensors)
        self.replay_count += 1
        return replace(
            self.result,
            loss=self.result.loss.clone(),
            outputs=_clone_tensors(self.result.outputs),
            metrics=_clone_tensors(self.result.metrics),
            measured=_ReplayMeasurement(self.measured, self.clocks.snapshot()),
        )


def _clone_tensors(value: Any) -> Any:
    """The caller's own: the next replay writes other numbers."""
    if value is None or (isinstance(value, dict) and not value):  # in most steps
        return value
    with torch.no_grad():
        return pytree.tree_map_only(Tensor, Tensor.clone, value)


@dataclass(frozen=True)
class _ReplayMeasurement:
    """When a replay did what."""

    capture: MeasuredRun
    timestamps: ReplayTimestamps

    @cached_property
    def timeline(self) -> Timeline:
        """This waits until the replay has ended."""
        written = self.timestamps.read()

        def to_seconds(moment: Timestamp) -> Timestamp:
            if isinstance(moment, GraphTimestamp):
                return written[moment.device][moment.slot] / 1e9
            return moment

        program, lanes, origins = (
            self.capture.program,
            self.capture.timed_actions,
            self.capture.time_origins,
        )
        marks = [
            [TimedAction(m.bound_action, to_seconds(m.start), to_seconds(m.end)) for m in lane]
            for lane in lanes
        ]
        return MeasuredRun(program, marks, list(map(to_seconds, origins))).timeline


# -------------------------------------------------------------------------------------------------

MAX_GRAPHS = 8  # recordings; the one that was not used for longest is dropped
MAX_REMEMBERED_KEYS = 64  # kinds of steps that were seen once, or could not be captured
WARN_AFTER_MISSES = 16  # steps, each of another kind: then something changes that should not
MAX_CAPTURE_ATTEMPTS = 2  # what stood against it so often is not tried again

RunStepEagerly = Callable[[PreparedStep, LaneExecutor, CaptureOverrides], StepResult]
GraphFactory = Callable[[Sequence[torch.device], GraphMemoryPools], RecordedGraph]


class FirstStepObservations(NamedTuple):
    """What the first step of a kind has shown."""

    rng_usage: RngUsage
    updated_parameters: list[nn.Parameter]


@dataclass
class _CaptureHistory:
    """Of kinds of steps."""

    graphs: OrderedDict[GraphKey, CapturedStep] = field(default_factory=OrderedDict)
    observations: OrderedDict[GraphKey, FirstStepObservations] = field(default_factory=OrderedDict)
    refusals: OrderedDict[GraphKey, str] = field(default_factory=OrderedDict)
    failure_counts: OrderedDict[GraphKey, int] = field(default_factory=OrderedDict)  # how often


class GraphCache:
    """Of one pipe."""

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
        self._memory_pools, self._grad_buffers, self._reassigned_tensors = (
            GraphMemoryPools(),
            GradBufferPool(),
            ReassignedTensors(),
        )
        self._history = _CaptureHistory()
        self._step_modules: StepModules | None = None
        self._last_missed_key: GraphKey | None = None
        self._consecutive_misses = 0

    def run_step(self, prepared: PreparedStep, run_eagerly: RunStepEagerly) -> StepResult:
        """Replayed, if there is a recording; else captured, if one like it was seen."""
        self._reassigned_tensors.restore_static_tensors()
        subject, notes = self._current_modules(prepared), self._history
        check_dense_grads(subject.parameters, subject.describe_parameter)
        inputs = flatten_inputs(prepared.stage_inputs, prepared.loss_scale)
        key = build_graph_key(prepared, inputs, subject, self._device_types)
        captured = self._find_replayable(key)
        if captured is None:
            for refused in (key, key.without_module_state()):
                if refused in notes.refusals:
                    raise CaptureError(notes.refusals[refused])
            if key not in notes.observations:
                return self._run_first_step(prepared, run_eagerly, key, subject)
            captured = self._try_capture(prepared, run_eagerly, inputs, key, subject)
        notes.graphs.move_to_end(key)
        self._consecutive_misses = 0
        return captured.replay(inputs.tensors)

    def _find_replayable(self, key: GraphKey) -> CapturedStep | None:
        """What may be replayed: not what would write where old gradients are still looked at."""
        recordings = self._history.graphs
        captured = recordings.get(key)
        gone = set() if captured is None else find_viewed_grads(captured.grad_buffers)
        if gone:
            self._grad_buffers.discard(gone)
            for other in [
                other for other, one in recordings.items() if gone & one.grad_buffers.keys()
            ]:
                del recordings[other]
        return recordings.get(key)

    def _current_modules(self, prepared: PreparedStep) -> StepModules:
        """That of the last step, if nothing of it has changed."""
        loss_fn = prepared.request.loss_fn
        if self._step_modules is None or not self._step_modules.is_current(loss_fn):
            self._step_modules = StepModules(self._partition, loss_fn)
        return self._step_modules

    # ---- the first of its kind ------------------------------------------------------------

    def _run_first_step(
        self,
        prepared: PreparedStep,
        run_eagerly: RunStepEagerly,
        key: GraphKey,
        step_modules: StepModules,
    ) -> StepResult:
        """As the reference does it."""
        self._count_miss(key)
        modules, optimizer = step_modules.modules, prepared.request.optimizer
        asked, learned, host = (
            RngUsage(),
            GradUpdateDetector(step_modules.parameters),
            HostRngGuard(),
        )
        attributes, tensors = fingerprint_attributes(modules), collect_module_tensors(modules)
        numbers = get_optimizer_numbers(optimizer)
        result = run_eagerly(
            prepared,
            InlineExecutor(Mailboxes(*self._devices_and_placement)),
            CaptureOverrides(asked.rng_policy),
        )
        asked.finish_step()
        try:
            check_attributes_unchanged(
                attributes, fingerprint_attributes(modules), step_modules.describe_module
            )
            host.check_unchanged()
            check_optimizer_numbers_unchanged(optimizer, numbers)
            check_dense_grads(step_modules.parameters, step_modules.describe_parameter)
            self._reassigned_tensors.register_reassigned(
                tensors, modules, step_modules.describe_module
            )
        except CaptureError as reason:
            self._record_failure(key.without_module_state(), reason)
        else:
            moved = key._replace(tensors_and_hooks=step_modules.fingerprint_current_tensors())
            _remember(
                self._history.observations,
                moved,
                FirstStepObservations(asked, learned.find_updated_parameters()),
            )
        return result

    def _count_miss(self, key: GraphKey) -> None:
        last, self._last_missed_key = self._last_missed_key, key
        self._consecutive_misses += 1
        if self._consecutive_misses == WARN_AFTER_MISSES and last is not None:
            warnings.warn(
                f"{WARN_AFTER_MISSES} steps in a row were each of another kind, and so none was replayed: "
                f"the last two differ in {key.describe_difference(last)}",
                stacklevel=9,
            )

    # ---- the second -----------------------------------------------------------------------

    def _try_capture(
        self,
        prepared: PreparedStep,
        run_eagerly: RunStepEagerly,
        inputs: FlatInputs,
        key: GraphKey,
        step_modules: StepModules,
    ) -> CapturedStep:
        notes, before, host = (
            self._history,
            ModuleTablesSnapshot(step_modules.modules),
            HostRngGuard(),
        )
        while len(notes.graphs) >= MAX_GRAPHS:
            notes.graphs.popitem(last=False)
        try:
            with locate_capture_errors(self._partition.names):
                captured = self._capture(
                    prepared, run_eagerly, inputs, notes.observations[key], step_modules
                )
                host.check_unchanged()
        except BaseException as reason:
            before.restore()
            host.restore()
            if isinstance(reason, CaptureError):
                self._record_failure(
                    key, reason, MAX_CAPTURE_ATTEMPTS if reason.is_transient else 1
                )
            raise
        finally:
            torch.clear_autocast_cache()  # what was cast in the recording is of no use outside
        notes.graphs[key] = captured
        return captured

    def _capture(
        self,
        prepared: PreparedStep,
        run_eagerly: RunStepEagerly,
        inputs: FlatInputs,
        observations: FirstStepObservations,
        step_modules: StepModules,
    ) -> CapturedStep:
        places, placement = self._devices_and_placement
        recording = self._graph_factory([place.device for place in places], self._memory_pools)
        watch = CaptureGuard(self._device_types)
        sources = GraphGenerators(
            recording, watch, observations.rng_usage, lambda s: places[placement[s]].device
        )
        standing = StaticInputs(inputs)
        clocks = GraphTimestamps(places)
        lending = CaptureTransport(clocks.devices, placement)
        standing.copy_from(
            inputs.tensors
        )  # numbers that are possible, for whoever tries a kernel out
        fed, scale = standing.bind(prepared.stage_inputs, inputs)
        static = PreparedStep(prepared.options, prepared.request, fed, scale)
        modules = step_modules.modules
        others = {
            p: p.grad for p in set(step_modules.parameters) - set(observations.updated_parameters)
        }
        attributes, tensors = fingerprint_attributes(modules), collect_module_tensors(modules)

        def run_step_in_capture() -> StepResult:
            with build_constant_fill_mode(modules, self._device_types), watch:
                result = run_eagerly(
                    static,
                    InlineExecutor(lending),
                    CaptureOverrides(sources.rng_policy, True, clocks.devices),
                )
                self._reassigned_tensors.write_back(tensors, modules, step_modules.describe_module)
            return result

        torch.clear_autocast_cache()  # or what was cast before would be part of the recording
        try:
            with self._grad_buffers.redirect_grads_for_capture(
                observations.updated_parameters, step_modules.describe_parameter
            ) as taken:
                result = recording.capture(run_step_in_capture)
                for parameter, gradient in others.items():
                    if parameter.grad is not gradient:
                        raise CaptureError(
                            f"{step_modules.describe_parameter(parameter)} gets a gradient, and got none before"
                        )
        except BaseException:
            for parameter, gradient in others.items():
                parameter.grad = gradient
            raise
        check_attributes_unchanged(
            attributes, fingerprint_attributes(modules), step_modules.describe_module
        )
        sources.finish_capture()
        standing.finish_capture()
        assert isinstance(result.measured, MeasuredRun)
        return CapturedStep(
            recording, standing, taken, sources, clocks, result, result.measured, static
        )

    def _record_failure(
        self, key: GraphKey, error: CaptureError, max_attempts: int = MAX_CAPTURE_ATTEMPTS
    ) -> None:
        """Remember it, if it was so before: some layers make in their first step what they keep."""
        times = self._history.failure_counts.get(key, 0) + 1
        _remember(self._history.failure_counts, key, times)
        if times >= max_attempts:
            _remember(self._history.refusals, key, str(error))


def _remember(entries: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > MAX_REMEMBERED_KEYS:
        entries.popitem(last=False)
