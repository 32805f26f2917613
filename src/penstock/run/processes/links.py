"""How tensors get from this process to another: over gloo from host memory, or over NCCL.

A send does not wait for its receiver, and holds what it sends until that has been taken. From host
memory only a few are on their way to a receiver: then the sender waits. Over NCCL the device does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.run.processes.codec import Shape, flat
from penstock.stage.places import Gpu, Place, used_on

UNTAKEN = 4  # messages to one receiver that may be on their way at once

Arrival = Callable[[], list[Tensor]]
Wait = Callable[[], None]


class Group(Protocol):
    """A process group, as far as messages need it."""

    def rank(self) -> int:
        """Of this process."""

    def size(self) -> int:
        """How many ranks there are."""

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """What it gives can be waited for."""

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """What it gives can be waited for."""

    def abort(self) -> None:
        """Let all that waits fail."""


class Links(Protocol):
    """What carries tensors between the processes of a pipe."""

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> Wait | None:
        """Hand over. If too much is on its way, what it gives waits until some was taken."""

    def recv(self, peer: int, tag: int, shapes: Sequence[Shape]) -> Arrival:
        """Ask for tensors; the call that it gives waits for them."""

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""

    def abort(self) -> None:
        """Let every wait fail, from another thread."""


class HostLinks:
    """Between ranks on CPUs."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent = _Untaken()

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> Wait | None:
        """Straight from the tensors' memory."""
        works, held = [], []
        for tensor in tensors:
            if tensor.numel():
                one = flat(tensor).detach()
                works.append(self._group.send([one], peer, tag))
                held.append(one)
        return self._sent.add(peer, works, held)

    def recv(self, peer: int, tag: int, shapes: Sequence[Shape]) -> Arrival:
        """Into memory of its own."""
        buffers = [shape.empty("cpu") for shape in shapes]
        works = [
            self._group.recv([flat(buffer)], peer, tag) for buffer in buffers if buffer.numel()
        ]

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            return buffers

        return arrived

    def flush(self) -> None:
        """Wait for all sends."""
        self._sent.flush()

    def abort(self) -> None:
        """The group's own poison wakes those who wait."""


class StagedLinks:
    """Between GPUs that NCCL does not join: by way of pinned host memory, over gloo.

    A thread waits until a tensor has been copied to the host, and sends it; so the rank's own
    thread goes on.
    """

    def __init__(self, group: Group, place: Gpu) -> None:
        self._group, self._place = group, place
        self._host = HostLinks(group)
        self._orders: SimpleQueue[tuple[torch.cuda.Event, int, int, list[Tensor]] | None] = (
            SimpleQueue()
        )
        self._room = Semaphore(UNTAKEN)  # for copies that wait for their turn
        self._failed: list[BaseException] = []
        self._thread: Thread | None = None

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """Copy to the host beside the computation, then send from there."""
        self._room.acquire()
        place = self._place
        place.copy.wait_event(place.compute.record_event())
        used_on(place.copy, tensors)
        with torch.cuda.stream(place.copy):
            staged = [_pinned_copy(tensor) for tensor in tensors]
        if self._thread is None:
            self._thread = Thread(target=self._work, name="penstock-send", daemon=True)
            self._thread.start()
        self._orders.put((place.copy.record_event(), peer, tag, staged))

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            event, peer, tag, staged = order
            try:
                event.synchronize()
                wait = self._host.send(peer, tag, staged)
                if wait is not None:
                    wait()
            except BaseException as error:
                self._failed.append(error)
            finally:
                self._room.release()

    def recv(self, peer: int, tag: int, shapes: Sequence[Shape]) -> Arrival:
        """Into pinned memory, and from there to the GPU beside the computation."""
        place = self._place
        buffers = [shape.empty("cpu", pinned=True) for shape in shapes]
        works = [
            self._group.recv([flat(buffer)], peer, tag) for buffer in buffers if buffer.numel()
        ]

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            with torch.cuda.stream(place.copy):
                here = [buffer.to(place.device, non_blocking=True) for buffer in buffers]
            place.compute.wait_event(place.copy.record_event())
            used_on(place.compute, here)
            return here

        return arrived

    def flush(self) -> None:
        """Wait until the thread has sent all, and all has been taken."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop(0)
        self._host.flush()

    def abort(self) -> None:
        """The group's own poison wakes those who wait; the thread ends, and nobody waits for it."""
        self._orders.put(None)
        self._room.release(UNTAKEN)


class NcclLinks:
    """Between GPUs: a communicator for each pair of ranks and direction, with a stream of its own.

    NCCL knows no tags: what goes over one communicator is received in the order it was sent.
    """

    def __init__(self, rank: int, place: Gpu, groups: dict[tuple[int, int], Group]) -> None:
        self._rank, self._place, self._groups = rank, place, groups
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {}

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """After what has been computed so far. What has been taken is held no longer."""
        group, sent = self._groups[self._rank, peer], self._sent.setdefault(peer, deque())
        while sent and sent[0][0].is_completed():
            sent.popleft()
        with self._place.entered():
            for tensor in tensors:
                if tensor.numel():
                    one = flat(tensor)
                    sent.append((group.send([one], 1, 0), one))

    def recv(self, peer: int, tag: int, shapes: Sequence[Shape]) -> Arrival:
        """What is computed after the arrival waits for it; the host does not."""
        group = self._groups[peer, self._rank]
        with self._place.entered():
            buffers = [shape.empty(self._place.device) for shape in shapes]
            works = [group.recv([flat(buffer)], 0, 0) for buffer in buffers if buffer.numel()]

        def arrived() -> list[Tensor]:
            with self._place.entered():
                for work in works:
                    work.wait()
            return buffers

        return arrived

    def flush(self) -> None:
        """Let the computation's stream wait; what was sent may be freed after that."""
        with self._place.entered():
            for work, _ in chain.from_iterable(self._sent.values()):
                work.wait()
        self._sent.clear()

    def abort(self) -> None:
        """Who has opened the communicators aborts them."""


class _Untaken:
    """What was sent and may not have been taken yet, by receiver."""

    def __init__(self) -> None:
        self._of: dict[int, deque[tuple[list[Any], list[Tensor]]]] = {}

    def add(self, peer: int, works: list[Any], tensors: list[Tensor]) -> Wait | None:
        """Hold the tensors; gives a wait for the oldest, if there are many."""
        sent = self._of.setdefault(peer, deque())
        sent.append((works, tensors))
        return partial(_wait, *sent.popleft()) if len(sent) > UNTAKEN else None

    def flush(self) -> None:
        for sent in self._of.values():
            while sent:
                _wait(*sent.popleft())


def _wait(works: Iterable[Any], held: object) -> None:
    for work in works:
        work.wait()


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = Shape.of(tensor).empty("cpu", pinned=True)
    host.copy_(tensor, non_blocking=True)
    return host


def links_of(
    rank: int,
    place: Place,
    group: Group,
    communicators: dict[tuple[int, int], Group] | None,
) -> Links:
    """The best there is for the place; communicators of NCCL are by sender and receiver."""
    if not isinstance(place, Gpu):
        return HostLinks(group)
    if communicators is None:
        return StagedLinks(group, place)
    return NcclLinks(rank, place, communicators)
