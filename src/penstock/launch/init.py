"""`penstock.init`: the group of all ranks under `torchrun`, and a mesh over them."""

from __future__ import annotations

import atexit
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ArgumentError, RunError
from penstock.launch.store_rendezvous import JoinedRanks, join_rendezvous, open_store, wait_for_keys
from penstock.launch.torchrun_env import (
    RankEnv,
    find_network_interface,
    get_gpu_uuid,
    read_rank_env,
    select_device,
)

START_TIMEOUT = 300.0  # seconds in which all ranks must have started
EXIT_TIMEOUT = 10.0  # seconds that the rank with the store stays for the others
# Seconds for gloo's threads to let go of their last tensors. They need the interpreter for it, and
# where it has ended meanwhile, the process aborts. A mesh keeps its group, and so those threads.
GLOO_DRAIN_SECONDS = 0.05

_NCCL_BACKEND = "cpu:gloo,cuda:nccl"
_initialized: list[tuple[RankEnv, JoinedRanks]] = []  # of the group that `init` has made


def init(dp: int = 1, *, backend: str | None = None, timeout: float | None = None) -> DeviceMesh:
    """Join the ranks that `torchrun` started: a mesh ("dp", "pp"), or ("pp",) if dp is 1.

    Neighbours make a pipe; `dp` pipes share the batch. NCCL if every rank has a GPU of its own,
    else gloo, or the `backend` that you name. `timeout` is that of collectives, in seconds. Each
    rank's GPU becomes its current device. The group ends with the process. If a group is there
    already, it is used as it is.

        mesh = penstock.init()              # torchrun --nproc-per-node 2 train.py
        pipe = penstock.Pipe(model, chunks=8, mesh=mesh["pp"])
    """
    if not dist.is_available():
        raise RunError("this build of torch has no torch.distributed: install one that has it")
    if not dist.is_initialized():
        here = read_rank_env()
        _check_replicas(dp, here.world_size)
        _init_process_group(here, backend, timeout)
    elif _initialized:
        raise RunError("penstock.init() was called before in this process: keep the mesh it gave")
    else:
        _check_replicas(dp, dist.get_world_size())
    kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    size = dist.get_world_size()
    if dp == 1:
        return init_device_mesh(kind, (size,), mesh_dim_names=("pp",))
    return init_device_mesh(kind, (dp, size // dp), mesh_dim_names=("dp", "pp"))


def _check_replicas(dp: Any, world_size: int) -> None:
    if not isinstance(dp, int) or isinstance(dp, bool) or dp < 1:
        raise ArgumentError(f"dp is a whole number of pipes from 1 up, not {dp!r}")
    if world_size % dp:
        fit = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ArgumentError(
            f"{world_size} ranks do not make {dp} pipes of equal length: dp may be {fit}; for dp={dp} "
            f"start {world_size + dp - world_size % dp} ranks"
        )


def _init_process_group(env: RankEnv, backend: str | None, timeout: float | None) -> None:
    """Make the group."""
    device = select_device(env)
    met = join_rendezvous(
        open_store(env, START_TIMEOUT),
        env.rank,
        env.world_size,
        get_gpu_uuid(device),
        START_TIMEOUT,
    )
    missing = met.find_missing(env.world_size)
    if missing:
        raise RunError(
            f"of {env.world_size} ranks, {', '.join(map(str, missing))} did not start within "
            f"{START_TIMEOUT:g} s: look at what they print, and run  torchrun ... -m penstock doctor"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    set_gloo_interface(env)
    backend = backend or choose_backend(list(met.rank_info.values()))
    dist.init_process_group(
        backend,
        store=met.store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    _initialized[:] = [(env, met)]
    atexit.register(_shut_down)


def choose_backend(gpu_uuids: list[str]) -> str:
    """NCCL refuses two ranks on one GPU; then, and without GPUs, it is gloo."""
    alone = all(gpu_uuids) and len(set(gpu_uuids)) == len(gpu_uuids)
    return _NCCL_BACKEND if alone and dist.is_nccl_available() else "gloo"


def set_gloo_interface(env: RankEnv) -> None:
    """Name the interface, if nobody has: also for groups that are made later."""
    found = find_network_interface(env)
    if found is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)


def _shut_down() -> None:
    """At the end of the process; after an error at once, as peers may be gone and never answer."""
    time.sleep(GLOO_DRAIN_SECONDS)
    failed = hasattr(sys, "last_value")
    if failed or not _initialized or not dist.is_initialized():
        return
    here, met = _initialized.pop()
    dist.destroy_process_group()
    if here.launcher_has_store:
        return
    if here.rank:
        met.store.set(f"left/{here.rank}", "")
    else:
        wait_for_keys(
            met.store, [f"left/{other}" for other in range(1, here.world_size)], EXIT_TIMEOUT
        )
