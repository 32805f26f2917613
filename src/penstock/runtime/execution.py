"""`Execution`: the state of one call of a pipe, and the code that runs its phases.

An execution owns a `StageRunner` for each local stage and a `Worker` for each local rank. `run`
carries out one phase of a program:

    1. every rank's stream waits for what the caller has queued so far
    2. the executor runs the lanes: in threads, in the caller's thread, or as one process of several
    3. the caller's stream waits for every rank
    4. recomputations on accelerators are compared with their forwards
    5. gradients of tied parameters go to their owners
    6. the caller's random generator moves on if a stage drew random numbers

`pipe.step` has one phase; `pipe(x)` has a forward phase and, later, a backward phase.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.device.device import (
    CallerStreams,
    Device,
    GraphTimestamp,
    Timestamp,
    are_same_rng_states,
    read_rng_states,
)
from penstock.fingerprint import ModuleSnapshot
from penstock.runtime.program_cache import Phase
from penstock.runtime.transport import Transport, TransportFactory
from penstock.runtime.worker import BoundAction, CellIO, TimedAction, Worker
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline, cost_from_spans
from penstock.stage.aux_loss import AuxLossSink
from penstock.stage.caller_context import CallerContext, no_autocast
from penstock.stage.host_rng import advance_host_rng, select_host_rng_lock
from penstock.stage.parameter_proxies import StageProxies
from penstock.stage.payload import Payload
from penstock.stage.rng import (
    RngSource,
    advance_caller_rng,
    derive_cell_seed,
    peek_seed,
    read_shared_cpu_state,
    restore_shared_cpu_state,
)
from penstock.stage.stage import Stage
from penstock.stage.stage_runner import StageRunner


class LaneExecutor(Protocol):
    """The interface of a runtime: it runs the lanes of this process's ranks."""

    def endpoint(self, rank: int) -> Transport:
        """Return the transport with which a rank sends and receives."""

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Run a phase: each worker runs the lane of its rank."""


class TiedWeights(Protocol):
    """The interface for modules, parameters and buffers that several stages share."""

    @property
    def proxies(self) -> Mapping[int, StageProxies]:
        """The proxies that each stage computes with, by stage."""

    def accumulate_gradients(self) -> None:
        """Add the gradients of the proxies to those of the original parameters."""


class OutputAudits(Protocol):
    """The interface of the audits that compare `pipe(x)` with the unsplit model."""

    def check_outputs(self) -> None:
        """Raise if the outputs of the audited micro-batch differ."""

    def check_backward(
        self, get_output_gradients: Callable[[int], Sequence[torch.Tensor | None]]
    ) -> None:
        """Raise if gradients differ. The argument returns those of a micro-batch's outputs."""


class RngPolicy(NamedTuple):
    """The source of the random numbers of a call."""

    # return the seed of the call
    make_seed: Callable[[], int] = peek_seed
    # move the caller's generator on, after a call that drew random numbers
    advance_rng: Callable[[], None] = advance_caller_rng
    # return the source of a cell's random numbers, given seed, stage and micro-batch
    make_cell_rng: Callable[[int, int, int], RngSource | int] = derive_cell_seed
    # notice draws from PyTorch's shared generators while the call runs
    detect_outside_rng_use: bool = True


DEFAULT_RNG_POLICY = RngPolicy()


class CaptureOverrides(NamedTuple):
    """The differences between a step that is captured as a CUDA graph and any other step."""

    rng_policy: RngPolicy = DEFAULT_RNG_POLICY
    # raise if a layer uses a trainable tensor that is not a registered parameter
    require_known_leaves: bool = False
    devices: Sequence[Device] = ()  # by rank; empty: the devices of the pipe


NO_OVERRIDES = CaptureOverrides()


