"""Tests that each rank of a multi-process pipe reads and writes its own stages of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from penstock import Pipe
from tests.distributed.ranks import ranks
from tests.hugging_face.test_folders import on_meta, stored_in
from tests.hugging_face.tiny import ALL, batch_for


def load_step_save(name: str, folder: Path) -> tuple[float, int]:
    """Load, step and save; return the loss and the number of parameters on this rank."""
    torch.manual_seed(3)
    batch = batch_for(name)
    model = on_meta(ALL[name]()).eval()
    pipe = Pipe(
        model,
        chunks=2,
        stages=2,
        example=batch,
        schedule="1f1b",
        balance="parameters",
        group=distributed.group.WORLD,
        outputs="all",
    )
    pipe.load(folder / "given")
    loss = float(pipe.step(**batch).loss)
    pipe.save_pretrained(folder / "made")
    return loss, sum(p.numel() for p in pipe.parameters() if not p.is_meta)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_pretrained_folder_round_trip_over_processes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = ALL[name]().eval()
    model.save_pretrained(tmp_path / "given")
    (loss, mine), (other, theirs) = ranks(2).run(load_step_save, name, tmp_path)
    torch.manual_seed(3)
    batch = batch_for(name)
    expected = model(**batch).loss
    assert loss == other
    assert abs(loss - float(expected.detach())) < 1e-5
    whole = sum(p.numel() for p in model.parameters())
    assert max(mine, theirs) < whole
    given, made = stored_in(tmp_path / "given"), stored_in(tmp_path / "made")
    assert set(given) == set(made)
    assert all(torch.equal(given[key], made[key]) for key in given)
