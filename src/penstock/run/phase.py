"""A program made ready to be carried out, whole or as a forward and a backward phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.ir import Action, Compute, Op, Program
from penstock.play import play
from penstock.run.worker import Step, steps_of


class Phase(NamedTuple):
    """The steps of each rank, and all of them in the one order in which they could be played."""

    lanes: tuple[tuple[Step, ...], ...]
    order: tuple[tuple[int, Step], ...]

    def only(self, wanted: Callable[[Action], bool]) -> Phase:
        """Those steps alone."""
        return Phase(
            tuple(tuple(s for s in lane if wanted(s.action)) for lane in self.lanes),
            tuple((rank, s) for rank, s in self.order if wanted(s.action)),
        )


def whole(program: Program) -> Phase:
    """All of a program."""
    lanes = tuple(steps_of(program, rank) for rank in range(program.schedule.ranks))
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
