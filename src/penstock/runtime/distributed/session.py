"""The engine of a pipe whose ranks are processes: one rank's part of every call.

`step.py` drives each call inside `ProcessGroups.guarded_call`, so that an error on one rank becomes
the same RemoteError on all. What is particular to processes:

| method            | does                                                                        |
|-------------------|-----------------------------------------------------------------------------|
| `prepare`         | agree on the call; split the batch into the inputs of each stage            |
| `build_execution` | worker and transport of this rank; with data="first" the inputs travel here |
| `combine`         | exchange loss, rescale factor and timings of all ranks                      |
| `complete`        | advance the RNG on all ranks alike, and update the cache of shapes          |
| `build_result`    | send outputs and metrics from the last rank to the others                   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.data_parallel.all_reduce import ReplicaGroup
from penstock.data_parallel.clip import (
    ClipGradOptions,
    clip_grads_with_norm,
    compute_total_grad_norm,
)
from penstock.data_parallel.grad_scaler import propagate_overflow
from penstock.device.device import GraphTimestamp
from penstock.errors import RunError
from penstock.microbatch import move_to_device
from penstock.model.stage_inputs import (
    Cell,
    build_input_payloads,
    collect_tensors_by_cell,
    propagate_version_bumps,
)
from penstock.runtime import signals
from penstock.runtime.distributed.call_setup import (
    AgreedCall,
    CallSetup,
    DataPolicy,
    collect_batch_facts,
    collect_batch_tensors,
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
from penstock.runtime.distributed.control_channel import (
    RankFacts,
    WaitObserver,
    check_ranks_agree,
    sample_tensors,
)
from penstock.runtime.distributed.links import HostLinks, Links
from penstock.runtime.distributed.process_groups import (
    FIRST_CALL_TIMEOUT_FACTOR,
    SLOW_CALL_TIMEOUT_FACTOR,
    ProcessGroups,
)
from penstock.runtime.distributed.rank_exchange import RankExchange, share_rng
from penstock.runtime.distributed.step_results import (
    DistributedLossAccumulator,
    GlobalResult,
    RankResult,
    all_gather_results,
    exchange_replica_shares,
)
from penstock.runtime.execution import Execution, RngPolicy, use_worker_thread_settings
from penstock.runtime.loss_accumulator import LossAccumulator, read_loss_scale
from penstock.runtime.memory import Memory
from penstock.runtime.program_cache import Phase
from penstock.runtime.request import Request
from penstock.runtime.step import CheckpointPeers, PreparedPipe, StepResult
from penstock.runtime.step_metrics import BatchSize, HasTimeline
from penstock.runtime.tied_gradients import build_distributed_tied_weights
from penstock.runtime.transport import Transport
from penstock.runtime.worker import BoundAction, Worker
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Program, Recv
from penstock.schedules.timeline import Timeline
from penstock.stage.aux_loss import AuxLossSink
from penstock.stage.caller_context import CallerContext
from penstock.stage.deferred_batchnorm import find_deferred_batch_norms
from penstock.stage.loss import LossReduction
from penstock.stage.loss_terms import TermComparison
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
        watchdog: WaitObserver,
    ) -> None:
        self._transport, self._on_compute, self._cache_entry = transport, on_compute, cache_entry
        self._watchdog = watchdog

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
            self._wait_for_device(worker)

    def _wait_for_device(self, worker: Worker) -> None:
        """Wait until the GPU has run the lane, and tell the watchdog so.

        Over NCCL the GPU waits for other ranks, so a wait for the GPU may be a wait for a rank that
        has died. One wait per action lets the watchdog see that a long step makes progress.
        """
        for bound_action, _, end in worker.timed_actions:
            if not isinstance(end, float | GraphTimestamp):
                self._watchdog.mark_waiting(_GpuWait(bound_action.action), None)
                end.synchronize()
                self._watchdog.mark_arrived()

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

    call_lock = nullcontext()  # `guarded` lets one call at a time in

    def __init__(
        self, groups: ProcessGroups, prepared_pipe: PreparedPipe, data_policy: DataPolicy
    ) -> None:
        self.groups, self._prepared_pipe, self.data_policy = groups, prepared_pipe, data_policy
        self.placed_partition = prepared_pipe.placed_partition
        self._replicas = prepared_pipe.replicas
        self._deferred_batchnorms = find_deferred_batch_norms(self.placed_partition.local_stages)
        groups.open_links(self.placed_partition.communicating_ranks)
        self.call_setup = CallSetup(groups, self.placed_partition, data_policy)
        self.last_step: HasTimeline | None = None
        self._saves_on_preemption = False
        self.is_preempted = False  # all ranks have agreed that one of them has received SIGTERM

    @property
    def has_replicated_stages(self) -> bool:
        """Whether a stage is in DistributedDataParallel, replicate or fully_shard."""
        return not self._replicas.is_empty

    def guarded(self, operation: str) -> AbstractContextManager[str]:
        """Return a context in which an error is raised on every rank. It yields the call's name."""
        return self.groups.guarded_call(operation)

    def prepare(self, call_name: str, request: Request) -> DistributedCall:
        """Agree on the call with all ranks, and open the links that its stage graph needs."""
        facts = collect_call_facts(request, no_sync=not self._replicas.sync_enabled)
        local_state = _qualified_name(request.loss_fn) if request.is_step else ""
        agreed_call = self.call_setup.prepare_call(call_name, request, facts, local_state)
        self.groups.open_links(
            self.placed_partition.find_communicating_ranks(agreed_call.stage_inputs.graph)
        )
        if not request.is_step and torch.is_grad_enabled():
            raise RunError(
                "pipe(x) cannot be differentiated over several processes, because the loss would "
                "exist on one of them only. Train with pipe.step(x, target=y), and call pipe(x) "
                "under torch.no_grad()."
            )
        for layer in self._deferred_batchnorms:
            layer.begin_minibatch(agreed_call.stage_inputs.chunks)
        return DistributedCall(self, request, agreed_call)

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
                for t in self.placed_partition.tied_tensors
                if t.owner_rank != self.groups.rank
            }
            owned = [p for p in parameters if id(p) not in owned_elsewhere]
            total_norm = compute_total_grad_norm(owned, self.groups.pipeline_channel, options)
        clip_grads_with_norm(parameters, total_norm, max_norm, options)
        return total_norm

    def average_gradients(self) -> None:
        """Replace gradients by their mean over the replicas of the pipe. All ranks call this."""
        with self.groups.guarded_call("averaging gradients") as name:
            check_ranks_agree(self.groups.pipeline_channel, name, {})
            if self.groups.averaging_group is not None:
                self._replicas.average_unwrapped_gradients(self.groups.averaging_group)

    @contextmanager
    def guarded_slow_call(self, call_name: str, **facts: object) -> Iterator[None]:
        """Run a slow call, such as a save: check that all ranks make it, and share its errors."""
        with self.groups.guarded_call(call_name, SLOW_CALL_TIMEOUT_FACTOR) as name:
            check_ranks_agree(self.groups.pipeline_channel, name, _to_facts(facts))
            yield

    @contextmanager
    def open_exchange(self, request: Request) -> Iterator[RankExchange]:
        """Let all ranks run a method of the model together, with the same random numbers."""
        with self.groups.guarded_call("generate", FIRST_CALL_TIMEOUT_FACTOR) as name:
            # The call opens new groups after a fault.
            channel, device = self.groups.pipeline_channel, self.groups.device
            # A rank may have a streamer that the others do not have.
            inputs = {k: v for k, v in request.keyword_inputs.items() if k != "streamer"}
            request = replace(request, keyword_inputs=inputs)
            check_ranks_agree(
                channel,
                name,
                {**collect_call_facts(request), **collect_batch_facts(request)},
                sample_tensors(collect_batch_tensors(request)),
            )
            with torch.no_grad(), share_rng(channel, device.device):
                yield RankExchange(channel, device.device)
            channel.flush()

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """Return the process group for checkpoints, over all replicas, and this replica's index."""
        return CheckpointPeers(self.groups.get_save_channel(), self.groups.topology.replica_index)

    def expect_preemption(self) -> None:
        """Let the ranks tell each other from now on, at the end of each step, about SIGTERM."""
        self._saves_on_preemption = True

    def check_preemption(self) -> bool:
        """Return whether this rank has received SIGTERM, or the same rank of another replica."""
        if not self._saves_on_preemption:
            return False
        is_preempted, channel = signals.is_preempted(), self.groups.replica_channel
        if channel is None:
            return is_preempted
        flags = channel.all_gather(torch.tensor([is_preempted]), "the end of its step")
        return any(map(bool, flags))

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Return whether the value is true on any rank, inside a call that all ranks make."""
        channel = self.groups.get_save_channel()
        return any(channel.all_gather_value(value, "a decision of all ranks"))

    def forecast(self, request: Request, cost: Cost | None) -> Timeline:
        """Simulate a step with the given cost, or with the measured costs of the last step."""
        return self._prepared_pipe.forecast(request, cost, self.last_step)

    def measure_memory(self, request: Request) -> Memory:
        """Raise: measuring needs all stages in one process."""
        raise RunError(
            "pipe.memory measures a step in one thread, but the ranks of this pipe are processes. "
            "Create the same pipe in one process, or read "
            "torch.accelerator.max_memory_allocated() on each rank."
        )


# -------------------------------------------------------------------------------------------------
# One call
# -------------------------------------------------------------------------------------------------


class DistributedCall:
    """One call of a pipe on this rank, after all ranks have agreed on it."""

    _loss: DistributedLossAccumulator
    _transport: ProcessTransport

    is_local = False

    def __init__(
        self, engine: DistributedEngine, request: Request, agreed_call: AgreedCall
    ) -> None:
        self.request, self.inputs = request, agreed_call.stage_inputs
        self.has_target = agreed_call.announcement.has_target
        self._engine, self._agreed_call = engine, agreed_call
        self._groups, self._placed_partition = engine.groups, engine.placed_partition
        self._last_stage = len(self._placed_partition.partition.stages) - 1
        self._device = self._placed_partition.devices[self._groups.rank]

    @property
    def replica_group(self) -> ReplicaGroup | None:
        """The processes over which the pipe itself averages gradients."""
        return self._groups.averaging_group if self.request.is_step else None

    def replay(self) -> StepResult | None:
        """Return None: a step among processes is not captured."""
        return None

    def build_execution(
        self,
        program: Program,
        stages: Sequence[Stage],
        aux_sink: AuxLossSink | None,
        in_caller_graph: bool,
    ) -> Execution:
        """Return the execution of this rank. With data="first", this exchanges the inputs."""
        schedule, groups, agreed_call = program.schedule, self._groups, self._agreed_call
        transport = self._transport = self._build_transport(groups.links, program)
        local_stages = [stages[stage.index] for stage in self._placed_partition.local_stages]
        tied_weights = build_distributed_tied_weights(
            local_stages,
            self._placed_partition.tied_tensors,
            schedule.chunks,
            groups.pipeline_channel,
        )
        # All ranks use the seed of the first rank. `_finish` advances the generator, once it is
        # known whether any rank drew random numbers.
        rng_policy = RngPolicy(lambda: agreed_call.agreement.seed, lambda: None)
        on_compute = groups.watchdog.mark_computing
        if agreed_call.is_first_call:
            on_compute = partial(on_compute, timeout_factor=FIRST_CALL_TIMEOUT_FACTOR)
        return Execution(
            stages,
            schedule,
            self._placed_partition.devices,
            self._placed_partition.placement,
            RankExecutor(transport, on_compute, agreed_call.cache_entry, groups.pipeline_watchdog),
            self._load_inputs(program),
            tied_weights,
            aux_sink,
            rng_policy=rng_policy,
            compare_recomputations=self.request.audit != "off",
        )

    def _build_transport(self, links: Links, program: Program) -> ProcessTransport:
        groups = self._groups
        return ProcessTransport(
            links,
            self._placed_partition.placement,
            assign_message_tags(program),
            self._agreed_call.cache_entry,
            groups.pipeline_channel,
            groups.pipeline_watchdog,
        )

    def _load_inputs(self, program: Program) -> dict[Cell, Payload]:
        """Return the inputs of the local cells. With data="first", exchange them between ranks."""
        partition, by_stage = self._placed_partition, self.inputs.by_stage
        payloads = build_input_payloads(
            {s: values for s, values in by_stage.items() if s in partition.stage_devices}
        )
        if self._engine.call_setup.scatters_inputs:
            # Through host memory: NCCL communicators exist only for ranks whose stages exchange
            # messages.
            transport = self._build_transport(
                HostLinks(self._groups.pipeline_channel.group), program
            )
            cells = find_remote_input_cells(self._agreed_call.announcement, partition)
            if self._groups.rank == partition.placement[0]:
                send_inputs(by_stage, cells, partition, transport)
            else:
                payloads |= receive_inputs(cells, partition, transport, self._device.device)
        return payloads

    def build_loss(
        self,
        execution: Execution,
        reduction: LossReduction,
        comparison: TermComparison | None = None,
    ) -> DistributedLossAccumulator:
        """Return the accumulator of this rank. Replicas exchange their shares of the batch."""
        accumulator, replica_losses = None, None
        # On every rank: this also initialises the scaler, which every rank steps with.
        scale = read_loss_scale(self.request.scaler, self.request.scale, self._device.device)
        if self._last_stage in self._placed_partition.stage_devices:
            targets = (
                self._collect_targets(execution) if self.has_target else [()] * self.inputs.chunks
            )
            accumulator = LossAccumulator(
                reduction, self.inputs.rows.fractions(), targets, scale, comparison
            )
            if self._groups.averaging_channel is not None:
                replica_losses = exchange_replica_shares(
                    self._groups.averaging_channel,
                    self._agreed_call.facts,
                    accumulator,
                    self.inputs.rows,
                )
        self._loss = DistributedLossAccumulator(
            accumulator, replica_losses, self._transport, self._agreed_call.cache_entry
        )
        return self._loss

    def _collect_targets(self, execution: Execution) -> list[tuple[Any, ...]]:
        cells = [(self._last_stage, i) for i in range(self.inputs.chunks)]
        payloads = [execution.cell_io.inputs[cell] for cell in cells]
        return [unflatten_values(p.tensors, p.layout)[-1:] for p in payloads]  # type: ignore[arg-type]

    def combine(self, execution: Execution, program: Program) -> GlobalResult:
        """Exchange the results of all ranks, and wait until all replicas may reduce gradients."""
        send_outputs = self.request.return_outputs and self._engine.data_policy.outputs == "all"
        rank_result = self._loss.build_rank_result(
            execution.used_rng, self.inputs.rows, send_outputs
        )
        averaging_channel = self._groups.averaging_channel
        totals = all_gather_results(
            self._groups.pipeline_channel,
            program,
            execution,
            rank_result,
            1 if averaging_channel is None else averaging_channel.size,
            self._engine.check_preemption(),
        )
        # The collectives of DDP and FSDP run in the user's process groups, which the watchdog
        # cannot abort. A failure before this point is found in a wait of ours instead of a
        # collective that hangs.
        if self._engine.has_replicated_stages and self._groups.replica_channel is not None:
            self._groups.replica_channel.all_gather(torch.zeros(1), "the end of its step")
            self._groups.watchdog.mark_computing("the reduction of gradients")
        return totals

    def complete(self, totals: GlobalResult) -> None:
        """Let the ranks agree on overflows, and finish the call."""
        if self.request.scaler is not None and torch.is_grad_enabled():
            propagate_overflow(
                self._placed_partition.partition.parameters(), self._groups.pipeline_channel
            )
        self._finish(totals)

    def _finish(self, totals: GlobalResult) -> None:
        """Finish a successful call: advance the RNG and mark the cache entry as complete.

        All ranks advance the RNG if any rank drew random numbers, so that their generators stay
        equal. The entry is complete only here, after all ranks have reported success.
        """
        self._engine.is_preempted |= totals.is_preempted
        if totals.used_rng:
            advance_caller_rng()
        self._groups.pipeline_channel.flush()
        agreed_call = self._agreed_call
        agreed_call.cache_entry.loss_is_weighted = self._transport.loss_is_weighted
        self._groups.get_cache_entry(agreed_call.agreement.cache_key).is_complete = True

    def build_result(
        self, execution: Execution, program: Program, totals: GlobalResult
    ) -> StepResult:
        """Return the result of the step, which is the same on all ranks."""
        loss = torch.tensor(totals.loss, dtype=totals.loss_dtype, device=self._device.device)
        outputs, metrics = self._loss.collect_outputs(self.inputs, loss), self._loss.metrics
        if totals.has_outputs:
            shared_outputs = outputs if self._engine.data_policy.outputs == "all" else None
            broadcast_outputs, metrics = self._broadcast_from_last_rank((shared_outputs, metrics))
            outputs = broadcast_outputs if outputs is None else outputs
        if torch.is_grad_enabled():
            self._engine.last_step = totals.timings
        return StepResult(
            loss,
            outputs,
            metrics,
            totals.timings,
            size=BatchSize(
                sum(self.inputs.rows.counts), self.request.count_tokens(), (self._device.device,)
            ),
        )

    def forward(self, execution: Execution, program: Program, phases: tuple[Phase, Phase]) -> Any:
        """Return the outputs of the model, on the last rank or on all."""
        execution.run(phases[0])
        inputs = execution.cell_io.inputs
        for cell, tensors in collect_tensors_by_cell(self.inputs.by_stage).items():
            if cell in inputs:
                propagate_version_bumps(tensors, inputs[cell].tensors)
        outputs = None
        if self._last_stage in self._placed_partition.stage_devices:
            cells = [(self._last_stage, i) for i in range(self.inputs.chunks)]
            payloads = map(execution.cell_io.outputs.pop, cells)
            values = [unflatten_values(p.tensors, p.layout)[0] for p in payloads]  # type: ignore[arg-type]
            outputs = self.inputs.merge_outputs(values)
        totals = all_gather_results(
            self._groups.pipeline_channel,
            program,
            execution,
            RankResult(used_rng=execution.used_rng),
            # Some replicas may not make this call, so they could not agree on anything in it.
            is_preempted=self._groups.replica_channel is None and self._engine.check_preemption(),
        )
        self._finish(totals)
        is_shared = self._engine.data_policy.outputs == "all"
        return self._broadcast_from_last_rank(outputs) if is_shared else outputs

    def _broadcast_from_last_rank(self, value: Any) -> Any:
        """Return the value of the rank with the last stage, on the device of this rank."""
        last_rank = self._placed_partition.placement[self._last_stage]
        received = self._groups.pipeline_channel.broadcast_value(last_rank, value, "outputs")
        return move_to_device(received, self._device.device)


@dataclass(frozen=True)
class _GpuWait:
    """A wait for an action on the GPU. The text is built only when a heartbeat needs it."""

    action: object

    def __str__(self) -> str:
        return f"the messages that {self.action} needs on the GPU"


def _to_facts(values: Mapping[str, object]) -> RankFacts:
    return {name: str(value) for name, value in values.items()}


def _qualified_name(loss_fn: Any) -> str:
    named_object = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    return f"{named_object.__module__}.{named_object.__qualname__}"
