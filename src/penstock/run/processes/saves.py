"""The group that saves speak over: watched in a call, and not in the background of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.run.processes.watch import Watch


@dataclass(frozen=True)
class SavesGroup:
    """A gloo group of a pipe, or of all its copies; `in_call` says whether this thread calls it."""

    group: Any
    watch: Watch
    in_call: Callable[[], bool]

    def rank(self) -> int:
        """This process's."""
        found: int = self.group.rank()
        return found

    def size(self) -> int:
        """How many there are."""
        found: int = self.group.size()
        return found

    def allgather(self, into: list[list[Tensor]], given: list[Tensor]) -> Gathered:
        """Starts to give everyone everything."""
        return Gathered(self.group.allgather(into, given), self.watch, self.in_call())


@dataclass(frozen=True)
class Gathered:
    """What was started."""

    work: Any
    watch: Watch
    watched: bool

    def wait(self) -> None:
        """Until it has arrived from all."""
        if self.watched:
            self.watch.waiting("what they have to save, or have saved,")
            self.work.wait()
            self.watch.arrived()
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.watch.behind(error) from None
