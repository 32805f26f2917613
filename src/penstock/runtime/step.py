"""The path of `pipe.step` and of `pipe(x)`, for every runtime.

`run_step` is the only driver of a training step. What differs between runtimes is behind two
interfaces:

    Engine    of a pipe: `LocalEngine`, or `DistributedEngine` if each rank is a process
    Call      of one call: its inputs, its transport, and how losses of other ranks are combined

The order of events in a step:

    1. `Engine.prepare`          split the batch; processes agree on the call first
    2. `Call.replay`             only runtime "graph": replay the step, or capture it
    3. `execute_step`            all other steps, and the steps that are captured
         `Call.build_execution`  workers, transport and tied weights of this call
         run the lanes           forwards, losses and backwards, under any schedule
         `Call.combine`          the loss and the scale of the gradients, of all ranks
         scale gradients, run the hooks of parameters, and reduce gradients of replicas once
         pass gradients of the inputs on to the caller's graph
    4. `optimizer.step()`, if `step` was called with an optimizer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.data_parallel.all_reduce import ReplicaGroup
from penstock.data_parallel.clip import ClipGradOptions
from penstock.data_parallel.sync import DeferredSync, Replicas
from penstock.draw.notebook import step_html
from penstock.errors import RunError
from penstock.model.partition import TensorExchange
from penstock.model.placement import PlacedPartition
from penstock.model.sequential import refuse_forward
from penstock.model.stage_inputs import (
    Cell,
    StageInputs,
    collect_tensors_by_cell,
    propagate_version_bumps,
)
from penstock.runtime.audit.auditor import Auditor, CallAudits
from penstock.runtime.call_hints import ResultHints, add_call_hint
from penstock.runtime.execution import Execution
from penstock.runtime.memory import Memory
from penstock.runtime.program_cache import Phase, ProgramCache, ProgramKey
from penstock.runtime.request import Request
from penstock.runtime.step_metrics import BatchSize, HasTimeline, StepMetrics
from penstock.runtime.worker import StepLoss
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Op, Program
from penstock.schedules.timeline import Timeline, simulate
from penstock.stage.aux_loss import AuxLossSink, select_forward_sink
from penstock.stage.gradient_hooks import DeferredHooks
from penstock.stage.loss import (
    LossReduction,
    OutputStageFunction,
    append_loss,
    resolve_reduction,
)
from penstock.stage.loss_terms import Gates, TermComparison
from penstock.stage.stage import Stage
from penstock.torch_compat import (
    is_forward_ad_enabled,
    is_inside_transform,
    is_parametrization_cached,
)

# ---- results -------------------------------------------------------------------------------------


class RuntimeUsed(NamedTuple):
    """The runtime that ran a step, and the reason if it is not the one that was requested."""

    runtime: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}: {self.why}" if self.why else self.runtime


@dataclass(frozen=True)
class StepResult(ResultHints):
    """The result of `Pipe.step`.

    Attributes:
        loss: The loss of the batch, detached, with the auxiliary losses that layers have added.
        outputs: The output of the model for the whole batch. None unless `step` was called with
            `outputs=True`.
        combined_metrics: The metrics of `loss_fn` as a plain dictionary, from which `metrics` is
            made.
        measured: The run, with its timestamps.
        ran: The runtime that ran the step, and why it was not the requested one, if it was not.
        size: The rows and tokens of the batch, and the devices of this process.

    >>> from torch import nn
    >>> from penstock import Pipe
    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
    >>> result = pipe.step(torch.zeros(6, 4), target=torch.zeros(6, 2), outputs=True)
    >>> result.outputs.shape, str(result.ran)
    (torch.Size([6, 2]), 'threads')
    >>> sorted(result.metrics())
    ['bubble', 'loss', 'peak_bytes', 'rows', 'rows_per_second', 'step_seconds']
    """

    loss: Tensor
    outputs: Any
    combined_metrics: Mapping[str, Any]
    measured: HasTimeline
    ran: RuntimeUsed = RuntimeUsed("processes")  # noqa: RUF009 (a value)
    size: BatchSize = BatchSize()  # noqa: RUF009 (a value)
    # Compares what only the device knows about the losses of a captured step, after each replay.
    _check_terms: Callable[[], object] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @cached_property
    def metrics(self) -> StepMetrics:
        """The metrics that `loss_fn` returned, combined over the micro-batches.

        Returns:
            A dictionary. Called, it returns all numbers of the step as plain numbers, for a logger:
            `loss`, `step_seconds`, `bubble`, `rows` and `rows_per_second`, `tokens` and
            `tokens_per_second` for token ids, `peak_bytes`, and the metrics of `loss_fn`.
        """
        return StepMetrics(self.combined_metrics, self.loss, self.measured, self.size)

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the step. On a GPU, reading it waits until the step has ended.

        Returns:
            A `Timeline` that can be drawn and compared with `Pipe.forecast`.
        """
        return self.measured.timeline

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss.item():.6g})"

    def _repr_html_(self) -> str:
        return step_html(self.timeline, self.metrics())


