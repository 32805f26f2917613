"""Times that a captured step writes down; here the host's memory is the device's."""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import pytest
import torch

from penstock.device import gpu_timestamps
from penstock.device.device import Cpu, GraphTimestamp
from penstock.device.gpu_timestamps import GraphTimestamps, ReplayTimestamps, TimestampBuffer

HERE = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where a kernel was asked to write the time to."""
    found: list[int] = []
    monkeypatch.setattr(
        gpu_timestamps, "_launch_timestamp_kernel", lambda stream, address: found.append(address)
    )
    return found


def replay(asked: list[int], clock: Any) -> None:
    for address in asked:
        ctypes.c_int64.from_address(address).value = next(clock)


@pytest.mark.parametrize("room", [2, 3, 4096])
def test_each_replay_has_its_own(
    room: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_timestamps, "_SLOTS_PER_BLOCK", room)
    made, clock, stream = TimestampBuffer(HERE), count(2**60, 7), torch.Stream(HERE)
    taken = [made.record(stream) for _ in range(7)]  # type: ignore[arg-type]
    assert taken == [GraphTimestamp(HERE, number) for number in range(7)]
    written = []
    for _ in range(2):
        replay(asked, clock)
        written.append(ReplayTimestamps({HERE: made.snapshot()}))
    for times in written:
        assert times.read()[HERE][:7] == [7 * number for number in range(7)]


def test_what_is_no_gpu_has_its_own_clock() -> None:
    places = [Cpu(), Cpu()]
    clocks = GraphTimestamps(places)
    assert clocks.devices == places
    assert clocks.snapshot().read() == {}
