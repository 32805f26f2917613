"""`Worker`: runs the actions of one rank's lane, one after another.

    action            what the worker does
    ------            --------------------
    Recv              post the receive; wait for the payload only where a computation needs it
    Compute           take the payloads it consumes, call the rank's `StageRunner`, keep the
                      payloads it produces
    Send              hand a kept payload to the transport

Tensors that enter the pipe from the caller, or leave it, go through a `CellIO` instead of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import RLock
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.device.device import Device, Timestamp
from penstock.errors import ErrorLocation
from penstock.runtime.transport import Transport
from penstock.schedules.ir import (
    Action,
    Compute,
    Message,
    Op,
    Program,
    Send,
    consumes,
    produces,
)
from penstock.stage.payload import Payload
from penstock.stage.stage import OUTSIDE
from penstock.stage.stage_runner import StageRunner


class BoundAction(NamedTuple):
    """An action with its index in the lane and the messages that it consumes and produces."""

    lane_index: int
    action: Action
    consumed_messages: tuple[Message, ...]
    produced_messages: tuple[Message, ...]


# An action with the timestamps of its start and its end. A named tuple takes longer to make.
TimedAction = tuple[BoundAction, Timestamp, Timestamp]


class TimedActionLog(list[TimedAction]):
    """The timed actions of a rank, in order.

    When the log is collected, its timestamps go back to the device, which uses them again: on a
    GPU they are CUDA events, and creating an event takes as long as recording it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __del__(self) -> None:
        self._device.recycle_timestamps(moment for _, *moments in self for moment in moments)


def bind_lane(program: Program, rank: int) -> tuple[BoundAction, ...]:
    """Return the actions of a lane with their messages, so that running them looks nothing up."""

    def bind_action(lane_index: int, action: Action) -> BoundAction:
        if not isinstance(action, Compute):
            return BoundAction(lane_index, action, (), ())
        graph = program.graph
        return BoundAction(
            lane_index, action, tuple(consumes(action, graph)), tuple(produces(action, graph))
        )

    return tuple(bind_action(index, action) for index, action in enumerate(program.lanes[rank]))


class StepLoss(Protocol):
    """The losses of one training step on this process."""

    def compute_output_gradients(self, microbatch: int, outputs: Payload) -> Payload:
        """Record the loss of a micro-batch. Return the gradients with which its backward begins.

        The worker of the last stage calls this as soon as an output is there, so that a backward
        can begin while other micro-batches are still in their forward.
        """

    @property
    def needs_rescale(self) -> bool:
        """Whether the loss has weights, so that the scale of gradients is known at the end."""

    def before_backward(self, stage_runner: StageRunner, microbatch: int) -> None:
        """Set earlier gradients aside, if those of this step have a provisional scale."""

    def finish_gradients(self, rescale_factor: Tensor | None) -> None:
        """Give the gradients of this step their final scale."""

    def restore_gradients(self) -> None:
        """Restore the gradients of earlier steps after the step has failed."""


class CellObserver(Protocol):
    """The interface of what watches the computations of a call, as an audit does."""

    def take_turn(self, action: Compute) -> AbstractContextManager[object]:
        """Return a context for a computation, in which other ranks may have to wait."""

    def before_compute(self, stage_runner: StageRunner, action: Compute) -> None:
        """Note the state before a computation, in the thread of its rank."""

    def after_compute(
        self, stage_runner: StageRunner, action: Compute, payloads: Mapping[int, Payload]
    ) -> None:
        """Note what a computation has changed and returned."""


class CellIO:
    """The payloads that enter cells from the caller and leave them for the caller.

    Each dictionary maps a cell (stage, micro-batch) to a payload; a cell has at most one of each:

                         enters the cell     leaves the cell
        forward          inputs              outputs
        backward         output_gradients    input_gradients

    `loss` computes the output gradients of a step. Without it, the caller supplies them.
    """

    def __init__(self) -> None:
        self.loss: StepLoss | None = None
        self.inputs: dict[tuple[int, int], Payload] = {}
        self.outputs: dict[tuple[int, int], Payload] = {}
        self.output_gradients: dict[tuple[int, int], Payload] = {}
        self.input_gradients: dict[tuple[int, int], Payload] = {}


