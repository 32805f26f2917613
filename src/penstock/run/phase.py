"""A program made ready to be carried out, whole or as a forward and a backward phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.ir import Action, Compute, Op, Program
from penstock.play import play
from penstock.run.worker import BoundAction, bind_lane


class Phase(NamedTuple):
    """The steps of each rank, and all of them in the one order in which they could be played."""

    lanes: tuple[tuple[BoundAction, ...], ...]
    execution_order: tuple[tuple[int, BoundAction], ...]

    def filter_actions(self, predicate: Callable[[Action], bool]) -> Phase:
        """Those steps alone."""
        return Phase(
            tuple(tuple(s for s in lane if predicate(s.action)) for lane in self.lanes),
            tuple((rank, s) for rank, s in self.execution_order if predicate(s.action)),
        )


def bind_program(program: Program) -> Phase:
    """All of a program."""
    lanes = tuple(bind_lane(program, rank) for rank in range(program.schedule.ranks))
    order = tuple((span.rank, lanes[span.rank][span.step]) for span in play(program))
    return Phase(lanes, order)


def is_forward(action: Action) -> bool:
    """A forward, or a message of activations?"""
    if isinstance(action, Compute):
        return action.op is Op.F
    return action.message.src < action.message.dst


def is_backward(action: Action) -> bool:
    """Anything else."""
    return not is_forward(action)
