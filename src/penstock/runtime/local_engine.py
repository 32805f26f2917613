"""A pipe whose ranks are all in this process: threads, or the caller's thread alone."""

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
from penstock.device.device import Device, Gpu
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

# -------------------------------------------------------------------------------------------------
# What carries a step out, of what was asked for and what there is; and why.
# -------------------------------------------------------------------------------------------------


def select_runtime(requested: str, devices: Sequence[Device], replicas: Replicas) -> RuntimeUsed:
    """Before the step."""
    if is_capturing():
        return RuntimeUsed("inline", "it is part of a step that is captured")
    if requested in ("threads", "inline"):
        return RuntimeUsed(requested)
    if requested == "auto" and (sys.gettrace() is not None or torch.is_anomaly_enabled()):
        return RuntimeUsed("inline", "a debugger follows it, or autograd looks for anomalies")
    against = _find_graph_obstacle(devices, replicas)
    if against is None:
        return RuntimeUsed("graph")
    if requested == "graph":
        raise ArgumentError(f"runtime='graph' cannot be, as {against}: take 'threads', or 'auto'")
    return RuntimeUsed("threads", against)


def _find_graph_obstacle(devices: Sequence[Device], replicas: Replicas) -> str | None:
    elsewhere = [place for place in devices if not isinstance(place, Gpu)]
    if elsewhere:
        return f"a rank is on {elsewhere[0]!r}, which has no CUDA graphs"
    if replicas:
        return "a stage is in DistributedDataParallel, replicate or fully_shard"
    return None


def fall_back_to_threads(
    requested: str, error: CaptureError, already_warned: set[str]
) -> RuntimeUsed:
    """After it could not be captured. What is known has been warned of."""
    if requested == "graph":
        if error.is_transient and error.__cause__ is not None:
            error.__cause__.add_note("while the step was captured as a CUDA graph")
            raise error.__cause__
        raise CaptureError(
            f"the step cannot be captured as a CUDA graph: {error}; runtime='auto' takes threads "
            "for such a step"
        ) from error
    text = str(error)
    if text not in already_warned:
        already_warned.add(text)
        warnings.warn(
            f"the step is not captured as a CUDA graph, and runs in threads: {text}", stacklevel=7
        )
    return RuntimeUsed("threads", text)


# -------------------------------------------------------------------------------------------------


