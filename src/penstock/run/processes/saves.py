"""The group that saves speak over: watched in a call, and not in the background of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.run.processes.watch import Watchdog


@dataclass(frozen=True)
class WatchedProcessGroup:
    """A gloo group of a pipe, or of all its copies; `in_call` says whether this thread calls it."""

    group: Any
    watchdog: Watchdog
    is_in_call: Callable[[], bool]

    def rank(self) -> int:
        """This process's."""
        found: int = self.group.rank()
        return found

    def size(self) -> int:
        """How many there are."""
        found: int = self.group.size()
        return found

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> PendingAllGather:
        """Starts to give everyone everything."""
        return PendingAllGather(
            self.group.allgather(outputs, inputs), self.watchdog, self.is_in_call()
        )


@dataclass(frozen=True)
class PendingAllGather:
    """What was started."""

    work: Any
    watchdog: Watchdog
    is_watched: bool

    def wait(self) -> None:
        """Until it has arrived from all."""
        if self.is_watched:
            self.watchdog.mark_waiting("what they have to save, or have saved,")
            self.work.wait()
            self.watchdog.mark_arrived()
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.watchdog.explain_lost_connection(error) from None
