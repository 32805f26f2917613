"""The failure detector: it decides from heartbeats whether a rank has failed, and which one.

This module does no communication and has no clock: heartbeats and times go in, a `Failure` or None
comes out. The watchdog does the rest.

| finding  | condition for a rank that this rank waits for           | limit (see `Timeouts`)  |
|----------|---------------------------------------------------------|-------------------------|
| died     | no new heartbeat                                        | `silence`               |
|          | no new heartbeat, after a connection was lost           | `after_lost_connection` |
|          | no new heartbeat, while this rank computes on a GPU     | `silence`               |
|          | that receives messages by itself (NCCL)                 |                         |
| left     | its last heartbeat says that it left                    | 2 intervals             |
| stalled  | new heartbeats, but no progress, while it computes or   | `silence`, longer with  |
|          | is outside a call                                       | a `timeout_factor`      |
| deadlock | it waits without progress, and so do all ranks that it  | 2 heartbeats, times     |
|          | waits for                                               | `timeout_factor`        |

A rank blames only ranks that it waits for itself. If those wait for another rank, they blame it.
So the rank at the root of a chain of waits is found by the ranks next to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import NamedTuple

from penstock.runtime.distributed.failure import report as causes
from penstock.runtime.distributed.failure.report import Failure


class RankState(IntEnum):
    """The state of a rank."""

    OUTSIDE_CALL = 0  # runs the caller's code, between calls of the pipe
    COMPUTING = 1  # runs an action
    WAITING = 2  # waits for a message of one rank, or for several ranks
    LEFT = 3  # has closed its pipe
    NOT_STARTED = 4  # has sent no heartbeat yet


AwaitedRanks = int | tuple[int, ...] | None  # one rank, some ranks, or all (None)


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat: its sequence number, the rank's progress counter, and its current activity."""

    sequence_number: int
    progress: int
    state: RankState = RankState.OUTSIDE_CALL
    call_name: str = ""  # for example "step (call 3)"
    description: str = ""  # the action, or what the rank waits for
    awaited_ranks: AwaitedRanks = None
    timeout_factor: float = 1.0  # how many heartbeats the activity may take

    def __str__(self) -> str:
        if self.state is RankState.WAITING:
            awaited = (
                f"rank {self.awaited_ranks}" if isinstance(self.awaited_ranks, int) else "all ranks"
            )
            return f"in {self.call_name}, waiting for {self.description} from {awaited}"
        if self.state is RankState.COMPUTING:
            return f"in {self.call_name}, at {self.description}"
        if self.state is RankState.NOT_STARTED:
            return "before it created this pipe"
        return f"after {self.call_name}" if self.call_name else "before its first step"

    def to_json(self) -> str:
        """Return the heartbeat as JSON text."""
        return json.dumps(astuple(self))

    @staticmethod
    def from_json(text: str | bytes) -> Heartbeat:
        """Return the heartbeat that `to_json` has written."""
        number, progress, state, call_name, description, awaited, factor = json.loads(text)
        awaited = tuple(awaited) if isinstance(awaited, list) else awaited
        return Heartbeat(
            number, progress, RankState(state), call_name, description, awaited, factor
        )


class PeerStatus(NamedTuple):
    """The last heartbeat of a rank, and for how long it has not changed."""

    heartbeat: Heartbeat
    seconds_silent: float  # since the last new heartbeat
    seconds_without_progress: float  # since its progress counter or its state changed


class HeartbeatTracker:
    """The heartbeats that this rank has observed, with the times of their last changes.

    `observed_seconds` is a clock that runs only while this rank observes. Two observations more
    than `max_gap` apart count as `max_gap`: if this process or the store was suspended, the other
    ranks may have sent heartbeats that it could not see, and it must not blame them for that time.
    Clocks of other machines are not used.
    """

    def __init__(self, max_gap: float) -> None:
        self._max_gap = max_gap  # seconds
        self.observed_seconds = self._last_update = 0.0
        self._last_heartbeats: dict[int, tuple[Heartbeat, float, float]] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat], now: float) -> dict[int, PeerStatus]:
        """Record the current heartbeats of all ranks, and return the status of each."""
        self.observed_seconds += min(now - self._last_update, self._max_gap)
        self._last_update = now
        return {rank: self._update_rank(rank, heartbeat) for rank, heartbeat in heartbeats.items()}

    def _update_rank(self, rank: int, heartbeat: Heartbeat) -> PeerStatus:
        now = self.observed_seconds
        previous, beat_time, progress_time = self._last_heartbeats.get(rank, (heartbeat, now, now))
        if heartbeat.sequence_number != previous.sequence_number:
            beat_time = now
        if heartbeat.progress != previous.progress or heartbeat.state != previous.state:
            progress_time = now
        self._last_heartbeats[rank] = heartbeat, beat_time, progress_time
        return PeerStatus(heartbeat, now - beat_time, now - progress_time)


@dataclass(frozen=True)
class Timeouts:
    """The limits of the detector in seconds. All of them follow from `heartbeat=` of the pipe."""

    heartbeat: float

    @property
    def interval(self) -> float:
        """The time between two heartbeats of a rank."""
        return min(0.25, self.heartbeat / 8)

    @property
    def silence(self) -> float:
        """The limit without heartbeats or progress. The report arrives within `heartbeat`."""
        return self.heartbeat - 2 * self.interval

    @property
    def startup(self) -> float:
        """The limit without a first heartbeat, as a process may take long to start."""
        return max(60.0, self.heartbeat)

    @property
    def after_lost_connection(self) -> float:
        """The limit without heartbeats after a connection was lost."""
        return min(1.0, self.silence)

    @property
    def failure_wait(self) -> float:
        """The time to wait for the cause of a lost connection.

        It is at least as long as another rank needs to find the cause.
        """
        return 3 * self.after_lost_connection + 2 * self.interval


