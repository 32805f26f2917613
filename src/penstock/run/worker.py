"""A worker carries out one rank's lane over the rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from penstock.errors import Whereabouts
from penstock.ir import Action, Compute, Message, Op, Program, Recv, Send, consumes, produces
from penstock.run.transport import Transport
from penstock.stage.graph import Gradients
from penstock.stage.parcel import Parcel
from penstock.stage.places import Moment, Place
from penstock.stage.stage import OUTSIDE
from penstock.stage.tape import Tape


class Step(NamedTuple):
    """An action at its place in the lane, with the messages it takes and makes."""

    at: int
    action: Action
    takes: tuple[Message, ...]
    makes: tuple[Message, ...]


class Mark(NamedTuple):
    """When a step was carried out."""

    step: Step
    start: Moment
    end: Moment


class Marks(list[Mark]):
    """Those of a rank, in order. When nobody looks at them any more, its place forgets them."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def __del__(self) -> None:
        self._place.forget(moment for _, *both in self for moment in both)


def steps_of(program: Program, rank: int) -> tuple[Step, ...]:
    """A lane, ready to be carried out: the rule has been asked for every action."""

    def ready(at: int, action: Action) -> Step:
        if not isinstance(action, Compute):
            return Step(at, action, (), ())
        graph = program.graph
        return Step(at, action, tuple(consumes(action, graph)), tuple(produces(action, graph)))

    return tuple(ready(at, action) for at, action in enumerate(program.lanes[rank]))


class Desk:
    """What comes from outside into cells, and what they give out: forward and backward.

    Each cell (stage, micro-batch) takes at most one parcel and gives at most one, each way.
    `answer` makes the gradients for an output as soon as it is there, if they are known;
    `prepare` is told of each cell before its backward.
    """

    def __init__(self) -> None:
        self.answer: Callable[[int, Parcel], Parcel] | None = None
        self.prepare: Callable[[Tape, int], None] | None = None
        self.inputs: dict[tuple[int, int], Parcel] = {}
        self.outputs: dict[tuple[int, int], Parcel] = {}
        self.gradients: dict[tuple[int, int], Parcel] = {}
        self.input_gradients: dict[tuple[int, int], Parcel] = {}


class Worker:
    """One rank of one call: its tapes, its messages, and when it did what."""

    def __init__(
        self, rank: int, place: Place, tapes: Mapping[int, Tape], transport: Transport, desk: Desk
    ) -> None:
        self.rank, self.place = rank, place
        self.tapes = tapes
        self.marks = Marks(place)
        self._last: Moment | None = None  # the end of the last step, if nothing came since
        self._transport, self._desk = transport, desk
        self._made: dict[Message, Parcel] = {}  # not sent yet, or for a stage of this rank
        self._asked: dict[Message, Callable[[], Parcel]] = {}
        self.retain = False
        self.turn: AbstractContextManager[object] = nullcontext()  # to compute forward

    def do(self, step: Step) -> None:
        """Carry out one step."""
        action = step.action
        if isinstance(action, Recv):
            self._asked[action.message] = self._transport.recv(action.message)
            return
        if isinstance(action, Send):
            start = self.place.now() if self._last is None else self._last  # it follows at once
            self._transport.send(action.message, self._made.pop(action.message))
            self._last = self.place.sent(start)
        else:
            taken = {m.src: self._taken(m) for m in step.takes}
            start = self.place.now(self._last)
            self._compute(action, taken, step.makes)
            self._last = self.place.now()
        self.marks.append(Mark(step, start, self._last))

    def _taken(self, message: Message) -> Parcel:
        wait = self._asked.pop(message, None)
        if wait is None:
            return self._made.pop(message)
        self._last = None
        return wait()

    def _compute(
        self, action: Compute, taken: dict[int, Parcel], makes: tuple[Message, ...]
    ) -> None:
        op, stage, microbatch = action
        tape = self.tapes[stage]
        try:
            if op is Op.F:
                with self.turn:
                    made = self._forward(tape, microbatch, taken)
            elif op is Op.R:
                with self.turn:
                    tape.recompute(microbatch)
                return
            elif op is Op.W:
                tape.backward_weights(microbatch)
                return
            else:
                made = self._backward(tape, microbatch, taken)
        except BaseException as error:
            names, called = tape.stage.names, str(tape.stage)
            where = Whereabouts(stage, names, microbatch, str(action), called)
            error.whereabouts = where  # type: ignore[attr-defined]
            error.add_note(f"{where} on rank {self.rank} ({self.place!r})")
            raise
        for message in makes:
            self._made[message] = made[message.dst]

    def _forward(self, tape: Tape, microbatch: int, taken: dict[int, Parcel]) -> dict[int, Parcel]:
        cell = tape.stage.index, microbatch
        given = self._desk.inputs.get(cell)
        if given is not None:
            taken[OUTSIDE] = given
        made = tape.forward(microbatch, taken)
        if OUTSIDE in made:
            self._desk.outputs[cell] = made[OUTSIDE]
            if self._desk.answer is not None:
                self._desk.gradients[cell] = self._desk.answer(microbatch, made[OUTSIDE])
        return made

    def _backward(self, tape: Tape, microbatch: int, taken: dict[int, Parcel]) -> dict[int, Parcel]:
        cell = tape.stage.index, microbatch
        gradients = self._gradients(tape, microbatch, taken)
        found = tape.backward(microbatch, gradients, self.retain)
        made = {source: Parcel(tensors) for source, tensors in found.items()}
        if OUTSIDE in made:
            self._desk.input_gradients[cell] = made[OUTSIDE]
        return made

    def _gradients(
        self, tape: Tape, microbatch: int, taken: Mapping[int, Parcel]
    ) -> dict[int, Gradients]:
        """Those of a cell's outputs, with which its backward begins."""
        if self._desk.prepare is not None:
            self._desk.prepare(tape, microbatch)
        gradients = {source: parcel.tensors for source, parcel in taken.items()}
        given = self._desk.gradients.get((tape.stage.index, microbatch))
        if given is not None:
            gradients[OUTSIDE] = given.tensors
        return gradients
