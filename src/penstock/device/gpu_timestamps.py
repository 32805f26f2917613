"""Timestamps inside a captured step, written by a small kernel that reads the GPU's clock.

A CUDA graph could record timing events instead. But the driver splits the graph at each event and
puts the following nodes onto another internal stream: with 512 actions on eight ranks there were
515 streams instead of 12, and the step took 1.7 times as long. A kernel is a node like any other.

    GraphTimestamps     all devices of one captured step
    TimestampBuffer     one device: memory with one slot per timestamp
    TimestampedGpu      a Gpu whose record_timestamp() adds a kernel to the graph
    ReplayTimestamps    the times of one replay
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

# The kernel as PTX, which the driver compiles for the GPU at hand. It writes %globaltimer, a clock
# in nanoseconds that all multiprocessors of a GPU share, to the address that it is given.
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
_SLOTS_PER_BLOCK = 4096  # timestamps in one block of memory
_PURPOSE = "timing a captured step"


class TimestampBuffer:
    """The timestamps of one captured step on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._slots_used = device, 0
        # The first block is allocated before the capture begins. That is enough for most steps.
        self._blocks = [self._allocate_block()]

    def record(self, stream: torch.cuda.Stream) -> GraphTimestamp:
        """Add a timestamp to the stream, which is being captured, and return its slot."""
        block_index, offset = divmod(self._slots_used, _SLOTS_PER_BLOCK)
        if block_index == len(self._blocks):
            self._blocks.append(self._allocate_block())
        _launch_timestamp_kernel(stream, self._blocks[block_index][offset:].data_ptr())
        self._slots_used += 1
        return GraphTimestamp(self._device, self._slots_used - 1)

    def _allocate_block(self) -> Tensor:
        return torch.empty(_SLOTS_PER_BLOCK, dtype=torch.int64, device=self._device)

    def snapshot(self) -> list[Tensor]:
        """Return copies of the times of the last replay; the next replay overwrites them."""
        return [block.clone() for block in self._blocks]


class TimestampedGpu(Gpu):
    """A GPU, or a part of one, whose timestamps become part of a captured step."""

    def __init__(self, gpu: Gpu, timestamps: TimestampBuffer) -> None:
        # It uses the two streams of the original device.
        super().__init__(
            gpu.device, repr(gpu), iter((gpu.compute_stream, gpu.copy_stream)).__next__
        )
        self._timestamps = timestamps

    def record_timestamp(self, previous: Timestamp | None = None) -> GraphTimestamp:
        """Return `previous`, or a new timestamp on the compute stream.

        In a replay the host launches nothing, so the stream is not idle between two actions: the
        second one begins when the first one ends.
        """
        if isinstance(previous, GraphTimestamp):
            return previous
        with torch.cuda.device(self.device):
            return self._timestamps.record(self.compute_stream)


class GraphTimestamps:
    """The timestamps of all devices of one captured step.

    Attributes:
        devices: The devices of the ranks, with each GPU replaced by one that records timestamps.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        gpus = [device for device in devices if isinstance(device, Gpu)]
        self._buffers = {gpu.device: TimestampBuffer(gpu.device) for gpu in gpus}
        self.devices = [
            TimestampedGpu(device, self._buffers[device.device])
            if isinstance(device, Gpu)
            else device
            for device in devices
        ]

    def snapshot(self) -> ReplayTimestamps:
        """Return the times of the last replay. They can be read when it has ended."""
        return ReplayTimestamps(
            {device: buffer.snapshot() for device, buffer in self._buffers.items()}
        )


class ReplayTimestamps:
    """The times of one replay. Each device has its own clock; they cannot be compared."""

    def __init__(self, blocks: dict[torch.device, list[Tensor]]) -> None:
        self._blocks = blocks

    def read(self) -> dict[torch.device, list[int]]:
        """Wait for the replay; return nanoseconds since the first timestamp by device and slot."""
        nanoseconds = {}
        for device, blocks in self._blocks.items():
            times = [time for block in blocks for time in block.tolist()]
            nanoseconds[device] = [time - times[0] for time in times]
        return nanoseconds


def _launch_timestamp_kernel(stream: torch.cuda.Stream, address: int) -> None:
    """Launch the kernel with one thread on the stream."""
    driver = load_driver(_PURPOSE)
    grid = block = 1, 1, 1
    kernel_args = (address,), (ctypes.c_void_p,)
    result = driver.cuLaunchKernel(
        _load_timestamp_kernel(), *grid, *block, 0, stream.cuda_stream, kernel_args, 0
    )
    check_status(result, _PURPOSE)


@cache
def _load_timestamp_kernel() -> Any:
    """Load the kernel once per process. The driver makes it available in every context."""
    driver = load_driver(_PURPOSE)
    library = check_status(driver.cuLibraryLoadData(_TIMESTAMP_PTX, [], [], 0, [], [], 0), _PURPOSE)
    return driver.CUfunction(
        int(check_status(driver.cuLibraryGetKernel(library, b"stamp"), _PURPOSE))
    )