def diagnose(
    own_rank: int,
    statuses: Mapping[int, PeerStatus],
    timeouts: Timeouts,
    has_symptom: bool,
    may_wait_on_device: bool = False,
) -> Failure | None:
    """Return the failure of a rank that this rank waits for, or None.

    `has_symptom` says that an operation of this rank has failed with a transport error, or that
    it was told to end. Some rank has then most likely died or aborted, so the limits are shorter
    and all ranks are suspects.

    `may_wait_on_device` says that the GPU of this rank waits for messages by itself. A layer that
    reads a value, such as `x.item()`, then waits for other ranks although this rank computes. Any
    rank may be the one it waits for, so a silent one has died. Slow ranks are not blamed.
    """
    own_status = statuses[own_rank]
    others = {rank: status for rank, status in statuses.items() if rank != own_rank}
    awaited = _find_awaited(own_status.heartbeat, others)
    waiter = f"rank {own_rank} was {own_status.heartbeat}"
    is_computing = own_status.heartbeat.state is RankState.COMPUTING
    # A rank that waits at the same point, and then falls silent, has died or is cut off.
    suspects = _find_awaited(own_status.heartbeat, others, include_arrived=True)
    if has_symptom or (may_wait_on_device and is_computing):
        suspects = others
    # Died. The most silent rank comes first: on a busy machine the heartbeats of live ranks are
    # late as well.
    for rank, (beat, silent, _) in sorted(
        suspects.items(), key=lambda item: (-item[1].seconds_silent, item[0])
    ):
        limit = timeouts.startup if beat.state is RankState.NOT_STARTED else timeouts.silence
        if has_symptom:  # a lost connection most likely led to an awaited rank
            limit = timeouts.after_lost_connection * (2 if awaited and rank not in awaited else 1)
        if beat.state is not RankState.LEFT and silent > limit:
            return causes.describe_death(rank, str(beat), silent, waiter)
    # Left. Messages that it sent before it left may still be in transit.
    for rank, (beat, _, stuck) in sorted(awaited.items()):
        if beat.state is RankState.LEFT and (
            has_symptom or min(stuck, own_status.seconds_without_progress) > 2 * timeouts.interval
        ):
            return causes.describe_departure(rank, str(beat), waiter)
    # Stalled. The time counts from when this rank began to wait. A rank without recent heartbeats
    # may have died instead: that is decided later, by its silence.
    for rank, (beat, silent, stuck) in sorted(awaited.items()):
        waited = min(stuck, own_status.seconds_without_progress)
        is_alive = silent <= 3 * timeouts.interval
        is_running = beat.state in (RankState.OUTSIDE_CALL, RankState.COMPUTING)
        limit = timeouts.silence + (beat.timeout_factor - 1) * timeouts.heartbeat
        if is_running and is_alive and waited > limit:
            return causes.describe_stall(rank, str(beat), waited, waiter, timeouts.heartbeat)
    return _find_deadlock(own_rank, statuses, timeouts)


def _find_awaited(
    heartbeat: Heartbeat, others: Mapping[int, PeerStatus], include_arrived: bool = False
) -> dict[int, PeerStatus]:
    """Return the statuses of the ranks that a rank waits for.

    If it waits for several, those that wait at the same point are left out, unless
    `include_arrived` is set: they have arrived, too.
    """
    if heartbeat.state is not RankState.WAITING:
        return {}
    if isinstance(heartbeat.awaited_ranks, int):
        return {rank: status for rank, status in others.items() if rank == heartbeat.awaited_ranks}

    def get_position(beat: Heartbeat) -> tuple[RankState, str, str]:
        return beat.state, beat.call_name, beat.description

    awaited = others.keys() if heartbeat.awaited_ranks is None else set(heartbeat.awaited_ranks)
    return {
        rank: status
        for rank, status in others.items()
        if rank in awaited
        and (include_arrived or get_position(status.heartbeat) != get_position(heartbeat))
    }


def _find_deadlock(
    own_rank: int, statuses: Mapping[int, PeerStatus], timeouts: Timeouts
) -> Failure | None:
    """Return a deadlock report if every rank that can be reached over waits is itself waiting.

    Follow the waits from this rank. If one of the ranks is not waiting, or has made progress
    recently, the others may still continue.
    """
    visited, pending = {own_rank}, [own_rank]
    while pending:
        rank = pending.pop()
        beat, _, stuck = statuses[rank]
        limit = 2 * timeouts.heartbeat * beat.timeout_factor
        if beat.state is not RankState.WAITING or stuck <= limit:
            return None
        if isinstance(beat.awaited_ranks, int) and beat.awaited_ranks not in statuses:
            return None  # this rank does not monitor that one; other ranks do
        others = {r: s for r, s in statuses.items() if r != rank}
        pending += (unvisited := set(_find_awaited(beat, others)) - visited)
        visited |= unvisited
    description = "; ".join(f"rank {rank} {statuses[rank].heartbeat}" for rank in sorted(visited))
    return causes.describe_deadlock(
        own_rank, str(statuses[own_rank].heartbeat), description, timeouts.heartbeat
    )
