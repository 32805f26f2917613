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
from penstock.launch.launched import Launched, device_of, identity_of, interface_for, launched
from penstock.launch.meeting import Met, meet, open_store, told

START = 300.0  # seconds in which all ranks must have started
FAREWELL = 10.0  # seconds that the rank with the store stays for the others
# Seconds for gloo's threads to let go of their last tensors. They need the interpreter for it, and
# where it has ended meanwhile, the process aborts. A mesh keeps its group, and so those threads.
LAST_WORK = 0.05

_NCCL = "cpu:gloo,cuda:nccl"
_mine: list[tuple[Launched, Met]] = []  # of the group that `init` has made


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
        here = launched()
        _check_replicas(dp, here.size)
        _join(here, backend, timeout)
    elif _mine:
        raise RunError("penstock.init() was called before in this process: keep the mesh it gave")
    else:
        _check_replicas(dp, dist.get_world_size())
    kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    size = dist.get_world_size()
    if dp == 1:
        return init_device_mesh(kind, (size,), mesh_dim_names=("pp",))
    return init_device_mesh(kind, (dp, size // dp), mesh_dim_names=("dp", "pp"))


def _check_replicas(dp: Any, size: int) -> None:
    if not isinstance(dp, int) or isinstance(dp, bool) or dp < 1:
        raise ArgumentError(f"dp is a whole number of pipes from 1 up, not {dp!r}")
    if size % dp:
        fit = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ArgumentError(
            f"{size} ranks do not make {dp} pipes of equal length: dp may be {fit}; for dp={dp} "
            f"start {size + dp - size % dp} ranks"
        )


def _join(here: Launched, backend: str | None, timeout: float | None) -> None:
    """Make the group."""
    device = device_of(here)
    met = meet(open_store(here, START), here.rank, here.size, identity_of(device), START)
    missing = met.missing(here.size)
    if missing:
        raise RunError(
            f"of {here.size} ranks, {', '.join(map(str, missing))} did not start within "
            f"{START:g} s: look at what they print, and run  torchrun ... -m penstock doctor"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    prepare_gloo(here)
    backend = backend or backend_for(list(met.words.values()))
    dist.init_process_group(
        backend,
        store=met.store,
        rank=here.rank,
        world_size=here.size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    _mine[:] = [(here, met)]
    atexit.register(_leave)


def backend_for(gpus: list[str]) -> str:
    """NCCL refuses two ranks on one GPU; then, and without GPUs, it is gloo."""
    alone = all(gpus) and len(set(gpus)) == len(gpus)
    return _NCCL if alone and dist.is_nccl_available() else "gloo"


def prepare_gloo(here: Launched) -> None:
    """Name the interface, if nobody has: also for groups that are made later."""
    found = interface_for(here)
    if found is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)


def _leave() -> None:
    """At the end of the process; after an error at once, as peers may be gone and never answer."""
    time.sleep(LAST_WORK)
    failed = hasattr(sys, "last_value")
    if failed or not _mine or not dist.is_initialized():
        return
    here, met = _mine.pop()
    dist.destroy_process_group()
    if here.has_store:
        return
    if here.rank:
        met.store.set(f"left/{here.rank}", "")
    else:
        told(met.store, [f"left/{other}" for other in range(1, here.size)], FAREWELL)
