"""The processes that save or load together. They succeed or fail as one.

Each step of a save is a function that runs on some or all ranks. Its results, and any failure, are
gathered on every rank. If one rank fails, every rank raises the same `RemoteError`, so no rank is
left waiting and no rank commits a save that another could not finish.

    run_and_gather      every rank works and gets the results of all
    run_on_each_rank    every rank works and keeps its own result
    run_on_rank_zero    rank 0 works and every rank gets its result
"""

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
    """The processes that save together. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The rank of this process in the group. Rank 0 decides for all."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks."""


@dataclass(frozen=True)
class LocalSaveGroup:
    """A group of one process. It does not need torch.distributed."""

    rank: int = 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list of the one value."""
        return [value]


class HostProcessGroup(Protocol):
    """A torch.distributed process group that transfers CPU tensors, such as a gloo group."""

    def rank(self) -> int:
        """Return the rank of this process."""

    def size(self) -> int:
        """Return the number of processes."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any:
        """Start to gather the inputs of all ranks into `outputs`. Return a work handle."""


class DistributedSaveGroup:
    """The processes of a process group that is used for saving and loading only.

    A background save communicates over the group from its own thread, while the training step uses
    other groups. Sharing one group would mix up the order of its collectives.
    """

    def __init__(self, group: HostProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which are sent pickled.

        An all-gather needs tensors of one size, so the ranks first exchange the lengths and then
        pad to the longest.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)]))]
        padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
        pairs = zip(self._all_gather(padded), sizes, strict=True)
        return [pickle.loads(buffer[:size].numpy().tobytes()) for buffer, size in pairs]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(tensor) for _ in range(self._group.size())]
        self._group.allgather([outputs], [tensor]).wait()
        return outputs


def run_and_gather(save_group: SaveGroup, description: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return the results of all ranks.

    Raise `RemoteError` on every rank, with the same text, if the work of any rank fails.
    """
    # A single process raises its own exception, with its type and traceback, not a `RemoteError`.
    if isinstance(save_group, LocalSaveGroup):
        return [work()]
    # A failure must not leave this rank out of the gather: the others would wait for it forever.
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    try:
        answers = save_group.all_gather_object(
            (result, None if failure is None else _format_failure(failure))
        )
    except RuntimeError:
        # The other ranks may learn of this rank's failure in another way and leave first. Then the
        # gather fails, and the rank's own failure is the one worth raising.
        if failure is None:
            raise
        raise failure from None
    problems = {rank: problem for rank, (_, problem) in enumerate(answers) if problem is not None}
    if problems:
        first_rank, (_, frames) = next(iter(problems.items()))
        listed = "\n".join(f"  rank {rank}: {summary}" for rank, (summary, _) in problems.items())
        text = f"{description} failed, so no rank continues with it:\n{listed}"
        raise RemoteError(text, "raised", first_rank, description, traceback=frames) from failure
    return [value for value, _ in answers]


def _format_failure(failure: Exception) -> tuple[str, str]:
    """Return a failure as one short text and as a full traceback."""
    summary = "".join(format_exception_only(failure)).strip()
    return summary, "".join(format_exception(failure))


def run_on_each_rank(save_group: SaveGroup, description: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result. If one rank fails, all raise.

    The result is not sent to the other ranks, so it may be large or impossible to pickle.
    """
    results: list[T] = []
    run_and_gather(save_group, description, lambda: results.append(work()))
    return results[0]


def run_on_rank_zero(save_group: SaveGroup, description: str, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank. If it fails, all raise."""
    return cast(
        T,
        run_and_gather(save_group, description, lambda: work() if save_group.rank == 0 else None)[
            0
        ],
    )
