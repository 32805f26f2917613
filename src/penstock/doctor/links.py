"""The links between ranks, two by two: how long a message takes, and how much goes through.

Each two ranks make a group of their own, so that one link that does not work spoils no other. All
of it happens in a thread, and whoever does not answer in time is left there: neither gloo nor NCCL
can be relied on to give up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

PINGS = 50
SMALL_BYTES, LARGE_BYTES = 1 << 20, 1 << 26  # bytes
MAX_SECONDS = 1.0  # seconds: what would take longer is not sent
REPEATS = 3


@dataclass(frozen=True)
class Link:
    """Between two ranks, a before b: seconds of a small message one way, bytes a second.

    If it does not work, `problem` says how.
    """

    a: int
    b: int
    latency: float = 0.0
    bandwidth: float = 0.0
    problem: str = ""


class LinkEndpoint(Protocol):
    """What a measurement needs of a link: one end of it."""

    def send(self, tensor: Tensor) -> None:
        """To the other end; done when it has left."""

    def recv(self, tensor: Tensor) -> None:
        """From the other end; done when it is here."""


def pair_ranks_in_rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every two ranks once; those of a round have nobody in common.

    >>> pair_ranks_in_rounds([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*ranks] + [None] * (len(ranks) % 2)
    made = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        made.append(
            sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return made


def measure_link(
    store: Store, link: Link, rank: int, backend: str, device: torch.device, patience: float
) -> Link:
    """With the other rank of the link, who does the same."""

    def work() -> Link:
        part = PrefixStore(f"link/{link.a}-{link.b}", store)
        ends = _ProcessGroupEndpoint(part, int(rank == link.b), backend, device, patience)
        return time_link(link, ends, is_first=rank == link.a, device=device)

    try:
        return run_with_timeout(patience, work)
    except TimeoutError:
        return replace(link, problem=f"no answer within {patience:g} s")
    except Exception as error:  # of whatever kind the backend raises
        return replace(link, problem=str(error).strip().splitlines()[0])


class _ProcessGroupEndpoint:
    """A group of two ranks, outside of torch.distributed's own list of groups."""

    def __init__(
        self, store: Store, group_rank: int, backend: str, device: torch.device, patience: float
    ) -> None:
        kind: Any = dist.ProcessGroupNCCL if "nccl" in backend else dist.ProcessGroupGloo
        self._group = kind(store, group_rank, 2, timedelta(seconds=patience))
        self._peer, self._device = (
            1 - group_rank,
            device if "nccl" in backend else torch.device("cpu"),
        )

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor.to(self._device)], self._peer, 0).wait()
        self._synchronize()

    def recv(self, tensor: Tensor) -> None:
        arrived = torch.empty_like(tensor, device=self._device)
        self._group.recv([arrived], self._peer, 0).wait()
        tensor.copy_(arrived)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def time_link(link: Link, endpoint: LinkEndpoint, is_first: bool, device: torch.device) -> Link:
    """The first end counts, the other answers. What is measured is there and back, halved."""
    small = torch.zeros(1, dtype=torch.int64, device=device)
    trips = [_time_round_trip(endpoint, small, is_first) for _ in range(PINGS)]
    size = torch.tensor([SMALL_BYTES], dtype=torch.int64)
    seconds = _time_round_trip(endpoint, _make_bytes(SMALL_BYTES, device), is_first)
    if seconds < MAX_SECONDS / (2 * REPEATS * LARGE_BYTES / SMALL_BYTES):
        size[0] = LARGE_BYTES
    endpoint.send(size) if is_first else endpoint.recv(size)
    large = _make_bytes(int(size), device)
    throughs = [_time_round_trip(endpoint, large, is_first) for _ in range(REPEATS)]
    return replace(link, latency=median(trips) / 2, bandwidth=2 * int(size) / min(throughs))


def _make_bytes(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _time_round_trip(endpoint: LinkEndpoint, tensor: Tensor, is_first: bool) -> float:
    start = time.perf_counter()
    for sends in (is_first, not is_first):
        endpoint.send(tensor) if sends else endpoint.recv(tensor)
    return time.perf_counter() - start


def measure_device_copies(devices: Sequence[torch.device]) -> list[Link]:
    """Between the GPUs of one process, by their numbers: what goes from thread to thread."""
    found = []
    for a, one in enumerate(devices):
        for b in range(a + 1, len(devices)):
            ends = _DeviceCopyEndpoint(one, devices[b])
            found.append(time_link(Link(a, b), ends, is_first=True, device=one))
    return found


class _DeviceCopyEndpoint:
    """Both ends in one process: what is sent is there, and comes back."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._copy_on_target = torch.empty(0)

    def send(self, tensor: Tensor) -> None:
        self._copy_on_target = tensor.to(self._target, copy=True)
        self._synchronize()

    def recv(self, tensor: Tensor) -> None:
        tensor.copy_(self._copy_on_target)
        self._synchronize()

    def _synchronize(self) -> None:
        for device in (self._source, self._target):
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def run_with_timeout(seconds: float, measure: Callable[[], Link]) -> Link:
    """What it gives, or TimeoutError; then its thread is left behind."""
    given: list[Link | Exception] = []

    def run_in_thread() -> None:
        try:
            given.append(measure())
        except Exception as error:  # comes out in the caller's thread
            given.append(error)

    thread = threading.Thread(target=run_in_thread, daemon=True)
    thread.start()
    thread.join(seconds)
    if not given:
        raise TimeoutError
    if isinstance(given[0], Exception):
        raise given[0]
    return given[0]