class LocalEngine:
    """Answers a pipe's calls. A copy has threads of its own."""

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
        """What the model computes of a batch; behind it, an autograd function."""
        self._prepared_pipe.check_model_unchanged()
        self._replicas.check_forward_allowed()
        fed = build_stage_inputs(
            self._placed_partition.partition, options.chunks, batch, self._device_of
        )
        size = options.build_program_key(fed.chunks, torch.is_grad_enabled())
        program, *phases = self._program_cache.for_graph(fed.graph).get_forward_backward_phases(
            size
        )
        stages = block_aux_losses(self._placed_partition.partition.stages)
        ran = select_runtime(
            options.runtime, list(self._placed_partition.devices.values()), self._replicas
        )
        runtime, tracked = self._build_executor(ran.runtime), torch.is_grad_enabled()
        terms = CaptureOverrides(
            DEFAULT_RNG_POLICY._replace(detect_outside_rng_use=not is_capturing())
        )
        call = self._build_execution(runtime, program, stages, tracked, terms)
        passage = AutogradCall(call, (phases[0], phases[1]), fed.by_stage)
        with self._replicas.deferred_sync():
            tensors = (
                passage.apply_autograd_function()
                if torch.is_grad_enabled()
                else passage.forward()[0]
            )
        return fed.merge_outputs(passage.unflatten_outputs(tensors))

    def step(self, options: CallOptions, batch: Batch, request: StepRequest) -> StepResult:
        """Forward, loss and backward of a batch under the schedule."""
        self._prepared_pipe.check_model_unchanged()
        fed = build_stage_inputs(
            self._placed_partition.partition, options.chunks, batch, self._device_of
        )
        scale = read_loss_scale(
            request.scaler, self._device_of(len(self._placed_partition.partition.stages) - 1)
        )
        with self._get_step_lock():
            result = self._run_with_fallback(PreparedStep(options, request, fed, scale))
        if torch.is_grad_enabled():
            if request.scaler is not None:
                propagate_overflow(self._placed_partition.partition.parameters(), None)
            self._lazy_state.last_measured = result.measured
        return result

    def _run_with_fallback(self, prepared_step: PreparedStep) -> StepResult:
        """By what was asked for, or by what can."""
        ran = select_runtime(
            prepared_step.options.runtime,
            list(self._placed_partition.devices.values()),
            self._replicas,
        )
        if ran.runtime == "graph":
            for (
                layer
            ) in self._deferred_batchnorms:  # or what the last step left would make another kind
                layer.begin_minibatch(prepared_step.stage_inputs.chunks)
            try:
                return replace(self._graph_cache.run_step(prepared_step, self._run_step), ran=ran)
            except CaptureError as reason:
                ran = fall_back_to_threads(
                    prepared_step.options.runtime, reason, self._lazy_state.capture_warnings
                )
        return replace(self._run_step(prepared_step, self._build_executor(ran.runtime)), ran=ran)

    def _run_step(
        self,
        prepared_step: PreparedStep,
        executor: LaneExecutor,
        overrides: CaptureOverrides = NO_OVERRIDES,
    ) -> StepResult:
        settings, lesson, fed = (
            prepared_step.options,
            prepared_step.request,
            prepared_step.stage_inputs,
        )
        program, phase = self._prepared_pipe.select_step_program(settings, fed)
        rule = fed.refine_reduction(resolve_reduction(lesson.loss_fn, settings.reduction))
        stages = append_loss(
            self._placed_partition.partition.stages,
            lesson.loss_fn,
            rule.target_counter,
            fed.has_target,
            lesson.return_outputs,
        )
        ledger = LossAccumulator(rule, fed.rows.fractions(), fed.targets, prepared_step.loss_scale)
        call = self._build_execution(executor, program, stages, False, overrides)
        result = run_train_step(call, program, phase, fed, ledger, self._replicas)
        if lesson.optimizer is not None:
            lesson.optimizer.step()
        return result

    @property
    def _graph_cache(self) -> GraphCache:
        if self._lazy_state.graph_cache is None:
            places = list(self._placed_partition.devices.values())
            self._lazy_state.graph_cache = GraphCache(
                self._placed_partition.partition, places, self._placed_partition.placement
            )
        return self._lazy_state.graph_cache

    def guard_call(self, call_name: str, **facts: object) -> AbstractContextManager[object]:
        """Nothing has to be told to anybody."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> Tensor:
        """All are here."""
        total = compute_total_grad_norm(parameters, None, options)
        clip_grads_with_norm(parameters, total, max_norm, options)
        return total

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """There is one process."""
        return CheckpointPeers()

    def forecast(self, options: CallOptions, cost: Cost | None) -> Timeline:
        """With the costs of the last step, if there was one."""
        return self._prepared_pipe.forecast(options, cost, self._lazy_state.last_measured)

    def measure_memory(self, options: CallOptions, batch: Batch, request: StepRequest) -> Memory:
        """Of a step that is taken in this thread."""
        self._prepared_pipe.check_model_unchanged()
        if self._replicas:
            raise RunError(
                "pipe.memory leaves no trace, and stages in DistributedDataParallel or fully_shard "
                "would: weigh the pipe without them"
            )
        partition, placement = self._placed_partition.partition, self._placed_partition.placement
        inside = (module for stage in partition.stages for module in stage.modules())
        with (
            self._get_step_lock(),
            isolated_step(list(dict.fromkeys([*partition.names(), *inside])), batch) as given,
        ):
            fed = build_stage_inputs(partition, options.chunks, given, self._device_of)
            program, _ = self._prepared_pipe.select_step_program(options, fed)
            run = partial(self._run_step, PreparedStep(options, request, fed, None))
            readings = profile_step_memory(run, self._placed_partition.devices, placement)
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
        places, placement = self._placed_partition.devices, self._placed_partition.placement
        places = dict(enumerate(overrides.devices)) or places
        ties = LocalTiedWeights(
            stages, list(places.values()), placement, in_caller_graph, schedule.chunks
        )
        manner = build_cell_policy(schedule, in_caller_graph or overrides.require_known_leaves)
        return Execution(stages, places, placement, manner, executor, ties, overrides.rng_policy)

    def _build_executor(self, runtime: str) -> LaneExecutor:
        where = list(self._placed_partition.devices.values()), self._placed_partition.placement
        if len(self._placed_partition.devices) == 1 or runtime == "inline":
            return InlineExecutor(Mailboxes(*where))  # of one rank, there is nothing to run beside
        return ThreadExecutor(self._get_worker_pool(), *where, self._build_forward_lock())

    def _build_forward_lock(self) -> AbstractContextManager[object] | None:
        """Stages in wrappers of data parallelism wait for other processes: they take none."""
        return None if self._replicas else make_forward_lock(self._modules)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        found = self._placed_partition.partition.computing()
        return list(dict.fromkeys(module for one in found for module in one.modules()))

    def _device_of(self, stage: int) -> torch.device:
        return self._placed_partition.stage_device(stage).device

    def _get_step_lock(self) -> AbstractContextManager[object]:
        """Within, no other thread takes a step: it would find gradients of another unit."""
        if self._lazy_state.worker_pool is not None:
            self._lazy_state.worker_pool.check_caller()
        return self._lazy_state.step_lock

    def _get_worker_pool(self) -> WorkerPool:
        """The threads: made at the first call, and ended with the pipe."""
        with self._lazy_state.pool_lock:  # one crew, though several threads call
            if (
                self._lazy_state.worker_pool is None
                or not self._lazy_state.worker_pool.is_in_this_process
            ):
                check_separate_process_groups(
                    self._placed_partition.partition, self._placed_partition.placement
                )
                self._lazy_state.worker_pool = WorkerPool(len(self._placed_partition.devices))
            return self._lazy_state.worker_pool


@dataclass
class _LazyState:
    """What is made when it is first needed. A copy of the pipe makes its own."""

    worker_pool: WorkerPool | None = None
    graph_cache: GraphCache | None = None
    capture_warnings: set[str] = field(default_factory=set)  # why steps were not captured
    pool_lock: Lock = field(default_factory=Lock)
    step_lock: AbstractContextManager[object] = field(default_factory=RLock)
    last_measured: HasTimeline | None = None

    def __reduce__(self) -> tuple[type[_LazyState], tuple[()]]:
        return _LazyState, ()
