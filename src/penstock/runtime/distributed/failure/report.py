"""The failure report: why all ranks of a pipe stop.

A `Failure` is written to the store as JSON by the first rank that finds out. All ranks read it and
raise the same RemoteError from it. The functions below build the report of each kind:

| function             | kind        | the rank ...                                    |
|----------------------|-------------|-------------------------------------------------|
| describe_exception   | raised      | raised an exception                             |
|                      | interrupted | got KeyboardInterrupt or SystemExit             |
| describe_signal      | interrupted | received SIGTERM or SIGINT and cannot handle it |
| describe_death       | died        | sends no heartbeats any more                    |
| describe_lost_store  | died        | that hosts the store is gone                    |
| describe_unreachable_store | died  | that hosts the store does not answer            |
| describe_unreadable_report | raised | wrote a failure that is not one                 |
| describe_stall       | stalled     | sends heartbeats but makes no progress          |
| describe_deadlock    | stalled     | waits for another, which waits for this one     |
| describe_departure   | left        | ended its program, or deleted its pipe          |
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass, replace

from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import ErrorLocation, FailureKind, RemoteError
from penstock.tracebacks import fold_frames

# What goes into the store of a traceback (its end) and of a message (its beginning). A store takes
# 8 MB, and breaks the connection of a process that writes more.
_MAX_TRACEBACK_CHARS = 20_000
_MAX_MESSAGE_CHARS = 20_000
_MAX_ERROR_LINE_CHARS = 2_000


@dataclass(frozen=True)
class Failure:
    """The fields of a `RemoteError`, plus the number of the call that failed (0 if unknown)."""

    message: str
    kind: FailureKind
    rank: int | None
    doing: str = ""
    where: ErrorLocation | None = None
    traceback: str = ""
    call_number: int = 0

    def to_error(self) -> RemoteError:
        """Return a new RemoteError with these fields."""
        return RemoteError(
            self.message, self.kind, self.rank, self.doing, self.where, self.traceback
        )

    def to_json(self) -> str:
        """Return the failure as JSON text."""
        return json.dumps(asdict(self))

    def shorten(self) -> Failure:
        """Return the failure with a message and a traceback that fit into a store."""
        message, omitted = self.message, len(self.message) - _MAX_MESSAGE_CHARS
        if omitted > 0:
            message = f"{message[:_MAX_MESSAGE_CHARS]} ... ({omitted} more characters)"
        return replace(self, message=message, traceback=self.traceback[-_MAX_TRACEBACK_CHARS:])

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """Return the failure that `to_json` has written."""
        fields = json.loads(text)
        where = fields.pop("where")
        if where is not None:
            where["layers"] = tuple(where["layers"])
            where = ErrorLocation(**where)
        return Failure(where=where, **fields)


def describe_exception(
    error: BaseException, rank: int, call_name: str, doing: str, call_number: int
) -> Failure:
    """Return the report of an exception that was raised on this rank.

    A RemoteError, for example a disagreement of the ranks, keeps its own message and kind.
    """
    if isinstance(error, RemoteError):
        fields = error.message, error.kind, error.rank, doing, error.where, error.traceback
        return Failure(*fields, call_number)
    if isinstance(error, Exception):
        fold_frames(error)
    text = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK_CHARS:]
    if not isinstance(error, Exception):
        message = (
            f"rank {rank} was interrupted by {type(error).__name__}, {doing}. Every rank of the "
            f"pipe stopped."
        )
        return Failure(message, "interrupted", rank, doing, None, text, call_number)
    where = getattr(error, "whereabouts", None)
    location = doing if where is None else f"in {call_name}, {where}"
    error_line = "".join(traceback.format_exception_only(error)).split("\n", 1)[0]
    if len(error_line) > _MAX_ERROR_LINE_CHARS:
        error_line = f"{error_line[:_MAX_ERROR_LINE_CHARS]} ..."
    message = (
        f"rank {rank} failed, {location}: {error_line}\n"
        f"Every rank of the pipe stopped. Fix the error on rank {rank}, or catch RemoteError on "
        f"every rank and call the pipe again."
    )
    return Failure(message, "raised", rank, doing, where, text, call_number)


def describe_death(rank: int, doing: str, seconds_silent: float, waiter_status: str) -> Failure:
    """Return the report of a process that sends no heartbeats any more."""
    message = (
        f"rank {rank} died: no heartbeat for {seconds_silent:.1f} s, last seen {doing}; "
        f"{waiter_status}. Its output or the system log of its machine may say why, for example "
        f"that memory ran out. Restart all ranks from the last checkpoint."
    )
    return Failure(message, "died", rank, doing)


def describe_stall(
    rank: int, doing: str, seconds_without_progress: float, waiter_status: str, heartbeat: float
) -> Failure:
    """Return the report of a process that is alive but makes no progress."""
    message = (
        f"rank {rank} has stalled, {doing}: it made no progress for "
        f"{seconds_without_progress:.1f} s; {waiter_status}. Its output says where it is stuck. If "
        f"it is only slow, create the pipe with a heartbeat= above {heartbeat:g} seconds."
    )
    return Failure(message, "stalled", rank, doing)


def describe_deadlock(rank: int, doing: str, waiter_statuses: str, heartbeat: float) -> Failure:
    """Return the report of ranks that wait for one another."""
    message = (
        f"the ranks wait for one another, and none makes progress: {waiter_statuses}. If a large "
        f"message is in transit over a slow link, create the pipe with a heartbeat= above "
        f"{heartbeat:g} seconds."
    )
    return Failure(message, "stalled", rank, doing)


def describe_departure(rank: int, doing: str, waiter_status: str) -> Failure:
    """Return the report of a rank that deleted its pipe or ended its program too early."""
    message = (
        f"rank {rank} has left, {doing}: its program ended, or its pipe was deleted; "
        f"{waiter_status}. Call the pipe equally often on every rank."
    )
    return Failure(message, "left", rank, doing)


def describe_signal(
    rank: int, doing: str, signal_name: str, preemption_limit: float | None = None
) -> Failure:
    """Return the report of a signal that ends this process and that no other handler caught."""
    message = (
        f"rank {rank} was terminated by {signal_name}, {doing}. Every rank of the pipe stopped."
    )
    if preemption_limit is not None:
        message += (
            f" It could not end its step and save within {preemption_limit:g} s. Save more often, "
            f"or call save_on_preemption with a larger within=, if the launcher waits so long."
        )
    return Failure(message, "interrupted", rank, doing)


def describe_lost_store(host_rank: int | None) -> Failure:
    """Return the report of a lost store.

    Without the store the ranks cannot agree on a report. Each builds this one alone, and all get
    the same text.
    """
    host = "the process that hosts it" if host_rank is None else f"rank {host_rank}, which hosts it"
    message = (
        f"the store that the ranks share is gone, with {host}: that process died or its program "
        f"ended. Its output may say why. Restart all ranks from the last checkpoint."
    )
    return Failure(message, "died", host_rank)


def describe_unreachable_store(host: str, host_rank: int | None, seconds: float) -> Failure:
    """Return the report of a store that does not answer. Each rank builds it alone."""
    message = (
        f"lost contact with {host}, which holds the store that the ranks share: no answer for "
        f"{seconds:.1f} s. That host is down, frozen, or cut off from the network. Restart all "
        f"ranks from the last checkpoint."
    )
    return Failure(message, "died", host_rank)


def describe_store_host(store: Store, host_rank: int | None) -> str:
    """Return the host of a store in words."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    name = f"host {getattr(store, 'host', 'unknown')}"
    return name if host_rank is None else f"{name} (rank {host_rank})"


def describe_unreadable_report(text: bytes) -> Failure:
    """Return the report of a text in the place of a failure that no rank has written."""
    message = (
        f"the store that the ranks share says that a rank has failed, but not how: {text[:80]!r}. "
        f"Another program has written to the store. Keep its port closed to others."
    )
    return Failure(message, "raised", None)
