"""Plans and results of a save as text, which the ranks exchange."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from penstock.checkpoint.writer import decode_records, encode_records


def test_save_plans_survive_the_encoding(tmp_path: object) -> None:
    planner = DefaultSavePlanner()
    state = {
        "model": {"weight": torch.ones(2, 3, dtype=torch.bfloat16), "step": torch.tensor(4)},
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)},
    }
    planner.set_up_planner(state, None, True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    plans = FileSystemWriter(str(tmp_path)).prepare_global_plan(plans)
    assert len(plans[0].items) > 3
    assert decode_records(encode_records(plans)) == plans


def test_write_results_survive_the_encoding() -> None:
    index = MetadataIndex("model.weight", torch.Size([0, 3]), 1)
    decoded = decode_records(encode_records([WriteResult(index, 24, None)]))
    assert decoded == [WriteResult(index, 24, None)]
    assert isinstance(decoded[0].index.offset, torch.Size)


def test_other_classes_are_not_sent() -> None:
    with pytest.raises(TypeError, match="a Generator in a save plan cannot be sent"):
        encode_records([torch.Generator()])
