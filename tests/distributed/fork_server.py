"""Fork the processes of tests from a server that has already imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.context import ForkServerContext

from torch.distributed import TCPStore  # type: ignore[attr-defined]

PRELOADED = (
    "penstock.cli.check",
    "penstock.cli.plan",
    "penstock.model.planner",
    "pydantic",  # with which typer parses options
    "penstock.pipe",
    "penstock.checkpoint.saver",
    "torch._dynamo",  # creating the first optimizer imports it
    "tests.distributed.rank",
    "tests.faults.training_run",
    "tests.properties.comparing",
    "tests.features.page",
    "tests.distributed.freeze_imports",  # the last one
)
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",  # a client of a TCPStore resolves host names
}


def visible_gpus() -> str | None:
    """Return which GPUs this process may see, for the processes that it starts.

    The fork server has the environment of the test that started it, which may differ from that of
    the test that forks: see `tests/conftest.py`.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def show_gpus(visible: str | None) -> None:
    """Let this process see the GPUs that its parent sees."""
    if visible is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible


def without_network_notes(text: str) -> str:
    """Return what a process has written, without notes of PyTorch about the network.

    Gloo says in PyTorch 2.10 which ranks are connected, and a store that no name server answered.
    """
    notes = "[Gloo] Rank ", "[c10d] The hostname of the client socket cannot be retrieved"
    return "".join(
        line for line in text.splitlines(True) if not any(note in line for note in notes)
    )


def forked() -> ForkServerContext:
    """Return the context of the fork server. Preloading takes effect at the first fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def store() -> TCPStore:
    """Return a TCPStore that this process serves over IPv4.

    Over IPv6, which is the default, the server looks up the host name of each client's address.
    Where no name server answers, every client waits for five seconds.
    """
    ear = socket.create_server(("127.0.0.1", 0))
    port = ear.getsockname()[1]
    listens = ear.detach()
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listens
    )
