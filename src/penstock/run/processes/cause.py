"""Why a pipe's ranks stop: one value, the same on every rank, that goes through a store as JSON."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass

from penstock.errors import Kind, RemoteError, Whereabouts

_LONGEST = 20_000  # characters of a traceback


@dataclass(frozen=True)
class Cause:
    """The fields of a `RemoteError`, and in the how-manieth call it was, if that is known."""

    message: str
    kind: Kind
    rank: int | None
    doing: str = ""
    where: Whereabouts | None = None
    traceback: str = ""
    call: int = 0

    def error(self) -> RemoteError:
        """A new error with these fields."""
        return RemoteError(
            self.message, self.kind, self.rank, self.doing, self.where, self.traceback
        )

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str | bytes) -> Cause:
        """The other way."""
        fields = json.loads(text)
        where = fields.pop("where")
        if where is not None:
            where["layers"] = tuple(where["layers"])
            where = Whereabouts(**where)
        return Cause(where=where, **fields)


def raised(error: BaseException, rank: int, label: str, doing: str, call: int) -> Cause:
    """An error on this rank; one that is a RemoteError already says all of it itself."""
    if isinstance(error, RemoteError):
        given = error.message, error.kind, error.rank, doing, error.where, error.traceback
        return Cause(*given, call)
    text = "".join(traceback.format_exception(error))[-_LONGEST:]
    if not isinstance(error, Exception):
        message = (
            f"rank {rank} was interrupted by {type(error).__name__}, {doing}: every rank of the "
            f"pipe stopped"
        )
        return Cause(message, "interrupted", rank, doing, None, text, call)
    where = getattr(error, "whereabouts", None)
    place = doing if where is None else f"in {label}, {where}"
    said = "".join(traceback.format_exception_only(error)).split("\n", 1)[0]
    message = (
        f"rank {rank} failed, {place}: {said}\n"
        f"Every rank of the pipe stopped. Mend it on rank {rank}; or catch RemoteError on every "
        f"rank, and call the pipe again."
    )
    return Cause(message, "raised", rank, doing, where, text, call)


def died(rank: int, doing: str, quiet: float, waiter: str) -> Cause:
    """A process that shows no sign of life any more."""
    message = (
        f"rank {rank} died: no sign of life for {quiet:.1f} s, last seen {doing}; {waiter}. Its "
        f"own output may say why, or its machine's log: memory that ran out, a lost machine. "
        f"Start all ranks again, from the last checkpoint."
    )
    return Cause(message, "died", rank, doing)


def stalled(rank: int, doing: str, still: float, waiter: str, heartbeat: float) -> Cause:
    """A process that lives and does not come on."""
    message = (
        f"rank {rank} has stalled, {doing}: it does not come on for {still:.1f} s; {waiter}. Its "
        f"own output says where it stands. If it is only slow, make the pipe with a heartbeat= "
        f"above {heartbeat:g} seconds."
    )
    return Cause(message, "stalled", rank, doing)


def knotted(rank: int, doing: str, waiters: str, heartbeat: float) -> Cause:
    """Ranks that all wait for one another."""
    message = (
        f"the ranks wait for one another, and none comes on: {waiters}. If a large message is on "
        f"its way over a slow link, make the pipe with a heartbeat= above {heartbeat:g} seconds."
    )
    return Cause(message, "stalled", rank, doing)


def left(rank: int, doing: str, waiter: str) -> Cause:
    """A rank that closed its pipe, or ended its program, too early."""
    message = (
        f"rank {rank} has left, {doing}: its program ended, or its pipe was dropped; {waiter}. "
        f"Call the pipe equally often on every rank."
    )
    return Cause(message, "left", rank, doing)


def told_to_end(rank: int, doing: str, signal: str) -> Cause:
    """A signal that asks this process to end, and is not caught elsewhere."""
    message = f"rank {rank} was told to end by {signal}, {doing}: every rank of the pipe stopped"
    return Cause(message, "interrupted", rank, doing)


def store_lost(host: int | None) -> Cause:
    """The ranks can hear nothing of each other any more. Each says this by itself, alike."""
    by = "the process that hosts it" if host is None else f"rank {host}, which hosts it"
    message = (
        f"the store through which the ranks know of each other is gone, with {by}: it died or its "
        f"program ended. Its own output may say why. Start all ranks again, from the last "
        f"checkpoint."
    )
    return Cause(message, "died", host)
