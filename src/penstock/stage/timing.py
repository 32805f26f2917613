"""Events that tell the time on a stream, used again when nobody looks at them any more.

To make one costs the host as much as to record it, and every action of every step has some. So a
stream keeps those whose readers are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar


class EventLike(Protocol):
    """As CUDA's."""

    def record(self, stream: Any) -> None:
        """From now on it means this moment on the stream."""

    def query(self) -> bool:
        """Has the moment come?"""


E = TypeVar("E", bound=EventLike)


class EventPool(Generic[E]):
    """Those of one stream. Threads may take some and give some back at the same time."""

    def __init__(self, event_class: type[E]) -> None:
        self._event_class = event_class  # of no other use: what is of this kind may be used again
        self._free: list[E] = []

    def record(self, stream: Any, previous: E | None) -> E:
        """This moment; or `after`, if nothing was asked of the stream since, and it has not come.

        If it has, the stream may have been idle in between: the host was late.
        """
        if previous is not None and not previous.query():
            return previous
        try:
            event = self._free.pop()
        except IndexError:
            event = self._event_class()
        event.record(stream)
        return event

    def recycle(self, events: Iterable[object]) -> None:
        """Nobody reads these any more. Those of another kind are not taken."""
        found = {id(event): event for event in events if isinstance(event, self._event_class)}
        self._free += found.values()
