"""A pipe with accelerate: `prepare` in one process, and `adapt` over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator

from penstock import PenstockTypeError, Pipe
from penstock.integrations.accelerate import adapt
from tests.distributed.ranks import ranks

pytestmark = pytest.mark.filterwarnings("default")  # those of accelerate

LOSS = nn.CrossEntropyLoss()
CPUS = ["cpu", "cpu"]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_loader(rows: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 4, generator=generator), torch.arange(16) % 3
    return DataLoader(TensorDataset(x, y), batch_size=rows)


def train_unsplit() -> list[tuple[float, float]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    curve = []
    for x, y in make_loader(4):
        loss = LOSS(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def train_with_steps(replicas: int, pipe_options: dict[str, Any]) -> list[tuple[float, float]]:
    """Train as the documentation shows it. Each replica gets its part of a batch of 4 rows."""
    pipe = Pipe(make_model(), 2, schedule="1f1b", loss_fn=LOSS, **pipe_options)
    accelerator = adapt(Accelerator(cpu=True), pipe)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    pipe, optimizer, loader = accelerator.prepare(pipe, optimizer, make_loader(4 // replicas))
    curve = []
    for x, y in loader:
        result = pipe.step(x, target=y)
        norm = accelerator.clip_grad_norm_(pipe.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((result.loss.item(), norm.item()))
    rows = accelerator.gather(torch.tensor([float(distributed.is_initialized())]))
    assert rows.shape == (replicas,)  # each replica once, however many ranks it has
    return curve


def train_on_ranks(replicas: int) -> list[tuple[float, float]]:
    ranks_each = distributed.get_world_size() // replicas
    shape = (replicas, ranks_each)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    return train_with_steps(replicas, {"mesh": mesh})


def test_prepare_and_backward_in_one_process() -> None:
    pipe = Pipe(make_model(), 2, stages=2, devices=CPUS)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    prepared, optimizer, loader = accelerator.prepare(pipe, optimizer, make_loader(4))
    assert prepared is pipe
    curve = []
    for x, y in loader:
        loss = LOSS(pipe(x), y)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(pipe.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    torch.testing.assert_close(curve, train_unsplit())


def test_steps_in_one_process() -> None:
    curve = train_with_steps(1, {"stages": 2, "devices": CPUS})
    torch.testing.assert_close(curve, train_unsplit())


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2)])
def test_steps_over_processes(size: int, replicas: int) -> None:
    for curve in ranks(size).run(train_on_ranks, replicas):
        torch.testing.assert_close(curve, train_unsplit())


def test_other_model_is_refused() -> None:
    with pytest.raises(PenstockTypeError, match=r"needs a penstock\.Pipe, not Sequential"):
        adapt(Accelerator(cpu=True), make_model())  # type: ignore[arg-type]
