"""Times of a captured step: a kernel reads the GPU's clock, and writes it down.

An event that a graph records would tell the time as well. But the driver cuts the graph there, and
puts what follows onto another of its own streams: with 512 actions on eight ranks there were 515
streams instead of 12, and the step took 1.7 times as long. A kernel is a node like all others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.device.cuda_driver import check_status, load_driver
from penstock.device.device import Device, Gpu, GraphTimestamp, Timestamp

_TIMESTAMP_PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry stamp(.param .u64 where)
{
    .reg .b64 %place, %time;
    ld.param.u64 %place, [where];
    cvta.to.global.u64 %place, %place;
    mov.u64 %time, %globaltimer;
    st.global.u64 [%place], %time;
    ret;
}
"""
_SLOTS_PER_BLOCK = 4096  # stamps in one piece of memory
_PURPOSE = "to tell when a captured step does what"


class TimestampBuffer:
    """Those of one captured step, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._slots_used = device, 0
        self._blocks = [self._allocate_block()]  # before the capture begins

    def record(self, stream: torch.cuda.Stream) -> GraphTimestamp:
        """This moment on the stream, which is being captured."""
        piece, at = divmod(self._slots_used, _SLOTS_PER_BLOCK)
        if piece == len(self._blocks):
            self._blocks.append(self._allocate_block())
        _launch_timestamp_kernel(stream, self._blocks[piece][at:].data_ptr())
        self._slots_used += 1
        return GraphTimestamp(self._device, self._slots_used - 1)

    def _allocate_block(self) -> Tensor:
        return torch.empty(_SLOTS_PER_BLOCK, dtype=torch.int64, device=self._device)

    def snapshot(self) -> list[Tensor]:
        """What the last replay has written: the next one writes other times."""
        return [piece.clone() for piece in self._blocks]


class TimestampedGpu(Gpu):
    """A GPU, or a part of one, in a step that is captured."""

    def __init__(self, gpu: Gpu, timestamps: TimestampBuffer) -> None:
        super().__init__(
            gpu.device, repr(gpu), iter((gpu.compute_stream, gpu.copy_stream)).__next__
        )
        self._timestamps = timestamps

    def record_timestamp(self, previous: Timestamp | None = None) -> GraphTimestamp:
        """No host is late in a replay: what follows at once begins where the other ends."""
        if isinstance(previous, GraphTimestamp):
            return previous
        with torch.cuda.device(self.device):
            return self._timestamps.record(self.compute_stream)


class GraphTimestamps:
    """Of all devices of one captured step."""

    def __init__(self, devices: Sequence[Device]) -> None:
        gpus = [place for place in devices if isinstance(place, Gpu)]
        self._buffers = {place.device: TimestampBuffer(place.device) for place in gpus}
        self.devices = [
            TimestampedGpu(place, self._buffers[place.device]) if isinstance(place, Gpu) else place
            for place in devices
        ]

    def snapshot(self) -> ReplayTimestamps:
        """Those of the last replay, to be read when it has ended."""
        return ReplayTimestamps(
            {device: stamps.snapshot() for device, stamps in self._buffers.items()}
        )


class ReplayTimestamps:
    """Of one replay. Those of two devices have nothing in common."""

    def __init__(self, blocks: dict[torch.device, list[Tensor]]) -> None:
        self._blocks = blocks

    def read(self) -> dict[torch.device, list[int]]:
        """In nanoseconds since the first, by the number of the stamp. This waits for the replay."""
        found = {}
        for device, pieces in self._blocks.items():
            times = [time for piece in pieces for time in piece.tolist()]
            found[device] = [time - times[0] for time in times]
        return found


def _launch_timestamp_kernel(stream: torch.cuda.Stream, address: int) -> None:
    driver = load_driver(_PURPOSE)
    one = 1, 1, 1
    given = (address,), (ctypes.c_void_p,)
    asked = driver.cuLaunchKernel(
        _load_timestamp_kernel(), *one, *one, 0, stream.cuda_stream, given, 0
    )
    check_status(asked, _PURPOSE)


@cache
def _load_timestamp_kernel() -> Any:
    driver = load_driver(_PURPOSE)
    library = check_status(driver.cuLibraryLoadData(_TIMESTAMP_PTX, [], [], 0, [], [], 0), _PURPOSE)
    return driver.CUfunction(
        int(check_status(driver.cuLibraryGetKernel(library, b"stamp"), _PURPOSE))
    )
