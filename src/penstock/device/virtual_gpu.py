"""Virtual GPUs: one GPU cut into disjoint groups of multiprocessors, each a device to a pipe.

The stages really run at the same time, each with its part of the machine; memory and clocks are
shared. That is how a pipeline is developed and measured with one GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from penstock.device.cuda_driver import check_status, load_driver
from penstock.device.device import Gpu
from penstock.errors import ArgumentError

_SM_GRANULARITY = 8  # groups are made of so many multiprocessors, from Hopper on
_PURPOSE = "to cut a GPU into virtual ones"


class VirtualGpu(Gpu):
    """A group of multiprocessors of one GPU, with streams that run on them alone."""

    def __init__(
        self,
        pickle_args: tuple[str, int, int, int],
        device: torch.device,
        sms: int,
        green_context: Any,
    ) -> None:
        self._pickle_args = pickle_args
        self.sms = sms
        self._green_context = green_context  # lives as long as its streams
        super().__init__(
            device, f"{device}/{pickle_args[-1]}", lambda: _create_stream(green_context, device)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_virtual_gpu, self._pickle_args


def virtual_devices(
    device: torch.device | str = "cuda:0", n: int = 2, sms: int | None = None
) -> list[VirtualGpu]:
    """Cut a GPU into `n` devices of `sms` multiprocessors each (by default as many as there are).

    Give them to a pipe: `Pipe(model, stages=4, devices=virtual_devices("cuda:0", 4))`. Asked
    again, the same ones are given.
    """
    named = torch.device(device)
    if named.type != "cuda" or not torch.cuda.is_available():
        raise ArgumentError(
            f"virtual devices are cut from a CUDA device that is there, not '{device}'"
        )
    index = torch.cuda.current_device() if str(named) == "cuda" else named.index
    total = torch.cuda.get_device_properties(index).multi_processor_count
    if n < 1:
        raise ArgumentError(f"n={n}: there is at least one virtual device")
    share = total // n
    wanted = sms or (share - share % _SM_GRANULARITY if share >= _SM_GRANULARITY else share)
    if wanted < 1 or wanted * n > total:
        raise ArgumentError(
            f"{n} groups of {wanted} multiprocessors are more than the {total} of "
            f"{torch.device('cuda', index)}: ask for {total // n} at most in each"
        )
    return list(_split_gpu(index, n, wanted))


def _rebuild_virtual_gpu(device: str, groups: int, sms: int, index: int) -> VirtualGpu:
    return virtual_devices(device, groups, sms)[index]


@lru_cache
def _split_gpu(index: int, groups: int, sms: int) -> tuple[VirtualGpu, ...]:
    driver = load_driver(_PURPOSE)
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # PyTorch's own context exists from here on
        handle = check_status(driver.cuDeviceGet(index), _PURPOSE)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = check_status(driver.cuDeviceGetDevResource(handle, kind), _PURPOSE)
        split = driver.cuDevSmResourceSplitByCount(groups, whole, 0, sms)
        parts, made, _ = check_status(split, _PURPOSE)
        if made < groups:
            raise ArgumentError(
                f"{device} gives {made} groups of {sms} multiprocessors, not {groups}: ask for "
                f"fewer in each, sms={max(1, sms - _SM_GRANULARITY)}, say"
            )
        found = []
        for at in range(groups):
            described = check_status(driver.cuDevResourceGenerateDesc([parts[at]], 1), _PURPOSE)
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = check_status(driver.cuGreenCtxCreate(described, handle, flags), _PURPOSE)
            given = str(device), groups, sms, at
            found.append(VirtualGpu(given, device, int(parts[at].sm.smCount), context))
    return tuple(found)


def _create_stream(green_context: Any, device: torch.device) -> torch.cuda.Stream:
    driver = load_driver(_PURPOSE)
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    handle = check_status(driver.cuGreenCtxStreamCreate(green_context, flags, 0), _PURPOSE)
    return torch.cuda.ExternalStream(int(handle), device=device)
