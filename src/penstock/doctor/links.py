"""Latency and bandwidth of the links between ranks, one pair of ranks at a time.

Each pair makes a process group of its own, so a link that does not work spoils no other. The
measurement runs in a thread. If a peer does not answer in time, the thread is left behind, because
neither gloo nor NCCL can be relied on to give up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.device.accelerator import synchronize
from penstock.runtime.distributed.links import find_link_backend

PINGS = 50  # round trips for the latency
SMALL_BYTES, LARGE_BYTES = 1 << 20, 1 << 26
MAX_SECONDS = 1.0  # the large message is not sent if its round trips would take longer
REPEATS = 3  # round trips for the bandwidth


@dataclass(frozen=True)
class Link:
    """A measured link between the ranks a < b.

    `latency` is the seconds of a small message one way, `bandwidth` is in bytes per second. If the
    link does not work, `problem` says why.
    """

    a: int
    b: int
    latency: float = 0.0
    bandwidth: float = 0.0
    problem: str = ""


class LinkEndpoint(Protocol):
    """One end of a link, as far as a measurement needs it."""

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the other end, and return when it has left."""

    def recv(self, tensor: Tensor) -> None:
        """Receive a tensor from the other end, and return when it is here."""


def pair_ranks_in_rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs: every pair of ranks once, and no rank twice in a round.

    This is the circle method for tournaments: the first seat is fixed, the others rotate by one.

    >>> pair_ranks_in_rounds([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*ranks] + [None] * (len(ranks) % 2)
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append(
            sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_link(
    store: Store, link: Link, rank: int, backend: str, device: torch.device, patience: float
) -> Link:
    """Measure a link together with the rank at its other end, which calls this, too."""

    def measure() -> Link:
        link_store = PrefixStore(f"link/{link.a}-{link.b}", store)
        endpoint = _ProcessGroupEndpoint(link_store, int(rank == link.b), backend, device, patience)
        return time_link(link, endpoint, is_first=rank == link.a, device=device)

    try:
        return run_with_timeout(patience, measure)
    except TimeoutError:
        return replace(link, problem=f"no answer within {patience:g} s")
    except Exception as error:  # backends raise errors of several classes
        return replace(link, problem=str(error).strip().splitlines()[0])


class _ProcessGroupEndpoint:
    """One end of a process group of two ranks.

    The group is made directly. `torch.distributed.new_group` would need all ranks to take part.
    """

    def __init__(
        self, store: Store, group_rank: int, backend: str, device: torch.device, patience: float
    ) -> None:
        link_backend = find_link_backend(backend, device.type)
        timeout = timedelta(seconds=patience)
        self._group = link_backend.open_group(store, group_rank, 2, device, timeout)
        self._peer = 1 - group_rank
        self._device = torch.device("cpu") if link_backend.device_type == "cpu" else device

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor.to(self._device)], self._peer, 0).wait()
        # `wait` of NCCL only orders the current stream. The time is that of the transfer itself.
        synchronize(self._device)

    def recv(self, tensor: Tensor) -> None:
        received = torch.empty_like(tensor, device=self._device)
        self._group.recv([received], self._peer, 0).wait()
        tensor.copy_(received)
        synchronize(self._device)


def time_link(link: Link, endpoint: LinkEndpoint, is_first: bool, device: torch.device) -> Link:
    """Return the link with its latency and bandwidth. The first end measures, the other answers.

    Round trips are timed and halved: the clocks of two hosts cannot be compared that precisely.
    """
    small = torch.zeros(1, dtype=torch.int64, device=device)
    ping_seconds = [_time_round_trip(endpoint, small, is_first) for _ in range(PINGS)]
    # From one trip of SMALL_BYTES the first end decides whether LARGE_BYTES would take too long. It
    # sends the size to the other end, so that both use the same.
    size = torch.tensor([SMALL_BYTES], dtype=torch.int64)
    seconds = _time_round_trip(endpoint, _make_bytes(SMALL_BYTES, device), is_first)
    if seconds < MAX_SECONDS / (2 * REPEATS * LARGE_BYTES / SMALL_BYTES):
        size[0] = LARGE_BYTES
    endpoint.send(size) if is_first else endpoint.recv(size)
    large = _make_bytes(int(size), device)
    large_seconds = [_time_round_trip(endpoint, large, is_first) for _ in range(REPEATS)]
    return replace(
        link, latency=median(ping_seconds) / 2, bandwidth=2 * int(size) / min(large_seconds)
    )


def _make_bytes(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _time_round_trip(endpoint: LinkEndpoint, tensor: Tensor, is_first: bool) -> float:
    start = time.perf_counter()
    for sends in (is_first, not is_first):
        endpoint.send(tensor) if sends else endpoint.recv(tensor)
    return time.perf_counter() - start


def measure_device_copies(devices: Sequence[torch.device]) -> list[Link]:
    """Measure copies between the GPUs of one process, for every pair of GPU indices."""
    links = []
    for a, source in enumerate(devices):
        for b in range(a + 1, len(devices)):
            endpoint = _DeviceCopyEndpoint(source, devices[b])
            links.append(time_link(Link(a, b), endpoint, is_first=True, device=source))
    return links


class _DeviceCopyEndpoint:
    """Both ends of a link between two GPUs: `send` copies there, `recv` copies back."""

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
            synchronize(device)


def run_with_timeout(seconds: float, measure: Callable[[], Link]) -> Link:
    """Return what `measure` returns, or raise TimeoutError and leave its thread behind."""
    outcomes: list[Link | Exception] = []

    def run_in_thread() -> None:
        try:
            outcomes.append(measure())
        except Exception as error:  # raised again in the caller's thread
            outcomes.append(error)

    # A daemon, so that a thread which waits forever does not keep the process alive.
    thread = threading.Thread(target=run_in_thread, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcomes:
        raise TimeoutError
    if isinstance(outcomes[0], Exception):
        raise outcomes[0]
    return outcomes[0]
