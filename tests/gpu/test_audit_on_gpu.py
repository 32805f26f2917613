"""The audit on a GPU that computes float32 in TF32: no false alarm, and errors are still found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe
from penstock.device.accelerator import may_use_tf32
from tests.gpu.support import GPU, needs_gpu, virtual_gpus

pytestmark = needs_gpu
CHANNELS = 16


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    """Let convolutions and matrix products round as TF32 does, with any algorithm."""
    torch.manual_seed(0)
    precision = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    with torch.backends.cudnn.flags(benchmark=True, deterministic=False, allow_tf32=True):
        yield
    torch.backends.cuda.matmul.allow_tf32 = precision


class Block(nn.Module):
    """Two convolutions with a normalisation, as in a U-Net."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class UNet(nn.Module):
    """A small U-Net: a skip connection around a part of half the size."""

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.head, self.down = nn.Conv2d(3, CHANNELS, 3, padding=1), Block(CHANNELS, 2 * CHANNELS)
        self.middle = nn.ModuleList(Block(2 * CHANNELS, 2 * CHANNELS) for _ in range(4))
        self.extra = extra or nn.Identity()
        self.up, self.tail = Block(3 * CHANNELS, CHANNELS), nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.head(x)
        h = self.down(functional.avg_pool2d(top, 2))
        for block in self.middle:
            h = h + block(h)
        h = functional.interpolate(h, scale_factor=2.0)
        result: Tensor = self.extra(self.tail(self.up(torch.cat([h, top], 1))))
        return result


def draw(size: int = 32) -> Tensor:
    return torch.randn(8, 3, size, size, device=GPU)


def build(model: nn.Module, devices: list[Any], runtime: str = "threads") -> Pipe:
    return Pipe(
        model.to(GPU), chunks=4, devices=devices, stages=len(devices), runtime=runtime,
        loss_fn=functional.mse_loss, example=draw(), balance="parameters",
    )  # fmt: skip


@pytest.mark.parametrize("runtime", ["threads", "inline"])
@pytest.mark.parametrize("are_virtual", [False, True])
def test_u_net_in_tf32_is_no_false_alarm(are_virtual: bool, runtime: str) -> None:
    """Another stream, or another share of the GPU, may choose another algorithm."""
    devices = virtual_gpus(3) if are_virtual else [GPU] * 3
    pipe = build(UNet(), devices, runtime)
    assert may_use_tf32("cuda")
    for size in (32, 48, 32):
        pipe.step(draw(size), target=draw(size))
        pipe(draw(size)).square().mean().backward()


class InThread(nn.Module):
    """A layer that computes something else in the threads of a pipe: 5 % more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        is_main = threading.current_thread() is threading.main_thread()
        return x * self.scale * (1.0 if is_main else 1.05)


class Centred(nn.Module):
    """A layer that mixes rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [(InThread(), "does not compute what the model computes"), (Centred(), "depends on how")],
)
def test_audit_in_tf32_finds_an_error(extra: nn.Module, message: str) -> None:
    pipe = build(UNet(extra), virtual_gpus(3))
    with pytest.raises(AuditError, match=message):
        pipe.step(draw(), target=0 * draw())
