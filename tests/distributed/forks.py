"""Where the processes of tests come from: forked from a server that has imported what they need."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.context import ForkServerContext

from torch.distributed import TCPStore  # type: ignore[attr-defined]

PRELOADED = (
    "penstock.pipe",
    "penstock.checkpoint.saver",
    "torch._dynamo",  # the first optimizer imports it
    "tests.distributed.rank",
    "tests.faults.course",
    "tests.properties.comparing",
    "tests.features.page",
)
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",  # a client of a store asks for names
}


def forked() -> ForkServerContext:
    """There is one server; what it has imported counts from the first fork on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def store() -> TCPStore:
    """Served by this process, over IPv4.

    Over IPv6, which is the default, a server asks for the name of each client's address, and where
    no name server answers, everyone waits for five seconds.
    """
    ear = socket.create_server(("127.0.0.1", 0))
    port = ear.getsockname()[1]
    listens = ear.detach()
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listens
    )
