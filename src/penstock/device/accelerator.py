"""The accelerators that PyTorch sees, and PyTorch's functions for them, whatever their type.

`torch.accelerator` knows which type of accelerator this build of PyTorch is for: "cuda" (NVIDIA and
ROCm), "xpu", "mps" or another. A process uses one type. Each type has a module with its streams,
generators and statistics (`torch.cuda`, `torch.xpu`, `torch.mps`), which differ in what they
offer. Here each question has an answer for every type, the CPU included, so that no other
folder asks for the type of a device.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Imported by name: while a traced forward runs, the attribute of `torch.cuda` answers its code (see
# `torch_compat.install_call_handlers`).
from torch.cuda import is_current_stream_capturing

from penstock.errors import RunError
from penstock.torch_compat import get_mps_generator, sleep_on_device

# The library that moves tensors between accelerators in different processes. Types without an entry
# go through host memory and gloo.
COLLECTIVE_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}

# The functions that a type's module must have for a rank to queue its work on streams of its own.
_STREAM_FUNCTIONS = ("Stream", "Event", "stream", "device", "current_stream")


# ---- devices -----------------------------------------------------------------------------------


def get_accelerator_type() -> str:
    """Return the type of accelerator that this build of PyTorch is for, or "cpu" for none."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def list_accelerators() -> list[torch.device]:
    """Return all accelerators that PyTorch sees."""
    kind = get_accelerator_type()
    count = 0 if kind == "cpu" else torch.accelerator.device_count()
    return [torch.device(kind, index) for index in range(count)]


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device is neither the host nor the meta device."""
    return device.type not in ("cpu", "meta")


def resolve_index(device: torch.device) -> torch.device:
    """Return the device with an index: "cuda" is the current CUDA device of this thread."""
    if device.index is None and is_accelerator(device):
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


@cache
def has_streams(device_type: str) -> bool:
    """Return whether devices of this type run work on streams that a program can create.

    Only then may a copy go on after its call (`non_blocking=True`): without streams, nothing keeps
    the source alive until the copy has ended.
    """
    module = _get_module(device_type)
    return device_type != "cpu" and all(hasattr(module, name) for name in _STREAM_FUNCTIONS)


def has_nvidia_driver(device_type: str) -> bool:
    """Return whether devices of this type are NVIDIA's. PyTorch calls ROCm's "cuda", too."""
    return device_type == "cuda" and torch.version.hip is None


def has_double_precision(device_type: str) -> bool:
    """Return whether devices of this type compute in float64. Apple's GPUs do not."""
    return device_type != "mps"


def may_use_tf32(device_type: str) -> bool:
    """Return whether PyTorch may compute float32 with the 10 bits of TF32 on these devices.

    By default it does so for convolutions.
    """
    if not has_nvidia_driver(device_type):
        return False
    try:
        return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # `fp32_precision` was set, which these older settings cannot express
        return True


def _get_module(device_type: str) -> Any:
    return getattr(torch, device_type, None)


# ---- work --------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device. On the CPU there is none to wait for."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


# The most that a device is kept busy before it is timed, and the cycles of its clock in a second. A
# slower clock only makes the wait longer.
_LONGEST_HEAD_START = 0.05
_CYCLES_PER_SECOND = 2e9


class TimedWork(NamedTuple):
    """The time of some work.

    `seconds` is the time on the device from the first kernel to the last, and `host_seconds` the
    time that the host took to launch them. If not `is_device_time`, the device may have waited for
    the host in between.
    """

    seconds: float
    host_seconds: float
    is_device_time: bool


def time_work(
    function: Callable[[], object], device: torch.device | None, host_seconds: float = 0.0
) -> TimedWork:
    """Run a function, and return the time that it takes on a device; None is the host.

    Python often takes longer to launch small kernels than the device takes to run them, and then a
    clock around the call shows the time of Python. So the device sleeps until the host is done with
    launching, and then runs all kernels in one go, as in a captured step:

        host     [ sleep ][ start ][ launch a, b, c ][ end ]
        device   [ sleep                              ][ start ][ a ][ b ][ c ][ end ]

    Args:
        function: The function. It uses the current stream of the device.
        device: The accelerator, or None for the host.
        host_seconds: The time that the host will take, from an earlier run. 0 if it is not known;
            the device then begins at once.
    """
    if device is None or not has_streams(device.type):
        if device is not None:
            synchronize(device)
        begin = perf_counter()
        function()
        if device is not None:
            synchronize(device)
        seconds = perf_counter() - begin
        return TimedWork(seconds, seconds, device is None)
    module = _get_module(device.type)
    stream = module.current_stream(device)
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    if device.type == "cuda" and host_seconds:
        head_start = min(1.5 * host_seconds, _LONGEST_HEAD_START)
        sleep_on_device(int(head_start * _CYCLES_PER_SECOND))
    start.record(stream)
    begin = perf_counter()
    function()
    host_seconds = perf_counter() - begin
    is_device_time = not start.query()
    end.record(stream)
    end.synchronize()
    return TimedWork(start.elapsed_time(end) / 1e3, host_seconds, is_device_time)


