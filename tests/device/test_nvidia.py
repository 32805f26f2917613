"""Tests of timestamps inside a captured step, with host memory in place of a GPU's, and of ROCm."""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import pytest
import torch

from penstock.device import nvidia
from penstock.device.device import Cpu, GraphTimestamp
from penstock.device.nvidia import GraphTimestamps, ReplayTimestamps, TimestampBuffer
from penstock.errors import RunError

HERE = torch.device("cpu")


@pytest.fixture
def written_addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the addresses that the timestamp kernel was told to write to."""
    found: list[int] = []
    monkeypatch.setattr(
        nvidia, "_launch_timestamp_kernel", lambda stream, address: found.append(address)
    )
    return found


def replay(written_addresses: list[int], clock: Any) -> None:
    for address in written_addresses:
        ctypes.c_int64.from_address(address).value = next(clock)


@pytest.mark.parametrize("room", [2, 3, 4096])
def test_each_graph_replay_has_its_own_timestamps(
    room: int, written_addresses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "_SLOTS_PER_BLOCK", room)
    buffer, clock, stream = TimestampBuffer(HERE), count(2**60, 7), torch.Stream(HERE)
    taken = [buffer.record(stream) for _ in range(7)]  # type: ignore[arg-type]
    assert taken == [GraphTimestamp(HERE, number) for number in range(7)]
    written = []
    for _ in range(2):
        replay(written_addresses, clock)
        written.append(ReplayTimestamps({HERE: buffer.snapshot()}))
    for times in written:
        assert times.read()[HERE][:7] == [7 * number for number in range(7)]


def test_cpu_has_no_graph_timestamps() -> None:
    devices = [Cpu(), Cpu()]
    clocks = GraphTimestamps(devices)
    assert clocks.devices == devices
    assert clocks.snapshot().read() == {}


def test_rocm_has_no_driver_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(RunError, match="cutting a GPU needs NVIDIA's driver, but this is a build"):
        nvidia.load_driver("cutting a GPU")
