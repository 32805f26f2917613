"""Features that only NVIDIA GPUs have: timestamps inside a captured step, and virtual GPUs.

Both call the CUDA driver through NVIDIA's bindings, as PyTorch has no such functions. On ROCm,
which PyTorch also calls "cuda", they are refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor

from penstock.device.accelerator import has_nvidia_driver, resolve_index
from penstock.device.device import Device, Gpu, GraphTimestamp, Timestamp
from penstock.errors import ArgumentError, MissingExtra, RunError

# ---- the driver --------------------------------------------------------------------------------


def load_driver(purpose: str) -> Any:
    """Return the module of the bindings.

    Args:
        purpose: What the bindings are needed for, for the error message: "cutting a GPU into ...".

    Raises:
        MissingExtra: The bindings are not installed.
        RunError: PyTorch was built for ROCm, which has no such driver.
    """
    if not has_nvidia_driver("cuda"):
        raise RunError(f"{purpose} needs NVIDIA's driver, but this is a build of torch for ROCm.")
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise MissingExtra("cuda-bindings", "cuda", purpose) from missing
    return driver


def check_status(result: tuple[Any, ...], purpose: str) -> Any:
    """Return the values of a driver call without its status code; raise if the call failed."""
    status, *values = result
    if int(status):
        raise RunError(f"the CUDA driver failed while {purpose}: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)


# ---- timestamps inside a captured step -----------------------------------------------------------
#
# A small kernel reads the GPU's clock. A CUDA graph could record timing events instead. But the
# driver splits the graph at each event and puts the following nodes onto another internal stream:
# with 512 actions on eight ranks there were 515 streams instead of 12, and the step took 1.7 times
# as long. A kernel is a node like any other.
#
#     GraphTimestamps     all devices of one captured step
#     TimestampBuffer     one device: memory with one slot per timestamp
#     TimestampedGpu      a Gpu whose record_timestamp() adds a kernel to the graph
#     ReplayTimestamps    the times of one replay

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
_TIMING = "timing a captured step"


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
    driver = load_driver(_TIMING)
    grid = block = 1, 1, 1
    kernel_args = (address,), (ctypes.c_void_p,)
    result = driver.cuLaunchKernel(
        _load_timestamp_kernel(), *grid, *block, 0, stream.cuda_stream, kernel_args, 0
    )
    check_status(result, _TIMING)


@cache
def _load_timestamp_kernel() -> Any:
    """Load the kernel once per process. The driver makes it available in every context."""
    driver = load_driver(_TIMING)
    library = check_status(driver.cuLibraryLoadData(_TIMESTAMP_PTX, [], [], 0, [], [], 0), _TIMING)
    return driver.CUfunction(
        int(check_status(driver.cuLibraryGetKernel(library, b"stamp"), _TIMING))
    )


# ---- virtual GPUs ------------------------------------------------------------------------------
#
# One GPU is cut into disjoint groups of multiprocessors, each a device of a pipe. The stages run at
# the same time, each on its own multiprocessors; memory and clocks are shared. So a pipeline can be
# developed and measured with one GPU. A group is a green context of the CUDA driver:
#
#     cuDeviceGetDevResource        all multiprocessors of the GPU
#     cuDevSmResourceSplitByCount   disjoint groups of them
#     cuGreenCtxCreate              a context for each group
#     cuGreenCtxStreamCreate        streams whose kernels run on that group only
#
# (`torch.cuda.green_contexts` cannot be used: n contexts that it creates are on the same
# multiprocessors.)

_SM_GRANULARITY = 8  # since Hopper, the size of a group is a multiple of this
_CUTTING = "cutting a GPU into virtual devices"


class VirtualGpu(Gpu):
    """A group of multiprocessors of one GPU, with streams that run on them only.

    Attributes:
        sms: The number of its multiprocessors.
    """

    def __init__(
        self,
        pickle_args: tuple[str, int, int | tuple[int, ...], int],
        device: torch.device,
        sms: int,
        green_context: Any,
    ) -> None:
        self._pickle_args = pickle_args
        self.sms = sms
        self._green_context = green_context  # must live as long as its streams
        super().__init__(
            device, f"{device}/{pickle_args[-1]}", lambda: _create_stream(green_context, device)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_virtual_gpu, self._pickle_args


def virtual_devices(
    device: torch.device | str = "cuda:0",
    n: int | None = None,
    sms: int | Sequence[int] | None = None,
) -> list[VirtualGpu]:
    """Cut a GPU into `n` virtual devices of `sms` multiprocessors each.

    Equal arguments return the same devices.

    Args:
        device: The CUDA device to cut.
        n: The number of virtual devices; by default 2.
        sms: The multiprocessors of each; by default as many as fit. A list has one number for each,
            for unequal devices.

    Returns:
        A list of devices for `Pipe(..., devices=...)`.

    Raises:
        ArgumentError: There is no such CUDA device, or it has too few multiprocessors.
        MissingExtra: NVIDIA's bindings of the CUDA driver are not installed.
        RunError: PyTorch was built for ROCm.

    Example:

    >>> from penstock import Pipe
    >>> devices = virtual_devices("cuda:0", 4)  # doctest: +SKIP
    >>> pipe = Pipe(model, chunks=8, stages=4, devices=devices)  # doctest: +SKIP
    """
    named = torch.device(device)
    if named.type != "cuda" or not torch.cuda.is_available():
        raise ArgumentError(
            f"virtual devices need an available CUDA device, not '{device}'. On a CPU, use "
            "['cpu'] * n."
        )
    index = resolve_index(named).index
    total = torch.cuda.get_device_properties(index).multi_processor_count
    if isinstance(sms, Sequence):
        sizes = tuple(sms)
        if not sizes or n not in (None, len(sizes)) or min(sizes) < 1 or sum(sizes) > total:
            raise ArgumentError(
                f"sms={list(sms)} must have a positive number for each of the virtual devices, and "
                f"at most {total} in all, which {torch.device('cuda', index)} has."
            )
        return list(_split_gpu(index, len(sizes), sizes))
    n = 2 if n is None else n
    if n < 1:
        raise ArgumentError(f"virtual_devices needs n of at least 1, not n={n}.")
    # By default each group gets an equal share, rounded down to a size that the driver can form.
    share = total // n
    group_size = sms or (share - share % _SM_GRANULARITY if share >= _SM_GRANULARITY else share)
    if group_size < 1 or group_size * n > total:
        raise ArgumentError(
            f"{n} groups of {group_size} multiprocessors are more than the {total} of "
            f"{torch.device('cuda', index)}. Ask for at most {total // n} in each group, or for "
            "fewer groups."
        )
    return list(_split_gpu(index, n, group_size))


def _rebuild_virtual_gpu(
    device: str, groups: int, sms: int | tuple[int, ...], index: int
) -> VirtualGpu:
    """Return a virtual GPU that was pickled, on the GPU of this process."""
    return virtual_devices(device, groups, sms)[index]


# Cached, as the groups of two calls would share multiprocessors.
@lru_cache
def _split_gpu(index: int, groups: int, sms: int | tuple[int, ...]) -> tuple[VirtualGpu, ...]:
    """Create the green contexts of all groups of a GPU."""
    driver = load_driver(_CUTTING)
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes PyTorch create its own context first
        handle = check_status(driver.cuDeviceGet(index), _CUTTING)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = check_status(driver.cuDeviceGetDevResource(handle, kind), _CUTTING)
        # Only equal parts can be split off, so an unequal group has several of them.
        part_size = sms if isinstance(sms, int) else gcd(*sms)
        part_counts = [1] * groups if isinstance(sms, int) else [s // part_size for s in sms]
        split = driver.cuDevSmResourceSplitByCount(sum(part_counts), whole, 0, part_size)
        parts, num_parts, _ = check_status(split, _CUTTING)
        # The driver rounds the size of a part up, so fewer may fit than were asked for.
        if num_parts < sum(part_counts):
            raise ArgumentError(
                f"{device} has room for {num_parts} groups of {part_size} multiprocessors, not "
                f"{sum(part_counts)}. Ask for fewer in each group, for example "
                f"sms={max(1, part_size - _SM_GRANULARITY)}."
            )
        virtual_gpus = []
        for group, end in enumerate(accumulate(part_counts)):
            mine = parts[end - part_counts[group] : end]
            described = driver.cuDevResourceGenerateDesc(mine, len(mine))
            description = check_status(described, _CUTTING)
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = check_status(driver.cuGreenCtxCreate(description, handle, flags), _CUTTING)
            pickle_args = str(device), groups, sms, group
            virtual_gpus.append(
                VirtualGpu(pickle_args, device, sum(int(part.sm.smCount) for part in mine), context)
            )
    return tuple(virtual_gpus)


def _create_stream(green_context: Any, device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose kernels run on the multiprocessors of a green context only."""
    driver = load_driver(_CUTTING)
    # The driver requires this flag for streams of a green context.
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    handle = check_status(driver.cuGreenCtxStreamCreate(green_context, flags, 0), _CUTTING)
    return torch.cuda.ExternalStream(int(handle), device=device)
