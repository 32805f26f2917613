"""When a process of one replica fails, the processes of the other replicas do not wait for it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock import RemoteError
from penstock.data_parallel import sync
from tests.data_parallel.replicas import half, mesh, model, pipe_of
from tests.distributed.rank import Returned
from tests.distributed.ranks import Died, ranks
from tests.support import Do, batch

HEARTBEAT = 3.0
FAULTY = 3  # the second rank of the second replica


# keeps the pipe alive, because a pipe that is freed closes its connections, which wakes the others
kept: list[Any] = []


class Burst(Exception):
    """The error that a fault raises."""


def burst(kind: str) -> None:
    """Fail when the other replica has reached the end of its step and waits there."""
    time.sleep(0.5)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Burst("on purpose")


def failing(wrap: str | None, kind: str, where: str) -> tuple[str, int | None]:
    """Return the kind and the rank of the error that this rank raises."""
    layers, faulty = model(), dist.get_rank() == FAULTY
    broken = False

    def see(x: Tensor) -> Tensor:
        if broken and faulty and where in ("forward", "collective"):
            burst(kind)
        if where == "collective":  # as tensor-parallel layers do
            dist.all_reduce(torch.ones(1), group=mesh()["dp"].get_group())
        return x

    layers[4] = Do(see)
    kept[:] = [pipe := pipe_of(layers, wrap, "zb-h1", heartbeat=HEARTBEAT)]
    x, y = map(half, batch(16))
    pipe.step(x, target=y)
    broken = True
    spoilt = patch.object(sync, "average_gradients", lambda *_: burst(kind))
    try:
        if faulty and where == "between":
            burst(kind)
        with spoilt if faulty and where == "average" else nullcontext():
            for _ in range(2):  # a rank that is done before the failure raises in the next step
                pipe.step(x, target=y)
    except RemoteError as error:
        return error.kind, error.rank
    return "nothing", None


def heard(wrap: str | None, kind: str, where: str) -> list[Any]:
    return ranks(4).answers(failing, wrap, kind, where)


@pytest.mark.parametrize(
    ("wrap", "where"),
    [(None, "forward"), (None, "average"), ("ddp", "forward"), ("replicate", "forward")],
)
def test_error_is_raised_on_all_ranks_of_all_replicas(wrap: str | None, where: str) -> None:
    for answer in heard(wrap, "raise", where):
        assert isinstance(answer, Returned), answer
        assert answer.value == ("raised", FAULTY)


@pytest.mark.parametrize(
    ("wrap", "where"), [(None, "forward"), (None, "average"), (None, "between"), ("ddp", "forward")]
)
def test_dead_process_is_reported_by_all_replicas(wrap: str | None, where: str) -> None:
    *others, dead = heard(wrap, "kill", where)
    assert isinstance(dead, Died)
    for answer in others:
        assert isinstance(answer, Returned), answer
        assert answer.value == ("died", FAULTY)


def test_rank_blocked_in_a_collective_of_the_users_group_ends_itself() -> None:
    """The other replica's rank waits in a collective of a layer, where no rank can wake it."""
    answers = heard("ddp", "raise", "collective")
    peer = answers.pop(1)
    assert isinstance(peer, Died)
    assert peer.code == 1
    assert not peer.waited
    assert "rank 1 exits, because its thread is stuck here" in peer.written
    assert "rank 3 failed, in step" in peer.written
    for answer in answers:
        assert isinstance(answer, Returned), answer
        assert answer.value == ("raised", FAULTY)
