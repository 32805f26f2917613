"""What one rank knows of itself and its host: versions, devices, memory, disk, settings."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock.launch.launched import (
    Launched,
    device_of,
    identity_of,
    interface_for,
    is_launched,
    launched,
)

SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
)
FAMILIES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "MASTER_", "TORCHELASTIC_")
ALONE = Launched(0, 1, 0, 1, "localhost", 0, has_store=False)


@dataclass(frozen=True)
class Room:
    """Bytes: of memory, or of a disk."""

    free: int
    total: int


@dataclass(frozen=True)
class Facts:
    """Of one rank. A version that is not there is left out; `gpu` tells GPUs apart."""

    rank: int
    host: str
    local_size: int
    versions: dict[str, str]
    device: str
    gpu: str
    gpus: int
    cores: int
    threads: int
    memory: dict[str, Room]
    disk: dict[str, Room]
    settings: dict[str, str]
    interfaces: list[str]
    interface: str | None

    def dumps(self) -> str:
        """As one line of text."""
        return json.dumps(asdict(self))


def loads(text: str) -> Facts:
    """What `dumps` wrote."""
    values = json.loads(text)
    for kind in ("memory", "disk"):
        values[kind] = {name: Room(**room) for name, room in values[kind].items()}
    return Facts(**values)


def here() -> Launched:
    """As the launcher says; without one, alone."""
    return launched() if is_launched() else ALONE


def observe(seat: Launched) -> Facts:
    """Look around. Nothing here waits for another rank."""
    device = device_of(seat)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in SETTINGS or name.startswith(FAMILIES)
    }
    return Facts(
        rank=seat.rank,
        host=socket.gethostname(),
        local_size=seat.local_size,
        versions=_versions(),
        device=f"{device} {name}",
        gpu=identity_of(device),
        gpus=torch.cuda.device_count(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        memory=_memory(device),
        disk={place: _disk(place) for place in dict.fromkeys((str(Path.cwd()), _temporary()))},
        settings=settings,
        interfaces=[name for _, name in socket.if_nameindex()],
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or interface_for(seat),
    )


def _versions() -> dict[str, str]:
    found = {
        "penstock": _penstock(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "driver": _driver(),
    }
    return {name: version for name, version in found.items() if version}


def _penstock() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # its files alone are there
        return "not installed"


def _nccl() -> str | None:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _driver() -> str | None:
    """Also where torch finds no GPU: then it may be the driver's fault."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else None


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory(device: torch.device) -> dict[str, Room]:
    found = {}
    if device.type == "cuda":
        found[str(device)] = Room(*torch.cuda.mem_get_info(device))
    if host := _host_memory():
        found["host"] = host
    return found


def _host_memory() -> Room | None:
    """What can be had without swapping; Linux tells it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines)
    }
    return Room(sizes["MemAvailable"], sizes["MemTotal"])


def _disk(place: str) -> Room:
    usage = shutil.disk_usage(place)
    return Room(usage.free, usage.total)


def _temporary() -> str:
    return tempfile.gettempdir()
