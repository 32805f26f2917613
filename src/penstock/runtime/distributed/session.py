"""The engine of a pipe whose ranks are processes: one rank's part of every call.

A training step on each rank, all inside `ProcessGroups.guarded_call`, so that an error on one rank
becomes the same RemoteError on all:

1. `CallSetup.prepare_call`   agree on the call; split the batch into the inputs of each stage
2. `_build_execution`         worker, transport, tied weights of this call
3. `_load_inputs`             inputs of local stages; with data="first" they travel here
4. `Execution.run`            the lane of this rank: compute, send, receive
5. `all_gather_results`       loss, rescale factor, timings of all ranks
6. `finish_gradients`, then the all-reduce over replicas
7. `_build_step_result`       update the cache, gradients of inputs, outputs and metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.data_parallel.clip import (
    ClipGradOptions,
    clip_grads_with_norm,
    compute_total_grad_norm,
)
from penstock.data_parallel.grad_scaler import propagate_overflow
from penstock.device.device import Device
from penstock.errors import RunError
from penstock.microbatch import move_to_device
from penstock.runtime.autograd_call import (
    Cell,
    build_input_payloads,
    collect_tensors_by_cell,
    propagate_version_bumps,
)
from penstock.runtime.distributed.call_setup import (
    AgreedCall,
    CallSetup,
    DataPolicy,
    collect_call_facts,
    find_remote_input_cells,
    receive_inputs,
    send_inputs,
)
from penstock.runtime.distributed.channels import (
    CallCacheEntry,
    ProcessTransport,
    assign_message_tags,
)
from penstock.runtime.distributed.control_channel import RankFacts, check_ranks_agree
from penstock.runtime.distributed.links import HostLinks, Links
from penstock.runtime.distributed.process_groups import (
    FIRST_CALL_TIMEOUT_FACTOR,
    SLOW_CALL_TIMEOUT_FACTOR,
    ProcessGroups,
)
from penstock.runtime.distributed.step_results import (
    DistributedLossAccumulator,
    GlobalResult,
    RankResult,
    all_gather_results,
    exchange_replica_shares,
)
from penstock.runtime.distributed.tied_weights import DistributedTiedGradients
from penstock.runtime.execution import Execution, RngPolicy
from penstock.runtime.inline import use_worker_thread_settings
from penstock.runtime.loss_accumulator import LossAccumulator, read_loss_scale
from penstock.runtime.memory import Memory
from penstock.runtime.program_cache import Phase
from penstock.runtime.stage_inputs import Batch
from penstock.runtime.step_request import (
    CallOptions,
    CheckpointPeers,
    PreparedPipe,
    StepRequest,
    build_cell_policy,
)
from penstock.runtime.train_step import HasTimeline, StepResult, backpropagate_to_inputs
from penstock.runtime.transport import Transport
from penstock.runtime.worker import BoundAction, Worker
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Program, Recv
from penstock.schedules.timeline import Timeline
from penstock.stage.aux_loss import block_aux_losses
from penstock.stage.caller_context import CallerContext
from penstock.stage.deferred_batchnorm import find_deferred_batch_norms
from penstock.stage.loss import append_loss, resolve_reduction
from penstock.stage.payload import Payload, unflatten_values
from penstock.stage.rng import advance_caller_rng
from penstock.stage.stage import Stage

# -------------------------------------------------------------------------------------------------
# The lane of one rank, in the caller's thread
# -------------------------------------------------------------------------------------------------

# How many computations earlier a receive is posted. With one, small messages are posted too late.
PREFETCH_DISTANCE = 2


class RankExecutor:
    """Runs the lane of this process. `on_compute` is called before each computation."""

    def __init__(
        self,
        transport: ProcessTransport,
        on_compute: Callable[[object], None],
        cache_entry: CallCacheEntry,
    ) -> None:
        self._transport, self._on_compute, self._cache_entry = transport, on_compute, cache_entry

    def endpoint(self, rank: int) -> Transport:
        """Return the transport. This process has only one rank."""
        return self._transport

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Run all actions of the lane, and wait until the receivers have all messages."""
        (worker,) = workers
        actions = self._order_actions(phase.lanes[worker.rank])
        # Do not enter inference_mode(False): it sets the whole autograd state of the thread, and so
        # it enables autograd's own threads again, which use_worker_thread_settings disables.
        mode = torch.inference_mode() if context.inference_mode else nullcontext()
        with use_worker_thread_settings(context), mode, worker.device.activate():
            for bound_action in actions:
                if isinstance(bound_action.action, Compute):
                    self._on_compute(bound_action.action)
                worker.execute(bound_action)
            self._transport.flush()

    def _order_actions(self, actions: Sequence[BoundAction]) -> Sequence[BoundAction]:
        """Return the actions with receives moved forward, once the shapes of messages are known.

        In the first call the header of a message must arrive before its receive can be posted.
        """
        entry = self._cache_entry
        if not entry.is_complete:
            return actions
        if entry.prefetch_order is None or entry.prefetch_order[0] is not actions:
            entry.prefetch_order = actions, prefetch_receives(actions)
        return entry.prefetch_order[1]


