"""Links: they move the tensors of a payload from this process to another.

| class       | ranks on | path                                | who waits for the data            |
|-------------|----------|-------------------------------------|-----------------------------------|
| HostLinks   | CPU      | gloo, from the memory of the tensor | the host, in `wait()`             |
| StagedLinks | GPU      | GPU -> pinned memory -> gloo -> ... | the host, then the compute stream |
| NcclLinks   | GPU      | NCCL                                | the compute stream, not the host  |

A send returns at once and keeps its tensors alive until the receiver has them. Even a small gloo
send completes only when the receive is posted. Over gloo at most MAX_IN_FLIGHT messages may be
under way to one receiver. The next send then waits for the oldest one, so a fast sender cannot fill
the memory. Over NCCL the device waits instead of the host.
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
from penstock.runtime.distributed.payload_codec import flatten_dense
from penstock.tensor_spec import TensorSpec

MAX_IN_FLIGHT = 4  # messages to one receiver that may be under way at once

ReceiveWait = Callable[[], list[Tensor]]
SendWait = Callable[[], None]


class PointToPointGroup(Protocol):
    """The part of `ProcessGroup` that messages need."""

    def rank(self) -> int:
        """Return the rank of this process in the group."""

    def size(self) -> int:
        """Return the number of ranks in the group."""

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """Start to send. Return a `Work` to wait for."""

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """Start to receive into the tensors. Return a `Work` to wait for."""

    def abort(self) -> None:
        """Make every pending operation fail."""


class Links(Protocol):
    """The interface of all links. Peers are ranks of the pipeline."""

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> SendWait | None:
        """Start to send tensors.

        If too many messages are under way to this peer, return a function that waits for the oldest
        one. The caller calls it, so that it can tell the watchdog first.
        """

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Start to receive tensors. Return a function that waits for them and returns them."""

    def flush(self) -> None:
        """Wait until the receivers have all tensors that were sent."""

    def abort(self) -> None:
        """Make every wait fail. Another thread calls this."""


class HostLinks:
    """Links between ranks on CPUs, over gloo."""

    def __init__(self, group: PointToPointGroup) -> None:
        self._group = group
        self._in_flight = _InFlightSends()

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> SendWait | None:
        """Send from the memory of the tensors, without a copy if they are dense."""
        works, flat_tensors = [], []
        for tensor in tensors:
            if tensor.numel():  # both ends skip empty tensors: the spec describes them fully
                flat = flatten_dense(tensor).detach()
                works.append(self._group.send([flat], peer, tag))
                flat_tensors.append(flat)
        return self._in_flight.add(peer, works, flat_tensors)

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Receive into new CPU tensors."""
        buffers = [spec.allocate("cpu") for spec in tensor_specs]
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
        """Do nothing: `abort_gloo` of the group makes the waits fail."""


class StagedLinks:
    """Links between GPUs without NCCL: through pinned host memory, over gloo.

    NCCL refuses two ranks on one GPU, and some builds of PyTorch lack it. The copies run on
    `copy_stream` beside the computation:

        send   compute ─event─► copy to pinned ─event─► sender thread: gloo send
        recv   gloo recv into pinned ─► copy to GPU ─event─► compute

    gloo reads host memory and ignores CUDA streams, so a thread must wait for the copy before it
    sends. The sender thread waits, so that the thread of the rank can continue.
    """

    def __init__(self, group: PointToPointGroup, gpu: Gpu) -> None:
        self._group, self._gpu = group, gpu
        self._host_links = HostLinks(group)
        self._send_queue: SimpleQueue[tuple[torch.cuda.Event, int, int, list[Tensor]] | None] = (
            SimpleQueue()
        )
        # Limits the pinned buffers that are queued for the sender thread.
        self._free_slots = Semaphore(MAX_IN_FLIGHT)
        self._errors: list[BaseException] = []
        self._sender_thread: Thread | None = None

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """Copy to pinned memory beside the computation, and queue that for the sender thread."""
        self._free_slots.acquire()
        gpu = self._gpu
        gpu.copy_stream.wait_event(gpu.compute_stream.record_event())
        # Without this the caching allocator could reuse the tensors while they are copied.
        record_stream(gpu.copy_stream, tensors)
        with torch.cuda.stream(gpu.copy_stream):
            staged = [_copy_to_pinned(tensor) for tensor in tensors]
        if self._sender_thread is None:
            self._sender_thread = Thread(target=self._run_sender, name="penstock-send", daemon=True)
            self._sender_thread.start()
        self._send_queue.put((gpu.copy_stream.record_event(), peer, tag, staged))

    def _run_sender(self) -> None:
        while (order := self._send_queue.get()) is not None:
            event, peer, tag, staged = order
            try:
                event.synchronize()
                wait = self._host_links.send(peer, tag, staged)
                if wait is not None:
                    wait()
            except BaseException as error:
                self._errors.append(error)  # `flush` raises it in the thread of the rank
            finally:
                self._free_slots.release()

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Receive into pinned memory. The wait copies from there to the GPU."""
        gpu = self._gpu
        buffers = [spec.allocate("cpu", pinned=True) for spec in tensor_specs]
        works = [
            self._group.recv([flatten_dense(buffer)], peer, tag)
            for buffer in buffers
            if buffer.numel()
        ]

        def wait_for_tensors() -> list[Tensor]:
            for work in works:
                work.wait()
            with torch.cuda.stream(gpu.copy_stream):
                received = [buffer.to(gpu.device, non_blocking=True) for buffer in buffers]
            gpu.compute_stream.wait_event(gpu.copy_stream.record_event())
            record_stream(gpu.compute_stream, received)
            return received

        return wait_for_tensors

    def flush(self) -> None:
        """End the sender thread, raise its first error, and wait for all sends."""
        if self._sender_thread is not None:
            self._send_queue.put(None)
            self._sender_thread.join()
            self._sender_thread = None
        if self._errors:
            raise self._errors.pop(0)
        self._host_links.flush()

    def abort(self) -> None:
        """Let the sender thread end, and free a rank that waits for a slot. Do not wait for them.

        `abort_gloo` of the group makes the waits inside gloo fail.
        """
        self._send_queue.put(None)
        self._free_slots.release(MAX_IN_FLIGHT)


