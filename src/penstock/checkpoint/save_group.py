"""Who saves together: one process alone, or a group of them that succeed or fail as one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from traceback import format_exception, format_exception_only
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from penstock.errors import RemoteError

T = TypeVar("T")


class SaveGroup(Protocol):
    """The processes that save together. `share` is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """Of this process; 0 decides for all."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everyone's values, in the order of the ranks, on every rank."""


@dataclass(frozen=True)
class LocalSaveGroup:
    """One process."""

    rank: int = 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]


class HostProcessGroup(Protocol):
    """A group of torch.distributed that carries tensors of the host, such as gloo's."""

    def rank(self) -> int:
        """This process's."""

    def size(self) -> int:
        """How many there are."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any:
        """Starts to give everyone everything."""


class DistributedSaveGroup:
    """The processes of a group that carries nothing else than this.

    (A save in the background speaks over it, while others are in use.)
    """

    def __init__(self, group: HostProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Their sizes first."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)]))]
        padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
        found = zip(self._all_gather(padded), sizes, strict=True)
        return [pickle.loads(one[:size].numpy().tobytes()) for one, size in found]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self._group.size())]
        self._group.allgather([found], [tensor]).wait()
        return found


def run_and_gather(save_group: SaveGroup, description: str, work: Callable[[], T]) -> list[T]:
    """Everyone's results of the work; if anyone's fails, all fail, with one message."""
    if isinstance(save_group, LocalSaveGroup):
        return [work()]
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    try:
        answers = save_group.all_gather_object(
            (result, None if failure is None else _format_failure(failure))
        )
    except RuntimeError:  # the others heard of the failure first: they have told all, and left
        if failure is None:
            raise
        raise failure from None
    problems = {rank: said for rank, (_, said) in enumerate(answers) if said is not None}
    if problems:
        first, (_, frames) = next(iter(problems.items()))
        listed = "\n".join(f"  rank {rank}: {said}" for rank, (said, _) in problems.items())
        text = f"{description} failed, so no rank goes on with it:\n{listed}"
        raise RemoteError(text, "raised", first, description, traceback=frames) from failure
    return [value for value, _ in answers]


def _format_failure(failure: Exception) -> tuple[str, str]:
    """In short, and with its traceback."""
    said = "".join(format_exception_only(failure)).strip()
    return said, "".join(format_exception(failure))


def run_on_each_rank(save_group: SaveGroup, description: str, work: Callable[[], T]) -> T:
    """This rank's result alone, which stays here; if anyone's work fails, all fail."""
    mine: list[T] = []
    run_and_gather(save_group, description, lambda: mine.append(work()))
    return mine[0]


def run_on_rank_zero(save_group: SaveGroup, description: str, work: Callable[[], T]) -> T:
    """What the first rank's work gives, on every rank."""
    return cast(
        T,
        run_and_gather(save_group, description, lambda: work() if save_group.rank == 0 else None)[
            0
        ],
    )
