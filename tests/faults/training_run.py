"""A training run of three steps in which one rank fails, and the same run with the unsplit model.

    step 0 ── save ── step 1 ╳ in a stage, the loss, a message ── ╳ between ── save ╳ ── step 2

The checkpoint saved after step 0 must be readable whatever happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from penstock import Pipe, is_recomputing
from penstock.checkpoint.writer import CheckpointWriter
from penstock.runtime.distributed.channels import ProcessTransport
from tests.faults.disposable_ranks import RankContext
from tests.faults.watchdog_step import EXIT_CODE, HEARTBEAT, LONG_HEARTBEAT, Burst, stall

CHUNKS, STEPS, LAYERS = 3, 3, 6


def burst() -> None:
    raise Burst("all wrong")


def ends() -> None:
    sys.exit(EXIT_CODE)


@dataclass(frozen=True)
class Fault:
    """A failure of one rank at one place of step 1. Inside a stage it happens in micro-batch 1."""

    rank: int
    place: str
    fail: Callable[[], object]


class FaultInjector:
    """Trigger the fault when its rank first reaches its place."""

    def __init__(self, rank: int, fault: Fault) -> None:
        self._rank, self.fault = rank, fault
        self.step, self.triggered = 0, False

    def __call__(self, place: str, microbatch: int = 1) -> None:
        here = self._rank, place, self.step, microbatch
        if here == (self.fault.rank, self.fault.place, 1, 1) and not self.triggered:
            self.triggered = True
            self.fault.fail()


def no_fault(place: str, microbatch: int = 1) -> None:
    pass


Injector = Callable[[str, int], None]


class Layer(nn.Module):
    """A layer that may fail. The first column of its input holds the micro-batch index."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._injector = injector

    def forward(self, x: Tensor) -> Tensor:
        place = "recomputation" if is_recomputing() else "forward"
        microbatch = int(x.detach()[0, 0].round())
        self._injector(place, microbatch)
        y: Tensor = _InjectInBackward.apply(x, lambda: self._injector("backward", microbatch))  # type: ignore[no-untyped-call]
        made = self.linear(y).tanh()
        return torch.cat([x[:, :1], made[:, 1:]], 1)


class _InjectInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, injector: Callable[[], None]) -> Tensor:
        ctx.injector = injector
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.injector()
        return gradient, None


def model_of(injector: Injector = no_fault) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(injector) for _ in range(LAYERS))).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets with two rows per micro-batch."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(2 * CHUNKS, 4, generator=made, dtype=torch.float64)
    x[:, 0] = torch.arange(CHUNKS).repeat_interleave(2)
    return x, x.cos()


def loss_of(injector: Injector) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        injector("loss", int(y.detach()[0, 0].round()))
        return nn.functional.mse_loss(y, target)

    return loss


def optimizer_of(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, momentum=0.9)


def inject_into_send_and_save(injector: Injector) -> None:
    """Let sending and saving fail. The patches stay, so the process must not be reused."""
    send, write = ProcessTransport.send, CheckpointWriter.write_data

    def injected_send(self: ProcessTransport, *given: Any) -> Any:
        injector("send", 1)
        return send(self, *given)

    def injected_write(self: CheckpointWriter, *given: Any) -> Any:
        injector("saving", 1)
        return write(self, *given)

    patch.object(ProcessTransport, "send", injected_send).start()
    patch.object(CheckpointWriter, "write_data", injected_write).start()


def pipe_of(injector: Injector, **options: Any) -> Pipe:
    defaults = {"schedule": "1f1b", "heartbeat": LONG_HEARTBEAT, "loss_fn": loss_of(injector)}
    return Pipe(model_of(injector), CHUNKS, group=dist.group.WORLD, **{**defaults, **options})


def train_with_fault(context: RankContext, fault: Fault, folder: Path) -> None:
    """Run the training on one rank."""
    injector = FaultInjector(context.rank, fault)
    inject_into_send_and_save(injector)
    pipe = pipe_of(injector, heartbeat=HEARTBEAT if fault.fail is stall else LONG_HEARTBEAT)
    optimizer = optimizer_of(pipe)
    optimizer.register_step_pre_hook(lambda *_: injector("between"))
    for injector.step in range(STEPS):
        x, target = batch(injector.step)
        optimizer.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()
        pipe.save(folder, optimizer=optimizer, extra=injector.step)
        # From here on a save may take no longer than a step: one that stalls is found soon.
        patch("penstock.runtime.distributed.session.SLOW_CALL_TIMEOUT_FACTOR", 1.0).start()


# ---- expected results ----------------------------------------------------------------------


def unsplit() -> list[Tensor]:
    """Return the losses of the whole run in plain PyTorch."""
    model = model_of()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def resumed(folder: Path) -> tuple[int, list[Tensor]]:
    """Load the last checkpoint; return the step of its save, and the losses of the later steps."""
    pipe = Pipe(model_of(), CHUNKS, stages=1, loss_fn=nn.functional.mse_loss)
    optimizer = optimizer_of(pipe)
    last: int = pipe.load(folder, optimizer=optimizer)
    losses = []
    for step in range(last + 1, STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=target).loss)
        optimizer.step()
    return last, losses