# ---- the pipe, its engine and its calls ----------------------------------------------------------


def _return_no_model() -> None:
    """Return None: this process trains the whole model."""


@dataclass(frozen=True)
class PreparedPipe:
    """A model that is cut and placed, with its programs: what does not change between calls.

    `layers` are the children of the pipe, and `hook_tables` its hooks by kind: the live
    dictionaries, so later changes show.
    """

    placed_partition: PlacedPartition
    program_cache: ProgramCache
    replicas: Replicas
    layers: Mapping[str, nn.Module | None]
    hook_tables: Sequence[Mapping[int, Any]]
    auditor: Auditor = field(default_factory=Auditor)
    # Returns the user's model if this process trains only a part of it, as long as it exists.
    partial_model: Callable[[], nn.Module | None] = _return_no_model

    def check_model_unchanged(self) -> None:
        """Raise if layers were replaced after the pipe was made, or are still on `meta`."""
        if is_parametrization_cached():
            raise RunError(
                "a pipe was called inside torch.nn.utils.parametrize.cached(). Its cache holds one "
                "tensor for all threads, micro-batches and recomputations, and most of them need "
                "one with a graph of their own. Call the pipe outside of the context."
            )
        if is_forward_ad_enabled():
            raise RunError(
                "a pipe was called in forward-mode AD (torch.autograd.forward_ad, torch.func.jvp), "
                "whose tangents do not pass from stage to stage. Call the model itself for them."
            )
        if is_inside_transform():
            raise RunError(
                "a pipe was called inside a transform of torch.func (vmap, grad, jacrev). It has "
                "one node of its own in the graph of autograd, which these cannot transform. Call "
                "the model itself there, or use torch.autograd."
            )
        model = self.partial_model() if torch.is_grad_enabled() else None
        if model is not None and vars(model).get("forward") is not refuse_forward:
            vars(model)["forward"] = refuse_forward
        self.placed_partition.partition.check_unchanged(self.layers)
        if self.placed_partition.uninitialized_tensors.slots:
            self.placed_partition.uninitialized_tensors.check_initialized()

    def check_no_hooks(self) -> None:
        """Raise if the pipe itself has hooks, of which a step has no call to run them around."""
        if any(self.hook_tables):
            raise RunError(
                "the pipe itself has hooks, which pipe.step would not run: it never has the output "
                "of the whole batch. Register them on its layers, or train with pipe(x)."
            )

    def select_step_program(
        self, request: Request, stage_inputs: StageInputs
    ) -> tuple[Program, Phase]:
        """Return the program of a step and the phase to run.

        Under `torch.no_grad()` the phase has the forwards only.
        """
        programs = self.program_cache.for_graph(stage_inputs.graph)
        if torch.is_grad_enabled():
            return programs.get_step_phase(_build_program_key(request, stage_inputs.chunks))
        # Without a backward there is nothing to recompute for.
        program, forwards, _ = programs.get_forward_backward_phases(
            _build_program_key(request, stage_inputs.chunks, False)
        )
        return program, forwards

    def forecast(
        self, request: Request, cost: Cost | None, last_measured: HasTimeline | None
    ) -> Timeline:
        """Return the simulated timeline of a training step.

        Without a `cost`, the measured costs of the last step are used, if there was one.
        """
        program, _ = self.program_cache.get_step_phase(_build_program_key(request, request.chunks))
        if cost is None and last_measured is not None:
            cost = last_measured.timeline.cost
        return simulate(program, cost)


