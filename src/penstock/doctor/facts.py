"""Facts about one rank and its host: versions, devices, memory, disk, settings, network."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock.device.accelerator import (
    get_free_memory,
    get_model_name,
    get_nccl_version,
    get_uuid,
    is_accelerator,
    list_accelerators,
)
from penstock.launch.torchrun_env import (
    RankEnv,
    find_network_interface,
    is_launched,
    read_rank_env,
    select_device,
)
from penstock.torch_compat import TORCH_VERSION, find_missing_apis

# Environment variables that are reported, because they change how PyTorch computes or communicates.
ENVIRONMENT_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
)
ENVIRONMENT_PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "MASTER_", "TORCHELASTIC_")
SINGLE_PROCESS = RankEnv(0, 1, 0, 1, "localhost", 0, launcher_has_store=False)


@dataclass(frozen=True)
class FreeSpace:
    """Free and total bytes of a memory or a disk."""

    free: int
    total: int


@dataclass(frozen=True)
class RankInfo:
    """The facts about one rank.

    `versions` leaves out what is not installed. `gpu` is the UUID of the rank's GPU, or empty; two
    ranks with the same one share a GPU. `missing_apis` says what does not work with this PyTorch.
    """

    rank: int
    host: str
    local_size: int
    versions: dict[str, str]
    device: str
    gpu: str
    gpus: int
    cores: int
    threads: int
    memory: dict[str, FreeSpace]
    disk: dict[str, FreeSpace]
    settings: dict[str, str]
    interfaces: list[str]
    interface: str | None
    missing_apis: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the facts as one line of JSON, for the launcher's store."""
        return json.dumps(asdict(self))


def parse_rank_info(text: str) -> RankInfo:
    """Return the facts that `RankInfo.to_json` has written."""
    values = json.loads(text)
    for kind in ("memory", "disk"):
        values[kind] = {name: FreeSpace(**space) for name, space in values[kind].items()}
    return RankInfo(**values)


def get_rank_env() -> RankEnv:
    """Return the rank and world size that the launcher has set, or those of a single process."""
    return read_rank_env() if is_launched() else SINGLE_PROCESS


def collect_rank_info(rank_env: RankEnv) -> RankInfo:
    """Collect the facts about this rank. Nothing here waits for another rank."""
    device = select_device(rank_env)
    name = get_model_name(device) if is_accelerator(device) else platform.machine()
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in ENVIRONMENT_VARIABLES or name.startswith(ENVIRONMENT_PREFIXES)
    }
    return RankInfo(
        rank=rank_env.rank,
        host=socket.gethostname(),
        local_size=rank_env.local_world_size,
        versions=_collect_versions(),
        device=f"{device} {name}",
        gpu=get_uuid(device),
        gpus=len(list_accelerators()),
        cores=_count_cores(),
        threads=torch.get_num_threads(),
        memory=_measure_memory(device),
        disk={
            path: _measure_disk(path)
            for path in dict.fromkeys((str(Path.cwd()), tempfile.gettempdir()))
        },
        settings=settings,
        interfaces=[name for _, name in socket.if_nameindex()],
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or find_network_interface(rank_env),
        missing_apis=find_missing_apis(),
    )


def _collect_versions() -> dict[str, str]:
    versions = {
        "penstock": _find_penstock_version(),
        "python": platform.python_version(),
        "torch": TORCH_VERSION,
        "cuda": torch.version.cuda,
        "nccl": get_nccl_version(),
        "driver": _find_driver_version(),
    }
    return {name: version for name, version in versions.items() if version}


def _find_penstock_version() -> str:
    try:
        return version("torch-penstock")
    except PackageNotFoundError:  # the package runs from its source tree
        return "not installed"


def _find_driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None.

    nvidia-smi reports it even if torch finds no GPU, which may be because of the driver.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = process.stdout.split() if process.returncode == 0 else []
    return lines[0] if lines else None


def _count_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _measure_memory(device: torch.device) -> dict[str, FreeSpace]:
    memory = {}
    if space := get_free_memory(device):
        memory[str(device)] = FreeSpace(*space)
    if host := _measure_host_memory():
        memory["host"] = host
    return memory


def _measure_host_memory() -> FreeSpace | None:
    """Return the memory that is available without swapping, or None where it is not Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {
        name: int(text.split()[0]) * 1024 for name, _, text in (x.partition(":") for x in lines)
    }
    return FreeSpace(sizes["MemAvailable"], sizes["MemTotal"])


def _measure_disk(path: str) -> FreeSpace:
    usage = shutil.disk_usage(path)
    return FreeSpace(usage.free, usage.total)
