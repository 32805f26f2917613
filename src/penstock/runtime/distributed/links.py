"""Links: they move the tensors of a payload from this process to another.

| class             | ranks on      | path                               | who waits for the data |
|-------------------|---------------|------------------------------------|------------------------|
| SharedMemoryLinks | CPU, one host | memory that both ranks have mapped | the host, in `wait()`  |
| HostLinks         | CPU           | gloo, from the tensor's memory     | the host, in `wait()`  |
| StagedLinks       | GPU           | GPU -> host memory -> gloo -> ...  | the host, then the GPU |
| NcclLinks         | GPU           | NCCL                               | the GPU, not the host  |

`shared_memory.py` has the first ones. The others are here.

A send returns at once and keeps its tensors alive until the receiver has them. Even a small gloo
send completes only when the receive is posted. Over gloo at most MAX_IN_FLIGHT messages may be
under way to one receiver. The next send then waits for the oldest one, so a fast sender cannot fill
the memory. Over NCCL the device waits instead of the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.device.accelerator import COLLECTIVE_BACKENDS, is_accelerator, is_collective_available
from penstock.device.device import Device
from penstock.runtime.distributed.payload_codec import flatten_dense
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import connect_nccl_eagerly

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


PairGroups = dict[tuple[int, int], PointToPointGroup]  # by (sender, receiver)


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

    def __init__(self, group: PointToPointGroup, pinned: bool = False) -> None:
        self._group, self._pinned = group, pinned
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
        buffers = [spec.allocate("cpu", self._pinned) for spec in tensor_specs]
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
    """Links between accelerators without NCCL: through host memory, over gloo.

    NCCL refuses two ranks on one GPU, and some builds of PyTorch lack it. On a device with streams
    the memory is pinned, and the copies run on `copy_stream` beside the computation:

        send   compute ─event─► copy to pinned ─event─► sender thread: gloo send
        recv   gloo recv into pinned ─► copy to GPU ─event─► compute

    gloo reads host memory and ignores streams, so a thread must wait for the copy before it sends.
    The sender thread waits, so that the thread of the rank can continue.
    """

    def __init__(self, group: PointToPointGroup, device: Device) -> None:
        self._device = device
        self._host_links = HostLinks(group, pinned=device.has_streams)
        self._send_queue: SimpleQueue[tuple[torch.Event | None, int, int, list[Tensor]] | None] = (
            SimpleQueue()
        )
        # Limits the pinned buffers that are queued for the sender thread.
        self._free_slots = Semaphore(MAX_IN_FLIGHT)
        self._errors: list[BaseException] = []
        self._sender_thread: Thread | None = None

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """Copy to host memory beside the computation, and queue that for the sender thread."""
        self._free_slots.acquire()
        pinned = self._device.has_streams
        staged = [TensorSpec.of_packed(tensor).allocate("cpu", pinned) for tensor in tensors]
        copied = self._device.copy_to_host(tensors, staged)
        if self._sender_thread is None:
            self._sender_thread = Thread(target=self._run_sender, name="penstock-send", daemon=True)
            self._sender_thread.start()
        self._send_queue.put((copied, peer, tag, staged))

    def _run_sender(self) -> None:
        while (order := self._send_queue.get()) is not None:
            copied, peer, tag, staged = order
            try:
                if copied is not None:
                    copied.synchronize()
                wait = self._host_links.send(peer, tag, staged)
                if wait is not None:
                    wait()
            except BaseException as error:
                self._errors.append(error)  # `flush` raises it in the thread of the rank
            finally:
                self._free_slots.release()

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Receive into host memory. The wait copies from there to the device."""
        wait = self._host_links.recv(peer, tag, tensor_specs)
        return lambda: self._device.copy_from_host(wait())

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

    def __init__(self, rank: int, device: Device, communicators: PairGroups) -> None:
        self._rank, self._device, self._communicators = rank, device, communicators
        self._in_flight: dict[int, deque[tuple[Any, Tensor]]] = {}

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """Send after the work that is on the compute stream now.

        This also releases the tensors of sends that have completed.
        """
        group = self._communicators[self._rank, peer]
        in_flight = self._in_flight.setdefault(peer, deque())
        while in_flight and in_flight[0][0].is_completed():
            in_flight.popleft()
        with self._device.activate():
            for tensor in tensors:
                if tensor.numel():
                    flat = flatten_dense(tensor)
                    in_flight.append((group.send([flat], 1, 0), flat))

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Receive on the stream of NCCL. The compute stream waits for it, the host does not."""
        group = self._communicators[peer, self._rank]
        with self._device.activate():
            buffers = [spec.allocate(self._device.device) for spec in tensor_specs]
            works = [
                group.recv([flatten_dense(buffer)], 0, 0) for buffer in buffers if buffer.numel()
            ]

        def wait_for_tensors() -> list[Tensor]:
            with self._device.activate():
                for work in works:
                    work.wait()
            return buffers

        return wait_for_tensors

    def flush(self) -> None:
        """Let the compute stream wait for all sends. After that their memory may be reused."""
        with self._device.activate():
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


# -------------------------------------------------------------------------------------------------
# The table of backends. A new transport needs a class with the interface of `Links` and an entry
# in LINK_BACKENDS. Everything else asks the entry what it has to know.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkBackend:
    """A transport that carries payloads between processes.

    name         its name in the backend config of a process group and in the texts of its errors
    config       the `backend` argument of `init_process_group` that includes it
    device_type  the type of the devices whose memory it reads
    is_available whether this build of PyTorch has it
    open_group   returns a connected group from (store, rank, size, device, timeout)
    abort_group  makes every operation of a group fail; must not block
    build_links  returns links from (rank, device, control group, pair groups)
    uses_pairs   each pair (sender, receiver) gets a group; otherwise the control group is used
    device_waits the device waits for messages by itself, while the host goes on
    """

    name: str
    config: str
    device_type: str
    is_available: Callable[[], bool]
    open_group: Callable[[Store, int, int, torch.device, timedelta], Any]
    abort_group: Callable[[Any], object]
    build_links: Callable[[int, Any, PointToPointGroup, PairGroups], Links]
    uses_pairs: bool = False
    device_waits: bool = False


def _open_collective(store: Store, rank: int, size: int, device: torch.device, _: timedelta) -> Any:
    # The group keeps its default timeout: only a backstop, as the callers stop waiting before.
    group_class: Any = getattr(dist, f"ProcessGroup{COLLECTIVE_BACKENDS[device.type].upper()}")
    group = group_class(store, rank, size, group_class.Options())
    connect_nccl_eagerly(group, device)
    return group


def _abort_collective(group: Any) -> None:
    # `abort` of NCCL may block, but the watchdog must go on to abort the other groups.
    Thread(target=group.abort, name="penstock-abort", daemon=True).start()


_ABORT_TAG = 2**31 - 7  # nothing is ever sent under this tag


def abort_gloo(group: PointToPointGroup) -> None:
    """Make every operation of a gloo group fail: pending ones and later ones.

    `ProcessGroup.abort`, `shutdown` and `destroy_process_group` do not wake a thread that is inside
    a gloo `wait()` (measured with PyTorch 2.13). A receive that times out does: gloo then closes
    the connection, and every pending operation on it fails within milliseconds.
    """
    byte = torch.empty(1, dtype=torch.uint8)
    # One receive per peer, as a connection that is closed already raises at once.
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([byte], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


GLOO = LinkBackend(
    "gloo",
    config="gloo",
    device_type="cpu",
    is_available=dist.is_gloo_available,
    open_group=lambda store, rank, size, _, timeout: dist.ProcessGroupGloo(
        store, rank, size, timeout
    ),
    abort_group=abort_gloo,
    build_links=lambda _, device, group, __: (
        StagedLinks(group, device) if is_accelerator(device.device) else HostLinks(group)
    ),
)
# One entry for each type of accelerator whose library moves tensors between devices itself.
_COLLECTIVES = [
    LinkBackend(
        library,
        config=f"cpu:gloo,{device_type}:{library}",
        device_type=device_type,
        is_available=partial(is_collective_available, device_type),
        open_group=_open_collective,
        abort_group=_abort_collective,
        build_links=lambda rank, device, _, pair_groups: NcclLinks(rank, device, pair_groups),
        uses_pairs=True,
        device_waits=True,
    )
    for device_type, library in COLLECTIVE_BACKENDS.items()
]
LINK_BACKENDS = (*_COLLECTIVES, GLOO)  # in the order of preference; gloo serves every device


def find_link_backend(config: str, device_type: str | None = None) -> LinkBackend:
    """Return the backend for a process group with this config, and for devices of this type.

    Without a type, return the best backend in the config.

    >>> find_link_backend("cpu:gloo,cuda:nccl").name
    'nccl'
    >>> find_link_backend("cpu:gloo,cuda:nccl", "cpu").name
    'gloo'
    """
    for backend in LINK_BACKENDS:
        if backend.name in config and device_type in (None, backend.device_type):
            return backend
    return GLOO
