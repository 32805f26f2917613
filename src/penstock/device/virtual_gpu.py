"""Virtual GPUs: one GPU cut into disjoint groups of multiprocessors, each a device of a pipe.

The stages run at the same time, each on its own multiprocessors; memory and clocks are shared. So a
pipeline can be developed and measured with one GPU.

A group is a green context of the CUDA driver:

    cuDeviceGetDevResource        all multiprocessors of the GPU
    cuDevSmResourceSplitByCount   disjoint groups of them
    cuGreenCtxCreate              a context for each group
    cuGreenCtxStreamCreate        streams whose kernels run on that group only

(`torch.cuda.green_contexts` cannot be used: n contexts that it creates are on the same
multiprocessors.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from penstock.device.cuda_driver import check_status, load_driver
from penstock.device.device import Gpu
from penstock.errors import ArgumentError

_SM_GRANULARITY = 8  # since Hopper, the size of a group is a multiple of this
_PURPOSE = "cutting a GPU into virtual devices"


class VirtualGpu(Gpu):
    """A group of multiprocessors of one GPU, with streams that run on them only.

    Attributes:
        sms: The number of its multiprocessors.
    """

    def __init__(
        self,
        pickle_args: tuple[str, int, int, int],
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
    device: torch.device | str = "cuda:0", n: int = 2, sms: int | None = None
) -> list[VirtualGpu]:
    """Cut a GPU into `n` virtual devices of `sms` multiprocessors each.

    Equal arguments return the same devices.

    Args:
        device: The CUDA device to cut.
        n: The number of virtual devices.
        sms: The multiprocessors of each; by default as many as fit.

    Returns:
        A list of devices for `Pipe(..., devices=...)`.

    Raises:
        ArgumentError: There is no such CUDA device, or it has too few multiprocessors.
        MissingExtra: NVIDIA's bindings of the CUDA driver are not installed.

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
    index = torch.cuda.current_device() if str(named) == "cuda" else named.index
    total = torch.cuda.get_device_properties(index).multi_processor_count
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


def _rebuild_virtual_gpu(device: str, groups: int, sms: int, index: int) -> VirtualGpu:
    """Return a virtual GPU that was pickled, on the GPU of this process."""
    return virtual_devices(device, groups, sms)[index]


# Cached, as the groups of two calls would share multiprocessors.
@lru_cache
def _split_gpu(index: int, groups: int, sms: int) -> tuple[VirtualGpu, ...]:
    """Create the green contexts of all groups of a GPU."""
    driver = load_driver(_PURPOSE)
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes PyTorch create its own context first
        handle = check_status(driver.cuDeviceGet(index), _PURPOSE)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = check_status(driver.cuDeviceGetDevResource(handle, kind), _PURPOSE)
        split = driver.cuDevSmResourceSplitByCount(groups, whole, 0, sms)
        parts, num_parts, _ = check_status(split, _PURPOSE)
        # The driver rounds the size of a group up, so fewer groups may fit than were asked for.
        if num_parts < groups:
            raise ArgumentError(
                f"{device} has room for {num_parts} groups of {sms} multiprocessors, not {groups}. "
                f"Ask for fewer in each group, for example sms={max(1, sms - _SM_GRANULARITY)}."
            )
        virtual_gpus = []
        for group in range(groups):
            part = parts[group]
            description = check_status(driver.cuDevResourceGenerateDesc([part], 1), _PURPOSE)
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = check_status(driver.cuGreenCtxCreate(description, handle, flags), _PURPOSE)
            pickle_args = str(device), groups, sms, group
            virtual_gpus.append(VirtualGpu(pickle_args, device, int(part.sm.smCount), context))
    return tuple(virtual_gpus)


def _create_stream(green_context: Any, device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose kernels run on the multiprocessors of a green context only."""
    driver = load_driver(_PURPOSE)
    # The driver requires this flag for streams of a green context.
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    handle = check_status(driver.cuGreenCtxStreamCreate(green_context, flags, 0), _PURPOSE)
    return torch.cuda.ExternalStream(int(handle), device=device)
