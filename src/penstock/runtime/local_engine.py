"""`LocalEngine`: runs a pipe whose ranks are all in this process.

`LocalCall` is one call of it: it chooses the runtime ("graph", "threads" or "inline") and builds
what `step.py` needs to run the call.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.data_parallel.clip import (
    ClipGradOptions,
    clip_grads_with_norm,
    compute_total_grad_norm,
)
from penstock.data_parallel.grad_scaler import propagate_overflow
from penstock.data_parallel.sync import Replicas
from penstock.device.accelerator import is_accelerator
from penstock.device.device import Device
from penstock.errors import ArgumentError, RunError
from penstock.fingerprint import ModuleSnapshot, SnapshotMemo
from penstock.model.isolation import isolated_step
from penstock.model.stage_inputs import StageInputs, build_input_payloads
from penstock.model.stage_wrapping import check_separate_process_groups
from penstock.runtime import signals
from penstock.runtime.autograd_call import AutogradCall
from penstock.runtime.cuda_graph.capture_guard import CaptureError, is_capturing
from penstock.runtime.cuda_graph.graph_cache import GraphCache
from penstock.runtime.cuda_graph.graph_key import PreparedStep
from penstock.runtime.execution import (
    NO_OVERRIDES,
    CaptureOverrides,
    Execution,
    InlineExecutor,
    LaneExecutor,
)
from penstock.runtime.loss_accumulator import LossAccumulator, combine_metrics, read_loss_scale
from penstock.runtime.memory import Memory, count_resident_bytes, profile_step_memory
from penstock.runtime.memory_forecast import (
    MemoryForecast,
    forecast_peak,
    order_depth_first,
    trace_storages,
)
from penstock.runtime.program_cache import Phase, ProgramCache
from penstock.runtime.request import Request
from penstock.runtime.step import (
    CheckpointPeers,
    PreparedPipe,
    RuntimeUsed,
    StepResult,
    execute_step,
)
from penstock.runtime.step_metrics import BatchSize, HasTimeline
from penstock.runtime.threads import ThreadExecutor, WorkerPool
from penstock.runtime.tied_gradients import build_local_tied_weights
from penstock.runtime.transport import Mailboxes
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Program
from penstock.schedules.registry import ScheduleFactory
from penstock.schedules.timeline import Timeline
from penstock.stage.aux_loss import AuxLossSink
from penstock.stage.compile_support import make_forward_lock
from penstock.stage.deferred_batchnorm import find_deferred_batch_norms
from penstock.stage.loss import LossFn, LossReduction, identify_loss
from penstock.stage.loss_terms import TermComparison
from penstock.stage.stage import Stage, StageMembers, collect_members, find_shared_ids
from penstock.state_copy import find_reachable
from penstock.torch_compat import get_dispatch_modes

# ---- choosing the runtime ------------------------------------------------------------------------


def select_runtime(requested: str, devices: Sequence[Device], replicas: Replicas) -> RuntimeUsed:
    """Return the runtime for a call, with the reason if it is not the requested one.

        requested    runtime
        threads      threads
        inline       inline
        graph        graph, or an error
        auto         graph if that is possible, else threads; inline under a debugger

    A pipe inside a layer of another pipe, whose step is being captured, always runs inline: work of
    other threads would not become part of the capture.
    """
    if get_dispatch_modes() and is_capturing():
        return RuntimeUsed("inline", "it is part of a step that is captured")
    if requested in ("threads", "inline"):
        return RuntimeUsed(requested)
    if requested == "auto" and (sys.gettrace() is not None or torch.is_anomaly_enabled()):
        return RuntimeUsed("inline", "a debugger or autograd's anomaly detection is active")
    obstacle = _find_graph_obstacle(devices, replicas)
    if obstacle is None:
        return RuntimeUsed("graph")
    if requested == "graph":
        raise ArgumentError(
            f"runtime='graph' cannot run this pipe: {obstacle}. Use runtime='threads' or 'auto'."
        )
    return RuntimeUsed("threads", obstacle)


def _find_graph_obstacle(devices: Sequence[Device], replicas: Replicas) -> str | None:
    for rank, device in enumerate(devices):
        if not device.has_graphs:
            return f"rank {rank} is on {device!r}, which has no CUDA graphs"
    if replicas:
        return "a stage is wrapped in DistributedDataParallel, replicate or fully_shard"
    return None


def fall_back_to_threads(
    requested: str, error: CaptureError, already_warned: set[str]
) -> RuntimeUsed:
    """Return the threads runtime after a failed capture, and warn once for each reason.

    If "graph" was requested, raise instead: the error itself, or its cause if the cause is not
    about capturing, such as an error in a layer.
    """
    if requested == "graph":
        if error.is_transient and error.__cause__ is not None:
            error.__cause__.add_note("while the step was captured as a CUDA graph")
            raise error.__cause__
        raise CaptureError(
            f"the step cannot be captured as a CUDA graph: {error}. Use runtime='auto', which runs "
            "such a step in threads."
        ) from error
    text = str(error)
    if error.reason not in already_warned:
        already_warned.add(error.reason)
        warnings.warn(
            f"the step is not captured as a CUDA graph, and runs in threads: {text}", stacklevel=7
        )
    return RuntimeUsed("threads", text)


# ---- the engine ----------------------------------------------------------------------------------


class LocalEngine:
    """The engine of a pipe in one process. A copy of the pipe gets threads of its own."""

    def __init__(self, prepared_pipe: PreparedPipe) -> None:
        self._prepared_pipe = prepared_pipe
        self.placed_partition, self.replicas = (
            prepared_pipe.placed_partition,
            prepared_pipe.replicas,
        )
        self.devices = list(self.placed_partition.devices.values())
        self.torch_devices = tuple(dict.fromkeys(device.device for device in self.devices))
        self.deferred_batchnorms = find_deferred_batch_norms(self.placed_partition.local_stages)
        self._lazy_state = _LazyState()

    @property
    def call_lock(self) -> AbstractContextManager[object]:
        """The lock that a call holds. Raise if the caller is one of the pipe's workers.

        While a step runs, `.grad` may have a provisional scale (see loss_accumulator.py), which a
        step of another thread must not add to. An audit, and the trace of a new shape, exchange the
        parameters of the modules for a while, which a `pipe(x)` of another thread must not see.
        """
        # A worker that waited for this lock would block the step that holds it, so it must get its
        # error before.
        if self._lazy_state.worker_pool is not None:
            self._lazy_state.worker_pool.check_caller()
        return self._lazy_state.call_lock

    def guarded(self, operation: str) -> AbstractContextManager[str]:
        """Return an empty context: there are no other processes to tell of an error."""
        return nullcontext(operation)

    def prepare(self, call_name: str, request: Request) -> LocalCall:
        """Split the batch into the inputs of the stages."""
        devices = self.placed_partition.stage_devices
        inputs = self.placed_partition.partition.build_stage_inputs(request, devices)
        loss_scale = read_loss_scale(request.scaler, request.scale, devices[len(devices) - 1])
        return LocalCall(self, request, inputs, loss_scale)

    def replay_or_capture(self, call: LocalCall) -> StepResult:
        """Run a step as a CUDA graph. Raise a CaptureError if that is not possible."""
        # The counters of a deferred BatchNorm are part of the key of the captured graph. Left as
        # the last step set them, they would make every step look like a new kind of step.
        for layer in self.deferred_batchnorms:
            layer.begin_minibatch(call.inputs.chunks)
        prepared_step = PreparedStep(call.request, call.inputs, call.loss_scale)
        return self._graph_cache.run_step(prepared_step, self._run_eagerly)

    def _run_eagerly(
        self,
        prepared_step: PreparedStep,
        executor: LaneExecutor,
        overrides: CaptureOverrides = NO_OVERRIDES,
    ) -> StepResult:
        """Run a step with its optimizer, in a given executor: to capture it, or to measure it."""
        request, inputs, loss_scale = prepared_step
        call = LocalCall(self, request, inputs, loss_scale, executor, overrides)
        result = execute_step(self._prepared_pipe, call)
        if request.optimizer is not None:
            request.optimizer.step()
        return result

    @property
    def _graph_cache(self) -> GraphCache:
        if self._lazy_state.graph_cache is None:
            self._lazy_state.graph_cache = GraphCache(
                self.placed_partition.partition, self.devices, self.placed_partition.placement
            )
        return self._lazy_state.graph_cache

    @property
    def capture_warnings(self) -> set[str]:
        """The reasons against a capture that the user was warned of."""
        return self._lazy_state.capture_warnings

    def open_exchange(self, request: Request) -> AbstractContextManager[None]:
        """Return an empty context: all stages are in this process."""
        return nullcontext()

    def guarded_slow_call(self, call_name: str, **facts: object) -> AbstractContextManager[object]:
        """Return an empty context: there are no other processes to tell of an error."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> Tensor:
        """Clip gradients by their norm over all stages. Return the norm before clipping."""
        total_norm = compute_total_grad_norm(parameters, None, options)
        clip_grads_with_norm(parameters, total_norm, max_norm, options)
        return total_norm

    def average_gradients(self) -> None:
        """Do nothing: only the wrappers of the stages reduce gradients."""

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """Return a record that says that this process saves alone."""
        return CheckpointPeers()

    @property
    def is_preempted(self) -> bool:
        """Whether SIGTERM has arrived, in a process that saves on preemption."""
        return signals.is_preempted()

    def expect_preemption(self) -> None:
        """Do nothing: there are no other processes to tell."""

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Return the value."""
        return value

    def forecast(self, request: Request, cost: Cost | None) -> Timeline:
        """Return the simulated timeline of a step, by default with the costs of the last step."""
        return self._prepared_pipe.forecast(request, cost, self._lazy_state.last_measured)

    def measure_memory(self, request: Request) -> Memory:
        """Run a step in this thread, undo its effects, and return the bytes it had alive."""
        with self._prepare_isolated_step(request) as (step, program):
            run_step = partial(self._run_eagerly, step)
            placed = self.placed_partition
            readings = profile_step_memory(run_step, placed.devices, placed.placement)
        return Memory(program, readings, self._count_resident_bytes())

    def forecast_memory(self, request: Request, optimizer_factor: float) -> MemoryForecast:
        """Return the bytes that a step will have alive, from a run that needs little memory.

        The effects of that run are undone. An optimizer has `optimizer_factor` times the bytes of
        the gradients.
        """
        placed, traces = self.placed_partition, []
        with self._prepare_isolated_step(request) as (step, program):
            for late_weight_gradients in (False, True)[: 1 + bool(program.schedule.divided)]:
                schedule = order_depth_first(program.schedule, late_weight_gradients)
                factory = ScheduleFactory(schedule, placed.placement)
                cache = ProgramCache(factory, program.graph)
                engine = LocalEngine(replace(self._prepared_pipe, program_cache=cache))
                # The schedule has the Rs already.
                step = step._replace(request=replace(step.request, checkpoint="never"))
                run_step = partial(engine._run_eagerly, step)
                traces.append(trace_storages(run_step, placed.devices, placed.placement))
        held = self._count_resident_bytes()
        with_state = self._count_resident_bytes(1 + optimizer_factor)
        optimizer = tuple(size - part for size, part in zip(with_state, held, strict=True))
        # `pipe.memory` reads the bytes of the CPU after each action, and an accelerator runs out
        # of memory during one.
        on_accelerator = any(is_accelerator(device.device) for device in self.devices)
        peak = forecast_peak(program, traces, with_transient=on_accelerator)
        return MemoryForecast(held, optimizer, peak)

    def _count_resident_bytes(self, gradient_factor: float = 1.0) -> tuple[int, ...]:
        placed = self.placed_partition
        return count_resident_bytes(placed.partition.stages, placed.placement, gradient_factor)

    @contextmanager
    def _prepare_isolated_step(self, request: Request) -> Iterator[tuple[PreparedStep, Program]]:
        """Yield a step on copies of the batch, and its program. Afterwards, undo what ran."""
        self._prepared_pipe.check_model_unchanged()
        if self.replicas:
            raise RunError(
                "pipe.memory undoes the effects of its steps, which is not possible for stages in "
                "DistributedDataParallel or fully_shard. Measure a pipe of the same model without "
                "these wrappers."
            )
        partition = self.placed_partition.partition
        stage_modules = (module for stage in partition.stages for module in stage.modules())
        modules = list(dict.fromkeys([*partition.names(), *stage_modules]))
        batch = request.inputs, dict(request.keyword_inputs), request.target
        with self.call_lock, isolated_step(modules, batch) as (args, kwargs, target):
            isolated_request = replace(
                request, inputs=args, keyword_inputs=kwargs, target=target, audit="off"
            )
            devices = self.placed_partition.stage_devices
            inputs = partition.build_stage_inputs(isolated_request, devices)
            program, _ = self._prepared_pipe.select_step_program(request, inputs)
            yield PreparedStep(isolated_request, inputs, None), program

    def build_executor(self, runtime: str) -> LaneExecutor:
        """Return the executor of one call."""
        mailbox_args = self.devices, self.placed_partition.placement
        # A single rank gains nothing from a thread of its own.
        if len(self.devices) == 1 or runtime == "inline":
            return InlineExecutor(Mailboxes(*mailbox_args))
        return ThreadExecutor(self._get_worker_pool(), *mailbox_args, self._build_forward_lock())

    def remember_measured(self, measured: HasTimeline) -> None:
        """Keep the measured times of a step, for `forecast`."""
        self._lazy_state.last_measured = measured

    def _build_forward_lock(self) -> AbstractContextManager[object] | None:
        """Return the lock that lets one compiled stage at a time compute a forward.

        Stages in DistributedDataParallel or fully_shard get none. They wait for other processes in
        their forward, and two processes that hold their locks for different stages would deadlock.
        """
        return make_forward_lock(self._modules) if self.replicas.is_empty else None

    @cached_property
    def _modules(self) -> list[nn.Module]:
        stage_modules = self.placed_partition.partition.compute_modules()
        return list(
            dict.fromkeys(
                module for stage_module in stage_modules for module in stage_module.modules()
            )
        )

    def find_thread_locals(self, loss_fn: LossFn | None) -> list[threading.local]:
        """Return the `threading.local` objects that the code of the model or a loss refers to."""
        thread_locals, kind = self._lazy_state.thread_locals, identify_loss(loss_fn)
        if kind not in thread_locals:
            partition = self.placed_partition.partition
            stage_modules = (module for stage in partition.stages for module in stage.modules())
            reached = find_reachable([*partition.names(), *stage_modules, loss_fn])
            thread_locals[kind] = reached.find(threading.local)
        return thread_locals[kind]

    @property
    def snapshot(self) -> ModuleSnapshot | None:
        """The state of the modules at the beginning of this call, if the call has looked at it."""
        return self._prepared_pipe.auditor.snapshot

    def find_members(
        self, stages: Sequence[Stage], snapshot: ModuleSnapshot | None
    ) -> tuple[Sequence[StageMembers], set[int]]:
        """Return the members of each stage, and the ids of those that several stages have.

        With a snapshot that is the same as in an earlier call, nothing has changed since. All calls
        of a pipe have stages of the same layers.
        """
        known_members = self._lazy_state.known_members.get(snapshot)
        if known_members is not None:
            return known_members
        by_stage = [collect_members(stage) for stage in stages]
        members = by_stage, find_shared_ids(by_stage)
        modules = [m for m in chain(*map(dict.values, by_stage)) if isinstance(m, nn.Module)]
        if snapshot is not None and snapshot.covers(modules):
            self._lazy_state.known_members.set(snapshot, members)
        return members

    def _get_worker_pool(self) -> WorkerPool:
        """Return the threads of the pipe. They start with its first call and end with the pipe."""
        with self._lazy_state.pool_lock:  # several threads may make the first call
            if (
                self._lazy_state.worker_pool is None
                or not self._lazy_state.worker_pool.is_in_this_process
            ):
                # Threads run in no fixed order. Two ranks that communicate in one process group
                # could start their collectives in another order than the peer process does.
                check_separate_process_groups(
                    self.placed_partition.partition, self.placed_partition.placement
                )
                self._lazy_state.worker_pool = WorkerPool(len(self.devices))
            return self._lazy_state.worker_pool


@dataclass
class _LazyState:
    """The state that is made when a call first needs it. A copy of the pipe starts without it."""

    worker_pool: WorkerPool | None = None
    graph_cache: GraphCache | None = None
    capture_warnings: set[str] = field(default_factory=set)  # reasons that were warned of
    pool_lock: threading.Lock = field(default_factory=threading.Lock)
    call_lock: AbstractContextManager[object] = field(default_factory=threading.RLock)
    last_measured: HasTimeline | None = None
    thread_locals: dict[Any, list[threading.local]] = field(default_factory=dict)  # by loss
    known_members: SnapshotMemo[tuple[Sequence[StageMembers], set[int]]] = field(
        default_factory=SnapshotMemo
    )

    # Threads, locks and captured graphs cannot be copied or pickled.
    def __reduce__(self) -> tuple[type[_LazyState], tuple[()]]:
        return _LazyState, ()


# ---- one call ------------------------------------------------------------------------------------


class LocalTotals(NamedTuple):
    """The totals of a step whose ranks are all in this process."""

    accumulator: LossAccumulator
    rescale_factor: Tensor | None

    @property
    def input_gradient_factor(self) -> Tensor | None:
        """The factor for the gradients of the pipe's inputs."""
        return self.rescale_factor