def _build_program_key(request: Request, chunks: int, allow_recompute: bool = True) -> ProgramKey:
    """Return the key of the program for a call that was split into `chunks` micro-batches."""
    # As in PyTorch's old `Pipe`, a model in eval mode is never recomputed.
    return ProgramKey(chunks, request.training and allow_recompute, request.checkpoint)


class StepTotals(Protocol):
    """The combined losses of all micro-batches, ranks and replicas."""

    @property
    def rescale_factor(self) -> Tensor | None:
        """The factor for this step's gradients, if their scale was provisional until now."""

    @property
    def input_gradient_factor(self) -> Tensor | None:
        """The factor for the gradients of the pipe's inputs."""


class Call(Protocol):
    """One call of a pipe on the ranks of this process."""

    @property
    def request(self) -> Request:
        """The arguments and options of the call."""

    @property
    def inputs(self) -> StageInputs:
        """The batch, split into micro-batches."""

    @property
    def is_local(self) -> bool:
        """Whether all ranks are in this process."""

    @property
    def has_target(self) -> bool:
        """Whether the last stage gets a target, on whatever rank it is."""

    @property
    def replica_group(self) -> ReplicaGroup | None:
        """The processes over which the pipe itself averages gradients."""

    def replay(self) -> StepResult | None:
        """Run the step as a CUDA graph, or return None if it has to run now."""

    def build_execution(
        self,
        program: Program,
        stages: Sequence[Stage],
        aux_sink: AuxLossSink | None,
        in_caller_graph: bool,
    ) -> Execution:
        """Return the execution of this call, with the inputs of its cells."""

    def build_loss(
        self,
        execution: Execution,
        reduction: LossReduction,
        comparison: TermComparison | None = None,
    ) -> StepLoss:
        """Return the accumulator of the losses of this step, which compares their terms."""

    def combine(self, execution: Execution, program: Program) -> StepTotals:
        """Return the totals of the step, after the lanes have run."""

    def complete(self, totals: Any) -> None:
        """Note that the step has succeeded, before its gradients go on to the caller's graph."""

    def build_result(self, execution: Execution, program: Program, totals: Any) -> StepResult:
        """Return the result of the step."""

    def forward(self, execution: Execution, program: Program, phases: tuple[Phase, Phase]) -> Any:
        """Run the forwards of `pipe(x)`, and return the output for the whole batch."""


class CheckpointPeers(NamedTuple):
    """The processes that save a checkpoint together."""

    channel: Any = None  # a control channel between all of them; None: this process saves alone
    replica: int = 0  # the replica of the pipe that this process belongs to


