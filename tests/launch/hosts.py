"""Two hosts on one machine: network namespaces joined by a pair of virtual interfaces."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.fork_server import without_network_notes
from tests.launch.forked_python import ForkedPython, end_with_parent

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Command = subprocess.Popen[str] | ForkedPython
LIMIT = 300.0  # seconds for everything that a test starts at once


class Ended(NamedTuple):
    """The output and the exit code of a command."""

    out: str
    err: str
    code: int


class Host(NamedTuple):
    """A network namespace with its own address."""

    name: str
    address: str


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a shell in the repository, without variables of a launcher."""
    said = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GLOO_", "OMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(said)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "examples")])
    return {**kept, "PYTHONPATH": path, "COLUMNS": "200", **more}


def rank_environment(rank: int, size: int, port: str) -> dict[str, str]:
    """Return the environment of a rank on this host, as mpirun or srun would set it."""
    return environment(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT=port,
        OMP_NUM_THREADS="1",
    )


def free_port() -> str:
    """Return a port of this host that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def start(words: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
    """Start a command. It receives SIGTERM if this process ends first, however that happens.

    A Python program runs in a fork of a process that has imported PyTorch.
    """
    env = dict(env or environment())
    if words[0] == sys.executable:
        return ForkedPython(words[1:], env)
    return subprocess.Popen(
        list(words),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent if sys.platform == "linux" else None,
    )


def children(pid: int) -> list[int]:
    """Return the child processes of a running process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def end(started: Sequence[Command]) -> list[Ended]:
    """Wait for all commands up to the time limit, and kill whatever is left of them."""
    late = threading.Timer(LIMIT, kill, [started])
    late.start()
    try:
        written = [tuple(map(without_network_notes, process.communicate())) for process in started]
        return [
            Ended(out, err, process.returncode or 0)
            for (out, err), process in zip(written, started, strict=True)
        ]
    finally:
        late.cancel()
        kill(started)


def kill(started: Sequence[Command]) -> None:
    """Kill the commands with their workers, which have sessions of their own."""
    todo = [process.pid for process in started if process.poll() is None]
    while todo:
        pid = todo.pop()
        todo += children(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(words: Sequence[str], env: Mapping[str, str] | None = None) -> Ended:
    """Run one command."""
    return end([start(words, env)])[0]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts for the duration of a test, or skip it where this is not allowed."""
    _clear_those_left()
    tag = f"penstock-{os.getpid()}"
    hosts = Host(f"{tag}-a", "10.79.0.1"), Host(f"{tag}-b", "10.79.0.2")
    made: list[Host] = []
    try:
        for host in hosts:
            if shutil.which("ip") is None or _ip("netns", "add", host.name) != 0:
                pytest.skip("network namespaces cannot be made here")
            made.append(host)
        a, b = (host.name for host in hosts)
        ends = ["eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b]
        if _ip("link", "add", *ends) != 0:
            pytest.skip("virtual interfaces cannot be made here")
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in made:
            _clear(host)


def _ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True, timeout=10).returncode


def _clear_those_left() -> None:
    """Remove the namespaces of test runs that were killed."""
    for place in Path("/run/netns").glob("penstock-*"):
        if not Path("/proc", place.name.split("-")[1]).exists():
            _clear(Host(place.name, ""))


def _clear(host: Host) -> None:
    kill_all_on(host)
    _ip("netns", "del", host.name)


def kill_all_on(host: Host) -> None:
    """Kill all processes in the namespace of a host."""
    found = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, timeout=10
    )
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def start_on(
    hosts: Sequence[Host],
    words: Sequence[str],
    env: Mapping[str, str],
    nodes: str = "2",
    conf: str = "timeout=60",
    restarts: int = 2,
) -> list[ForkedPython]:
    """Start `torchrun` on each host, with one rank per host."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:29517"]
    common = ["--nnodes", nodes, "--nproc-per-node", "1", *where]
    common += ["--max-restarts", str(restarts)]
    started = []
    for host in hosts:
        mine = ["--local-addr", host.address]
        mine += ["--rdzv-conf", f"is_host={host is hosts[0]},{conf}"]
        started.append(ForkedPython([*TORCHRUN, *common, *mine, *words][1:], env, host.name))
    return started