class Worker:
    """One rank in one call: its stage runners, its payloads and its timestamps."""

    def __init__(
        self,
        rank: int,
        device: Device,
        stage_runners: Mapping[int, StageRunner],
        transport: Transport,
        cell_io: CellIO,
    ) -> None:
        self.rank, self.device = rank, device
        self.stage_runners = stage_runners
        # Timestamps of other devices are numbers, which nobody uses again.
        self.timed_actions: list[TimedAction] = TimedActionLog(device) if device.has_streams else []
        # The end of the last action, or None if the rank has waited since: for a message, or for
        # the caller.
        self.last_end: Timestamp | None = None
        self.shares_thread = False  # with other ranks, which run between two of its actions
        self._transport, self._cell_io = transport, cell_io
        # Payloads that wait for their Send, or for a stage of the same rank.
        self._ready_payloads: dict[Message, Payload] = {}
        self._posted_recvs: dict[Message, Callable[[], Payload]] = {}
        self.retain_graph = False
        # Held by F and R. A lock of its own takes a fifth of the time of a null context.
        self.forward_lock: AbstractContextManager[object] = RLock()
        self.observer: CellObserver | None = None

    def execute(self, bound_action: BoundAction) -> None:
        """Run one action and record its start and its end."""
        # Attributes, because a named tuple is unpacked more slowly than a tuple.
        action = bound_action.action
        if isinstance(action, Compute):
            # Waiting for messages comes before the start is recorded.
            received: dict[int, Payload] = {}
            for message in bound_action.consumed_messages:
                # A payload of a stage on the same rank was not sent.
                payload = self._ready_payloads.pop(message, None)
                received[message.src] = payload or self._receive(message)
            start = self.last_end
            if start is None or self.shares_thread or self.device.has_streams:
                start = self.device.record_timestamp(start)
            microbatch, stage_runner = action.microbatch, self.stage_runners[action.stage]
            try:
                compute = _COMPUTATIONS[action.op]
                if self.observer is None:
                    payloads = compute(self, stage_runner, microbatch, received)
                else:
                    with self.observer.take_turn(action):
                        self.observer.before_compute(stage_runner, action)
                        payloads = compute(self, stage_runner, microbatch, received)
                        self.observer.after_compute(stage_runner, action, payloads)
            except BaseException as error:
                # The error keeps its type and its traceback. The location is added as an
                # attribute, for `RemoteError`, and as a note, for people.
                layers, stage_label = stage_runner.stage.names, str(stage_runner.stage)
                location = ErrorLocation(action.stage, layers, microbatch, str(action), stage_label)
                error.whereabouts = location  # type: ignore[attr-defined]
                error.add_note(f"{location} on rank {self.rank} ({self.device!r})")
                raise
            for message in bound_action.produced_messages:
                self._ready_payloads[message] = payloads[message.dst]
            end = self.last_end = self.device.record_timestamp()
        elif isinstance(action, Send):
            # A send follows the last action at once, so that action's end serves as its start.
            start = self.device.record_timestamp() if self.last_end is None else self.last_end
            self._transport.send(action.message, self._ready_payloads.pop(action.message))
            end = self.last_end = self.device.record_send_end(start)
        else:
            # Posting a receive takes no time that is worth showing in a timeline.
            self._posted_recvs[action.message] = self._transport.recv(action.message)
            return
        self.timed_actions.append((bound_action, start, end))

    def _receive(self, message: Message) -> Payload:
        """Wait for a payload whose receive was posted."""
        # The rank may be idle until the message is there, so the next action needs a start of its
        # own: the end of the last one would count the wait as work.
        self.last_end = None
        return self._posted_recvs.pop(message)()

    def _forward(
        self, stage_runner: StageRunner, microbatch: int, received: dict[int, Payload]
    ) -> dict[int, Payload]:
        cell_io, cell = self._cell_io, (stage_runner.stage.index, microbatch)
        caller_inputs = cell_io.inputs.get(cell)
        if caller_inputs is not None:
            received[OUTSIDE] = caller_inputs
        with self.forward_lock:
            payloads = stage_runner.forward(microbatch, received)
        if OUTSIDE in payloads:
            cell_io.outputs[cell] = payloads[OUTSIDE]
            self._take_loss(cell, payloads[OUTSIDE])
        return payloads

    def _take_loss(self, cell: tuple[int, int], output: Payload) -> None:
        loss = self._cell_io.loss
        if loss is not None:
            gradients = loss.compute_output_gradients(cell[1], output)
            self._cell_io.output_gradients[cell] = gradients

    def _recompute(
        self, stage_runner: StageRunner, microbatch: int, received: dict[int, Payload]
    ) -> dict[int, Payload]:
        with self.forward_lock:
            payloads = stage_runner.recompute(microbatch)
        if OUTSIDE in payloads:
            self._take_loss((stage_runner.stage.index, microbatch), payloads[OUTSIDE])
        return {}

    def _backward(
        self, stage_runner: StageRunner, microbatch: int, received: dict[int, Payload]
    ) -> dict[int, Payload]:
        cell_io, cell = self._cell_io, (stage_runner.stage.index, microbatch)
        if cell_io.loss is not None:
            cell_io.loss.before_backward(stage_runner, microbatch)
        caller_grads = cell_io.output_gradients.get(cell)
        if caller_grads is not None:
            received[OUTSIDE] = caller_grads
        payloads = stage_runner.backward(microbatch, received, self.retain_graph)
        if OUTSIDE in payloads:
            cell_io.input_gradients[cell] = payloads[OUTSIDE]
        return payloads

    def _backward_weights(
        self, stage_runner: StageRunner, microbatch: int, received: dict[int, Payload]
    ) -> dict[int, Payload]:
        stage_runner.backward_weights(microbatch)
        return {}


# How a worker computes each op: from the payloads that the action consumes to those it produces.
_COMPUTATIONS: dict[
    Op, Callable[[Worker, StageRunner, int, dict[int, Payload]], dict[int, Payload]]
] = {
    Op.F: Worker._forward,
    Op.R: Worker._recompute,
    Op.B: Worker._backward,
    Op.I: Worker._backward,
    Op.W: Worker._backward_weights,
}
