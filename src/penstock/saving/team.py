"""Who saves together: one process alone, or a group of them that succeed or fail as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from traceback import format_exception_only
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from penstock.errors import RunError

T = TypeVar("T")


class Team(Protocol):
    """The processes that save together. `share` is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """Of this process; 0 decides for all."""

    def share(self, value: Any) -> list[Any]:
        """Everyone's values, in the order of the ranks, on every rank."""


@dataclass(frozen=True)
class Alone:
    """One process."""

    rank: int = 0

    def share(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]


class Grouped:
    """The processes of a group that carries values of the host, and nothing else than savings.

    (A save in the background speaks over it, while the other groups are in use.)
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)

    def share(self, value: Any) -> list[Any]:
        """By torch.distributed."""
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found


def together(team: Team, doing: str, work: Callable[[], T]) -> list[T]:
    """Everyone's results of the work; if anyone's fails, all fail, with one message."""
    if isinstance(team, Alone):
        return [work()]
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = None if failure is None else "".join(format_exception_only(failure)).strip()
    answers = team.share((result, told))
    problems = [f"  rank {rank}: {said}" for rank, (_, said) in enumerate(answers) if said]
    if problems:
        listed = "\n".join(problems)
        raise RunError(f"{doing} failed, so no rank goes on with it:\n{listed}") from failure
    return [value for value, _ in answers]


def each(team: Team, doing: str, work: Callable[[], T]) -> T:
    """This rank's result alone, which stays here; if anyone's work fails, all fail."""
    mine: list[T] = []
    together(team, doing, lambda: mine.append(work()))
    return mine[0]


def decided(team: Team, doing: str, work: Callable[[], T]) -> T:
    """What the first rank's work gives, on every rank."""
    return cast(T, together(team, doing, lambda: work() if team.rank == 0 else None)[0])