class Execution:
    """One call of a pipe, in this process.

    Args:
        stages: The stages of the pipe. Those of other ranks are left out.
        schedule: The schedule. It says which cells are recomputed, and which backwards are split.
        devices: The devices of the ranks of this process, by rank.
        placement: The rank of each stage.
        executor: Runs the lanes, and connects the ranks.
        inputs: The payloads that enter cells from the caller.
        tied_weights: The weights that several stages share, or None if there are none.
        aux_sink: Where `add_loss` of a layer goes: None in a step, which sends it on to the loss.
        require_known_leaves: Whether to raise if a layer uses a trainable tensor that is not a
            registered parameter.
        rng_policy: The source of random numbers.
        allow_host_rng: Whether layers may draw from `random` and `numpy.random`.
        compare_recomputations: Whether every recomputation is compared with its forward. False:
            those of the first call are. None: none is.
        thread_locals: The `threading.local` objects that layers read.
        snapshot: The state of the modules. See `Stage.read_contents`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        devices: Mapping[int, Device],
        placement: Sequence[int],
        executor: LaneExecutor,
        inputs: dict[tuple[int, int], Payload],
        tied_weights: TiedWeights | None = None,
        aux_sink: AuxLossSink | None = None,
        require_known_leaves: bool = False,
        rng_policy: RngPolicy = DEFAULT_RNG_POLICY,
        allow_host_rng: bool = True,
        compare_recomputations: bool | None = False,
        thread_locals: Sequence[threading.local] = (),
        snapshot: ModuleSnapshot | None = None,
    ) -> None:
        self.cell_io = CellIO()
        self.cell_io.inputs = inputs
        self.audits: OutputAudits | None = None
        self.executor = executor
        self._devices, self._placement = devices, placement
        self._torch_devices = {device.device for device in devices.values()}
        if any(device.has_streams for device in devices.values()):
            _silence_stream_mismatch_warning()
        self.context = CallerContext.current(
            {device.type for device in self._torch_devices}, thread_locals
        )
        self._tied_weights, self._rng_policy = tied_weights, rng_policy
        # Read here, in the caller's thread: worker threads have a grad mode of their own.
        saves_graphs = torch.is_grad_enabled()
        self.stage_runners = [
            StageRunner(
                stage,
                self.context,
                schedule.recomputed if saves_graphs else None,
                schedule.divided,
                require_known_leaves,
                None if tied_weights is None else tied_weights.proxies[stage.index],
                aux_sink,
                compare_recomputations,
                snapshot,
            )
            for stage in stages
            if placement[stage.index] in devices
        ]
        # A seed is made only if a stage may need it: reading the generator takes time.
        runners = self.stage_runners
        # References to all of them would be a cycle, which keeps their tensors for a while.
        peers = tuple(map(weakref.ref, runners))
        for runner in runners:
            runner.peers = peers
        self.seed: int | None = None  # of the random numbers of the call
        if any(runner.may_draw_random or runner.may_draw_host_random for runner in runners):
            seed = self.seed = rng_policy.make_seed()
            host_rng_lock = select_host_rng_lock() if allow_host_rng else None
            for runner in runners:
                runner.rng_source = partial(rng_policy.make_cell_rng, seed, runner.stage.index)
                runner.call_seed, runner.host_rng_lock = seed, host_rng_lock
        self.is_cleared = self._rng_advanced = False
        self._caller_states: list[torch.Tensor] = []  # of its CPU generator, before each phase
        self.workers = [
            Worker(
                rank,
                device,
                {
                    runner.stage.index: runner
                    for runner in self.stage_runners
                    if placement[runner.stage.index] == rank
                },
                executor.endpoint(rank),
                self.cell_io,
            )
            for rank, device in devices.items()
        ]
        self.time_origins: list[Timestamp] = []

    @property
    def used_rng(self) -> bool:
        """Return True if any stage has drawn random numbers."""
        return any(runner.has_drawn for runner in self.stage_runners)

    def find_hooked_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this process's stages that have hooks on their gradients."""
        runners = self.stage_runners
        return [parameter for runner in runners for parameter in runner.find_hooked_parameters()]

    def describe_graphs(self, microbatches: Container[int]) -> None:
        """Let the stages describe the graphs that their layers make for some micro-batches."""
        for runner in self.stage_runners:
            runner.described_microbatches = microbatches

    def read_graph_descriptions(self, microbatch: int) -> tuple[int | None, ...]:
        """Return the descriptions of the graphs of the stages for a micro-batch.

        None: it has no graph yet, or needs none. A recomputed stage gets it in its backward.
        """
        runners = self.stage_runners
        return tuple([runner.graph_descriptions.get(microbatch) for runner in runners])

    def run(self, phase: Phase, retain_graph: bool = False) -> None:
        """Run a phase. With `retain_graph`, the backwards keep what a further one would need."""
        with self.ordered_with_caller(retain_graph, phase.runs_layers):
            self.executor.execute(self.workers, phase, self.context)

    @contextmanager
    def ordered_with_caller(
        self, retain_graph: bool = False, runs_layers: bool = True
    ) -> Iterator[None]:
        """Run lanes in the context, in order with what the caller queues before and after it.

        Only where layers run, a layer may draw random numbers that were not expected. In other
        phases, a `torch.utils.checkpoint` may run layers, which sets generators.
        """
        streams = CallerStreams()
        devices = list(self._devices.values())
        for worker in self.workers:
            worker.retain_graph, worker.last_end = retain_graph, None
            worker.device.wait_for_caller(streams)
        if not self.time_origins:
            self.time_origins = _record_time_origins(devices)
        states_before = []
        if runs_layers and self._rng_policy.detect_outside_rng_use:
            states_before = read_rng_states(self._torch_devices)
        cpu_state = read_shared_cpu_state() if self._caller_states else None
        try:
            yield
        except BaseException:
            # After a CUDA error every further call fails, too. The first error is the one to show.
            with suppress(RuntimeError):
                self._release_streams(streams)
            raise
        self._release_streams(streams)
        for runner in self.stage_runners:
            runner.repeat_check.finish()
        if self._tied_weights is not None:
            self._tied_weights.accumulate_gradients()
        if cpu_state is not None:
            restore_shared_cpu_state(cpu_state, self._caller_states)
        self._update_caller_rng(states_before)

    def _release_streams(self, streams: CallerStreams) -> None:
        for worker in self.workers:
            worker.device.release_to_caller(streams)

    def create_grad_accumulators(self) -> list[GradientEdge]:
        """Create the AccumulateGrad nodes of parameters on GPUs. Return edges that keep them alive.

        The caller holds the edges while it links the call into its own graph.
        """
        # Autograd creates a parameter's AccumulateGrad node when something first needs it and ties
        # it to the stream that is current then. Linking the call into the caller's graph would
        # create all nodes on the caller's stream, and the backwards of all ranks would wait for
        # that one stream.
        edges: list[GradientEdge] = []
        for runner in self.stage_runners:  # of a tied parameter, the owner's stage comes first
            device = self._devices[self._placement[runner.stage.index]]
            if device.has_streams:
                with device.activate():
                    edges += map(get_gradient_edge, runner.parameters)
        return edges

    def _update_caller_rng(self, states_before: Sequence[torch.Tensor]) -> None:
        """Advance the caller's generator if a stage drew, and detect draws that were not expected.

        A stage that has not drawn so far runs without generators of its own, because these cost
        time. If it draws now, the shared generators have moved. Every stage then goes back to
        "may draw", so that the next call gives each one its own generators.
        """
        devices = self._torch_devices
        have_changed = _have_rng_states_changed(devices, states_before)
        if have_changed:
            restore_shared_cpu_state(states_before[0])
            have_changed = _have_rng_states_changed(devices, states_before)
        if have_changed:
            for runner in self.stage_runners:
                runner.stage.reset_behaviors()
            if any(runner.has_recomputed for runner in self.stage_runners):
                warnings.warn(
                    "random numbers were drawn from PyTorch's global generator while the pipe ran, "
                    "by a layer that had not drawn before or by another thread. If it was a layer, "
                    "its recomputation in this call drew different numbers. Later calls repeat "
                    "them correctly.",
                    stacklevel=4,
                )
        self._caller_states += states_before[:1]
        if self.used_rng and not self._rng_advanced:
            self._rng_advanced = True
            self._rng_policy.advance_rng()
            advance_host_rng(set().union(*(r.used_host_generators for r in self.stage_runners)))

    def build_measured_run(self, program: Program) -> MeasuredRun:
        """Return the times at which each rank ran its actions."""
        return MeasuredRun(
            program, [worker.timed_actions for worker in self.workers], self.time_origins
        )

    def clear(self) -> None:
        """Drop everything that was saved for backwards."""
        self.is_cleared = True
        for runner in self.stage_runners:
            runner.clear()


