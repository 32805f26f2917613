"""`penstock.init`: create the default process group under `torchrun`, and a mesh over its ranks."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store

from penstock.device.accelerator import get_uuid, is_accelerator
from penstock.errors import ArgumentError, RunError
from penstock.launch.torchrun_env import (
    RankEnv,
    find_network_interface,
    read_rank_env,
    select_device,
)
from penstock.runtime.distributed.links import GLOO, LINK_BACKENDS, find_link_backend
from penstock.runtime.distributed.store import JoinedRanks, join_rendezvous, wait_for_keys
from penstock.tracebacks import entry_point

START_TIMEOUT = 300.0  # seconds in which all ranks must have started
EXIT_TIMEOUT = 10.0  # seconds that the rank with the store waits for the others at exit
# Seconds for gloo's threads to release their last tensors at exit. They need the Python interpreter
# for that. If it has been finalized by then, the process aborts. `destroy_process_group` does not
# end those threads while a DeviceMesh still refers to the group.
GLOO_DRAIN_SECONDS = 0.05

_initialized: list[tuple[RankEnv, JoinedRanks]] = []  # empty, or one entry: the group of `init`


@entry_point
def init(dp: int = 1, *, backend: str | None = None, timeout: float | None = None) -> DeviceMesh:
    """Connect the processes that `torchrun` started, and return a mesh over their ranks.

    Consecutive ranks form a pipeline. With `dp` above 1 there are that many replicas of it, which
    share the batch. The GPU of each rank becomes its current device. The process group is
    destroyed when the process exits. If a default process group exists already, it is used as it
    is.

    Args:
        dp: The number of replicas of the pipeline. It must divide the number of ranks.
        backend: The backend of the process group. Default: NCCL if every rank has a GPU of its
            own, else gloo.
        timeout: The timeout of collectives in seconds. Default: that of PyTorch.

    Returns:
        A mesh with the dimensions ("dp", "pp"), or ("pp",) if dp is 1.

    Raises:
        ArgumentError: `dp` is not a positive integer, or does not divide the number of ranks.
        RunError: The process was not started by torchrun, a rank did not start in time, or
            `init` was called before.

    Example:
        Start with `torchrun --nproc-per-node 2 train.py`::

            mesh = penstock.init()
            pipe = penstock.Pipe(model, chunks=8, mesh=mesh["pp"])
    """
    if not dist.is_available():
        raise RunError("this build of torch has no torch.distributed: install one that has it")
    if not dist.is_initialized():
        env = read_rank_env()
        _check_replicas(dp, env.world_size)
        _init_process_group(env, backend, timeout)
    elif _initialized:
        raise RunError(
            "penstock.init() was already called in this process. Keep the mesh that it returned."
        )
    else:
        _check_replicas(dp, dist.get_world_size())
    device_type = find_link_backend(dist.get_backend_config()).device_type
    size = dist.get_world_size()
    if dp == 1:
        return init_device_mesh(device_type, (size,), mesh_dim_names=("pp",))
    return init_device_mesh(device_type, (dp, size // dp), mesh_dim_names=("dp", "pp"))


def _check_replicas(dp: Any, world_size: int) -> None:
    if not isinstance(dp, int) or isinstance(dp, bool) or dp < 1:
        raise ArgumentError(f"dp must be a whole number of replicas from 1 up, not {dp!r}")
    if world_size % dp:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ArgumentError(
            f"{world_size} ranks cannot form {dp} pipelines of equal length. dp can be {divisors}; "
            f"for dp={dp} start {world_size + dp - world_size % dp} ranks."
        )


def _init_process_group(env: RankEnv, backend: str | None, timeout: float | None) -> None:
    """Wait for all ranks, then create the default process group."""
    device = select_device(env)
    joined = join_rendezvous(
        open_store(env, START_TIMEOUT), env.rank, env.world_size, get_uuid(device), START_TIMEOUT
    )
    missing = joined.find_missing(env.world_size)
    if missing:
        raise RunError(
            f"of {env.world_size} ranks, {', '.join(map(str, missing))} did not start within "
            f"{START_TIMEOUT:g} s. Look at their output, and run  torchrun ... -m penstock doctor"
        )
    # Both before the group is created: NCCL uses the current device, and gloo reads the variable.
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    set_gloo_interface(env)
    backend = backend or choose_backend(list(joined.rank_info.values()))
    dist.init_process_group(
        backend,
        store=joined.store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    _initialized[:] = [(env, joined)]
    atexit.register(_shut_down)


def open_store(env: RankEnv, timeout: float) -> Store:
    """Return the TCP store at MASTER_ADDR. Rank 0 serves it unless the launcher does."""
    is_host = env.rank == 0 and not env.launcher_has_store
    limit = timedelta(seconds=timeout)
    try:
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=is_host,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"rank {env.rank} on {socket.gethostname()} could not reach the store of the ranks at "
            f"{env.master_addr}:{env.master_port} within {timeout:g} s. Check that rank 0 runs "
            f"there, that the host name resolves to it, and that the port is open. ({reason})"
        ) from error
    assert isinstance(store, Store)
    return store


def choose_backend(gpu_uuids: list[str]) -> str:
    """Return the config for NCCL if every rank has a GPU of its own, else for gloo.

    NCCL refuses two ranks on one GPU. An empty UUID stands for a rank without a GPU.
    """
    gpus_are_distinct = all(gpu_uuids) and len(set(gpu_uuids)) == len(gpu_uuids)
    for backend in LINK_BACKENDS:
        if backend.is_available() and (gpus_are_distinct or backend.device_type == "cpu"):
            return backend.config
    return GLOO.config


def set_gloo_interface(env: RankEnv) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set. Groups that are created later use it as well."""
    interface = find_network_interface(env)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _shut_down() -> None:
    """Destroy the process group at exit. Rank 0 stays until the others have left its store.

    After an error the process exits at once: peers may be gone and would never answer.
    """
    time.sleep(GLOO_DRAIN_SECONDS)
    failed = hasattr(sys, "last_value")  # Python sets it for an exception that ended the program
    if failed or not _initialized or not dist.is_initialized():
        return
    env, joined = _initialized.pop()
    dist.destroy_process_group()
    if env.launcher_has_store:
        return
    # The store lives in the process of rank 0. If it ended first, the others could not reach it.
    if env.rank:
        joined.store.set(f"left/{env.rank}", "")
    else:
        wait_for_keys(
            joined.store, [f"left/{other}" for other in range(1, env.world_size)], EXIT_TIMEOUT
        )