class LocalCall:
    """One call of a pipe in one process.

    With an `executor`, the call runs in it. Otherwise the call chooses its runtime.
    """

    is_local = True
    has_target: bool
    replica_group = None  # only the wrappers of the stages reduce gradients

    def __init__(
        self,
        engine: LocalEngine,
        request: Request,
        inputs: StageInputs,
        loss_scale: Tensor | None,
        executor: LaneExecutor | None = None,
        overrides: CaptureOverrides = NO_OVERRIDES,
    ) -> None:
        self.request, self.inputs, self.loss_scale = request, inputs, loss_scale
        self.has_target = inputs.has_target
        self._engine, self._executor, self._overrides = engine, executor, overrides
        self._runtime_used = RuntimeUsed("inline")
        if executor is None:
            self._runtime_used = select_runtime(request.runtime, engine.devices, engine.replicas)

    def replay(self) -> StepResult | None:
        """Run the step as a CUDA graph if that is its runtime. Fall back to threads if it fails."""
        if self._runtime_used.runtime != "graph":
            return None
        try:
            result = replace(self._engine.replay_or_capture(self), ran=self._runtime_used)
        except CaptureError as error:
            self._runtime_used = fall_back_to_threads(
                self.request.runtime, error, self._engine.capture_warnings
            )
            return None
        self._propagate_overflow()
        if torch.is_grad_enabled():
            self._engine.remember_measured(result.measured)
        return result

    def build_execution(
        self,
        program: Program,
        stages: Sequence[Stage],
        aux_sink: AuxLossSink | None,
        in_caller_graph: bool,
    ) -> Execution:
        """Return the execution of this call, with the inputs of its cells."""
        schedule, partition = program.schedule, self._engine.placed_partition
        for layer in self._engine.deferred_batchnorms:
            layer.begin_minibatch(schedule.chunks)
        # In a capture the ranks get devices whose timestamps the graph itself writes.
        devices = dict(enumerate(self._overrides.devices)) or partition.devices
        snapshot = self._engine.snapshot
        members_by_stage, shared_ids = self._engine.find_members(stages, snapshot)
        tied_weights = None
        if shared_ids or in_caller_graph:
            tied_weights = build_local_tied_weights(
                stages,
                members_by_stage,
                shared_ids,
                list(devices.values()),
                partition.placement,
                in_caller_graph,
                schedule.chunks,
            )
        is_captured = bool(get_dispatch_modes()) and is_capturing()
        rng_policy = self._overrides.rng_policy
        if not self.request.is_step:
            # Inside the captured step of another pipe, the shared generators are not compared: the
            # capture has rules of its own for random numbers (see cuda_graph/graph_rng.py).
            rng_policy = rng_policy._replace(detect_outside_rng_use=not is_captured)
        return Execution(
            stages,
            schedule,
            devices,
            partition.placement,
            self._executor or self._engine.build_executor(self._runtime_used.runtime),
            build_input_payloads(self.inputs.by_stage),
            tied_weights,
            aux_sink,
            in_caller_graph or self._overrides.require_known_leaves,
            rng_policy,
            allow_host_rng=self._engine.replicas.is_empty,
            # A captured step has no Python state, and its numbers cannot be read.
            compare_recomputations=None if is_captured else self.request.audit != "off",
            thread_locals=self._engine.find_thread_locals(self.request.loss_fn),
            snapshot=snapshot,
        )

    def build_loss(
        self,
        execution: Execution,
        reduction: LossReduction,
        comparison: TermComparison | None = None,
    ) -> LossAccumulator:
        """Return the accumulator of the losses of this step."""
        inputs = self.inputs
        self._accumulator = LossAccumulator(
            reduction, inputs.rows.fractions(), inputs.targets, self.loss_scale, comparison
        )
        return self._accumulator

    def combine(self, execution: Execution, program: Program) -> LocalTotals:
        """Return the totals of the step. All losses are in this process."""
        comparison = self._accumulator.comparison
        if comparison and comparison.is_deferred and self.request.optimizer is not None:
            raise CaptureError(
                "its loss divides by a number that only the device knows, such as the targets that "
                "a cross-entropy does not ignore. Each step compares those of the micro-batches "
                "before the optimizer runs. Pass nn.CrossEntropyLoss(...) itself as loss_fn, or "
                "call optimizer.step() after pipe.step"
            )
        return LocalTotals(self._accumulator, self._accumulator.rescale_factor)

    def complete(self, totals: LocalTotals) -> None:
        """Note that the step has succeeded. A captured step is completed when it is replayed."""
        if self._executor is None:
            self._propagate_overflow()

    def _propagate_overflow(self) -> None:
        """Let processes that hold shards of DTensors agree whether gradients overflowed."""
        if self.request.scaler is not None and torch.is_grad_enabled():
            propagate_overflow(self._engine.placed_partition.partition.parameters(), None)

    def build_result(
        self, execution: Execution, program: Program, totals: LocalTotals
    ) -> StepResult:
        """Return the result of the step."""
        accumulator, rows = totals.accumulator, self.inputs.rows
        comparison = accumulator.comparison
        outputs = [m.extras.output[0] for m in accumulator.microbatch_losses if m.extras.output]
        measured = execution.build_measured_run(program)
        if self._executor is None and torch.is_grad_enabled():
            self._engine.remember_measured(measured)
        loss = accumulator.compute_total_loss()
        result = StepResult(
            loss,
            self.inputs.merge_step_outputs(outputs, loss) if outputs else None,
            combine_metrics(accumulator, rows),
            measured,
            self._runtime_used,
            BatchSize(sum(rows.counts), self.request.count_tokens(), self._engine.torch_devices),
        )
        if comparison is not None and comparison.is_deferred:
            object.__setattr__(result, "_check_terms", comparison.compare_device_numbers)
        return result

    def forward(self, execution: Execution, program: Program, phases: tuple[Phase, Phase]) -> Any:
        """Return the output of `pipe(x)`. With gradients, it is part of the caller's graph."""
        replicas = self._engine.replicas
        replicas.check_forward_allowed()
        autograd_call = AutogradCall(execution, phases, self.inputs.by_stage)
        with replicas.deferred_sync():
            tensors = (
                autograd_call.apply_autograd_function()
                if torch.is_grad_enabled()
                else autograd_call.forward()[0]
            )
        if execution.audits is not None:
            execution.audits.check_outputs()
        return self.inputs.merge_outputs(autograd_call.unflatten_outputs(tensors))
