"""What the launcher says of this process, its device, and the network interface of its host."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.errors import RunError

_REQUIRED_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_SIOCGIFADDR = 0x8915  # SIOCGIFADDR
_TEST_NET_ADDRESS = "203.0.113.1"  # kept free for documentation: nothing is sent there


class RankEnv(NamedTuple):
    """One of `size` ranks, of which `local_size` are on this host.

    Their store is at `address`: the launcher has it, or else rank 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher_has_store: bool  # the launcher

    @property
    def is_single_host(self) -> bool:
        """Are all ranks here?"""
        return self.local_world_size == self.world_size


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Does anything look as if a launcher had started this process?"""
    return any(name in environ for name in ("RANK", "WORLD_SIZE"))


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """As `torchrun` says it in the environment."""
    missing = [name for name in _REQUIRED_VARIABLES if not environ.get(name)]
    if missing:
        script = Path(sys.argv[0]).name or "train.py"
        raise RunError(
            f"this process was not started by torchrun, which sets {', '.join(missing)}: "
            f"start it with  torchrun --nproc-per-node 2 {script}"
        )
    wrong = [
        f"{name}={environ[name]}"
        for name in _REQUIRED_VARIABLES
        if name != "MASTER_ADDR" and not environ[name].isdecimal()
    ]
    if wrong:
        raise RunError(f"these are no numbers: {', '.join(wrong)}; torchrun sets them by itself")
    rank, size, local_rank, local_size = (int(environ[name]) for name in _REQUIRED_VARIABLES[:4])
    where = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankEnv(rank, size, local_rank, local_size, *where, has_store)


# ---- the device ---------------------------------------------------------------------------


def select_device(env: RankEnv) -> torch.device:
    """The GPU of this rank, alone or shared with others; the CPU where there is none."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", env.local_rank % gpus) if gpus else torch.device("cpu")


def get_gpu_uuid(device: torch.device) -> str:
    """The same for two ranks if they share the GPU, whatever number they know it by."""
    if device.type == "cpu":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


# ---- the interface ------------------------------------------------------------------------


def find_network_interface(env: RankEnv) -> str | None:
    """The interface for gloo: loopback on one host, else that which leads to rank 0.

    gloo takes the address of the host's name, which on many machines is loopback, or none at all.
    Nothing, if the right one is not found: then gloo decides.
    """
    names = [name for _, name in socket.if_nameindex()]
    if env.is_single_host:
        return next((name for name in names if is_loopback(name)), None)
    for there in (env.master_addr, _TEST_NET_ADDRESS):
        here = _find_source_address(there)
        if here and not here.startswith("127."):
            return next((name for name in names if _get_interface_address(name) == here), None)
    return None


def is_loopback(interface: str) -> bool:
    """By its name: lo, or lo0."""
    return interface in ("lo", "lo0")


def _find_source_address(destination: str) -> str | None:
    """The address that this host would send from. A datagram's socket sends nothing by itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _get_interface_address(interface: str) -> str | None:
    asked = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
