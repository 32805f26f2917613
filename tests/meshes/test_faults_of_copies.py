"""One process of one copy fails: those of the other copies do not wait for it."""

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
from tests.distributed.rank import Returned
from tests.distributed.ranks import Died, ranks
from tests.meshes.meshed import copy_here, mesh, model, pipe_of
from tests.support import Do, batch

HEARTBEAT = 3.0
FAULTY = 3  # the second rank of the second copy


kept: list[Any] = []  # a pipe that nobody holds closes its connections, which wakes the others


class Burst(Exception):
    """What goes wrong."""


def burst(kind: str) -> None:
    """When the other copy has come to the end of its step, and waits there."""
    time.sleep(0.5)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Burst("on purpose")


def failing(wrap: str | None, kind: str, where: str) -> tuple[str, int | None]:
    """What each rank hears of it."""
    layers, faulty = model(), dist.get_rank() == FAULTY
    broken = False

    def see(x: Tensor) -> Tensor:
        if broken and faulty and where in ("forward", "collective"):
            burst(kind)
        if where == "collective":  # as layers that are split over processes do
            dist.all_reduce(torch.ones(1), group=mesh()["dp"].get_group())
        return x

    layers[4] = Do(see)
    kept[:] = [pipe := pipe_of(layers, wrap, "zb-h1", heartbeat=HEARTBEAT)]
    x, y = (part.chunk(2)[copy_here()] for part in batch(16))
    pipe.step(x, target=y)
    broken = True
    spoilt = patch.object(sync, "average_gradients", lambda *_: burst(kind))
    try:
        if faulty and where == "between":
            burst(kind)
        with spoilt if faulty and where == "average" else nullcontext():
            for _ in range(2):  # who is done before it happens hears of it in the next
                pipe.step(x, target=y)
    except RemoteError as error:
        return error.kind, error.rank
    return "nothing", None


def heard(wrap: str | None, kind: str, where: str) -> list[Any]:
    return ranks(4).answers(failing, wrap, kind, where, within=30.0)


@pytest.mark.parametrize(
    ("wrap", "where"),
    [(None, "forward"), (None, "average"), ("ddp", "forward"), ("replicate", "forward")],
)
def test_an_error_is_raised_on_all_ranks_of_all_copies(wrap: str | None, where: str) -> None:
    for answer in heard(wrap, "raise", where):
        assert isinstance(answer, Returned), answer
        assert answer.value == ("raised", FAULTY)


@pytest.mark.parametrize(
    ("wrap", "where"),
    [(None, "forward"), (None, "average"), (None, "between"), ("ddp", "forward")],
)
def test_a_process_that_dies_is_named_by_all_copies(wrap: str | None, where: str) -> None:
    *others, dead = heard(wrap, "kill", where)
    assert isinstance(dead, Died)
    for answer in others:
        assert isinstance(answer, Returned), answer
        assert answer.value == ("died", FAULTY)


def test_whoever_waits_in_a_group_of_the_users_ends_itself() -> None:
    """Its twin is in a collective of a layer's, where nobody can wake it."""
    answers = heard("ddp", "raise", "collective")
    twin = answers.pop(1)
    assert isinstance(twin, Died)
    assert twin.code == 1
    assert not twin.waited
    assert "rank 1 exits, because its thread is stuck here" in twin.written
    assert "rank 3 failed, in step" in twin.written
    for answer in answers:
        assert isinstance(answer, Returned), answer
        assert answer.value == ("raised", FAULTY)