class Engine(Protocol):
    """The interface to where a pipe runs: in this process, or as one process of several."""

    @property
    def call_lock(self) -> AbstractContextManager[object]:
        """A lock that is held during a step, and during `pipe(x)`."""

    def guarded(self, operation: str) -> AbstractContextManager[str]:
        """Return a context for one call. It yields the name of the call, for messages.

        Among processes, an error inside is raised on every rank.
        """

    def prepare(self, call_name: str, request: Request) -> Call:
        """Split the batch, and agree on the call with other processes."""

    def open_exchange(self, request: Request) -> AbstractContextManager[TensorExchange | None]:
        """Return a context in which all processes run a method of the model together.

        It yields their connection, or None if there is only this process.
        """

    def guarded_slow_call(self, call_name: str, **facts: object) -> AbstractContextManager[object]:
        """Return a context for a call that may take minutes, such as a save.

        An error on one rank is raised on all ranks.

        All ranks compare the `facts` first and raise if they differ.
        """

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> Tensor:
        """Clip gradients by their norm over all ranks. Return the norm before clipping."""

    def average_gradients(self) -> None:
        """Replace gradients that steps in `no_sync` have left by their mean over the replicas."""

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """Return the processes that this process saves checkpoints with."""

    @property
    def is_preempted(self) -> bool:
        """Whether a rank has received SIGTERM. All ranks have the same answer."""

    def expect_preemption(self) -> None:
        """Let `is_preempted` say from now on whether a rank has received SIGTERM."""

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Return whether the value is true on any rank, inside a call that all ranks make."""

    def forecast(self, request: Request, cost: Cost | None) -> Timeline:
        """Return the simulated timeline of a training step."""

    def measure_memory(self, request: Request) -> Memory:
        """Run a training step and return the bytes alive after each action."""


# ---- the two doors -------------------------------------------------------------------------------


def run_step(pipe: PreparedPipe, request: Request, engine: Engine) -> StepResult:
    """Run forward, loss and backward of a batch under the schedule."""
    with engine.call_lock:
        with engine.guarded("step") as call_name:
            try:
                pipe.check_no_hooks()
                pipe.check_model_unchanged()
                call = engine.prepare(call_name, request)
                replayed = call.replay()
                result = execute_step(pipe, call) if replayed is None else replayed
            except Exception as error:
                # Inside of the guard, so that other ranks get the hint, too.
                add_call_hint(error, pipe.placed_partition, request)
                raise
        # Outside of the guard: the optimizer needs no other rank, and its hooks may call the pipe.
        # A captured step has its optimizer inside.
        if request.optimizer is not None and replayed is None:
            request.optimizer.step()
    return result


def execute_step(pipe: PreparedPipe, call: Call) -> StepResult:
    """Run a training step without its optimizer.

    After an error, `.grad` may contain what some micro-batches have added to it. Only if the loss
    has weights, whose gradients are kept apart until the end, it is as it was before the step.
    """
    request, inputs = call.request, call.inputs
    program, phase = pipe.select_step_program(request, inputs)
    reduction = inputs.refine_reduction(resolve_reduction(request.loss_fn, request.reduction))
    audits = CallAudits(pipe, call, reduction)
    comparison = TermComparison(
        inputs.rows.fractions(),
        audits.can_check_whole_loss(),
        inputs.rows.counts,
        audits.knows_loss_counts,
        audits.watched_gates,
    )
    # The loss is computed by the last stage, in its thread and on its device.
    stages = append_loss(
        audits.watch_branches(),
        request.loss_fn,
        reduction,
        call.has_target,
        request.return_outputs,
        comparison,
    )
    execution = call.build_execution(program, stages, None, False)
    for runner in execution.stage_runners:
        runner.added_terms = comparison.added_terms
    tensors_by_cell = collect_tensors_by_cell(inputs.by_stage)
    cell_io = execution.cell_io
    audits.start(execution, program)
    loss = cell_io.loss = call.build_loss(execution, reduction, comparison)
    # Gradients of replicas are reduced once, when this context ends. They must have their final
    # scale by then.
    replicas, group = pipe.replicas, call.replica_group
    needs_sync = group is not None or not replicas.is_empty
    with replicas.deferred_sync(group) if needs_sync else nullcontext(DeferredSync()) as deferred:
        hooked = execution.find_hooked_parameters()
        hooks = DeferredHooks(hooked) if hooked else None
        try:
            with audits.explaining_errors(), execution.ordered_with_caller():
                execution.executor.execute(execution.workers, phase, execution.context)
            term_sizes = comparison.finish(loss.needs_rescale)
            totals = call.combine(execution, program)
            audits.check(term_sizes, comparison)
        except BaseException:
            loss.restore_gradients()
            if hooks is not None:
                hooks.restore()
            raise
        loss.finish_gradients(totals.rescale_factor)
        if hooks is not None:
            hooks.run()
        # FSDP keeps its gradients elsewhere and needs the factor itself.
        deferred.rescale_factor = totals.rescale_factor
    call.complete(totals)
    for cell, tensors in tensors_by_cell.items():
        if cell in cell_io.inputs:  # otherwise it is a cell of another process
            propagate_version_bumps(tensors, cell_io.inputs[cell].tensors)
    backpropagate_to_inputs(tensors_by_cell, execution, totals.input_gradient_factor)
    audits.guard_kept_tensors()
    return call.build_result(execution, program, totals)


def run_forward(pipe: PreparedPipe, request: Request, engine: Engine) -> Any:
    """Return the output of the model for a batch. All forwards come before the first backward."""
    with engine.call_lock, engine.guarded("forward") as call_name:
        try:
            pipe.check_model_unchanged()
            call = engine.prepare(call_name, request)
            in_caller_graph = torch.is_grad_enabled()
            programs = pipe.program_cache.for_graph(call.inputs.graph)
            program, *phases = programs.get_forward_backward_phases(
                _build_program_key(request, call.inputs.chunks, in_caller_graph)
            )
            # `pipe(x)` returns an output and no loss, so a loss that a layer adds would be lost.
            aux_sink = select_forward_sink()
            audits = CallAudits(pipe, call, None)
            stages = audits.watch_branches()
            watched = None
            if call.inputs.averages_loss_by_rows:
                watched = watch_output(stages[-1], program, call.inputs, audits.watched_gates)
                stages = [*stages[:-1], replace(stages[-1], compute=watched)]
            execution = call.build_execution(program, stages, aux_sink, in_caller_graph)
            audits.start(execution, program)
            execution.audits = audits
            with audits.explaining_errors():
                output = call.forward(execution, program, (phases[0], phases[1]))
            sizes = None
            if watched is not None and call.is_local:
                sizes = watched.comparisons[1].compare_device_numbers()
            audits.check(sizes)
            audits.check_structure(output)
            execution.audits = audits if audits.needs_backward else None
            if in_caller_graph:
                audits.guard_kept_tensors()
            return output
        except Exception as error:
            add_call_hint(error, pipe.placed_partition, request)
            raise


def run_generate(pipe: PreparedPipe, request: Request, engine: Engine) -> Any:
    """Return what the model's own `generate` returns, computed where the stages are."""
    placed = pipe.placed_partition
    with engine.open_exchange(request) as exchange:
        pipe.check_model_unchanged()
        return placed.partition.run_method(
            "generate", request.inputs, request.keyword_inputs, placed.placement, exchange
        )


