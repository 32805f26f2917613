"""Checkpoints saved by several processes, compared with the whole model.

test_resume.py loads them with other numbers of ranks, data_parallel/ those of replicas.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from penstock import RunError, saved
from penstock.checkpoint.save_group import SaveGroup
from tests.checkpoint.saved_models import (
    alone,
    build,
    differences,
    interleaved,
    optimizer_of,
    part,
    plainly_loaded,
    saver_of,
    state_of,
    stepped,
)
from tests.distributed.ranks import ranks

# ---- functions that run on the ranks ------------------------------------------------------


def mine(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    module = part(build(seed), interleaved(rank, size))
    return module, optimizer_of(module, 0.01 * (1 + seed))


def trained_and_saved(folder: Path, steps: int) -> None:
    module, optimizer = mine(0)
    stepped(module, optimizer, steps)
    saving = saver_of(module).save(folder, optimizer, {"steps": steps}, True)
    stepped(module, optimizer)  # must not change what is being saved
    saving.wait()


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    module, optimizer = mine(3)
    extra = saver_of(module).load(folder, optimizer)
    return extra, state_of(module, optimizer)


def exported(file: Path) -> None:
    module, optimizer = mine(0)
    stepped(module, optimizer)
    saver_of(module).export(file)


def sharded_saved(folder: Path) -> None:
    """Save a model in which `fully_shard` shards every second layer among the ranks."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = build()
    for layer in list(model)[1:6:2]:
        fully_shard(layer, mesh=mesh)
    optimizer = optimizer_of(model)
    stepped(model, optimizer)
    saver_of(model).export(folder / "model.safetensors")
    saving = saver_of(model).save(folder, optimizer, None, True)
    stepped(model, optimizer)
    saving.wait()


def sharded_loaded(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = build(2)
    for layer in list(model)[2:7:2]:
        fully_shard(layer, mesh=mesh)
    optimizer = optimizer_of(model, 0.7)
    saver_of(model).load(folder, optimizer)
    whole = state_of(model, optimizer)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in whole.items()}


def failed_saves(folder: Path, at: int, background: bool) -> str:
    """Save while one rank cannot write; return the error that this rank raises."""
    module, optimizer = mine(0)
    saver = saver_of(module)
    saver.save(folder, optimizer, {"steps": 0}, False)
    stepped(module, optimizer)
    write = FileSystemWriter.write_data

    def broken(self: Any, plan: Any, planner: Any) -> Any:
        write(self, plan, planner)
        raise OSError("the disk is full")

    if distributed.get_rank() == at:
        FileSystemWriter.write_data = broken  # type: ignore[method-assign]
    try:
        saving = saver.save(folder, optimizer, {"steps": 2}, background)
        assert background
        with pytest.raises(RunError):
            saving.wait()
        saver.save(folder, optimizer, {"steps": 4}, False)  # raises the background save's error
    except RunError as error:
        return str(error)
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
    return "nothing was raised"


def read_by(folder: Path) -> int:
    """Return how many bytes a load reads."""
    saver = saver_of(wide(), {})
    before = bytes_read()
    saver.load(folder, None)
    return bytes_read() - before


def wide_saved(folder: Path) -> None:
    saver_of(wide(), {}).save(folder, None, None, False)


def wide() -> nn.Module:
    """Return a module with this rank's layer."""
    holder = nn.Module()
    holder._modules[str(distributed.get_rank())] = nn.Linear(1000, 1000, bias=False)
    return holder


WIDE = 4_000_000  # bytes of the layer


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


# ---- tests --------------------------------------------------------------------------------


def expected(steps: int = 2) -> dict[str, Any]:
    model = build()
    optimizer = optimizer_of(model)
    stepped(model, optimizer, steps)
    return state_of(model, optimizer)


def test_load_of_a_distributed_save_in_one_process_and_by_pytorch(tmp_path: Path) -> None:
    ranks(4).run(trained_and_saved, tmp_path, 3)
    model = build(4)
    optimizer = optimizer_of(model, 0.3)
    assert alone(model).load(tmp_path, optimizer) == {"steps": 3}
    assert differences(state_of(model, optimizer), expected(3)) == []
    assert differences(state_of(*plainly_loaded(tmp_path)), expected(3)) == []


def test_save_of_fully_sharded_parameters(tmp_path: Path) -> None:
    ranks(2).run(sharded_saved, tmp_path)
    assert differences(state_of(*plainly_loaded(tmp_path)), expected()) == []
    for found in ranks(3).run(sharded_loaded, tmp_path):
        assert differences(found, expected()) == []
    safetensors = pytest.importorskip("safetensors.torch")
    tensors: dict[str, Tensor] = safetensors.load_file(tmp_path / "model.safetensors")
    assert differences(tensors, expected()) == []


@pytest.mark.parametrize("background", [False, True])
def test_failed_write_on_one_rank_fails_the_save_on_all_ranks(
    background: bool, tmp_path: Path
) -> None:
    messages = ranks(3).run(failed_saves, tmp_path, 1, background)
    assert len(set(messages)) == 1
    assert "saving to" in messages[0]
    assert "rank 1: OSError: the disk is full" in messages[0]
    assert os.listdir(tmp_path) == ["save-000001"]
    for extra, _ in ranks(3).run(loaded, tmp_path):
        assert extra == {"steps": 0}


class Lost:
    """A channel whose other ranks have already aborted and closed their connections."""

    rank = 1

    def all_gather_value(self, value: Any, description: str) -> list[Any]:
        raise RuntimeError("Connection closed by peer")


def test_rank_raises_its_own_save_error_even_if_its_peers_have_left() -> None:
    def full() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        SaveGroup(Lost()).run_on_each_rank("saving", full)
    with pytest.raises(RuntimeError, match="Connection closed"):
        SaveGroup(Lost()).run_on_each_rank("saving", list)


def test_load_reads_only_the_tensors_of_its_rank(tmp_path: Path) -> None:
    ranks(4).run(wide_saved, tmp_path)
    found = saved(tmp_path)
    assert found is not None
    for read in ranks(4).run(read_by, tmp_path):
        assert WIDE <= read < 1.3 * WIDE


def test_export_by_several_ranks_into_one_file(tmp_path: Path) -> None:
    ranks(3).run(exported, tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    safetensors = pytest.importorskip("safetensors.torch")
    tensors: dict[str, Tensor] = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {*build().state_dict()} - {"7.weight"}
    assert differences(tensors, expected()) == []
