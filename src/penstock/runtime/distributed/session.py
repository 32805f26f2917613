"""A pipe each of whose ranks is a process: what one of them does when all call the pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
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
# One rank's lane, in the caller's thread: the runtime of a call among several processes.
# -------------------------------------------------------------------------------------------------

PREFETCH_DISTANCE = 2  # computations: with one, small messages are asked for too late


class RankExecutor:
    """Carries out the steps of this process's rank; `at` is told of each computation."""

    def __init__(
        self,
        transport: ProcessTransport,
        on_compute: Callable[[object], None],
        cache_entry: CallCacheEntry,
    ) -> None:
        self._transport, self._on_compute, self._cache_entry = transport, on_compute, cache_entry

    def endpoint(self, rank: int) -> Transport:
        """This process has one rank."""
        return self._transport

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Until all that was sent has been taken."""
        (worker,) = workers
        steps = self._order_actions(phase.lanes[worker.rank])
        # inference_mode(False) would switch autograd's threads on again
        mode = torch.inference_mode() if context.inference_mode else nullcontext()
        with use_worker_thread_settings(context), mode, worker.device.activate():
            for step in steps:
                if isinstance(step.action, Compute):
                    self._on_compute(step.action)
                worker.execute(step)
            self._transport.flush()

    def _order_actions(self, actions: Sequence[BoundAction]) -> Sequence[BoundAction]:
        """Receives early, if their sizes are known; found once for a signature."""
        learned = self._cache_entry
        if not learned.is_complete:
            return actions
        if learned.prefetch_order is None or learned.prefetch_order[0] is not actions:
            learned.prefetch_order = actions, prefetch_receives(actions)
        return learned.prefetch_order[1]


def prefetch_receives(actions: Sequence[BoundAction]) -> list[BoundAction]:
    """Each receive some computations earlier, so that the message arrives during those.

    A receive that is asked for early blocks nobody; so this program ends if the other does. It
    needs memory for as many more messages from each sender.
    """
    out: list[BoundAction] = []
    least = 0  # receives keep their order
    for step in actions:
        if not isinstance(step.action, Recv):
            out.append(step)
            continue
        at = len(out)
        for _ in range(PREFETCH_DISTANCE):
            while at > least and not isinstance(out[at - 1].action, Compute):
                at -= 1
            at = max(at - 1, least)
        out.insert(at, step)
        least = at + 1
    return out


# -------------------------------------------------------------------------------------------------


class DistributedEngine:
    """Answers a pipe's calls, on one of its ranks."""

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

    # ---- the two doors --------------------------------------------------------------------

    def forward(self, options: CallOptions, batch: Batch) -> Any:
        """What the model computes of a batch: on the last rank, or on all."""
        with self.groups.guarded_call("forward") as name:
            opened = self._prepare_call(name, options, batch, collect_call_facts(options), "")
            if torch.is_grad_enabled():
                raise RunError(
                    "pipe(x) cannot be differentiated over several processes, as the loss would be "
                    "on one of them alone: train with pipe.step(x, target=y), and call pipe(x) "
                    "under torch.no_grad()"
                )
            size = options.build_program_key(opened.stage_inputs.chunks, False)
            program, phase, _ = self._program_cache.for_graph(
                opened.stage_inputs.graph
            ).get_forward_backward_phases(size)
            call, wire = self._build_execution(program, block_aux_losses(self._stages), opened)
            self._load_inputs(call, program, opened)
            call.run(phase)
            _copy_back_input_changes(collect_tensors_by_cell(opened.stage_inputs.by_stage), call)
            outputs = None
            if self._placed_partition.is_local(self._last_stage):
                cells = [(self._last_stage, i) for i in range(opened.stage_inputs.chunks)]
                values = [_unpack_output(call.cell_io.outputs.pop(cell)) for cell in cells]
                outputs = opened.stage_inputs.merge_outputs(values)
            told = all_gather_results(
                self.groups.pipeline_channel, program, call, RankResult(used_rng=call.used_rng)
            )
            self._finish_call(told, opened, wire)
            return (
                self._broadcast_from_last_rank(outputs)
                if self._data_policy.outputs == "all"
                else outputs
            )

    def step(self, options: CallOptions, batch: Batch, request: StepRequest) -> StepResult:
        """Forward, loss and backward of a batch under the schedule."""
        with self.groups.guarded_call("step") as name:
            facts = collect_call_facts(
                options,
                outputs=request.return_outputs,
                scaler=request.scaler is not None,
                optimizer=request.optimizer is not None,
                no_sync=not self._replicas.sync_enabled,
            )
            opened = self._prepare_call(
                name, options, batch, facts, _qualified_name(request.loss_fn)
            )
            program, phase = self._prepared_pipe.select_step_program(options, opened.stage_inputs)
            result = self._run_train_step(options, request, opened, program, phase)
        if request.optimizer is not None:
            request.optimizer.step()
        return result

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> torch.Tensor:
        """All ranks call it, and each owns what no rank before has."""
        with self.groups.guarded_call("clipping gradients") as name:
            check_ranks_agree(
                self.groups.pipeline_channel,
                name,
                {"max_norm": str(max_norm), **_to_facts(asdict(options))},
            )
            elsewhere = {
                id(t.local_tensor)
                for t in self._placed_partition.tied_tensors
                if t.owner_rank != self.groups.rank
            }
            owned = [p for p in parameters if id(p) not in elsewhere]
            total = compute_total_grad_norm(owned, self.groups.pipeline_channel, options)
        clip_grads_with_norm(parameters, total, max_norm, options)
        return total

    @contextmanager
    def guard_call(self, call_name: str, **facts: object) -> Iterator[None]:
        """Within, what is raised on one rank is raised on all; it may take long."""
        with self.groups.guarded_call(call_name, SLOW_CALL_TIMEOUT_FACTOR) as name:
            check_ranks_agree(self.groups.pipeline_channel, name, _to_facts(facts))
            yield

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """The ranks of all copies."""
        return CheckpointPeers(
            self.groups.get_save_process_group(), self.groups.topology.replica_index
        )

    def forecast(self, options: CallOptions, cost: Cost | None) -> Timeline:
        """With the costs of the last step, if there was one."""
        return self._prepared_pipe.forecast(options, cost, self._last_step)

    def measure_memory(self, options: CallOptions, batch: Batch, request: StepRequest) -> Memory:
        """Refused."""
        raise RunError(
            "pipe.memory takes its step in one thread, and this pipe's ranks are processes: make "
            "the same pipe in one process, or read torch.cuda.max_memory_allocated() on each rank"
        )

    # ---- how a call begins and ends -------------------------------------------------------

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
        """Agree on what is about to be done; then every rank knows the sizes of it."""
        self._prepared_pipe.check_model_unchanged()
        opened = self._call_setup.prepare_call(call_name, options, batch, facts, local_state)
        self.groups.open_links(
            self._placed_partition.find_communicating_ranks(opened.stage_inputs.graph)
        )
        return opened

    def _build_execution(
        self, program: Program, stages: Sequence[Stage], agreed_call: AgreedCall
    ) -> tuple[Execution, ProcessTransport]:
        schedule, team = program.schedule, self.groups
        for layer in self._deferred_batchnorms:
            layer.begin_minibatch(schedule.chunks)
        wire = self._build_transport(team.links, program, agreed_call.cache_entry)
        here = [stages[stage.index] for stage in self._placed_partition.local_stages]
        ties = DistributedTiedGradients(
            here, self._placed_partition.tied_tensors, schedule.chunks, team.pipeline_channel
        )
        draws = RngPolicy(lambda: agreed_call.seed, lambda: None)  # it moves on when all have told
        at = (
            partial(team.watchdog.mark_computing, timeout_factor=FIRST_CALL_TIMEOUT_FACTOR)
            if agreed_call.is_first_call
            else team.watchdog.mark_computing
        )
        lane = RankExecutor(wire, at, agreed_call.cache_entry)
        where = self._placed_partition.devices, self._placed_partition.placement
        return Execution(stages, *where, build_cell_policy(schedule), lane, ties, draws), wire

    def _build_transport(
        self, links: Links, program: Program, cache_entry: CallCacheEntry
    ) -> ProcessTransport:
        team = self.groups
        return ProcessTransport(
            links,
            self._placed_partition.placement,
            assign_message_tags(program),
            cache_entry,
            team.pipeline_channel,
            team.pipeline_watchdog,
        )

    def _load_inputs(self, execution: Execution, program: Program, agreed_call: AgreedCall) -> None:
        """What comes from outside into this rank's cells, and from it into others'."""
        split, given = self._placed_partition, agreed_call.stage_inputs.by_stage
        execution.cell_io.inputs = build_input_payloads(
            {s: v for s, v in given.items() if split.is_local(s)}
        )
        if self._call_setup.scatters_inputs:
            wire = self._build_transport(
                HostLinks(self.groups.pipeline_channel.group), program, agreed_call.cache_entry
            )
            cells = find_remote_input_cells(agreed_call.announcement, split)
            if self.groups.rank == split.placement[0]:
                send_inputs(given, cells, split, wire)
            else:
                execution.cell_io.inputs |= receive_inputs(cells, split, wire, self._device.device)

    def _finish_call(
        self, global_result: GlobalResult, agreed_call: AgreedCall, transport: ProcessTransport
    ) -> None:
        """All went well: the generator moves on if any rank drew, and what was seen is known."""
        if global_result.used_rng:
            advance_caller_rng()
        self.groups.pipeline_channel.flush()
        agreed_call.cache_entry.loss_is_weighted = transport.loss_is_weighted
        self.groups.get_cache_entry(agreed_call.cache_key).is_complete = True

    def _broadcast_from_last_rank(self, value: Any) -> Any:
        """What the last stage's rank has, on all of them."""
        last = self._placed_partition.placement[self._last_stage]
        found = self.groups.pipeline_channel.broadcast_value(last, value, "outputs")
        return move_to_device(found, self._device.device)

    # ---- a training step ------------------------------------------------------------------

    def _run_train_step(
        self,
        options: CallOptions,
        request: StepRequest,
        agreed_call: AgreedCall,
        program: Program,
        phase: Phase,
    ) -> StepResult:
        rule = agreed_call.stage_inputs.refine_reduction(
            resolve_reduction(request.loss_fn, options.reduction)
        )
        target = agreed_call.announcement.has_target
        stages = append_loss(
            self._stages, request.loss_fn, rule.target_counter, target, request.return_outputs
        )
        call, wire = self._build_execution(program, stages, agreed_call)
        self._load_inputs(call, program, agreed_call)
        scale = read_loss_scale(request.scaler, self._device.device)
        ends_here = self._placed_partition.is_local(self._last_stage)
        ledger, together = None, None
        if ends_here:
            targets = (
                self._collect_targets(call, agreed_call)
                if target
                else [()] * agreed_call.stage_inputs.chunks
            )
            ledger = LossAccumulator(
                rule, agreed_call.stage_inputs.rows.fractions(), targets, scale
            )
            if self.groups.averaging_channel is not None:
                together = exchange_replica_shares(
                    self.groups.averaging_channel,
                    agreed_call.facts,
                    ledger,
                    agreed_call.stage_inputs.rows,
                )
        book = DistributedLossAccumulator(ledger, together, wire, agreed_call.cache_entry)
        call.cell_io.before_backward = book.before_backward
        call.cell_io.compute_output_gradients = book.compute_output_gradients if ends_here else None
        with self._replicas.deferred_sync(self.groups.averaging_group) as held:
            try:
                call.run(phase)
                more = request.return_outputs and self._data_policy.outputs == "all"
                ending = book.build_rank_result(call.used_rng, agreed_call.stage_inputs.rows, more)
                told = all_gather_results(self.groups.pipeline_channel, program, call, ending)
            except BaseException:
                book.restore_gradients()
                raise
            book.finish_gradients(told.rescale_factor)
            held.rescale_factor = told.rescale_factor
            self._wait_for_replicas()
        if request.scaler is not None and torch.is_grad_enabled():
            propagate_overflow(
                self._placed_partition.partition.parameters(), self.groups.pipeline_channel
            )
        return self._build_step_result(call, agreed_call, wire, book, told)

    def _wait_for_replicas(self) -> None:
        """Of the wrappers' collectives nobody can be woken: let all copies come so far first."""
        if self._replicas and self.groups.replica_channel is not None:
            self.groups.replica_channel.all_gather(torch.zeros(1), "the end of its step")
            self.groups.watchdog.mark_computing("the reduction of gradients")

    def _collect_targets(
        self, execution: Execution, agreed_call: AgreedCall
    ) -> list[tuple[Any, ...]]:
        cells = [(self._last_stage, i) for i in range(agreed_call.stage_inputs.chunks)]
        parcels = [execution.cell_io.inputs[cell] for cell in cells]
        return [unflatten_values(p.tensors, p.layout)[-1:] for p in parcels]  # type: ignore[arg-type]

    def _build_step_result(
        self,
        execution: Execution,
        agreed_call: AgreedCall,
        transport: ProcessTransport,
        loss_accumulator: DistributedLossAccumulator,
        global_result: GlobalResult,
    ) -> StepResult:
        """After all ranks have told: the same result on each."""
        self._finish_call(global_result, agreed_call, transport)
        given = collect_tensors_by_cell(agreed_call.stage_inputs.by_stage)
        _copy_back_input_changes(given, execution)
        backpropagate_to_inputs(
            given, execution, self._input_gradient_factor(global_result.rescale_factor)
        )
        outputs, metrics = (
            loss_accumulator.collect_outputs(agreed_call.stage_inputs.rows),
            loss_accumulator.metrics,
        )
        if global_result.has_outputs:
            seen = outputs if self._data_policy.outputs == "all" else None
            others = self._broadcast_from_last_rank((seen, metrics))
            outputs = others[0] if outputs is None else outputs
            metrics = others[1]
        loss = torch.tensor(
            global_result.loss, dtype=global_result.loss_dtype, device=self._device.device
        )
        if torch.is_grad_enabled():
            self._last_step = global_result.timings
        return StepResult(loss, outputs, metrics, global_result.timings)

    def _input_gradient_factor(self, rescale_factor: Tensor | None) -> Tensor | None:
        """The factor of gradients that are not averaged over copies."""
        if self.groups.averaging_channel is None:
            return rescale_factor
        return (
            torch.ones(()).double() if rescale_factor is None else rescale_factor
        ) / self.groups.averaging_channel.size


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
    named = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    return f"{named.__module__}.{named.__qualname__}"