def _have_rng_states_changed(
    devices: Iterable[torch.device], states_before: Sequence[torch.Tensor]
) -> bool:
    """Return whether default generators have other states than before, if those were read."""
    return bool(states_before) and not are_same_rng_states(read_rng_states(devices), states_before)


@cache
def _silence_stream_mismatch_warning() -> None:
    """Turn off PyTorch's warning about gradients that arrive from another stream.

    The streams of the ranks differ from the caller's on purpose; `Execution.run` orders them.
    """
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)


# ---- measured times ------------------------------------------------------------------------------


def _record_time_origins(devices: Sequence[Device]) -> list[Timestamp]:
    """Return a timestamp for each rank. Ranks on the same device share one."""
    timestamps: dict[torch.device, Timestamp] = {}
    for device in devices:
        if device.device not in timestamps:
            timestamps[device.device] = device.record_timestamp()
    return [timestamps[device.device] for device in devices]


def _elapsed_seconds(start: Timestamp, end: Timestamp) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(start, GraphTimestamp)
    assert not isinstance(end, float | GraphTimestamp)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class MeasuredRun:
    """A run with its timestamps. On a GPU it may still be going on."""

    program: Program
    timed_actions: Sequence[Sequence[TimedAction]]
    time_origins: Sequence[Timestamp]

    @cached_property
    def timeline(self) -> Timeline:
        """The measured timeline. On a GPU, reading it waits until the run has ended."""
        lanes = zip(self.timed_actions, self.time_origins, strict=True)
        spans = [
            Span(
                rank,
                bound_action.lane_index,
                bound_action.action,
                *compute_span_seconds(start, end, origin),
            )
            for rank, (lane, origin) in enumerate(lanes)
            for bound_action, start, end in lane
        ]
        return build_measured_timeline(self.program, spans)


