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

from penstock.device.device import Device, Gpu, record_stream
from penstock.runtime.distributed.payload_codec import WireTensorSpec, flatten_dense

MAX_IN_FLIGHT = 4  # messages to one receiver that may be on their way at once

ReceiveWait = Callable[[], list[Tensor]]
SendWait = Callable[[], None]


class PointToPointGroup(Protocol):
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

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> SendWait | None:
        """Hand over. If too much is on its way, what it gives waits until some was taken."""

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[WireTensorSpec]) -> ReceiveWait:
        """Ask for tensors; the call that it gives waits for them."""

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""

    def abort(self) -> None:
        """Let every wait fail, from another thread."""


class HostLinks:
    """Between ranks on CPUs."""

    def __init__(self, group: PointToPointGroup) -> None:
        self._group = group
        self._in_flight = _InFlightSends()

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> SendWait | None:
        """Straight from the tensors' memory."""
        works, held = [], []
        for tensor in tensors:
            if tensor.numel():
                one = flatten_dense(tensor).detach()
                works.append(self._group.send([one], peer, tag))
                held.append(one)
        return self._in_flight.add(peer, works, held)

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[WireTensorSpec]) -> ReceiveWait:
        """Into memory of its own."""
        buffers = [shape.allocate("cpu") for shape in tensor_specs]
        works = [
            self._group.recv([flatten_dense(buffer)], peer, tag)
            for buffer in buffers
            if buffer.numel()
        ]

        def wait_for_tensors() -> list[Tensor]:
            for work in works:
                work.wait()
            return buffers

        return wait_for_tensors

    def flush(self) -> None:
        """Wait for all sends."""
        self._in_flight.flush()

    def abort(self) -> None:
        """The group's own poison wakes those who wait."""


class StagedLinks:
    """Between GPUs that NCCL does not join: by way of pinned host memory, over gloo.

    A thread waits until a tensor has been copied to the host, and sends it; so the rank's own
    thread goes on.
    """

    def __init__(self, group: PointToPointGroup, gpu: Gpu) -> None:
        self._group, self._gpu = group, gpu
        self._host_links = HostLinks(group)
        self._send_queue: SimpleQueue[tuple[torch.cuda.Event, int, int, list[Tensor]] | None] = (
            SimpleQueue()
        )
        self._free_slots = Semaphore(MAX_IN_FLIGHT)  # for copies that wait for their turn
        self._errors: list[BaseException] = []
        self._sender_thread: Thread | None = None

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """Copy to the host beside the computation, then send from there."""
        self._free_slots.acquire()
        place = self._gpu
        place.copy_stream.wait_event(place.compute_stream.record_event())
        record_stream(place.copy_stream, tensors)
        with torch.cuda.stream(place.copy_stream):
            staged = [_copy_to_pinned(tensor) for tensor in tensors]
        if self._sender_thread is None:
            self._sender_thread = Thread(target=self._run_sender, name="penstock-send", daemon=True)
            self._sender_thread.start()
        self._send_queue.put((place.copy_stream.record_event(), peer, tag, staged))

    def _run_sender(self) -> None:
        while (order := self._send_queue.get()) is not None:
            event, peer, tag, staged = order
            try:
                event.synchronize()
                wait = self._host_links.send(peer, tag, staged)
                if wait is not None:
                    wait()
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._free_slots.release()

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[WireTensorSpec]) -> ReceiveWait:
        """Into pinned memory, and from there to the GPU beside the computation."""
        place = self._gpu
        buffers = [shape.allocate("cpu", pinned=True) for shape in tensor_specs]
        works = [
            self._group.recv([flatten_dense(buffer)], peer, tag)
            for buffer in buffers
            if buffer.numel()
        ]

        def wait_for_tensors() -> list[Tensor]:
            for work in works:
                work.wait()
            with torch.cuda.stream(place.copy_stream):
                here = [buffer.to(place.device, non_blocking=True) for buffer in buffers]
            place.compute_stream.wait_event(place.copy_stream.record_event())
            record_stream(place.compute_stream, here)
            return here

        return wait_for_tensors

    def flush(self) -> None:
        """Wait until the thread has sent all, and all has been taken."""
        if self._sender_thread is not None:
            self._send_queue.put(None)
            self._sender_thread.join()
            self._sender_thread = None
        if self._errors:
            raise self._errors.pop(0)
        self._host_links.flush()

    def abort(self) -> None:
        """The group's own poison wakes those who wait; the thread ends, and nobody waits for it."""
        self._send_queue.put(None)
        self._free_slots.release(MAX_IN_FLIGHT)