def prefetch_receives(actions: Sequence[BoundAction]) -> list[BoundAction]:
    """Return the actions with each receive posted PREFETCH_DISTANCE computations earlier.

    The message then arrives while the rank computes:

        before   F0 F1 recv F2        after   recv F0 F1 F2

    An early receive blocks no rank, so the new order cannot deadlock if the old one does not.
    It needs memory for PREFETCH_DISTANCE more messages from each sender. Receives keep their order
    among each other: NCCL matches messages by order.
    """
    ordered: list[BoundAction] = []
    lowest_index = 0  # after the last receive
    for bound_action in actions:
        if not isinstance(bound_action.action, Recv):
            ordered.append(bound_action)
            continue
        index = len(ordered)
        for _ in range(PREFETCH_DISTANCE):
            while index > lowest_index and not isinstance(ordered[index - 1].action, Compute):
                index -= 1
            index = max(index - 1, lowest_index)
        ordered.insert(index, bound_action)
        lowest_index = index + 1
    return ordered


# -------------------------------------------------------------------------------------------------
# The engine
# -------------------------------------------------------------------------------------------------


class DistributedEngine:
    """Runs the calls of a pipe on one of its ranks. All ranks make the same calls."""

    def __init__(
        self, groups: ProcessGroups, prepared_pipe: PreparedPipe, data_policy: DataPolicy
    ) -> None:
        self.groups, self._prepared_pipe, self._data_policy = groups, prepared_pipe, data_policy
        self._placed_partition, self._program_cache = (
            prepared_pipe.placed_partition,
            prepared_pipe.program_cache,
        )
        self._replicas = prepared_pipe.replicas
        self._deferred_batchnorms = find_deferred_batch_norms(self._placed_partition.local_stages)
        groups.open_links(self._placed_partition.communicating_ranks)
        self._call_setup = CallSetup(groups, self._placed_partition, data_policy)
        self._last_step: HasTimeline | None = None

    # ---- the calls of a pipe --------------------------------------------------------------

    def forward(self, options: CallOptions, batch: Batch) -> Any:
        """Return the outputs of the model, on the last rank or on all. Raise if grad is enabled."""
        with self.groups.guarded_call("forward") as name:
            agreed_call = self._prepare_call(name, options, batch, collect_call_facts(options), "")
            if torch.is_grad_enabled():
                raise RunError(
                    "pipe(x) cannot be differentiated over several processes, because the loss "
                    "would exist on one of them only. Train with pipe.step(x, target=y), and call "
                    "pipe(x) under torch.no_grad()."
                )
            stage_inputs = agreed_call.stage_inputs
            program_key = options.build_program_key(stage_inputs.chunks, False)
            program, phase, _ = self._program_cache.for_graph(
                stage_inputs.graph
            ).get_forward_backward_phases(program_key)
            execution, transport = self._build_execution(
                program, block_aux_losses(self._stages), agreed_call
            )
            self._load_inputs(execution, program, agreed_call)
            execution.run(phase)
            self._wait_for_device(execution)
            _copy_back_input_changes(collect_tensors_by_cell(stage_inputs.by_stage), execution)
            outputs = None
            if self._placed_partition.is_local(self._last_stage):
                cells = [(self._last_stage, i) for i in range(stage_inputs.chunks)]
                values = [_unpack_output(execution.cell_io.outputs.pop(cell)) for cell in cells]
                outputs = stage_inputs.merge_outputs(values)
            global_result = all_gather_results(
                self.groups.pipeline_channel,
                program,
                execution,
                RankResult(used_rng=execution.used_rng),
            )
            self._finish_call(global_result, agreed_call, transport)
            return (
                self._broadcast_from_last_rank(outputs)
                if self._data_policy.outputs == "all"
                else outputs
            )

    def step(self, options: CallOptions, batch: Batch, request: StepRequest) -> StepResult:
        """Run forward, loss and backward under the schedule. Return the same on all ranks."""
        with self.groups.guarded_call("step") as name:
            facts = collect_call_facts(
                options,
                outputs=request.return_outputs,
                scaler=request.scaler is not None,
                optimizer=request.optimizer is not None,
                no_sync=not self._replicas.sync_enabled,
            )
            agreed_call = self._prepare_call(
                name, options, batch, facts, _qualified_name(request.loss_fn)
            )
            program, phase = self._prepared_pipe.select_step_program(
                options, agreed_call.stage_inputs
            )
            result = self._run_train_step(options, request, agreed_call, program, phase)
        # Outside the guarded call: an optimizer step needs no other rank.
        if request.optimizer is not None:
            request.optimizer.step()
        return result

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> torch.Tensor:
        """Clip the gradients of all ranks by their total norm, and return that norm.

        All ranks call this. A tied parameter counts once, on its owner.
        """
        with self.groups.guarded_call("clipping gradients") as name:
            check_ranks_agree(
                self.groups.pipeline_channel,
                name,
                {"max_norm": str(max_norm), **_to_facts(asdict(options))},
            )
            owned_elsewhere = {
                id(t.local_tensor)
                for t in self._placed_partition.tied_tensors
                if t.owner_rank != self.groups.rank
            }
            owned = [p for p in parameters if id(p) not in owned_elsewhere]
            total_norm = compute_total_grad_norm(owned, self.groups.pipeline_channel, options)
        clip_grads_with_norm(parameters, total_norm, max_norm, options)
        return total_norm

    @contextmanager
    def guard_call(self, call_name: str, **facts: object) -> Iterator[None]:
        """Run a slow call, such as a save: check that all ranks make it, and share its errors."""
        with self.groups.guarded_call(call_name, SLOW_CALL_TIMEOUT_FACTOR) as name:
            check_ranks_agree(self.groups.pipeline_channel, name, _to_facts(facts))
            yield

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """Return the process group for checkpoints, over all replicas, and this replica's index."""
        return CheckpointPeers(self.groups.get_save_channel(), self.groups.topology.replica_index)

    def forecast(self, options: CallOptions, cost: Cost | None) -> Timeline:
        """Simulate a step with the given cost, or with the measured costs of the last step."""
        return self._prepared_pipe.forecast(options, cost, self._last_step)

    def measure_memory(self, options: CallOptions, batch: Batch, request: StepRequest) -> Memory:
        """Raise: measuring needs all stages in one process."""
        raise RunError(
            "pipe.memory measures a step in one thread, but the ranks of this pipe are processes. "
            "Create the same pipe in one process, or read torch.cuda.max_memory_allocated() on "
            "each rank."
        )

    # ---- the beginning and the end of a call ----------------------------------------------

    @property
    def _stages(self) -> Sequence[Stage]:
        return self._placed_partition.partition.stages

    @property
    def _last_stage(self) -> int:
        return len(self._stages) - 1

    @property
    def _device(self) -> Device:
        return self._placed_partition.devices[self.groups.rank]

    def _prepare_call(
        self, call_name: str, options: CallOptions, batch: Batch, facts: RankFacts, local_state: str
    ) -> AgreedCall:
        """Agree on the call with all ranks, and open the links that its stage graph needs."""
        self._prepared_pipe.check_model_unchanged()
        agreed_call = self._call_setup.prepare_call(call_name, options, batch, facts, local_state)
        self.groups.open_links(
            self._placed_partition.find_communicating_ranks(agreed_call.stage_inputs.graph)
        )
        return agreed_call

    def _build_execution(
        self, program: Program, stages: Sequence[Stage], agreed_call: AgreedCall
    ) -> tuple[Execution, ProcessTransport]:
        schedule, groups = program.schedule, self.groups
        for layer in self._deferred_batchnorms:
            layer.begin_minibatch(schedule.chunks)
        transport = self._build_transport(groups.links, program, agreed_call.cache_entry)
        local_stages = [stages[stage.index] for stage in self._placed_partition.local_stages]
        tied_gradients = DistributedTiedGradients(
            local_stages,
            self._placed_partition.tied_tensors,
            schedule.chunks,
            groups.pipeline_channel,
        )
        # All ranks use the seed of the first rank. `_finish_call` advances the generator, once it
        # is known whether any rank drew random numbers.
        rng_policy = RngPolicy(lambda: agreed_call.seed, lambda: None)
        on_compute = (
            partial(groups.watchdog.mark_computing, timeout_factor=FIRST_CALL_TIMEOUT_FACTOR)
            if agreed_call.is_first_call
            else groups.watchdog.mark_computing
        )
        executor = RankExecutor(transport, on_compute, agreed_call.cache_entry)
        devices_and_placement = self._placed_partition.devices, self._placed_partition.placement
        execution = Execution(
            stages,
            *devices_and_placement,
            build_cell_policy(schedule),
            executor,
            tied_gradients,
            rng_policy,
        )
        return execution, transport

    def _build_transport(
        self, links: Links, program: Program, cache_entry: CallCacheEntry
    ) -> ProcessTransport:
        groups = self.groups
        return ProcessTransport(
            links,
            self._placed_partition.placement,
            assign_message_tags(program),
            cache_entry,
            groups.pipeline_channel,
            groups.pipeline_watchdog,
        )

    def _load_inputs(self, execution: Execution, program: Program, agreed_call: AgreedCall) -> None:
        """Set the inputs of the local cells. With data="first", exchange inputs between ranks."""
        partition, inputs = self._placed_partition, agreed_call.stage_inputs.by_stage
        execution.cell_io.inputs = build_input_payloads(
            {s: v for s, v in inputs.items() if partition.is_local(s)}
        )
        if self._call_setup.scatters_inputs:
            # Through host memory: NCCL communicators exist only for ranks whose stages exchange
            # messages.
            transport = self._build_transport(
                HostLinks(self.groups.pipeline_channel.group), program, agreed_call.cache_entry
            )
            cells = find_remote_input_cells(agreed_call.announcement, partition)
            if self.groups.rank == partition.placement[0]:
                send_inputs(inputs, cells, partition, transport)
            else:
                execution.cell_io.inputs |= receive_inputs(
                    cells, partition, transport, self._device.device
                )

    def _wait_for_device(self, execution: Execution) -> None:
        """Wait until the GPU has run the lane, and tell the watchdog so.

        Over NCCL the GPU waits for other ranks, so a wait for the GPU may be a wait for a rank that
        has died. One wait per action lets the watchdog see that a long step makes progress.
        """
        (worker,) = execution.workers
        watchdog = self.groups.pipeline_watchdog
        for bound_action, _, end in worker.timed_actions:
            if isinstance(end, torch.cuda.Event):
                watchdog.mark_waiting(_GpuWait(bound_action.action))
                end.synchronize()
                watchdog.mark_arrived()

    def _finish_call(
        self, global_result: GlobalResult, agreed_call: AgreedCall, transport: ProcessTransport
    ) -> None:
        """Finish a successful call: advance the RNG and mark the cache entry as complete.

        All ranks advance the RNG if any rank drew random numbers, so that their generators stay
        equal. The entry is complete only here, after all ranks have reported success.
        """
        if global_result.used_rng:
            advance_caller_rng()
        self.groups.pipeline_channel.flush()
        agreed_call.cache_entry.loss_is_weighted = transport.loss_is_weighted
        self.groups.get_cache_entry(agreed_call.cache_key).is_complete = True

    def _broadcast_from_last_rank(self, value: Any) -> Any:
        """Return the value of the rank with the last stage, on the device of this rank."""
        last_rank = self._placed_partition.placement[self._last_stage]
        received = self.groups.pipeline_channel.broadcast_value(last_rank, value, "outputs")
        return move_to_device(received, self._device.device)

    # ---- a training step ------------------------------------------------------------------

    def _run_train_step(
        self,
        options: CallOptions,
        request: StepRequest,
        agreed_call: AgreedCall,
        program: Program,
        phase: Phase,
    ) -> StepResult:
        reduction = agreed_call.stage_inputs.refine_reduction(
            resolve_reduction(request.loss_fn, options.reduction)
        )
        has_target = agreed_call.announcement.has_target
        stages = append_loss(
            self._stages,
            request.loss_fn,
            reduction.target_counter,
            has_target,
            request.return_outputs,
        )
        execution, transport = self._build_execution(program, stages, agreed_call)
        self._load_inputs(execution, program, agreed_call)
        scale = read_loss_scale(request.scaler, self._device.device)
        has_last_stage = self._placed_partition.is_local(self._last_stage)
        accumulator, replica_losses = None, None
        if has_last_stage:
            targets = (
                self._collect_targets(execution, agreed_call)
                if has_target
                else [()] * agreed_call.stage_inputs.chunks
            )
            accumulator = LossAccumulator(
                reduction, agreed_call.stage_inputs.rows.fractions(), targets, scale
            )
            if self.groups.averaging_channel is not None:
                replica_losses = exchange_replica_shares(
                    self.groups.averaging_channel,
                    agreed_call.facts,
                    accumulator,
                    agreed_call.stage_inputs.rows,
                )
        loss = DistributedLossAccumulator(
            accumulator, replica_losses, transport, agreed_call.cache_entry
        )
        execution.cell_io.before_backward = loss.before_backward
        execution.cell_io.compute_output_gradients = (
            loss.compute_output_gradients if has_last_stage else None
        )
        # Gradients are reduced over replicas once, when this block ends. They must have their final
        # scale by then, so all ranks get the rescale factor inside it.
        with self._replicas.deferred_sync(self.groups.averaging_group) as deferred:
            try:
                execution.run(phase)
                self._wait_for_device(execution)
                send_outputs = request.return_outputs and self._data_policy.outputs == "all"
                rank_result = loss.build_rank_result(
                    execution.used_rng, agreed_call.stage_inputs.rows, send_outputs
                )
                global_result = all_gather_results(
                    self.groups.pipeline_channel, program, execution, rank_result
                )
            except BaseException:
                loss.restore_gradients()
                raise
            loss.finish_gradients(global_result.rescale_factor)
            deferred.rescale_factor = global_result.rescale_factor
            self._wait_for_replicas()
        if request.scaler is not None and torch.is_grad_enabled():
            propagate_overflow(
                self._placed_partition.partition.parameters(), self.groups.pipeline_channel
            )
        return self._build_step_result(execution, agreed_call, transport, loss, global_result)

    def _wait_for_replicas(self) -> None:
        """Wait until all replicas are about to start the collectives of DDP or FSDP.

        Those run in the user's process groups, which the watchdog cannot abort. A failure before
        this point is found in a wait of ours instead of a collective that hangs.
        """
        if self._replicas and self.groups.replica_channel is not None:
            self.groups.replica_channel.all_gather(torch.zeros(1), "the end of its step")
            self.groups.watchdog.mark_computing("the reduction of gradients")

    def _collect_targets(
        self, execution: Execution, agreed_call: AgreedCall
    ) -> list[tuple[Any, ...]]:
        cells = [(self._last_stage, i) for i in range(agreed_call.stage_inputs.chunks)]
        payloads = [execution.cell_io.inputs[cell] for cell in cells]
        return [unflatten_values(p.tensors, p.layout)[-1:] for p in payloads]  # type: ignore[arg-type]

    def _build_step_result(
        self,
        execution: Execution,
        agreed_call: AgreedCall,
        transport: ProcessTransport,
        loss_accumulator: DistributedLossAccumulator,
        global_result: GlobalResult,
    ) -> StepResult:
        """Finish the call and return its result, which is the same on all ranks."""
        self._finish_call(global_result, agreed_call, transport)
        inputs_by_cell = collect_tensors_by_cell(agreed_call.stage_inputs.by_stage)
        _copy_back_input_changes(inputs_by_cell, execution)
        backpropagate_to_inputs(
            inputs_by_cell, execution, self._input_gradient_factor(global_result.rescale_factor)
        )
        outputs, metrics = (
            loss_accumulator.collect_outputs(agreed_call.stage_inputs.rows),
            loss_accumulator.metrics,
        )
        if global_result.has_outputs:
            shared_outputs = outputs if self._data_policy.outputs == "all" else None
            broadcast_outputs, metrics = self._broadcast_from_last_rank((shared_outputs, metrics))
            outputs = broadcast_outputs if outputs is None else outputs
        loss = torch.tensor(
            global_result.loss, dtype=global_result.loss_dtype, device=self._device.device
        )
        if torch.is_grad_enabled():
            self._last_step = global_result.timings
        return StepResult(loss, outputs, metrics, global_result.timings)

    def _input_gradient_factor(self, rescale_factor: Tensor | None) -> Tensor | None:
        """Return the factor for gradients of inputs, which are not averaged over replicas.

        Gradients of a step are scaled so that their mean over replicas is right. An input belongs
        to one replica, so its gradient is divided by the number of replicas here.
        """
        if self.groups.averaging_channel is None:
            return rescale_factor
        return (
            torch.ones(()).double() if rescale_factor is None else rescale_factor
        ) / self.groups.averaging_channel.size


@dataclass(frozen=True)
class _GpuWait:
    """A wait for an action on the GPU. The text is built only when a heartbeat needs it."""

    action: object

    def __str__(self) -> str:
        return f"the messages that {self.action} needs on the GPU"


def _unpack_output(payload: Payload) -> Any:
    (value,) = unflatten_values(payload.tensors, payload.layout)  # type: ignore[arg-type]
    return value


def _copy_back_input_changes(
    inputs_by_cell: Mapping[Cell, Sequence[Tensor]], execution: Execution
) -> None:
    for cell, tensors in inputs_by_cell.items():
        if cell in execution.cell_io.inputs:
            propagate_version_bumps(tensors, execution.cell_io.inputs[cell].tensors)


def _to_facts(values: Mapping[str, object]) -> RankFacts:
    return {name: str(value) for name, value in values.items()}


def _qualified_name(loss_fn: Any) -> str:
    named_object = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    return f"{named_object.__module__}.{named_object.__qualname__}"