def compute_span_seconds(
    start: Timestamp, end: Timestamp, origin: Timestamp
) -> tuple[float, float]:
    """Return the start and the end of an action, in seconds since the origin."""
    if type(start) is type(end) is type(origin) is float:  # on the host
        return start - origin, end - origin
    return _elapsed_seconds(origin, start), _elapsed_seconds(origin, end)


def build_measured_timeline(program: Program, spans: Sequence[Span]) -> Timeline:
    """Return the timeline of measured spans, which may come in any order."""
    ordered = sorted(spans, key=lambda span: (span.start, span.end))
    return Timeline(program, cost_from_spans(program, ordered), tuple(ordered))


# ---- the executor in the caller's thread ---------------------------------------------------------
#
# The `inline` runtime runs all ranks in the caller's thread, one action after another, in the order
# in which `schedules.simulator.play` plays the program. It is the reference that other runtimes are
# compared with, and the runtime to use with a debugger.

# Returns a context to enter around one action of a rank.
ActionContext = Callable[[int, BoundAction], AbstractContextManager[object]]


def _no_context(rank: int, bound_action: BoundAction) -> AbstractContextManager[object]:
    return nullcontext()


class InlineExecutor:
    """The executor of one call in the caller's thread.

    `action_context` is entered around each action, for example to measure memory.
    """

    def __init__(
        self, transports: TransportFactory, action_context: ActionContext = _no_context
    ) -> None:
        self._transports, self._action_context = transports, action_context

    def endpoint(self, rank: int) -> Transport:
        """Return the transport of a rank."""
        return self._transports.endpoint(rank)

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Run the actions of all ranks in the execution order of the phase."""
        with context.use_thread_locals() if context.thread_locals else nullcontext():
            context.copy_variables().run(self._execute, workers, phase, context)

    def _execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        # On the CPU there is nothing to activate, and a context per action costs time.
        needs_contexts = self._action_context is not _no_context or any(
            worker.device.needs_activation for worker in workers
        )
        for worker in workers:
            worker.shares_thread = len(workers) > 1
        with use_worker_thread_settings(context):
            for rank, bound_action in phase.execution_order:
                worker = workers[rank]
                if needs_contexts:
                    with worker.device.activate(), self._action_context(rank, bound_action):
                        worker.execute(bound_action)
                else:
                    worker.execute(bound_action)


@contextmanager
def use_worker_thread_settings(context: CallerContext) -> Iterator[None]:
    """Give the caller's thread the settings of a worker thread for the duration of the context.

    Backwards run in this thread, and autocast is off outside of the stages, which enter the
    caller's autocast themselves.
    """
    # With autograd's own threads on, the backward of a stage on a GPU would run in autograd's
    # thread for that GPU. It runs in this thread instead, as in a worker: see
    # `threads._worker_loop`.
    with (
        torch.autograd.set_multithreading_enabled(False),
        no_autocast(),
        torch.set_grad_enabled(context.grad_enabled),
    ):
        yield
