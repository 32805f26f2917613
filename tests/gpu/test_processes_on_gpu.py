"""Tests of ranks in several processes on one GPU, over NCCL and through host memory.

NCCL refuses two ranks of one host on one GPU. With different host ids, it takes each rank for
another machine and uses sockets. That is slow, but runs the same code as several GPUs.
"""

from __future__ import annotations

import copy
import math
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipe, RemoteError
from tests.distributed.rank import Returned
from tests.distributed.ranks import ranks
from tests.gpu.support import needs_gpu
from tests.pairs import each_pair

pytestmark = needs_gpu

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
LINKS = ("nccl", "host")


def model_and_batch(rows: int = 10) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers).double()
    return model, torch.randn(rows, 16).double().cuda(), torch.randn(rows, 16).double().cuda()


def group_for(links: str) -> dist.ProcessGroup:
    torch.cuda.set_device(0)
    if links == "host":
        world = dist.group.WORLD
        assert world is not None
        return world
    os.environ.update(
        NCCL_HOSTID=f"host{dist.get_rank()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1"
    )
    found = dist.new_group(backend="nccl")
    assert isinstance(found, dist.ProcessGroup)
    return found


def trained(pipe: Pipe, x: Tensor, y: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    losses = [pipe.step(part, target=label).loss for part, label in ((x, y), (x[:5], y[:5]))]
    losses.append(pipe.step(x, target=y).loss)
    return [loss.cpu() for loss in losses]


def equal_to_one_process(schedule: str, links: str, checkpoint: str) -> dict[str, Any]:
    model, x, y = model_and_batch()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"schedule": schedule, "chunks": 4, "checkpoint": checkpoint}
    loss_fn = nn.MSELoss()
    size = dist.get_world_size()
    one = Pipe(plain, devices=["cuda:0"] * size, loss_fn=loss_fn, **options)
    expected = trained(one, x, y)
    pipe = Pipe(
        model, group=group_for(links), devices=["cuda:0"] * size, loss_fn=loss_fn, **options
    )
    found = trained(pipe, x, y)
    theirs = dict(one.named_parameters())
    worst = 0.0
    for name, parameter in pipe.named_parameters():
        expect = theirs[name].grad
        assert parameter.grad is not None
        assert expect is not None
        worst = max(worst, float((parameter.grad - expect).abs().max()))
    pipe.eval()
    with torch.no_grad():
        output = pipe(x)
        reference = one.eval()(x)
    if output is not None:
        worst = max(worst, float((output - reference).abs().max()))
    return {"found": found, "expected": expected, "worst": worst, "output": output is not None}


@each_pair(schedule=SCHEDULES, links=LINKS, checkpoint=["never", "always"])
def test_processes_on_gpu_equal_one_process(schedule: str, links: str, checkpoint: str) -> None:
    results = ranks(2).run(equal_to_one_process, schedule, links, checkpoint)
    for result in results:
        assert result["worst"] <= 1e-12
        for found, expected in zip(result["found"], result["expected"], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert [result["output"] for result in results].count(True) == 1


class Fails(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        self.times -= 1
        if self.times == 0:
            raise ValueError("a layer failed")
        return x


def fails_and_goes_on(links: str) -> tuple[str, float, float]:
    model, x, y = model_and_batch()
    model.append(Fails(3))
    pipe = Pipe(
        model, chunks=4, group=group_for(links), devices=["cuda:0"] * 2, loss_fn=nn.MSELoss()
    )
    begin = time.monotonic()
    try:
        pipe.step(x, target=y)
    except RemoteError as error:
        text = str(error)
    took = time.monotonic() - begin
    return text, took, float(pipe.step(x, target=y).loss)


@pytest.mark.parametrize("links", LINKS)
def test_error_on_gpu_reaches_all_ranks_and_the_pipe_recovers(links: str) -> None:
    (text, took, loss), (other, also, same) = ranks(2).run(fails_and_goes_on, links)
    assert "a layer failed" in text
    assert "a layer failed" in other
    assert max(took, also) < 10
    assert loss == same


class Ends(nn.Module):
    """A layer that ends its process after the given number of forwards."""

    def __init__(self, forwards: int) -> None:
        super().__init__()
        self.forwards = forwards

    def forward(self, x: Tensor) -> Tensor:
        self.forwards -= 1
        if not self.forwards:
            os._exit(7)
        return x


def error_of_step(pipe: Pipe, x: Tensor, y: Tensor) -> tuple[str, str, float]:
    """Return the kind and the text of the error that a step raises, and after how many seconds."""
    begin = time.monotonic()
    try:
        pipe.step(x, target=y)
    except RemoteError as error:
        return error.kind, str(error), time.monotonic() - begin
    return "nothing", "", 0.0


def left_alone(links: str) -> tuple[str, str, float]:
    model, x, y = model_and_batch()
    model.append(Ends(7))
    devices = ["cuda:0"] * 2
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "heartbeat": 3.0}
    pipe = Pipe(model, 4, "never", group=group_for(links), devices=devices, **options)
    pipe.step(x, target=y)
    return error_of_step(pipe, x, y)


@pytest.mark.parametrize("links", LINKS)
def test_dead_rank_on_gpu_is_reported_to_the_other(links: str) -> None:
    """Over NCCL the GPU waits instead of the host, so the communicators are aborted."""
    first, _ = ranks(2).answers(left_alone, links, within=60.0)
    assert isinstance(first, Returned)
    kind, text, took = first.value
    assert kind == "died"
    assert "rank 1" in text
    assert took < 10


class EndsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        os._exit(7)


def end_in_backward(x: Tensor) -> Tensor:
    return EndsInBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class ReadsGradient(nn.Module):
    """A layer that reads its gradient, for which the host waits for the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * 1.0 if math.isfinite(float(grad.sum())) else grad * 0)
        return x


# PyTorch takes long to destroy an NCCL group whose other rank is dead. The process ends before.
KEPT: list[Pipe] = []


def waits_inside_a_layer() -> tuple[str, str, float]:
    """The first rank waits for the GPU inside of a backward, and the last rank is dead by then."""

    class Last(nn.Module):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return end_in_backward(x) if self.steps > 4 else x

    model, x, y = model_and_batch()
    model.insert(3, ReadsGradient())
    model.append(Last())
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "heartbeat": 3.0}
    pipe = Pipe(model, 4, "never", group=group_for("nccl"), devices=["cuda:0"] * 2, **options)
    KEPT.append(pipe)
    pipe.step(x, target=y)
    return error_of_step(pipe, x, y)


def test_dead_rank_is_reported_while_a_layer_waits_for_the_gpu() -> None:
    first, _ = ranks(2).answers(waits_inside_a_layer, within=60.0)
    assert isinstance(first, Returned)
    kind, text, took = first.value
    assert (kind, "rank 1" in text) == ("died", True)
    assert took < 10


def without_synchronising(links: str) -> float:
    """Train and return the loss. Only the exchange at the end of a lane waits for the device."""
    model, x, y = model_and_batch(64)
    pipe = Pipe(
        model, chunks=8, group=group_for(links), devices=["cuda:0"] * 2, loss_fn=nn.MSELoss()
    )
    for _ in range(3):
        result = pipe.step(x, target=y)
    assert result.timeline.makespan > 0
    return float(result.loss)


@pytest.mark.parametrize("links", LINKS)
def test_loss_and_timeline_on_gpu_cover_all_ranks(links: str) -> None:
    first, second = ranks(2).run(without_synchronising, links)
    assert first == second
