"""Checkpoints of replicas: each tensor is written once, and any other arrangement can load it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import AdamW, Optimizer

import penstock
from penstock import Pipe
from tests.checkpoint.saved_models import state_of
from tests.data_parallel.replicas import STAGE_FNS, mesh, model, whole
from tests.distributed.ranks import ranks
from tests.support import batch

STEPS = 5
SAVED = 2


def arranged(replicas: int, kind: str) -> tuple[Pipe, int]:
    """Return a pipe with this many replicas over all processes, and the index of this replica."""
    options: dict[str, Any] = {"chunks": 2, "loss_fn": nn.MSELoss()}
    layers = model(tied=kind == "own")
    if not dist.is_initialized():
        return Pipe(layers, stages=1, devices=["cpu"], **options), 0
    here = mesh(replicas=replicas)
    pipe = (
        Pipe(layers, mesh=here, **options)
        if kind == "own"
        else Pipe(layers, mesh=here["pp"], stage_fn=STAGE_FNS[kind], **options)
    )
    return pipe, here.get_local_rank("dp")


def learned(
    pipe: Pipe, optimizer: Optimizer, steps: range, replicas: int, replica: int
) -> list[Tensor]:
    losses = []
    for step in steps:
        x, y = (part.roll(step, dims=0).chunk(replicas)[replica] for part in batch(16))
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=y).loss)
        optimizer.step()
    return losses


def full(state: dict[str, Any]) -> dict[str, Any]:
    return {n: whole(v) if isinstance(v, Tensor) else v for n, v in state.items()}


def begun(folder: Path, replicas: int, kind: str, background: bool) -> Tensor:
    pipe, replica = arranged(replicas, kind)
    optimizer = AdamW(pipe.parameters(), lr=0.05)
    learned(pipe, optimizer, range(SAVED), replicas, replica)
    torch.manual_seed(replica)
    pipe.save(folder, optimizer=optimizer, extra=SAVED, background=background).wait()
    pipe.export(folder / "model.safetensors")
    return torch.get_rng_state()


def gone_on_with(folder: Path, replicas: int, kind: str) -> tuple[list[Tensor], Any, Tensor]:
    pipe, replica = arranged(replicas, kind)
    optimizer = AdamW(pipe.parameters(), lr=0.5)
    step = pipe.load(folder, optimizer=optimizer)
    random = torch.get_rng_state()
    losses = learned(pipe, optimizer, range(step, STEPS), replicas, replica)
    return losses, full(state_of(pipe, optimizer)), random


def unsplit(tied: bool) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Return the losses, the state at the time of the save, and the final state."""
    expected = model(tied)
    optimizer = AdamW(expected.parameters(), lr=0.05)
    losses, saved = [], {}
    for step in range(STEPS):
        if step == SAVED:
            now = state_of(expected, optimizer).items()
            saved = {n: v.clone() for n, v in now if isinstance(v, Tensor)}
        x, y = (part.roll(step, dims=0) for part in batch(16))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(expected(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, saved, state_of(expected, optimizer)


def check_written_once(folder: Path) -> None:
    latest = penstock.saved(folder)
    assert latest is not None
    metadata = FileSystemReader(latest).read_metadata()
    spans = {(i.relative_path, i.offset, i.length) for i in metadata.storage_data.values()}
    assert sum(length for _, _, length in spans) == sum(
        file.stat().st_size for file in latest.glob("*.distcp")
    )
    starts = [(path, offset) for path, offset, _ in spans]
    assert len(starts) == len(set(starts))
    names = metadata.state_dict_metadata
    kept = [name for name in names if "7.first." not in name]  # the tied weight
    pieces = sum(len(getattr(names[name], "chunks", [None])) for name in kept)
    assert len(spans) == pieces


@pytest.mark.parametrize(
    ("kind", "after"), [("own", 1), ("own", 4), ("own", 0), ("fsdp", 2), ("fsdp", 0)]
)
def test_checkpoint_of_replicas_is_written_once_and_loads_into_other_arrangements(
    kind: str, after: int, tmp_path: Path
) -> None:
    losses, _, state = unsplit(tied=kind == "own")
    random = ranks(4).run(begun, tmp_path, 2, kind, after == 1)
    check_written_once(tmp_path)
    found = (
        ranks(4).run(gone_on_with, tmp_path, after, kind)
        if after
        else [gone_on_with(tmp_path, 1, kind)]
    )
    for rank, (mine, held, drawn) in enumerate(found):
        if kind == "own" or not after:
            torch.testing.assert_close(mine, losses[SAVED:], rtol=0, atol=1e-10)
        for name, value in held.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-10)
        replica = 0 if not after else rank * after // 4
        if replica < 2:
            assert torch.equal(drawn, random[2 * replica])


@pytest.mark.parametrize("kind", ["own", "ddp"])
def test_checkpoint_of_replicas_can_be_read_by_plain_pytorch(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    _, saved, _ = unsplit(tied=kind == "own")
    ranks(4).run(begun, tmp_path, 2, kind, False)
    check_written_once(tmp_path)
    newest = penstock.saved(tmp_path)
    fresh = {
        name: torch.zeros_like(t) for name, t in model(tied=kind == "own").state_dict().items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load({"model": fresh}, checkpoint_id=newest)
    exported = load_file(tmp_path / "model.safetensors")
    for name, value in fresh.items():
        torch.testing.assert_close(value, saved[name], rtol=0, atol=1e-10)
        torch.testing.assert_close(exported.get(name, value), saved[name], rtol=0, atol=1e-10)
    assert exported.keys() == {name for name in fresh if "7.first." not in name}
