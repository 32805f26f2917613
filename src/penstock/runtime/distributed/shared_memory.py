"""Links through shared memory, for a pipeline whose ranks are CPU processes of one host.

gloo copies a tensor through a loopback socket, twice, in threads that take cores from the
computation. Here the sender copies it into memory that the receiver has mapped, and the receiver
copies it out. Each pair (sender, receiver) has one memory file and two pipes of small records:

    sender                                                            receiver
    copy the tensors into a free block of the memory file
    ── doorbell (tag, size, offset and capacity of the block) ──────► read when it waits for a tag
    ◄────────────────────────────── notice _POSTED: a receive is posted ──
    ◄───────── notice (offset): the block was copied out, and is free ──

A send waits only while more than MAX_IN_FLIGHT messages lack a posted receive, as over gloo. It
never waits until the receiver copies: that may be busy, or wait for a rank that waits for this one.
So there are as many blocks as messages that lack a receive, or whose receive is posted and not yet
waited for. gloo needs the same memory, as buffers of the receiver.

The memory file has no name and the pipes have none either: the receiver opens them as descriptors
of the sender in /proc. Nothing is left behind when a rank is killed. When a rank ends, its pipes
close, and that wakes the rank that waits for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.distributed.control_channel import ControlChannel
from penstock.runtime.distributed.inherited_descriptors import close_in_children
from penstock.runtime.distributed.links import MAX_IN_FLIGHT, ReceiveWait, SendWait
from penstock.runtime.distributed.payload_codec import flatten_dense
from penstock.tensor_spec import TensorSpec

SWITCH = "PENSTOCK_SHARED_MEMORY"  # the environment variable that turns these links off, with "0"

_DOORBELL = struct.Struct("<qqqq")  # tag, bytes of the message, offset and capacity of the block
_NOTICE = struct.Struct("<q")  # _POSTED, or the offset of a free block
_POSTED = -1
_RECORDS_PER_READ = 1024
_ALIGNMENT = 64  # bytes, of each tensor in a block
_TOKEN_BYTES = 16  # at the beginning of a memory file
_FIRST_BLOCK = mmap.ALLOCATIONGRANULARITY


class Block(NamedTuple):
    """A part of a memory file, mapped into this process."""

    offset: int
    capacity: int
    address: int
    mapping: object  # keeps the memory mapped

    @staticmethod
    def map(descriptor: int, offset: int, capacity: int) -> Block:
        """Map a part of a memory file."""
        mapping = mmap.mmap(descriptor, capacity, offset=offset)
        buffer = ctypes.c_char.from_buffer(mapping)
        return Block(offset, capacity, ctypes.addressof(buffer), (mapping, buffer))


class AbortSignal:
    """A flag that another thread sets, and that ends every wait for a pipe."""

    def __init__(self) -> None:
        self.receiver, self.sender = os.pipe()
        self.is_set = False

    def set(self) -> None:
        """Make every wait fail, now and later."""
        self.is_set = True
        with suppress(OSError):
            os.write(self.sender, b"\0")


class RecordPipe:
    """One end of a pipe that carries records of a fixed size to or from another rank."""

    def __init__(
        self, descriptor: int, event: int, record: struct.Struct, peer: int, abort: AbortSignal
    ) -> None:
        self._descriptor, self._record = descriptor, record
        self._peer, self._abort = peer, abort
        os.set_blocking(descriptor, False)
        self._poll = select.poll()
        self._poll.register(descriptor, event)
        self._poll.register(abort.receiver, select.POLLIN)

    def write(self, *fields: int) -> None:
        """Write a record. Wait only if thousands of them have not been read."""
        record = self._record.pack(*fields)
        while True:
            try:
                os.write(self._descriptor, record)  # the kernel does not divide small writes
                return
            except BlockingIOError:
                self._wait()
            except OSError:
                raise self._closed_error() from None

    def read(self, wait: bool) -> list[tuple[int, ...]]:
        """Return the records that are there. If there are none, `wait` for the first one."""
        while True:
            try:
                data = os.read(self._descriptor, self._record.size * _RECORDS_PER_READ)
            except BlockingIOError:
                if not wait:
                    return []
                self._wait()
                continue
            if not data:
                raise self._closed_error()
            return list(self._record.iter_unpack(data))

    def _wait(self) -> None:
        self._poll.poll()
        if self._abort.is_set:
            raise RuntimeError("Connection closed: the links through shared memory were aborted")

    def _closed_error(self) -> RuntimeError:
        # The text matters: see `_CONNECTION_ERROR` of the watchdog.
        return RuntimeError(f"Connection closed by rank {self._peer} (shared memory)")


class Outbox:
    """The sender's end of a pair of ranks.

    Capacities of blocks are powers of two, so that messages of many sizes share blocks. The pages
    of a block that are never written take no memory.
    """

    def __init__(self, memory: int, doorbell: RecordPipe, notices: RecordPipe) -> None:
        self._memory, self._doorbell, self._notices = memory, doorbell, notices
        self._free_blocks: dict[int, list[Block]] = defaultdict(list)  # by capacity
        self._sent_blocks: dict[int, Block] = {}  # by offset
        self._file_size = _FIRST_BLOCK
        self._unposted = 0  # messages whose receive is not known to be posted

    def send(self, tag: int, tensors: Sequence[Tensor]) -> SendWait | None:
        """Copy the tensors into a block, and tell the receiver.

        Return a function that waits for posted receives if too many of them are missing.
        """
        offsets, size = _lay_out([tensor.nbytes for tensor in tensors])
        block = self._take_block(size)
        for tensor, offset in zip(tensors, offsets, strict=True):
            ctypes.memmove(block.address + offset, tensor.data_ptr(), tensor.nbytes)
        self._sent_blocks[block.offset] = block
        self._doorbell.write(tag, size, block.offset, block.capacity)
        self._unposted += 1
        if self._unposted > MAX_IN_FLIGHT:
            self._read_notices(wait=False)
        return partial(self.wait, MAX_IN_FLIGHT) if self._unposted > MAX_IN_FLIGHT else None

    def wait(self, allowed: int) -> None:
        """Wait until the receives of all messages but this many are posted."""
        while self._unposted > allowed:
            self._read_notices(wait=True)

    def _take_block(self, size: int) -> Block:
        """Return a free block for this many bytes, or a new one."""
        capacity = 1 << max(size - 1, _FIRST_BLOCK - 1).bit_length()
        free_blocks = self._free_blocks[capacity]
        if not free_blocks:
            self._read_notices(wait=False)
        if free_blocks:
            return free_blocks.pop()
        offset = self._file_size
        self._file_size += capacity
        os.ftruncate(self._memory, self._file_size)
        return Block.map(self._memory, offset, capacity)

    def _read_notices(self, wait: bool) -> None:
        """Count posted receives, and take blocks back that were copied out."""
        for (notice,) in self._notices.read(wait):
            if notice == _POSTED:
                self._unposted -= 1
            else:
                block = self._sent_blocks.pop(notice)
                self._free_blocks[block.capacity].append(block)


class Inbox:
    """The receiver's end of a pair of ranks."""

    def __init__(self, memory: int, doorbell: RecordPipe, notices: RecordPipe) -> None:
        self._memory, self._doorbell, self._notices = memory, doorbell, notices
        self._blocks: dict[int, Block] = {}  # by offset
        # Sizes and blocks of messages that nobody has waited for yet, by tag.
        self._arrived: dict[int, deque[tuple[int, Block]]] = defaultdict(deque)

    def recv(self, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Tell the sender that a receive is posted. The wait copies the tensors."""
        offsets, expected_size = _lay_out([spec.nbytes for spec in tensor_specs])
        if not expected_size:  # both ends skip empty tensors: the spec describes them fully
            return lambda: [spec.allocate("cpu") for spec in tensor_specs]
        self._notices.write(_POSTED)

        def wait_for_tensors() -> list[Tensor]:
            block = self._wait_for_block(tag, expected_size)
            tensors = [spec.allocate("cpu") for spec in tensor_specs]
            for tensor, offset in zip(tensors, offsets, strict=True):
                ctypes.memmove(tensor.data_ptr(), block.address + offset, tensor.nbytes)
            self._notices.write(block.offset)
            return tensors

        return wait_for_tensors

    def _wait_for_block(self, tag: int, expected_size: int) -> Block:
        arrived = self._arrived[tag]
        while not arrived:
            for other_tag, size, offset, capacity in self._doorbell.read(wait=True):
                block = self._blocks.get(offset)
                if block is None:
                    block = self._blocks[offset] = Block.map(self._memory, offset, capacity)
                self._arrived[other_tag].append((size, block))
        size, block = arrived.popleft()
        if size != expected_size:
            raise RunError(
                f"a message has {size} bytes, but {expected_size} were expected: the ranks do not "
                "run the same program. This is a bug in Penstock. Please report it."
            )
        return block


class SharedMemoryLinks:
    """Links between CPU ranks of one host. See the top of this file."""

    def __init__(
        self, outboxes: dict[int, Outbox], inboxes: dict[int, Inbox], abort: AbortSignal
    ) -> None:
        self._outboxes, self._inboxes, self._abort = outboxes, inboxes, abort

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor]) -> SendWait | None:
        """Copy the tensors into shared memory, where the receiver finds them."""
        flats = [flatten_dense(tensor) for tensor in tensors if tensor.numel()]
        return self._outboxes[peer].send(tag, flats) if flats else None

    def recv(self, peer: int, tag: int, tensor_specs: Sequence[TensorSpec]) -> ReceiveWait:
        """Tell the sender that it may go on. The wait copies the tensors from shared memory."""
        return self._inboxes[peer].recv(tag, tensor_specs)

    def flush(self) -> None:
        """Wait until the receives of all messages are posted."""
        for outbox in self._outboxes.values():
            outbox.wait(0)

    def abort(self) -> None:
        """Make every wait fail."""
        self._abort.set()


def open_shared_memory_links(
    channel: ControlChannel, rank_pairs: Collection[tuple[int, int]]
) -> SharedMemoryLinks | None:
    """Return links through shared memory for these pairs (sender, receiver) of ranks.

    Return None on all ranks if any of them cannot open the memory of another, because it runs on
    another host or in another container, or because the environment variable
    PENSTOCK_SHARED_MEMORY=0 forbids it. All ranks of the channel call this together.
    """
    abort, rank = AbortSignal(), channel.rank
    opened = [abort.receiver, abort.sender]
    offers, own_ends, peer_ends = {}, {}, []
    token = secrets.token_bytes(_TOKEN_BYTES)
    outboxes: dict[int, Outbox] = {}
    inboxes: dict[int, Inbox] = {}
    is_possible = os.environ.get(SWITCH) != "0" and hasattr(os, "memfd_create")
    try:
        for peer in sorted(dst for src, dst in rank_pairs if src == rank and is_possible):
            memory = os.memfd_create("penstock")
            opened.append(memory)
            os.write(memory, token)
            os.ftruncate(memory, _FIRST_BLOCK)
            (doorbell_reader, doorbell), (notices, notice_writer) = os.pipe(), os.pipe()
            opened += [doorbell, notices]
            peer_ends += [doorbell_reader, notice_writer]
            own_ends[peer] = memory, doorbell, notices
            offers[peer] = memory, doorbell_reader, notice_writer
    except OSError:  # too many open files, for example
        is_possible = False
    greeting = {"pid": os.getpid(), "token": token.hex(), "offers": offers}
    greetings = channel.all_gather_value(greeting, "the shared memory of all ranks")
    for peer, (memory, doorbell, notices) in own_ends.items():
        outboxes[peer] = Outbox(
            memory,
            RecordPipe(doorbell, select.POLLOUT, _DOORBELL, peer, abort),
            RecordPipe(notices, select.POLLIN, _NOTICE, peer, abort),
        )
    for peer in sorted(src for src, dst in rank_pairs if dst == rank and is_possible):
        descriptors = _open_offer(greetings[peer], rank)
        if descriptors is None:
            is_possible = False
            break
        opened += descriptors
        inboxes[peer] = Inbox(
            descriptors[0],
            RecordPipe(descriptors[1], select.POLLIN, _DOORBELL, peer, abort),
            RecordPipe(descriptors[2], select.POLLOUT, _NOTICE, peer, abort),
        )
    answers = channel.all_gather_value(is_possible, "the shared memory of all ranks")
    # Only now: the others have opened these ends. A pipe closes when its last end is closed, so
    # this process must not keep the ends of others.
    _close_all(peer_ends)
    if not all(answers):
        _close_all(opened)
        return None
    close_in_children(opened)
    links = SharedMemoryLinks(outboxes, inboxes, abort)
    # At exit the operating system closes them, after the watchdog has told the others.
    weakref.finalize(links, _close_all, opened).atexit = False
    return links


def _open_offer(greeting: dict[str, Any], rank: int) -> list[int] | None:
    """Return descriptors of a sender's memory file and pipes, or None if they are out of reach."""
    offer = greeting["offers"].get(rank)
    if offer is None:
        return None
    folder, descriptors = f"/proc/{greeting['pid']}/fd", list[int]()
    try:
        descriptors.append(os.open(f"{folder}/{offer[0]}", os.O_RDWR))
        # On another host, or in another container, the numbers may mean another file.
        if os.pread(descriptors[0], _TOKEN_BYTES, 0).hex() == greeting["token"]:
            descriptors.append(os.open(f"{folder}/{offer[1]}", os.O_RDONLY | os.O_NONBLOCK))
            descriptors.append(os.open(f"{folder}/{offer[2]}", os.O_WRONLY | os.O_NONBLOCK))
            return descriptors
    except OSError:
        pass
    _close_all(descriptors)
    return None


def _lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes in a block, and the size of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