class NcclLinks:
    """Links between GPUs over NCCL, with one communicator per pair of ranks and direction.

    NCCL ignores tags: one communicator delivers messages in the order in which they were sent. It
    also runs the operations of one communicator in order on one stream. With a shared communicator
    a send would wait behind a receive that the peer answers only after this send: a deadlock. In
    each communicator of two ranks the sender is rank 0 and the receiver is rank 1.
    """

    def __init__(
        self, rank: int, gpu: Gpu, communicators: dict[tuple[int, int], PointToPointGroup]
    ) -> None:
        self._rank, self._gpu, self._communicators = rank, gpu, communicators
        self._in_flight: dict[int, deque[tuple[Any, Tensor]]] = {}

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """Send after the work that is on the compute stream now.

        This also releases the tensors of sends that have completed.
        """
        group, in_flight = (
            self._communicators[self._rank, peer],
            self._in_flight.setdefault(peer, deque()),
        )
        while in_flight and in_flight[0][0].is_completed():
            in_flight.popleft()
        with self._gpu.activate():
            for tensor in tensors:
                if tensor.numel():
                    flat = flatten_dense(tensor)
                    in_flight.append((group.send([flat], 1, 0), flat))

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Receive on the stream of NCCL. The compute stream waits for it, the host does not."""
        group = self._communicators[peer, self._rank]
        with self._gpu.activate():
            buffers = [spec.allocate(self._gpu.device) for spec in tensor_specs]
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
        """Let the compute stream wait for all sends. After that their memory may be reused."""
        with self._gpu.activate():
            for work, _ in chain.from_iterable(self._in_flight.values()):
                work.wait()
        self._in_flight.clear()

    def abort(self) -> None:
        """Do nothing: `ProcessGroups`, which opened the communicators, aborts them."""


class _InFlightSends:
    """Sends over gloo that may not have completed, with their tensors, by receiver."""

    def __init__(self) -> None:
        self._by_receiver: dict[int, deque[tuple[list[Any], list[Tensor]]]] = {}

    def add(self, peer: int, works: list[Any], tensors: list[Tensor]) -> SendWait | None:
        """Keep the tensors alive. Return a wait for the oldest send if there are too many."""
        in_flight = self._by_receiver.setdefault(peer, deque())
        in_flight.append((works, tensors))
        return partial(_wait_all, *in_flight.popleft()) if len(in_flight) > MAX_IN_FLIGHT else None

    def flush(self) -> None:
        for in_flight in self._by_receiver.values():
            while in_flight:
                _wait_all(*in_flight.popleft())


# `tensors` is unused: the argument keeps them alive until the sends have completed.
def _wait_all(works: Iterable[Any], tensors: object) -> None:
    for work in works:
        work.wait()


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    host = TensorSpec.of_packed(tensor).allocate("cpu", pinned=True)
    host.copy_(tensor, non_blocking=True)
    return host


def build_links(
    rank: int,
    device: Device,
    group: PointToPointGroup,
    communicators: dict[tuple[int, int], PointToPointGroup] | None,
) -> Links:
    """Return the links for a device.

    `communicators` are those of NCCL by (sender, receiver), or None if NCCL is not used.
    """
    if not isinstance(device, Gpu):
        return HostLinks(group)
    if communicators is None:
        return StagedLinks(group, device)
    return NcclLinks(rank, device, communicators)
