from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.device.device import Cpu
from penstock.runtime.program_cache import bind_program
from penstock.runtime.worker import CellIO, Worker, bind_lane
from penstock.schedules import one_f_one_b
from penstock.schedules.ir import Message, Op, StageGraph, is_forward
from penstock.schedules.lowering import lower
from penstock.schedules.notation import loads
from penstock.stage.caller_context import CallerContext
from penstock.stage.payload import Payload
from penstock.stage.stage import OUTSIDE, Stage
from penstock.stage.stage_runner import StageRunner


class Recorded:
    """A transport that records what is sent, and delivers prepared messages."""

    def __init__(self, *arriving: tuple[Message, Tensor]) -> None:
        self.sent: list[tuple[Message, Tensor]] = []
        self._arriving = dict(arriving)

    def send(self, message: Message, payload: Payload) -> None:
        (tensor,) = payload.tensors
        assert tensor is not None
        self.sent.append((message, tensor))

    def recv(self, message: Message) -> Callable[[], Payload]:
        return lambda: Payload((self._arriving[message],), None, (True,))


class GivenGradients:
    """A loss whose output gradients are given by micro-batch."""

    needs_rescale = False

    def __init__(self, gradients: Callable[[int], Payload]) -> None:
        self._gradients = gradients

    def compute_output_gradients(self, microbatch: int, outputs: Payload) -> Payload:
        return self._gradients(microbatch)

    def before_backward(self, stage_runner: StageRunner, microbatch: int) -> None:
        pass

    def finish_gradients(self, rescale_factor: torch.Tensor | None) -> None:
        pass

    def restore_gradients(self) -> None:
        pass


def tripled(index: int, before: int, after: int) -> Stage:
    """Return a stage that multiplies by three."""

    def compute(arrived: Any) -> dict[int, tuple[Any, ...]]:
        return {after: (arrived[before][0] * 3,)}

    return Stage(index, ("0",), (nn.Identity(),), compute)


def worker(transport: Recorded, stage: Stage, rank: int, cell_io: CellIO) -> Worker:
    context = CallerContext.current(frozenset({"cpu"}))
    runner = StageRunner(stage, context)
    return Worker(rank, Cpu(), {stage.index: runner}, transport, cell_io)


def test_worker_executes_its_lane() -> None:
    """The second of three ranks computes what it receives, and sends what it computes."""
    schedule = loads("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0")
    program = lower(schedule, StageGraph.chain(3))  # type: ignore[arg-type]
    transport = Recorded(
        (Message(0, 1, 0), torch.tensor([2.0])), (Message(2, 1, 0), torch.tensor([10.0]))
    )
    middle = worker(transport, tripled(1, before=0, after=2), 1, CellIO())
    steps = bind_lane(program, 1)
    for step in steps:
        middle.execute(step)
    assert [(str(message), tensor.item()) for message, tensor in transport.sent] == [
        ("1>2:0", 6.0),
        ("1>0:0", 30.0),
    ]
    assert [str(bound.action) for bound, _, _ in middle.timed_actions] == [
        "1F0",
        "!1>2:0",
        "1B0",
        "!1>0:0",
    ]
    assert all(start <= end for _, start, end in middle.timed_actions)  # type: ignore[operator]


def test_cell_io_provides_inputs_and_output_gradients() -> None:
    """A single stage takes inputs and output gradients from CellIO, and puts its results there."""
    program = lower(loads("0F0 0F1 0B1 0B0"))  # type: ignore[arg-type]
    cell_io = CellIO()
    only = worker(Recorded(), tripled(0, before=OUTSIDE, after=OUTSIDE), 0, cell_io)
    for microbatch in range(2):
        cell_io.inputs[0, microbatch] = Payload((torch.tensor([1.0 + microbatch]),), None, (True,))
    cell_io.loss = GivenGradients(
        lambda microbatch: Payload((torch.tensor([100.0 * (microbatch + 1)]),))
    )
    for step in bind_lane(program, 0):
        only.execute(step)
    assert [cell_io.outputs[0, i].tensors[0].item() for i in range(2)] == [3.0, 6.0]  # type: ignore[union-attr]
    assert [cell_io.input_gradients[0, i].tensors[0].item() for i in range(2)] == [300.0, 600.0]  # type: ignore[union-attr]


def test_bound_actions_know_their_messages() -> None:
    program = lower(one_f_one_b(2, 1), StageGraph.chain(2))
    steps = {str(step.action): step for rank in range(2) for step in bind_lane(program, rank)}
    assert list(map(str, steps["1F0"].consumed_messages)) == ["0>1:0"]
    assert list(map(str, steps["1B0"].produced_messages)) == ["1>0:0"]
    assert steps["!0>1:0"].consumed_messages == steps["!0>1:0"].produced_messages == ()
    assert [step.lane_index for step in bind_lane(program, 0)] == list(range(len(program.lanes[0])))


def test_phase_has_one_execution_order_and_can_be_split_into_forward_and_backward() -> None:
    program = lower(one_f_one_b(2, 2))
    phase = bind_program(program)
    assert len(phase.execution_order) == sum(map(len, program.lanes))
    forward, backward = (
        phase.filter_actions(is_forward),
        phase.filter_actions(lambda a: not is_forward(a)),
    )
    for half, op in ((forward, Op.F), (backward, Op.B)):
        computes = [step.action for _, step in half.execution_order if hasattr(step.action, "op")]
        assert {action.op for action in computes} == {op}
        assert sum(map(len, half.lanes)) == len(half.execution_order)
    assert len(forward.execution_order) + len(backward.execution_order) == len(
        phase.execution_order
    )
