"""A worker carries out one rank's lane over the rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from penstock.device.device import Device, Timestamp
from penstock.errors import ErrorLocation
from penstock.runtime.transport import Transport
from penstock.schedules.ir import (
    Action,
    Compute,
    Message,
    Op,
    Program,
    Recv,
    Send,
    consumes,
    produces,
)
from penstock.stage.cell_graph import Gradients
from penstock.stage.payload import Payload
from penstock.stage.stage import OUTSIDE
from penstock.stage.stage_runner import StageRunner


class BoundAction(NamedTuple):
    """An action at its place in the lane, with the messages it takes and makes."""

    lane_index: int
    action: Action
    consumed_messages: tuple[Message, ...]
    produced_messages: tuple[Message, ...]


class TimedAction(NamedTuple):
    """When a step was carried out."""

    bound_action: BoundAction
    start: Timestamp
    end: Timestamp


class TimedActionLog(list[TimedAction]):
    """Those of a rank, in order. When nobody looks at them any more, its place forgets them."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __del__(self) -> None:
        self._device.recycle_timestamps(moment for _, *both in self for moment in both)


def bind_lane(program: Program, rank: int) -> tuple[BoundAction, ...]:
    """A lane, ready to be carried out: the rule has been asked for every action."""

    def bind_action(lane_index: int, action: Action) -> BoundAction:
        if not isinstance(action, Compute):
            return BoundAction(lane_index, action, (), ())
        graph = program.graph
        return BoundAction(
            lane_index, action, tuple(consumes(action, graph)), tuple(produces(action, graph))
        )

    return tuple(bind_action(at, action) for at, action in enumerate(program.lanes[rank]))


class CellIO:
    """What comes from outside into cells, and what they give out: forward and backward.

    Each cell (stage, micro-batch) takes at most one parcel and gives at most one, each way.
    `answer` makes the gradients for an output as soon as it is there, if they are known;
    `prepare` is told of each cell before its backward.
    """

    def __init__(self) -> None:
        self.compute_output_gradients: Callable[[int, Payload], Payload] | None = None
        self.before_backward: Callable[[StageRunner, int], None] | None = None
        self.inputs: dict[tuple[int, int], Payload] = {}
        self.outputs: dict[tuple[int, int], Payload] = {}
        self.output_gradients: dict[tuple[int, int], Payload] = {}
        self.input_gradients: dict[tuple[int, int], Payload] = {}


class Worker:
    """One rank of one call: its tapes, its messages, and when it did what."""

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
        self.timed_actions = TimedActionLog(device)
        self._last_end: Timestamp | None = None  # the end of the last step, if nothing came since
        self._transport, self._cell_io = transport, cell_io
        self._ready_payloads: dict[
            Message, Payload
        ] = {}  # not sent yet, or for a stage of this rank
        self._posted_recvs: dict[Message, Callable[[], Payload]] = {}
        self.retain_graph = False
        self.forward_lock: AbstractContextManager[object] = nullcontext()  # to compute forward

    def execute(self, bound_action: BoundAction) -> None:
        """Carry out one step."""
        action = bound_action.action
        if isinstance(action, Recv):
            self._posted_recvs[action.message] = self._transport.recv(action.message)
            return
        if isinstance(action, Send):
            start = (
                self.device.record_timestamp() if self._last_end is None else self._last_end
            )  # it follows at once
            self._transport.send(action.message, self._ready_payloads.pop(action.message))
            self._last_end = self.device.record_send_end(start)
        else:
            taken = {m.src: self._take_payload(m) for m in bound_action.consumed_messages}
            start = self.device.record_timestamp(self._last_end)
            self._compute(action, taken, bound_action.produced_messages)
            self._last_end = self.device.record_timestamp()
        self.timed_actions.append(TimedAction(bound_action, start, self._last_end))

    def _take_payload(self, message: Message) -> Payload:
        wait = self._posted_recvs.pop(message, None)
        if wait is None:
            return self._ready_payloads.pop(message)
        self._last_end = None
        return wait()

    def _compute(
        self, action: Compute, received: dict[int, Payload], produced_messages: tuple[Message, ...]
    ) -> None:
        op, stage, microbatch = action
        tape = self.stage_runners[stage]
        try:
            if op is Op.F:
                with self.forward_lock:
                    made = self._forward(tape, microbatch, received)
            elif op is Op.R:
                with self.forward_lock:
                    tape.recompute(microbatch)
                return
            elif op is Op.W:
                tape.backward_weights(microbatch)
                return
            else:
                made = self._backward(tape, microbatch, received)
        except BaseException as error:
            names, called = tape.stage.names, str(tape.stage)
            where = ErrorLocation(stage, names, microbatch, str(action), called)
            error.whereabouts = where  # type: ignore[attr-defined]
            error.add_note(f"{where} on rank {self.rank} ({self.device!r})")
            raise
        for message in produced_messages:
            self._ready_payloads[message] = made[message.dst]

    def _forward(
        self, stage_runner: StageRunner, microbatch: int, received: dict[int, Payload]
    ) -> dict[int, Payload]:
        cell = stage_runner.stage.index, microbatch
        given = self._cell_io.inputs.get(cell)
        if given is not None:
            received[OUTSIDE] = given
        made = stage_runner.forward(microbatch, received)
        if OUTSIDE in made:
            self._cell_io.outputs[cell] = made[OUTSIDE]
            if self._cell_io.compute_output_gradients is not None:
                self._cell_io.output_gradients[cell] = self._cell_io.compute_output_gradients(
                    microbatch, made[OUTSIDE]
                )
        return made

    def _backward(
        self, stage_runner: StageRunner, microbatch: int, received: dict[int, Payload]
    ) -> dict[int, Payload]:
        cell = stage_runner.stage.index, microbatch
        gradients = self._collect_output_gradients(stage_runner, microbatch, received)
        found = stage_runner.backward(microbatch, gradients, self.retain_graph)
        made = {source: Payload(tensors) for source, tensors in found.items()}
        if OUTSIDE in made:
            self._cell_io.input_gradients[cell] = made[OUTSIDE]
        return made

    def _collect_output_gradients(
        self, stage_runner: StageRunner, microbatch: int, received: Mapping[int, Payload]
    ) -> dict[int, Gradients]:
        """Those of a cell's outputs, with which its backward begins."""
        if self._cell_io.before_backward is not None:
            self._cell_io.before_backward(stage_runner, microbatch)
        gradients = {source: parcel.tensors for source, parcel in received.items()}
        given = self._cell_io.output_gradients.get((stage_runner.stage.index, microbatch))
        if given is not None:
            gradients[OUTSIDE] = given.tensors
        return gradients
