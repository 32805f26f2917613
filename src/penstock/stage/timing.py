"""Events that tell the time on a stream, used again when nobody looks at them any more.

To make one costs the host as much as to record it, and every action of every step has some. So a
stream keeps those whose readers are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar


class Event(Protocol):
    """As CUDA's."""

    def record(self, stream: Any) -> None:
        """From now on it means this moment on the stream."""

    def query(self) -> bool:
        """Has the moment come?"""


E = TypeVar("E", bound=Event)


class Timers(Generic[E]):
    """Those of one stream. Threads may take some and give some back at the same time."""

    def __init__(self, kind: type[E]) -> None:
        self._kind = kind  # of no other use: what is of this kind may be used again
        self._free: list[E] = []

    def now(self, stream: Any, after: E | None) -> E:
        """This moment; or `after`, if nothing was asked of the stream since, and it has not come.

        If it has, the stream may have been idle in between: the host was late.
        """
        if after is not None and not after.query():
            return after
        try:
            event = self._free.pop()
        except IndexError:
            event = self._kind()
        event.record(stream)
        return event

    def give_back(self, events: Iterable[object]) -> None:
        """Nobody reads these any more. Those of another kind are not taken."""
        found = {id(event): event for event in events if isinstance(event, self._kind)}
        self._free += found.values()
