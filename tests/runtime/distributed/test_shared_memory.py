"""Links through shared memory: what arrives, when a send waits, and what happens when a rank ends.

Both ranks are threads of this process, except in the last tests.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipe
from penstock.errors import RunError
from penstock.runtime.distributed import shared_memory
from penstock.runtime.distributed.inherited_descriptors import close_in_children
from penstock.runtime.distributed.links import MAX_IN_FLIGHT
from penstock.runtime.distributed.shared_memory import (
    SWITCH,
    AbortSignal,
    RecordPipe,
    SharedMemoryLinks,
    open_shared_memory_links,
)
from penstock.tensor_spec import TensorSpec
from tests.distributed.ranks import ranks
from tests.support import run_in_threads

PAIRS = frozenset({(0, 1), (1, 0)})
Change = Callable[[int, Any], Any]

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or not Path("/proc/self/fd").exists(),
    reason="shared memory links need memfd_create and /proc",
)


class ThreadChannel:
    """A control channel between two threads. `change` may alter what a rank sends."""

    def __init__(self, rank: int, values: list[Any], barrier: Barrier, change: Change) -> None:
        self.rank, self._values, self._barrier, self._change = rank, values, barrier, change

    def all_gather_value(self, value: Any, description: str) -> list[Any]:
        self._values[self.rank] = self._change(self.rank, value)
        self._barrier.wait(10)
        values = list(self._values)
        self._barrier.wait(10)
        return values


def open_pair(change: Change = lambda rank, value: value) -> list[SharedMemoryLinks | None]:
    values: list[Any] = [None, None]
    barrier = Barrier(2)

    def open_links(rank: int) -> SharedMemoryLinks | None:
        channel: Any = ThreadChannel(rank, values, barrier, change)
        return open_shared_memory_links(channel, PAIRS)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(open_links, range(2)))


@pytest.fixture
def pair() -> Iterator[list[SharedMemoryLinks]]:
    before = count_descriptors()
    links = [each for each in open_pair() if each is not None]
    assert len(links) == 2
    yield links
    links.clear()
    assert count_descriptors() == before


def count_descriptors() -> int:
    """Return how many memory files are open. Other tests may open and close anything else."""
    gc.collect()  # links that other tests have left close their files when they are collected
    paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum("memfd:penstock" in os.readlink(path) for path in paths if os.path.lexists(path))


def packed(*tensors: Tensor) -> list[TensorSpec]:
    return [TensorSpec.of_packed(tensor) for tensor in tensors]


def test_tensors_arrive_with_their_dtypes_strides_and_empty_ones(
    pair: list[SharedMemoryLinks],
) -> None:
    sent = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.tensor([True, False, True]),
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(8.0)[::2],  # with gaps: sent as a contiguous copy
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    ]
    wait = pair[1].recv(0, 5, packed(*sent))
    assert pair[0].send(1, 5, sent) is None
    received = wait()
    assert all(map(torch.equal, received, sent))
    assert [t.dtype for t in received] == [t.dtype for t in sent]
    assert [t.stride() for t in received] == [s.strides for s in packed(*sent)]
    only_empty = [torch.empty(0, 2)]
    assert pair[0].send(1, 6, only_empty) is None
    assert pair[1].recv(0, 6, packed(*only_empty))()[0].shape == (0, 2)


def test_messages_are_found_by_their_tags_in_any_order(pair: list[SharedMemoryLinks]) -> None:
    for tag in (3, 1, 2, 1):
        pair[0].send(1, tag, [torch.full((2,), float(tag))])
    waits = [pair[1].recv(0, tag, packed(torch.ones(2))) for tag in (1, 1, 2, 3)]
    assert [float(wait()[0][0]) for wait in waits] == [1.0, 1.0, 2.0, 3.0]


def test_a_send_waits_for_posted_receives_only(pair: list[SharedMemoryLinks]) -> None:
    waits = [pair[0].send(1, tag, [torch.ones(2)]) for tag in range(MAX_IN_FLIGHT + 1)]
    assert waits[:-1] == [None] * MAX_IN_FLIGHT
    send_wait = waits[-1]
    assert send_wait is not None
    # The receiver posts its receives and then computes. It takes nothing out of the memory.
    receives = [pair[1].recv(0, tag, packed(torch.ones(2))) for tag in range(MAX_IN_FLIGHT + 1)]
    send_wait()
    pair[0].flush()
    assert all(torch.equal(receive()[0], torch.ones(2)) for receive in receives)


def test_a_sender_may_change_its_tensor_after_the_send(pair: list[SharedMemoryLinks]) -> None:
    tensor = torch.ones(1000)
    wait = pair[1].recv(0, 0, packed(tensor))
    pair[0].send(1, 0, [tensor])
    tensor.zero_()
    assert float(wait()[0].sum()) == 1000


def test_blocks_are_used_again(pair: list[SharedMemoryLinks]) -> None:
    outbox: Any = pair[0]._outboxes[1]
    for size in (100_000, 99_000, 10):
        for tag in range(200):
            message = torch.full((size,), float(tag))
            pair[0].send(1, tag, [message])
            assert torch.equal(pair[1].recv(0, tag, packed(message))()[0], message)
    assert os.fstat(outbox._memory).st_size < 3 * 4 * 100_000


def test_a_message_of_another_size_is_refused(pair: list[SharedMemoryLinks]) -> None:
    pair[0].send(1, 0, [torch.ones(100)])
    with pytest.raises(RunError, match="a message has 448 bytes, but 832 were expected"):
        pair[1].recv(0, 0, packed(torch.ones(200)))()


@pytest.mark.parametrize("how", ["peer ends", "abort"])
def test_a_wait_fails_when_the_peer_ends_or_the_links_are_aborted(how: str) -> None:
    sender, receiver = open_pair()
    assert sender is not None
    assert receiver is not None
    wait = receiver.recv(0, 0, packed(torch.ones(2)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        if how == "abort":
            receiver.abort()
        else:
            del sender
        with pytest.raises(RuntimeError, match="Connection closed"):
            waiting.result(10)
    if how == "peer ends":  # so does a receive that is posted, and a send
        with pytest.raises(RuntimeError, match="Connection closed by rank 0"):
            receiver.recv(0, 1, packed(torch.ones(2)))
        with pytest.raises(RuntimeError, match="Connection closed by rank 0"):
            receiver.send(0, 1, [torch.ones(2)])


def test_several_threads_note_descriptors_at_once() -> None:
    """ "dictionary changed size during iteration": a thread went on when garbage was collected."""
    errors: list[RuntimeError] = []

    def note_descriptors() -> None:
        for _ in range(300):
            descriptors = os.pipe()
            try:
                close_in_children(descriptors)
            except RuntimeError as error:
                errors.append(error)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    gc.callbacks.append(lambda *_: time.sleep(0))  # lets another thread go on
    try:
        run_in_threads(note_descriptors, 4)
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*threshold)
    assert not errors


def test_messages_that_were_sent_before_the_peer_ended_still_arrive() -> None:
    sender, receiver = open_pair()
    assert sender is not None
    assert receiver is not None
    wait = receiver.recv(0, 0, packed(torch.ones(2)))
    sender.send(1, 0, [torch.ones(2)])
    shared_memory_records: Any = receiver._inboxes[0]
    shared_memory_records._notices.write = lambda *fields: None  # nobody reads them any more
    del sender
    assert torch.equal(wait()[0], torch.ones(2))


def test_a_full_pipe_waits_for_its_reader_or_an_abort() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    abort, record = AbortSignal(), shared_memory._NOTICE
    incoming = RecordPipe(reader, select.POLLIN, record, 0, abort)
    outgoing = RecordPipe(writer, select.POLLOUT, record, 1, abort)
    for number in range(512):
        outgoing.write(number)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(outgoing.write, 512)
        assert not writing.done()
        numbers = incoming.read(wait=True)
        writing.result(10)
        numbers += incoming.read(wait=True)
        assert numbers == [(number,) for number in range(513)]
        for number in range(512):
            outgoing.write(number)
        writing = pool.submit(outgoing.write, 512)
        abort.set()
        with pytest.raises(RuntimeError, match="aborted"):
            writing.result(10)
    for descriptor in (reader, writer, abort.receiver, abort.sender):
        os.close(descriptor)


def other_token(rank: int, value: Any) -> Any:
    """Let rank 0 seem to be a process of another host with the same number."""
    return {**value, "token": "00" * 16} if rank == 0 and isinstance(value, dict) else value


def no_such_process(rank: int, value: Any) -> Any:
    return {**value, "pid": 2**22 + 1} if rank == 0 and isinstance(value, dict) else value


@pytest.mark.parametrize("change", [other_token, no_such_process])
def test_no_links_if_a_rank_cannot_open_the_memory_of_another(change: Change) -> None:
    before = count_descriptors()
    assert open_pair(change) == [None, None]
    assert count_descriptors() == before


def test_no_links_if_one_rank_switches_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    before = count_descriptors()
    monkeypatch.setenv(SWITCH, "0")
    assert open_pair() == [None, None]
    assert count_descriptors() == before


def test_a_forked_process_closes_the_pipes() -> None:
    reader, writer = os.pipe()
    close_in_children([writer])
    told, answer = os.pipe()
    child = os.fork()
    if child == 0:
        is_open = os.path.exists(f"/proc/self/fd/{writer}")
        os.write(answer, b"open" if is_open else b"closed")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(told, 10) == b"closed"
    for descriptor in (reader, writer, told, answer):
        os.close(descriptor)


# ---- a pipe over processes -----------------------------------------------------------------------


def train(schedule: str, switch: str) -> tuple[str, list[Tensor]]:
    """Return the kind of links of a pipe, and losses and gradients of three steps."""
    os.environ[SWITCH] = switch
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        pipe = Pipe(
            model, 4, schedule=schedule, loss_fn=nn.functional.mse_loss, group=dist.group.WORLD
        )
        x, y = torch.randn(16, 16), torch.randn(16, 16)
        losses = [pipe.step(x, target=y).loss for _ in range(3)]
        engine: Any = pipe._engine
        gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
        return type(engine.groups.links).__name__, [*losses, *gradients]
    finally:
        del os.environ[SWITCH]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-v"])
def test_shared_memory_and_gloo_give_the_same_bits(schedule: str) -> None:
    shared, gloo = (ranks(2).run(train, schedule, switch) for switch in "10")
    for (shared_links, shared_numbers), (gloo_links, gloo_numbers) in zip(
        shared, gloo, strict=True
    ):
        assert (shared_links, gloo_links) == ("SharedMemoryLinks", "HostLinks")
        assert len(shared_numbers) > 3
        assert all(map(torch.equal, shared_numbers, gloo_numbers))
