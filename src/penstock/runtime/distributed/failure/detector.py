"""Who is to blame when a rank waits: decided from what the ranks last said of themselves.

Nothing here talks to anybody: signs of life in, a cause or nothing out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from penstock.runtime.distributed.failure import report as causes
from penstock.runtime.distributed.failure.report import Failure


class RankState(IntEnum):
    """What a rank does."""

    OUTSIDE_CALL = 0  # the caller's own code, between steps
    COMPUTING = 1  # computes an action
    WAITING = 2  # for a message of a rank, or for all ranks
    LEFT = 3
    NOT_STARTED = 4  # has given no sign yet


AwaitedRanks = int | tuple[int, ...] | None  # for whom a rank waits: for one, for some, or for all


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life: the how-manieth, how far the rank has come, and what it does."""

    sequence_number: int
    progress: int
    state: RankState = RankState.OUTSIDE_CALL
    call_name: str = ""  # of the step or the like
    description: str = ""
    awaited_ranks: AwaitedRanks = None
    timeout_factor: float = 1.0  # heartbeats that this may take

    def __str__(self) -> str:
        if self.state is RankState.WAITING:
            whose = (
                f"rank {self.awaited_ranks}" if isinstance(self.awaited_ranks, int) else "all ranks"
            )
            return f"in {self.call_name}, waiting for {self.description} of {whose}"
        if self.state is RankState.COMPUTING:
            return f"in {self.call_name}, at {self.description}"
        if self.state is RankState.NOT_STARTED:
            return "before it came to this pipe"
        return f"after {self.call_name}" if self.call_name else "before its first step"

    def to_json(self) -> str:
        """As JSON."""
        fields = (
            self.sequence_number,
            self.progress,
            self.state,
            self.call_name,
            self.description,
            self.awaited_ranks,
            self.timeout_factor,
        )
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str | bytes) -> Heartbeat:
        """The other way."""
        beat, count, mode, label, what, peer, patience = json.loads(text)
        peer = tuple(peer) if isinstance(peer, list) else peer
        return Heartbeat(beat, count, RankState(mode), label, what, peer, patience)


@dataclass(frozen=True)
class PeerStatus:
    """The last sign of a rank, and for how many seconds nothing about it has changed."""

    heartbeat: Heartbeat
    seconds_silent: float  # since the last beat
    seconds_without_progress: float  # since it last came on


class HeartbeatTracker:
    """What one rank has seen of all, by a clock that goes only while it looks.

    Clocks of other machines may differ; and while this process itself, or the store, was held
    up, others may have given signs that it could not see.
    """

    def __init__(self, max_gap: float) -> None:
        self._max_gap = max_gap  # seconds between two looks that count
        self.observed_seconds = self._last_update = 0.0
        self._last_heartbeats: dict[int, tuple[Heartbeat, float, float]] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat], now: float) -> dict[int, PeerStatus]:
        """One look: each rank's last sign, and for how long it has been the last."""
        self.observed_seconds += min(now - self._last_update, self._max_gap)
        self._last_update = now
        return {rank: self._update_rank(rank, sign) for rank, sign in heartbeats.items()}

    def _update_rank(self, rank: int, heartbeat: Heartbeat) -> PeerStatus:
        now = self.observed_seconds
        old, beaten, moved = self._last_heartbeats.get(rank, (heartbeat, now, now))
        if heartbeat.sequence_number != old.sequence_number:
            beaten = now
        if heartbeat.progress != old.progress or heartbeat.state != old.state:
            moved = now
        self._last_heartbeats[rank] = heartbeat, beaten, moved
        return PeerStatus(heartbeat, now - beaten, now - moved)


@dataclass(frozen=True)
class Timeouts:
    """After how many seconds a rank is blamed."""

    heartbeat: float

    @property
    def interval(self) -> float:
        """Between two signs of life."""
        return min(0.25, self.heartbeat / 8)

    @property
    def silence(self) -> float:
        """Without a sign, or without coming on: told before the heartbeat is over."""
        return self.heartbeat - 2 * self.interval

    @property
    def startup(self) -> float:
        """Without a first sign: it may take long to start."""
        return max(60.0, self.heartbeat)

    @property
    def after_lost_connection(self) -> float:
        """Without a sign, after a connection was lost."""
        return min(1.0, self.silence)

    @property
    def failure_wait(self) -> float:
        """For the cause behind a lost connection: at least as long as another needs to find it."""
        return 3 * self.after_lost_connection + 2 * self.interval


