"""Tests of adapters that several processes read and write, each with a part of the model.

Whole models are in test_pipes_over_ranks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import distributed, nn

from penstock.checkpoint.local_state import LocalState
from penstock.checkpoint.save_group import SaveGroup
from penstock.checkpoint.saver import SaveHistory, Saver
from penstock.model.tied import find_tied_names
from penstock.runtime.distributed.control_channel import ControlChannel
from tests.distributed.ranks import ranks
from tests.hugging_face.tiny import llama

ELSEWHERE = (
    ("model.layers.1", "model.layers.2", "model.norm", "lm_head"),
    ("model.embed_tokens", "model.layers.0"),
)


def built() -> Any:
    torch.manual_seed(7)
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))


def saver_here(zeros: bool) -> Saver:
    """Return the saver of a rank that has a part of the model; the model itself is on meta."""
    rank = distributed.get_rank()
    mine = built()
    same = find_tied_names(mine)
    for name in ELSEWHERE[rank]:
        path, _, key = f"base_model.model.{name}".rpartition(".")
        mine.get_submodule(path)._modules[key] = None
    if zeros:
        for parameter in mine.parameters():
            nn.init.zeros_(parameter)
    with torch.device("meta"):
        model = built()
    group: Any = distributed.group.WORLD
    return Saver(
        LocalState(mine, same, SaveGroup(ControlChannel(group)), pretrained_model=model),
        SaveHistory(),
    )


def saved(folder: Path) -> None:
    saver_here(zeros=False).save_pretrained(folder)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    saver = saver_here(zeros=True)
    saver.load(folder, None)
    return dict(saver.local_state.module.state_dict())


def test_adapters_are_saved_and_loaded_with_a_part_of_the_model_per_rank(tmp_path: Path) -> None:
    model = built()
    model.save_pretrained(tmp_path / "given")
    ranks(2).run(saved, tmp_path / "made")
    names = sorted(path.name for path in (tmp_path / "given").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "made").iterdir())
    (weights,) = (name for name in names if name.endswith(".safetensors"))
    given, made = (load_file(tmp_path / where / weights) for where in ("given", "made"))
    assert set(given) == set(made)
    assert all(torch.equal(given[key], made[key]) for key in given)
    first, second = ranks(2).run(loaded, tmp_path / "given")
    expected = model.state_dict()
    for name, tensor in (*first.items(), *second.items()):
        if "lora_" in name:
            assert torch.equal(tensor, expected[name]), name
