"""Why a pipe's ranks stop: one value, the same on every rank, that goes through a store as JSON."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass

from penstock.errors import ErrorLocation, FailureKind, RemoteError

_MAX_TRACEBACK_CHARS = 20_000  # characters of a traceback


@dataclass(frozen=True)
class Failure:
    """The fields of a `RemoteError`, and in the how-manieth call it was, if that is known."""

    message: str
    kind: FailureKind
    rank: int | None
    doing: str = ""
    where: ErrorLocation | None = None
    traceback: str = ""
    call_number: int = 0

    def to_error(self) -> RemoteError:
        """A new error with these fields."""
        return RemoteError(
            self.message, self.kind, self.rank, self.doing, self.where, self.traceback
        )

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """The other way."""
        fields = json.loads(text)
        where = fields.pop("where")
        if where is not None:
            where["layers"] = tuple(where["layers"])
            where = ErrorLocation(**where)
        return Failure(where=where, **fields)


def describe_exception(
    error: BaseException, rank: int, call_name: str, doing: str, call_number: int
) -> Failure:
    """An error on this rank; one that is a RemoteError already says all of it itself."""
    if isinstance(error, RemoteError):
        given = error.message, error.kind, error.rank, doing, error.where, error.traceback
        return Failure(*given, call_number)
    text = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK_CHARS:]
    if not isinstance(error, Exception):
        message = (
            f"rank {rank} was interrupted by {type(error).__name__}, {doing}: every rank of the "
            f"pipe stopped"
        )
        return Failure(message, "interrupted", rank, doing, None, text, call_number)
    where = getattr(error, "whereabouts", None)
    place = doing if where is None else f"in {call_name}, {where}"
    said = "".join(traceback.format_exception_only(error)).split("\n", 1)[0]
    message = (
        f"rank {rank} failed, {place}: {said}\n"
        f"Every rank of the pipe stopped. Mend it on rank {rank}; or catch RemoteError on every "
        f"rank, and call the pipe again."
    )
    return Failure(message, "raised", rank, doing, where, text, call_number)


def describe_death(rank: int, doing: str, seconds_silent: float, waiter_status: str) -> Failure:
    """A process that shows no sign of life any more."""
    message = (
        f"rank {rank} died: no sign of life for {seconds_silent:.1f} s, last seen {doing}; {waiter_status}. Its "
        f"own output may say why, or its machine's log: memory that ran out, a lost machine. "
        f"Start all ranks again, from the last checkpoint."
    )
    return Failure(message, "died", rank, doing)


def describe_stall(
    rank: int, doing: str, seconds_without_progress: float, waiter_status: str, heartbeat: float
) -> Failure:
    """A process that lives and does not come on."""
    message = (
        f"rank {rank} has stalled, {doing}: it does not come on for {seconds_without_progress:.1f} s; {waiter_status}. Its "
        f"own output says where it stands. If it is only slow, make the pipe with a heartbeat= "
        f"above {heartbeat:g} seconds."
    )
    return Failure(message, "stalled", rank, doing)


def describe_deadlock(rank: int, doing: str, waiter_statuses: str, heartbeat: float) -> Failure:
    """Ranks that all wait for one another."""
    message = (
        f"the ranks wait for one another, and none comes on: {waiter_statuses}. If a large message is on "
        f"its way over a slow link, make the pipe with a heartbeat= above {heartbeat:g} seconds."
    )
    return Failure(message, "stalled", rank, doing)


def describe_departure(rank: int, doing: str, waiter_status: str) -> Failure:
    """A rank that closed its pipe, or ended its program, too early."""
    message = (
        f"rank {rank} has left, {doing}: its program ended, or its pipe was dropped; {waiter_status}. "
        f"Call the pipe equally often on every rank."
    )
    return Failure(message, "left", rank, doing)


def describe_signal(rank: int, doing: str, signal_name: str) -> Failure:
    """A signal that asks this process to end, and is not caught elsewhere."""
    message = (
        f"rank {rank} was told to end by {signal_name}, {doing}: every rank of the pipe stopped"
    )
    return Failure(message, "interrupted", rank, doing)


def describe_lost_store(host_rank: int | None) -> Failure:
    """The ranks can hear nothing of each other any more. Each says this by itself, alike."""
    by = "the process that hosts it" if host_rank is None else f"rank {host_rank}, which hosts it"
    message = (
        f"the store through which the ranks know of each other is gone, with {by}: it died or its "
        f"program ended. Its own output may say why. Start all ranks again, from the last "
        f"checkpoint."
    )
    return Failure(message, "died", host_rank)
