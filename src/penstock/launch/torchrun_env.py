"""The environment variables of `torchrun`, and from them the device and the network interface."""

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

from penstock.device.accelerator import list_accelerators
from penstock.errors import RunError

_REQUIRED_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_SIOCGIFADDR = 0x8915  # the ioctl of Linux that returns the IPv4 address of an interface
_TEST_NET_ADDRESS = "203.0.113.1"  # TEST-NET-3, reserved for documentation; nothing is sent there


class RankEnv(NamedTuple):
    """The environment of one rank as `torchrun` sets it. The store is at MASTER_ADDR."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher_has_store: bool  # the launcher serves the store; otherwise rank 0 does

    @property
    def is_single_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher seems to have started this process."""
    return any(name in environ for name in ("RANK", "WORLD_SIZE"))


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Return the environment of this rank. Raise RunError if a variable is missing or invalid."""
    missing = [name for name in _REQUIRED_VARIABLES if not environ.get(name)]
    if missing:
        script = Path(sys.argv[0]).name or "train.py"
        raise RunError(
            f"this process was not started by torchrun, which sets {', '.join(missing)}. "
            f"Start it with  torchrun --nproc-per-node 2 {script}"
        )
    invalid = [
        f"{name}={environ[name]}"
        for name in _REQUIRED_VARIABLES
        if name != "MASTER_ADDR" and not (environ[name].isdecimal() and len(environ[name]) < 7)
    ]
    if invalid:
        raise RunError(
            f"these environment variables are not numbers: {', '.join(invalid)}. torchrun sets "
            f"them itself."
        )
    rank, size, local_rank, local_size = (int(environ[name]) for name in _REQUIRED_VARIABLES[:4])
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if not (rank < size and local_rank < local_size and address[1] < 65536):
        values = " ".join(f"{name}={environ[name]}" for name in _REQUIRED_VARIABLES)
        raise RunError(
            f"these environment variables contradict each other: {values}. RANK must be below "
            "WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE, and MASTER_PORT below 65536. torchrun "
            "sets them itself."
        )
    # torchrun sets this when its agent serves the store at MASTER_ADDR. Otherwise rank 0 must.
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankEnv(rank, size, local_rank, local_size, *address, has_store)


# ---- the device ---------------------------------------------------------------------------


def select_device(env: RankEnv) -> torch.device:
    """Return the GPU of this rank, or the CPU. Ranks share GPUs if there are too few."""
    gpus = list_accelerators()
    return gpus[env.local_rank % len(gpus)] if gpus else torch.device("cpu")


# ---- the network interface ----------------------------------------------------------------


def find_network_interface(env: RankEnv) -> str | None:
    """Return the interface for gloo: loopback on one host, else the one that leads to rank 0.

    By default gloo uses the address that the host name resolves to. On many machines that is
    loopback, which other hosts cannot reach, or nothing. Return None if no interface is found:
    then gloo decides.
    """
    names = [name for _, name in socket.if_nameindex()]
    if env.is_single_host:
        return next((name for name in names if is_loopback(name)), None)
    # On the host of rank 0 itself, MASTER_ADDR leads to loopback. The second address, which is
    # somewhere outside, gives the interface of the default route.
    for destination in (env.master_addr, _TEST_NET_ADDRESS):
        address = _find_source_address(destination)
        if address and not address.startswith("127."):
            return next((name for name in names if _get_interface_address(name) == address), None)
    return None


def is_loopback(interface: str) -> bool:
    """Return whether an interface is loopback, by its name: lo, or lo0."""
    return interface in ("lo", "lo0")


def _find_source_address(destination: str) -> str | None:
    """Return the address from which this host would send to the destination.

    `connect` on a UDP socket chooses a route and sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _get_interface_address(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            # The answer is a struct ifreq. The IPv4 address is in its bytes 20 to 23.
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:  # the interface has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
