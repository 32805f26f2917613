"""Penstock: pipeline parallelism for PyTorch that computes what your model computes, and proves it.

A schedule is a value: make one (`schedules`), write its messages in (`lower`), check it
(`verify`), time it (`simulate`), draw it (`draw`).

>>> import penstock
>>> schedule = penstock.schedules.one_f_one_b(ranks=4, chunks=8)
>>> timeline = penstock.simulate(penstock.lower(schedule))
>>> f"{timeline.bubble:.1%} idle, at most {max(timeline.peak):g} micro-batches alive"
'27.3% idle, at most 4 micro-batches alive'
"""

from penstock import draw, schedules
from penstock.cost import Cost
from penstock.errors import ArgumentError, FormatError, MissingExtra, PenstockError, Unsound
from penstock.ir import (
    Action,
    Compute,
    Message,
    Op,
    Program,
    Recv,
    Schedule,
    Send,
    StageGraph,
)
from penstock.lower import lower, recompute, recompute_mode
from penstock.notation import dumps, loads
from penstock.play import Deadlock, Sends, Span, Wait, play
from penstock.timeline import Timeline, simulate
from penstock.verify import require_sound, verify

__version__ = "0.1.0"

__all__ = [
    "Action",
    "ArgumentError",
    "Compute",
    "Cost",
    "Deadlock",
    "FormatError",
    "Message",
    "MissingExtra",
    "Op",
    "PenstockError",
    "Program",
    "Recv",
    "Schedule",
    "Send",
    "Sends",
    "Span",
    "StageGraph",
    "Timeline",
    "Unsound",
    "Wait",
    "draw",
    "dumps",
    "loads",
    "lower",
    "play",
    "recompute",
    "recompute_mode",
    "require_sound",
    "schedules",
    "simulate",
    "verify",
]
