"""The bound on messages that are under way over gloo, and the memory order of their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.distributed.links import MAX_IN_FLIGHT, HostLinks
from penstock.tensor_spec import TensorSpec


class Work:
    waited = False

    def wait(self) -> None:
        self.waited = True


class Loopback:
    """A process group that receives what it has sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.works: list[Work] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self.sent += tensors
        self.works.append(Work())
        return self.works[-1]

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        tensors[0].view(-1).copy_(self.sent.pop(0).view(-1))
        return Work()

    def abort(self) -> None:
        pass


def test_host_links_wait_for_the_oldest_message_when_too_many_are_in_flight() -> None:
    group = Loopback()
    links = HostLinks(group)
    waits = [links.send(1, tag, [torch.ones(2)]) for tag in range(MAX_IN_FLIGHT + 1)]
    assert waits[:-1] == [None] * MAX_IN_FLIGHT
    assert links.send(2, 0, [torch.ones(2)]) is None  # each receiver has its own bound
    wait = waits[-1]
    assert wait is not None
    wait()
    assert [work.waited for work in group.works] == [True] + [False] * (MAX_IN_FLIGHT + 1)
    links.flush()
    assert all(work.waited for work in group.works)


def test_host_links_keep_the_strides_of_dense_tensors() -> None:
    links = HostLinks(Loopback())
    given = [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(8.0)[::2],  # with gaps: sent as a contiguous copy
    ]
    links.send(1, 0, given)
    found = links.recv(1, 0, [TensorSpec.of_packed(tensor) for tensor in given])()
    assert all(map(torch.equal, found, given))
    assert [tensor.stride() for tensor in found] == [*(t.stride() for t in given[:2]), (1,)]