def watch_output(
    last: Stage, program: Program, inputs: StageInputs, gates: Gates
) -> OutputStageFunction:
    """Return the computation of the last stage of `pipe(x)`, if it returns a loss.

    It raises if the losses are not means over rows.
    """

    def list_microbatches(op: Op) -> list[int]:
        return [
            action.microbatch
            for lane in program.lanes
            for action in lane
            if isinstance(action, Compute) and (action.op, action.stage) == (op, last.index)
        ]

    shares = inputs.rows.fractions()
    comparisons = TermComparison(shares), TermComparison(shares, gates=gates)
    orders = list_microbatches(Op.F), list_microbatches(Op.R)
    return OutputStageFunction(last.compute, *orders, comparisons)


def backpropagate_to_inputs(
    tensors_by_cell: Mapping[Cell, Sequence[Tensor]],
    execution: Execution,
    rescale_factor: Tensor | None,
) -> None:
    """Pass the gradients of the pipe's inputs on to the graph that computed these inputs.

    An input may be the output of another module, such as an encoder in front of the pipe. One
    backward for all micro-batches runs that module's hooks once, with the gradient of the batch.
    """
    pairs = [
        (tensor, gradient if rescale_factor is None else _scale_gradient(gradient, rescale_factor))
        for cell, payload in sorted(execution.cell_io.input_gradients.items())
        if cell in tensors_by_cell  # otherwise the input came from another process
        for tensor, gradient in zip(tensors_by_cell[cell], payload.tensors, strict=True)
        if gradient is not None
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)


def _scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient * factor.to(gradient.device)).to(gradient.dtype)
