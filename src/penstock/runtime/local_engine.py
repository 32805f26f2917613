"""`LocalEngine`: runs a pipe whose ranks are all in this process.

A step takes this path:

    step -> build_stage_inputs              split the batch
         -> _run_with_fallback              choose the runtime; threads if a capture fails
              -> GraphCache.run_step        runtime "graph": replay, or capture `_run_step`
              -> _run_step                  runtimes "threads" and "inline"
                   -> _build_execution      stage runners, workers, tied weights
                   -> run_train_step
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor, nn

from penstock.data_parallel.clip import (
    ClipGradOptions,
    clip_grads_with_norm,
    compute_total_grad_norm,
)
from penstock.data_parallel.grad_scaler import propagate_overflow
from penstock.data_parallel.sync import Replicas
from penstock.device.device import Device
from penstock.errors import ArgumentError, RunError
from penstock.model.isolation import isolated_step
from penstock.model.stage_wrapping import check_separate_process_groups
from penstock.runtime.autograd_call import AutogradCall
from penstock.runtime.cuda_graph.capture_guard import CaptureError, is_capturing
from penstock.runtime.cuda_graph.graph_cache import GraphCache
from penstock.runtime.execution import (
    DEFAULT_RNG_POLICY,
    NO_OVERRIDES,
    CaptureOverrides,
    Execution,
    LaneExecutor,
)
from penstock.runtime.inline import InlineExecutor
from penstock.runtime.loss_accumulator import LossAccumulator, read_loss_scale
from penstock.runtime.memory import Memory, count_resident_bytes, profile_step_memory
from penstock.runtime.stage_inputs import Batch, build_stage_inputs
from penstock.runtime.step_request import (
    CallOptions,
    CheckpointPeers,
    PreparedPipe,
    PreparedStep,
    StepRequest,
    build_cell_policy,
)
from penstock.runtime.threads import ThreadExecutor, WorkerPool
from penstock.runtime.tied_gradients import LocalTiedWeights
from penstock.runtime.train_step import HasTimeline, RuntimeUsed, StepResult, run_train_step
from penstock.runtime.transport import Mailboxes
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Program
from penstock.schedules.timeline import Timeline
from penstock.stage.aux_loss import block_aux_losses
from penstock.stage.compile_support import make_forward_lock
from penstock.stage.deferred_batchnorm import find_deferred_batch_norms
from penstock.stage.loss import append_loss, resolve_reduction
from penstock.stage.stage import Stage

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
    if is_capturing():
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
        self._placed_partition, self._program_cache = (
            prepared_pipe.placed_partition,
            prepared_pipe.program_cache,
        )
        self._replicas = prepared_pipe.replicas
        self._deferred_batchnorms = find_deferred_batch_norms(self._placed_partition.local_stages)
        self._lazy_state = _LazyState()

    def forward(self, options: CallOptions, batch: Batch) -> Any:
        """Return the output of the model. It is part of the caller's graph if gradients are on."""
        self._prepared_pipe.check_model_unchanged()
        self._replicas.check_forward_allowed()
        stage_inputs = build_stage_inputs(
            self._placed_partition.partition, options.chunks, batch, self._device_of
        )
        key = options.build_program_key(stage_inputs.chunks, torch.is_grad_enabled())
        program, *phases = self._program_cache.for_graph(
            stage_inputs.graph
        ).get_forward_backward_phases(key)
        # `pipe(x)` returns an output and no loss, so an `add_loss` inside a layer would be lost.
        stages = block_aux_losses(self._placed_partition.partition.stages)
        runtime_used = select_runtime(
            options.runtime, list(self._placed_partition.devices.values()), self._replicas
        )
        executor, in_caller_graph = (
            self._build_executor(runtime_used.runtime),
            torch.is_grad_enabled(),
        )
        # Inside the captured step of another pipe, the shared generators are not compared: the
        # capture has rules of its own for random numbers (see cuda_graph/graph_rng.py).
        overrides = CaptureOverrides(
            DEFAULT_RNG_POLICY._replace(detect_outside_rng_use=not is_capturing())
        )
        execution = self._build_execution(executor, program, stages, in_caller_graph, overrides)
        autograd_call = AutogradCall(execution, (phases[0], phases[1]), stage_inputs.by_stage)
        with self._replicas.deferred_sync():
            tensors = (
                autograd_call.apply_autograd_function()
                if torch.is_grad_enabled()
                else autograd_call.forward()[0]
            )
        return stage_inputs.merge_outputs(autograd_call.unflatten_outputs(tensors))

    def step(self, options: CallOptions, batch: Batch, request: StepRequest) -> StepResult:
        """Run forward, loss and backward of a batch under the schedule."""
        self._prepared_pipe.check_model_unchanged()
        stage_inputs = build_stage_inputs(
            self._placed_partition.partition, options.chunks, batch, self._device_of
        )
        loss_scale = read_loss_scale(
            request.scaler, self._device_of(len(self._placed_partition.partition.stages) - 1)
        )
        with self._get_step_lock():
            result = self._run_with_fallback(
                PreparedStep(options, request, stage_inputs, loss_scale)
            )
        if torch.is_grad_enabled():
            # All ranks are here, so only processes that hold shards of DTensors have to agree.
            if request.scaler is not None:
                propagate_overflow(self._placed_partition.partition.parameters(), None)
            self._lazy_state.last_measured = result.measured
        return result

    def _run_with_fallback(self, prepared_step: PreparedStep) -> StepResult:
        """Run a step with the selected runtime, and in threads if it cannot be captured."""
        runtime_used = select_runtime(
            prepared_step.options.runtime,
            list(self._placed_partition.devices.values()),
            self._replicas,
        )
        if runtime_used.runtime == "graph":
            # The counters of a deferred BatchNorm are part of the key of the captured graph. Left
            # as the last step set them, they would make every step look like a new kind of step.
            for layer in self._deferred_batchnorms:
                layer.begin_minibatch(prepared_step.stage_inputs.chunks)
            try:
                return replace(
                    self._graph_cache.run_step(prepared_step, self._run_step), ran=runtime_used
                )
            except CaptureError as error:
                runtime_used = fall_back_to_threads(
                    prepared_step.options.runtime, error, self._lazy_state.capture_warnings
                )
        return replace(
            self._run_step(prepared_step, self._build_executor(runtime_used.runtime)),
            ran=runtime_used,
        )

    def _run_step(
        self,
        prepared_step: PreparedStep,
        executor: LaneExecutor,
        overrides: CaptureOverrides = NO_OVERRIDES,
    ) -> StepResult:
        options, request, stage_inputs = (
            prepared_step.options,
            prepared_step.request,
            prepared_step.stage_inputs,
        )
        program, phase = self._prepared_pipe.select_step_program(options, stage_inputs)
        reduction = stage_inputs.refine_reduction(
            resolve_reduction(request.loss_fn, options.reduction)
        )
        # The loss is computed by the last stage, in its thread and on its device.
        stages = append_loss(
            self._placed_partition.partition.stages,
            request.loss_fn,
            reduction.target_counter,
            stage_inputs.has_target,
            request.return_outputs,
        )
        accumulator = LossAccumulator(
            reduction,
            stage_inputs.rows.fractions(),
            stage_inputs.targets,
            prepared_step.loss_scale,
        )
        execution = self._build_execution(executor, program, stages, False, overrides)
        result = run_train_step(
            execution, program, phase, stage_inputs, accumulator, self._replicas
        )
        if request.optimizer is not None:
            request.optimizer.step()
        return result

    @property
    def _graph_cache(self) -> GraphCache:
        if self._lazy_state.graph_cache is None:
            devices = list(self._placed_partition.devices.values())
            self._lazy_state.graph_cache = GraphCache(
                self._placed_partition.partition, devices, self._placed_partition.placement
            )
        return self._lazy_state.graph_cache

    def guard_call(self, call_name: str, **facts: object) -> AbstractContextManager[object]:
        """Return an empty context: there are no other processes to tell of an error."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> Tensor:
        """Clip gradients by their norm over all stages. Return the norm before clipping."""
        total_norm = compute_total_grad_norm(parameters, None, options)
        clip_grads_with_norm(parameters, total_norm, max_norm, options)
        return total_norm

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """Return a record that says that this process saves alone."""
        return CheckpointPeers()

    def forecast(self, options: CallOptions, cost: Cost | None) -> Timeline:
        """Return the simulated timeline of a step, by default with the costs of the last step."""
        return self._prepared_pipe.forecast(options, cost, self._lazy_state.last_measured)

    def measure_memory(self, options: CallOptions, batch: Batch, request: StepRequest) -> Memory:
        """Run a step in this thread, undo its effects, and return the bytes it had alive."""
        self._prepared_pipe.check_model_unchanged()
        if self._replicas:
            raise RunError(
                "pipe.memory undoes the effects of its steps, which is not possible for stages in "
                "DistributedDataParallel or fully_shard. Measure a pipe of the same model without "
                "these wrappers."
            )
        partition, placement = self._placed_partition.partition, self._placed_partition.placement
        stage_modules = (module for stage in partition.stages for module in stage.modules())
        with (
            self._get_step_lock(),
            isolated_step(
                list(dict.fromkeys([*partition.names(), *stage_modules])), batch
            ) as isolated_batch,
        ):
            stage_inputs = build_stage_inputs(
                partition, options.chunks, isolated_batch, self._device_of
            )
            program, _ = self._prepared_pipe.select_step_program(options, stage_inputs)
            run_step = partial(self._run_step, PreparedStep(options, request, stage_inputs, None))
            readings = profile_step_memory(run_step, self._placed_partition.devices, placement)
        return Memory(program, readings, count_resident_bytes(partition.stages, placement))

    def _build_execution(
        self,
        executor: LaneExecutor,
        program: Program,
        stages: Sequence[Stage],
        in_caller_graph: bool,
        overrides: CaptureOverrides,
    ) -> Execution:
        schedule = program.schedule
        for layer in self._deferred_batchnorms:
            layer.begin_minibatch(schedule.chunks)
        devices, placement = self._placed_partition.devices, self._placed_partition.placement
        # In a capture the ranks get devices whose timestamps the graph itself writes.
        devices = dict(enumerate(overrides.devices)) or devices
        tied_weights = LocalTiedWeights(
            stages, list(devices.values()), placement, in_caller_graph, schedule.chunks
        )
        cell_policy = build_cell_policy(schedule, in_caller_graph or overrides.require_known_leaves)
        return Execution(
            stages, devices, placement, cell_policy, executor, tied_weights, overrides.rng_policy
        )

    def _build_executor(self, runtime: str) -> LaneExecutor:
        mailbox_args = (
            list(self._placed_partition.devices.values()),
            self._placed_partition.placement,
        )
        # A single rank gains nothing from a thread of its own.
        if len(self._placed_partition.devices) == 1 or runtime == "inline":
            return InlineExecutor(Mailboxes(*mailbox_args))
        return ThreadExecutor(self._get_worker_pool(), *mailbox_args, self._build_forward_lock())

    def _build_forward_lock(self) -> AbstractContextManager[object] | None:
        """Return the lock that lets one compiled stage at a time compute a forward.

        Stages in DistributedDataParallel or fully_shard get none. They wait for other processes in
        their forward, and two processes that hold their locks for different stages would deadlock.
        """
        return None if self._replicas else make_forward_lock(self._modules)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        stage_modules = self._placed_partition.partition.compute_modules()
        return list(
            dict.fromkeys(
                module for stage_module in stage_modules for module in stage_module.modules()
            )
        )

    def _device_of(self, stage: int) -> torch.device:
        return self._placed_partition.stage_device(stage).device

    def _get_step_lock(self) -> AbstractContextManager[object]:
        """Return the lock that a step holds. Raise if the caller is one of the pipe's workers.

        While a step runs, `.grad` may have a provisional scale (see loss_accumulator.py), which a
        step of another thread must not add to.
        """
        # A worker that waited for this lock would block the step that holds it, so it must get its
        # error before.
        if self._lazy_state.worker_pool is not None:
            self._lazy_state.worker_pool.check_caller()
        return self._lazy_state.step_lock

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
                    self._placed_partition.partition, self._placed_partition.placement
                )
                self._lazy_state.worker_pool = WorkerPool(len(self._placed_partition.devices))
            return self._lazy_state.worker_pool


@dataclass
class _LazyState:
    """The state that is made when a call first needs it. A copy of the pipe starts without it."""

    worker_pool: WorkerPool | None = None
    graph_cache: GraphCache | None = None
    capture_warnings: set[str] = field(default_factory=set)  # reasons that were warned of
    pool_lock: Lock = field(default_factory=Lock)
    step_lock: AbstractContextManager[object] = field(default_factory=RLock)
    last_measured: HasTimeline | None = None

    # Threads, locks and captured graphs cannot be copied or pickled.
    def __reduce__(self) -> tuple[type[_LazyState], tuple[()]]:
        return _LazyState, ()
