"""Who is to blame when a rank waits: decided from what the ranks last said of themselves.

Nothing here talks to anybody: signs of life in, a cause or nothing out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from penstock.run.processes import cause as causes
from penstock.run.processes.cause import Cause


class Mode(IntEnum):
    """What a rank does."""

    OUTSIDE = 0  # the caller's own code, between steps
    AT = 1  # computes an action
    WAITING = 2  # for a message of a rank, or for all ranks
    LEFT = 3
    ABSENT = 4  # has given no sign yet


Peer = int | tuple[int, ...] | None  # for whom a rank waits: for one, for some, or for all


@dataclass(frozen=True)
class Sign:
    """A sign of life: the how-manieth, how far the rank has come, and what it does."""

    beat: int
    count: int
    mode: Mode = Mode.OUTSIDE
    label: str = ""  # of the step or the like
    what: str = ""
    peer: Peer = None
    patience: float = 1.0  # heartbeats that this may take

    def __str__(self) -> str:
        if self.mode is Mode.WAITING:
            whose = f"rank {self.peer}" if isinstance(self.peer, int) else "all ranks"
            return f"in {self.label}, waiting for {self.what} of {whose}"
        if self.mode is Mode.AT:
            return f"in {self.label}, at {self.what}"
        if self.mode is Mode.ABSENT:
            return "before it came to this pipe"
        return f"after {self.label}" if self.label else "before its first step"

    def dumps(self) -> str:
        """As JSON."""
        fields = self.beat, self.count, self.mode, self.label, self.what, self.peer, self.patience
        return json.dumps(fields)

    @staticmethod
    def loads(text: str | bytes) -> Sign:
        """The other way."""
        beat, count, mode, label, what, peer, patience = json.loads(text)
        peer = tuple(peer) if isinstance(peer, list) else peer
        return Sign(beat, count, Mode(mode), label, what, peer, patience)


@dataclass(frozen=True)
class Sight:
    """The last sign of a rank, and for how many seconds nothing about it has changed."""

    sign: Sign
    quiet: float  # since the last beat
    still: float  # since it last came on


class Sightings:
    """What one rank has seen of all, by a clock that goes only while it looks.

    Clocks of other machines may differ; and while this process itself, or the store, was held
    up, others may have given signs that it could not see.
    """

    def __init__(self, most: float) -> None:
        self._most = most  # seconds between two looks that count
        self.clock = self._looked = 0.0
        self._seen: dict[int, tuple[Sign, float, float]] = {}

    def see(self, signs: Mapping[int, Sign], now: float) -> dict[int, Sight]:
        """One look: each rank's last sign, and for how long it has been the last."""
        self.clock += min(now - self._looked, self._most)
        self._looked = now
        return {rank: self._of(rank, sign) for rank, sign in signs.items()}

    def _of(self, rank: int, sign: Sign) -> Sight:
        now = self.clock
        old, beaten, moved = self._seen.get(rank, (sign, now, now))
        if sign.beat != old.beat:
            beaten = now
        if sign.count != old.count or sign.mode != old.mode:
            moved = now
        self._seen[rank] = sign, beaten, moved
        return Sight(sign, now - beaten, now - moved)


@dataclass(frozen=True)
class Patience:
    """After how many seconds a rank is blamed."""

    heartbeat: float

    @property
    def beat(self) -> float:
        """Between two signs of life."""
        return min(0.25, self.heartbeat / 8)

    @property
    def quiet(self) -> float:
        """Without a sign, or without coming on: told before the heartbeat is over."""
        return self.heartbeat - 2 * self.beat

    @property
    def absent(self) -> float:
        """Without a first sign: it may take long to start."""
        return max(60.0, self.heartbeat)

    @property
    def suspicious(self) -> float:
        """Without a sign, after a connection was lost."""
        return min(1.0, self.quiet)

    @property
    def hold(self) -> float:
        """For the cause behind a lost connection: at least as long as another needs to find it."""
        return 3 * self.suspicious + 2 * self.beat


def judge(
    me: int, sights: Mapping[int, Sight], patience: Patience, suspicious: bool
) -> Cause | None:
    """The cause, if a rank waits too long; `suspicious`: its connection to some rank is lost.

    Each rank blames only those it waits for itself: whom they wait for, they blame.
    """
    mine = sights[me]
    others = {rank: sight for rank, sight in sights.items() if rank != me}
    awaited = _awaited(mine.sign, others)
    waiter = f"rank {me} was {mine.sign}"
    looked_at = others if suspicious else awaited
    # The longest first: on a busy machine those who live are late, too.
    for rank, (sign, quiet, _) in sorted(_fields(looked_at), key=lambda one: -one[1][1]):
        limit = patience.absent if sign.mode is Mode.ABSENT else patience.quiet
        if suspicious:  # most likely it is the one that is waited for
            limit = patience.suspicious * (1 if rank in awaited else 2)
        if sign.mode is not Mode.LEFT and quiet > limit:
            return causes.died(rank, str(sign), quiet, waiter)
    for rank, (sign, _, still) in _fields(awaited):
        # What it sent before it left may still be on its way.
        if sign.mode is Mode.LEFT and (suspicious or min(still, mine.still) > 2 * patience.beat):
            return causes.left(rank, str(sign), waiter)
    for rank, (sign, quiet, still) in _fields(awaited):
        both, lives = min(still, mine.still), quiet <= 3 * patience.beat  # else it may have died
        limit = patience.quiet + (sign.patience - 1) * patience.heartbeat
        if sign.mode in (Mode.OUTSIDE, Mode.AT) and lives and both > limit:
            return causes.stalled(rank, str(sign), both, waiter, patience.heartbeat)
    return _knot(me, sights, patience)


def _fields(sights: Mapping[int, Sight]) -> list[tuple[int, tuple[Sign, float, float]]]:
    return [(r, (sights[r].sign, sights[r].quiet, sights[r].still)) for r in sorted(sights)]


def _awaited(sign: Sign, others: Mapping[int, Sight]) -> dict[int, Sight]:
    """Those whom a rank waits for. Of several, those that have not come there too."""
    if sign.mode is not Mode.WAITING:
        return {}
    if isinstance(sign.peer, int):
        return {rank: sight for rank, sight in others.items() if rank == sign.peer}

    def there(other: Sign) -> bool:
        return (other.mode, other.label, other.what) == (sign.mode, sign.label, sign.what)

    some = others.keys() if sign.peer is None else others.keys() & set(sign.peer)
    return {rank: others[rank] for rank in some if not there(others[rank].sign)}


def _knot(me: int, sights: Mapping[int, Sight], patience: Patience) -> Cause | None:
    """Do all whom this rank waits for, and those whom they wait for, wait for one another?"""
    found, todo = {me}, [me]
    while todo:
        rank = todo.pop()
        sight = sights[rank]
        limit = 2 * patience.heartbeat * sight.sign.patience
        if sight.sign.mode is not Mode.WAITING or sight.still <= limit:
            return None
        if isinstance(sight.sign.peer, int) and sight.sign.peer not in sights:
            return None  # others look at that one
        others = {r: s for r, s in sights.items() if r != rank}
        todo += (new := set(_awaited(sight.sign, others)) - found)
        found |= new
    told = "; ".join(f"rank {rank} {sights[rank].sign}" for rank in sorted(found))
    return causes.knotted(me, str(sights[me].sign), told, patience.heartbeat)
