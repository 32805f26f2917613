"""On the meta device, the pipe itself reads nothing from the device during a capture.

All ranks are on `meta`: an operation that reads a value fails, and the capture guard finds one that
takes a tensor of the host, as it would beside a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, add_loss
from penstock.device.device import Cpu
from penstock.runtime.cuda_graph.capture_guard import CaptureError
from penstock.schedules import FAMILIES
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from tests.gpu.support import Bottom, Top
from tests.pairs import each_pair
from tests.runtime.cuda_graph.support import emulate, recordings
from tests.runtime.cuda_graph.test_graph_cache import SCHEDULES
from tests.runtime.cuda_graph.test_lifetimes import Computed


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, Computed)
    is_autocast_enabled = torch.is_autocast_enabled  # it does not know the meta device
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda kind: kind != "meta" and is_autocast_enabled(kind)
    )


class Adds(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        add_loss(1e-3 * x.square().mean())
        return super().forward(x) * torch.tensor(0.5)


def counted(output: Tensor, target: Tensor) -> dict[str, Any]:
    loss = functional.cross_entropy(output, target)
    return {"loss": loss, "weight": (target >= 0).sum(), "rows": 3, "most": output.max()}


LOSSES: dict[str, Callable[..., Any]] = {
    "entropy": nn.CrossEntropyLoss(torch.ones(4, device="meta")),
    "counted": counted,
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


def layers() -> list[nn.Module]:
    norms = [nn.BatchNorm1d(8), DeferredStatsBatchNorm(8)]
    return [Top(8), *norms, Adds(8, 8), nn.ReLU(), nn.Linear(8, 8), Bottom()]


@each_pair(schedule=["gpipe", "1f1b", "zb-h1"], loss=LOSSES, checkpoint=["never", "always"])
def test_captured_step_on_the_meta_device(schedule: str, loss: str, checkpoint: str) -> None:
    model = nn.Sequential(*layers(), nn.Linear(8, 4))
    pipe = pipe_of(model, schedule, LOSSES[loss], checkpoint)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    x, y = torch.empty(8, 8, device="meta"), torch.empty(8, device="meta", dtype=torch.int64)
    for _ in range(4):
        optimizer.zero_grad()
        pipe.step(x, target=y, outputs=True, optimizer=optimizer)
    assert recordings(pipe) == [2]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_captured_tied_weights_on_the_meta_device(schedule: str) -> None:
    linears = [nn.Linear(8, 8) for _ in range(8)]
    pipe = pipe_of(nn.Sequential(*linears), schedule, nn.MSELoss(), "never")
    linears[6].weight = linears[1].weight
    x = torch.empty(8, 8, device="meta", requires_grad=True)
    for _ in range(3):
        pipe.step(x * 2, target=x.detach())
    assert recordings(pipe) == [2]


def test_capture_refuses_a_host_tensor() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = nn.Sequential(nn.Linear(8, 8), Forgotten(), nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = pipe_of(model, "1f1b", nn.MSELoss(), "never")
    x = torch.empty(8, 8, device="meta")
    pipe.step(x, target=x)
    text = r"layer 1 \(Forgotten\), .*test_meta_device.py:\d+: it computes with a tensor in host"
    with pytest.raises(CaptureError, match=text):
        pipe.step(x, target=x)


def pipe_of(model: nn.Sequential, schedule: str, loss_fn: Any, checkpoint: str) -> Pipe:
    """Split the model on the host, then move its layers and ranks to the meta device."""
    places = [Cpu() for _ in range(4 // FAMILIES[schedule].stages_per_rank)]
    pipe = Pipe(
        model,
        chunks=4,
        stages=4,
        devices=places,
        schedule=schedule,
        loss_fn=loss_fn,
        checkpoint=checkpoint,
        runtime="graph",
    )
    for place in places:
        place.device = torch.device("meta")
    pipe._placed_partition.__dict__.pop("stage_devices")  # it was computed on the host
    for layer in pipe:
        layer.to("meta")
    return pipe