@cache
def list_autocast_types() -> tuple[str, ...]:
    """Return the device types for which autocast may be on: the CPU and the accelerator."""
    return tuple(dict.fromkeys(("cpu", get_accelerator_type())))


def is_collective_available(device_type: str) -> bool:
    """Return whether this machine has such an accelerator, and PyTorch its library for messages."""
    backend = COLLECTIVE_BACKENDS.get(device_type)
    is_here = device_type == get_accelerator_type()
    return is_here and backend is not None and dist.is_backend_available(backend)


# ---- random numbers ----------------------------------------------------------------------------


def get_default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device, which all threads share.

    Raises:
        RunError: PyTorch does not expose the generator of this type of device.
    """
    if not is_accelerator(device):
        return torch.default_generator
    if device.type == "mps":
        return get_mps_generator()
    generators = getattr(_get_module(device.type), "default_generators", None)
    if not generators:
        raise RunError(
            f"PyTorch does not expose the default random generator of '{device}', which a pipe has "
            "to control so that recomputation draws the same numbers. Use another device."
        )
    generator: torch.Generator = generators[resolve_index(device).index]
    return generator


def fork_rng(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Restore the default generators of the CPU and of these devices when the context ends."""
    accelerators = [device for device in devices if is_accelerator(device)]
    # Without accelerators the type is not used, but it must be one that PyTorch has a module for.
    kind = accelerators[0].type if accelerators else "cuda"
    return torch.random.fork_rng(accelerators, device_type=kind)


# ---- properties and memory ---------------------------------------------------------------------


def get_model_name(device: torch.device) -> str:
    """Return the product name of an accelerator, or the type of the device if it has none."""
    get_name = getattr(_get_module(device.type), "get_device_name", None)
    return str(get_name(device)) if get_name is not None else device.type


def get_uuid(device: torch.device) -> str:
    """Return a name of the accelerator that no other one has, or "" for the CPU.

    Two ranks on one GPU get the same name, even if CUDA_VISIBLE_DEVICES gives it two indices.
    """
    if not is_accelerator(device):
        return ""
    get_properties = getattr(_get_module(device.type), "get_device_properties", None)
    uuid = getattr(get_properties(device), "uuid", None) if get_properties is not None else None
    return f"{socket.gethostname()} {device}" if uuid is None else str(uuid)


def get_total_memory(device: torch.device) -> float:
    """Return the bytes that fit on a device. Infinity for the CPU, and where PyTorch cannot say."""
    module = _get_module(device.type)
    if hasattr(module, "get_device_properties"):
        return float(module.get_device_properties(device).total_memory)
    return float(module.recommended_max_memory()) if device.type == "mps" else inf


def get_free_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total bytes of an accelerator, or None where PyTorch cannot say."""
    get_info = getattr(_get_module(device.type), "mem_get_info", None)
    return get_info(device) if get_info is not None else None


def get_allocated_bytes(device: torch.device) -> int:
    """Return the bytes of live tensors on an accelerator."""
    module = _get_module(device.type)
    if device.type == "mps":
        return int(module.current_allocated_memory())
    return int(module.memory_allocated(device))


def get_peak_bytes(device: torch.device) -> int:
    """Return the most bytes of tensors that an accelerator has held since its peak was last reset.

    On the CPU it is the most memory that this process has had. 0 where nobody can say.
    """
    if not is_accelerator(device):
        try:
            import resource
        except ImportError:  # on Windows
            return 0
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most  # Linux counts in KiB
    get_most = getattr(_get_module(device.type), "max_memory_allocated", None)
    return int(get_most(device)) if get_most is not None else 0


def get_allocated_bytes_by_stream(device_type: str) -> dict[int, int]:
    """Return the bytes of live tensors by the handle of the stream they were allocated on."""
    live_bytes: dict[int, int] = {}
    for segment in _get_module(device_type).memory_snapshot():
        stream = segment["stream"]
        live_bytes[stream] = live_bytes.get(stream, 0) + segment["allocated_size"]
    return live_bytes


def get_nccl_version() -> str | None:
    """Return the version of NCCL, or None without a CUDA device or without NCCL."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    return device.type == "cuda" and is_current_stream_capturing()