class NcclLinks:
    """Between GPUs: a communicator for each pair of ranks and direction, with a stream of its own.

    NCCL knows no tags: what goes over one communicator is received in the order it was sent.
    """

    def __init__(
        self, rank: int, gpu: Gpu, communicators: dict[tuple[int, int], PointToPointGroup]
    ) -> None:
        self._rank, self._gpu, self._communicators = rank, gpu, communicators
        self._in_flight: dict[int, deque[tuple[Any, Tensor]]] = {}

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """After what has been computed so far. What has been taken is held no longer."""
        group, sent = (
            self._communicators[self._rank, peer],
            self._in_flight.setdefault(peer, deque()),
        )
        while sent and sent[0][0].is_completed():
            sent.popleft()
        with self._gpu.activate():
            for tensor in tensors:
                if tensor.numel():
                    one = flatten_dense(tensor)
                    sent.append((group.send([one], 1, 0), one))

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[WireTensorSpec]) -> ReceiveWait:
        """What is computed after the arrival waits for it; the host does not."""
        group = self._communicators[peer, self._rank]
        with self._gpu.activate():
            buffers = [shape.allocate(self._gpu.device) for shape in tensor_specs]
            works = [
                group.recv([flatten_dense(buffer)], 0, 0) for buffer in buffers if buffer.numel()
            ]

        def wait_for_tensors() -> list[Tensor]:
            with self._gpu.activate():
                for work in works:
                    work.wait()
            return buffers

        return wait_for_tensors

    def flush(self) -> None:
        """Let the computation's stream wait; what was sent may be freed after that."""
        with self._gpu.activate():
            for work, _ in chain.from_iterable(self._in_flight.values()):
                work.wait()
        self._in_flight.clear()

    def abort(self) -> None:
        """Who has opened the communicators aborts them."""


class _InFlightSends:
    """What was sent and may not have been taken yet, by receiver."""

    def __init__(self) -> None:
        self._by_receiver: dict[int, deque[tuple[list[Any], list[Tensor]]]] = {}

    def add(self, peer: int, works: list[Any], tensors: list[Tensor]) -> SendWait | None:
        """Hold the tensors; gives a wait for the oldest, if there are many."""
        sent = self._by_receiver.setdefault(peer, deque())
        sent.append((works, tensors))
        return partial(_wait_all, *sent.popleft()) if len(sent) > MAX_IN_FLIGHT else None

    def flush(self) -> None:
        for sent in self._by_receiver.values():
            while sent:
                _wait_all(*sent.popleft())


def _wait_all(works: Iterable[Any], tensors: object) -> None:
    for work in works:
        work.wait()


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    host = WireTensorSpec.from_tensor(tensor).allocate("cpu", pinned=True)
    host.copy_(tensor, non_blocking=True)
    return host


def build_links(
    rank: int,
    device: Device,
    group: PointToPointGroup,
    communicators: dict[tuple[int, int], PointToPointGroup] | None,
) -> Links:
    """The best there is for the place; communicators of NCCL are by sender and receiver."""
    if not isinstance(device, Gpu):
        return HostLinks(group)
    if communicators is None:
        return StagedLinks(group, device)
    return NcclLinks(rank, device, communicators)