def diagnose(
    own_rank: int, statuses: Mapping[int, PeerStatus], timeouts: Timeouts, connection_lost: bool
) -> Failure | None:
    """The cause, if a rank waits too long; `suspicious`: its connection to some rank is lost.

    Each rank blames only those it waits for itself: whom they wait for, they blame.
    """
    mine = statuses[own_rank]
    others = {rank: sight for rank, sight in statuses.items() if rank != own_rank}
    awaited = _find_awaited(mine.heartbeat, others)
    waiter = f"rank {own_rank} was {mine.heartbeat}"
    looked_at = others if connection_lost else awaited
    # The longest first: on a busy machine those who live are late, too.
    for rank, (sign, quiet, _) in sorted(_sort_statuses(looked_at), key=lambda one: -one[1][1]):
        limit = timeouts.startup if sign.state is RankState.NOT_STARTED else timeouts.silence
        if connection_lost:  # most likely it is the one that is waited for
            limit = timeouts.after_lost_connection * (1 if rank in awaited else 2)
        if sign.state is not RankState.LEFT and quiet > limit:
            return causes.describe_death(rank, str(sign), quiet, waiter)
    for rank, (sign, _, still) in _sort_statuses(awaited):
        # What it sent before it left may still be on its way.
        if sign.state is RankState.LEFT and (
            connection_lost or min(still, mine.seconds_without_progress) > 2 * timeouts.interval
        ):
            return causes.describe_departure(rank, str(sign), waiter)
    for rank, (sign, quiet, still) in _sort_statuses(awaited):
        both, lives = (
            min(still, mine.seconds_without_progress),
            quiet <= 3 * timeouts.interval,
        )  # else it may have died
        limit = timeouts.silence + (sign.timeout_factor - 1) * timeouts.heartbeat
        if sign.state in (RankState.OUTSIDE_CALL, RankState.COMPUTING) and lives and both > limit:
            return causes.describe_stall(rank, str(sign), both, waiter, timeouts.heartbeat)
    return _find_deadlock(own_rank, statuses, timeouts)


def _sort_statuses(
    statuses: Mapping[int, PeerStatus],
) -> list[tuple[int, tuple[Heartbeat, float, float]]]:
    return [
        (
            r,
            (
                statuses[r].heartbeat,
                statuses[r].seconds_silent,
                statuses[r].seconds_without_progress,
            ),
        )
        for r in sorted(statuses)
    ]


def _find_awaited(heartbeat: Heartbeat, others: Mapping[int, PeerStatus]) -> dict[int, PeerStatus]:
    """Those whom a rank waits for. Of several, those that have not come there too."""
    if heartbeat.state is not RankState.WAITING:
        return {}
    if isinstance(heartbeat.awaited_ranks, int):
        return {rank: sight for rank, sight in others.items() if rank == heartbeat.awaited_ranks}

    def is_waiting_too(other: Heartbeat) -> bool:
        return (other.state, other.call_name, other.description) == (
            heartbeat.state,
            heartbeat.call_name,
            heartbeat.description,
        )

    some = (
        others.keys()
        if heartbeat.awaited_ranks is None
        else others.keys() & set(heartbeat.awaited_ranks)
    )
    return {rank: others[rank] for rank in some if not is_waiting_too(others[rank].heartbeat)}


def _find_deadlock(
    own_rank: int, statuses: Mapping[int, PeerStatus], timeouts: Timeouts
) -> Failure | None:
    """Do all whom this rank waits for, and those whom they wait for, wait for one another?"""
    found, todo = {own_rank}, [own_rank]
    while todo:
        rank = todo.pop()
        sight = statuses[rank]
        limit = 2 * timeouts.heartbeat * sight.heartbeat.timeout_factor
        if (
            sight.heartbeat.state is not RankState.WAITING
            or sight.seconds_without_progress <= limit
        ):
            return None
        if (
            isinstance(sight.heartbeat.awaited_ranks, int)
            and sight.heartbeat.awaited_ranks not in statuses
        ):
            return None  # others look at that one
        others = {r: s for r, s in statuses.items() if r != rank}
        todo += (new := set(_find_awaited(sight.heartbeat, others)) - found)
        found |= new
    told = "; ".join(f"rank {rank} {statuses[rank].heartbeat}" for rank in sorted(found))
    return causes.describe_deadlock(
        own_rank, str(statuses[own_rank].heartbeat), told, timeouts.heartbeat
    )
