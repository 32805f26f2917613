"""Find out where the time of a step between processes goes that the simulated step does not have.

A recording has, for each rank, when each action ran, when the rank waited for which message, when
that message was sent, and the CPU time of threads other than its own. All ranks are on one host,
so their clocks agree. For each rank, the causes add up to the measured step less the simulated one:

forward, backward  computations took longer than in the plain loop (I and W are one backward)
send               sends
late               waits for a message that was not sent yet, or at the end for the last rank, less
                   the idle time on paper
transport          the rest of the waits: the message was sent, and not there yet
before, after      what precedes the first action (agreeing on the call), and follows the last one
between            everything else between two actions: posting receives, and Python
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import penstock
from penstock import Cost
from penstock.runtime.worker import BoundAction, Worker
from penstock.schedules.ir import Compute, Message, Op, Program, Send

CAUSES = (
    *("forward", "backward", "send", "late", "transport", "before", "between", "after"),
)  # fmt: skip


@dataclass
class Recording:
    """What one rank did in one step. Times are those of the clock of the host."""

    start: float = 0.0
    end: float = 0.0
    other_threads: float = 0.0  # their CPU time
    page_faults: int = 0
    first_action: float = 0.0
    last_action: float = 0.0
    computed: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    sending: float = 0.0
    sent: dict[Message, float] = field(default_factory=dict)
    waits: list[tuple[Message, float, float]] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the actions of the step in this context."""
    recording = Recording()
    execute, receive, clock = Worker.execute, Worker._receive, time.perf_counter

    def timed_execute(self: Worker, bound_action: BoundAction) -> None:
        start, waited = clock(), len(recording.waits)
        recording.first_action = recording.first_action or start
        action = bound_action.action
        if isinstance(action, Send):
            recording.sent[action.message] = start
        execute(self, bound_action)
        end = recording.last_action = clock()
        busy = end - start - sum(e - s for _, s, e in recording.waits[waited:])
        if isinstance(action, Compute):
            recording.computed[action.op.name, action.stage] += busy
        elif isinstance(action, Send):
            recording.sending += busy

    def timed_receive(self: Worker, message: Message) -> Any:
        start = clock()
        payload = receive(self, message)
        recording.waits.append((message, start, clock()))
        return payload

    with (
        patch.object(Worker, "execute", timed_execute),
        patch.object(Worker, "_receive", timed_receive),
    ):
        threads, faults = time.process_time() - time.thread_time(), count_page_faults()
        recording.start = clock()
        yield recording
        recording.end = clock()
        recording.other_threads = time.process_time() - time.thread_time() - threads
        recording.page_faults = count_page_faults() - faults


def count_page_faults() -> int:
    """Return how many pages the process has got from the operating system so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def find_causes(step: Callable[[], object], program: Program, cost: Cost) -> Mapping[str, float]:
    """Run a step, and return the seconds of each cause, as means over the ranks.

    `cost` has the durations of the plain loop. "simulated" and "measured" are those of the step,
    "threads" is the CPU time of a rank's other threads, and "faults" are page faults. Both are no
    part of the sum.
    """
    dist.barrier()
    with recorded() as mine:
        step()
    recordings: list[Recording] = [mine] * dist.get_world_size()
    dist.all_gather_object(recordings, mine)
    timeline = penstock.simulate(program, cost)
    sent = {message: at for each in recordings for message, at in each.sent.items()}
    start, end = min(each.start for each in recordings), max(each.end for each in recordings)
    last_action = max(each.last_action for each in recordings)
    totals: dict[str, float] = defaultdict(float)
    for rank, each in enumerate(recordings):
        on_paper = _durations_on_paper(program, rank, cost)
        forward = sum(t for (op, _), t in each.computed.items() if op == "F")
        backward = sum(each.computed.values()) - forward
        waiting = sum(e - s for _, s, e in each.waits)
        late = sum(max(0.0, min(e, sent[m]) - s) for m, s, e in each.waits)
        waiting_at_end = last_action - each.last_action
        idle_on_paper = timeline.makespan - sum(on_paper.values())
        lane = each.last_action - each.first_action
        seconds = {
            "forward": forward - on_paper["forward"],
            "backward": backward - on_paper["backward"],
            "send": each.sending,
            "late": late + waiting_at_end - idle_on_paper,
            "transport": waiting - late,
            "before": each.first_action - start,
            "between": lane - forward - backward - waiting - each.sending,
            "after": end - last_action,
            "simulated": timeline.makespan,
            "measured": end - start,
            "threads": each.other_threads,
            "faults": each.page_faults,
        }
        for name, value in seconds.items():
            totals[name] += value / len(recordings)
    return totals


def _durations_on_paper(program: Program, rank: int, cost: Cost) -> dict[str, float]:
    """Return the seconds of a rank's forwards and backwards in the simulated step."""
    totals = {"forward": 0.0, "backward": 0.0}
    parts = {Op.F: (cost.F,), Op.B: (cost.I, cost.W), Op.I: (cost.I,), Op.W: (cost.W,)}
    for action in program.lanes[rank]:
        if isinstance(action, Compute):
            seconds = sum(part[action.stage] for part in parts[action.op])
            totals["forward" if action.op is Op.F else "backward"] += seconds
    return totals
