"""Tests of `pipe.generate` on virtual GPUs, and on CPU and GPU mixed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from penstock import Pipe
from tests.gpu.support import needs_gpu, virtual_gpus
from tests.hugging_face.tiny import WORDS, gpt2, llama, t5

pytestmark = [needs_gpu, pytest.mark.filterwarnings("default")]
NEW: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


@pytest.mark.parametrize("make", [llama, gpt2, t5])
@pytest.mark.parametrize("kind", ["virtual", "mixed"])
def test_generate_on_several_devices_equals_the_unsplit_model(kind: str, make: Any) -> None:
    torch.manual_seed(3)
    model = make().double().eval()
    ids = torch.randint(3, WORDS, (4, 5))
    example = {"input_ids": ids, "labels": ids}
    unsplit = copy.deepcopy(model)
    if kind == "virtual":
        unsplit, ids, devices = unsplit.cuda(), ids.cuda(), virtual_gpus(2)
    else:
        devices = ["cpu", "cuda:0"]
    pipe = Pipe(model, 2, stages=2, devices=devices, example=example, balance="parameters").eval()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    calls: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": True, "attention_mask": mask},
        {"do_sample": False, "num_beams": 2},
    ]
    for call in calls:
        torch.manual_seed(5)
        expected = unsplit.generate(ids, **NEW, **call)
        torch.manual_seed(5)
        tokens = pipe.generate(ids, **NEW, **call)
        assert tokens.device == ids.device
        assert torch.equal(tokens, expected)


def test_cache_of_each_layer_is_on_its_device() -> None:
    model = llama().eval()
    ids = torch.randint(3, WORDS, (4, 5))
    devices = ["cpu", "cuda:0"]
    pipe = Pipe(model, 2, stages=2, devices=devices, example=ids, balance="parameters").eval()
    result = pipe.generate(ids, **NEW, do_sample=False, return_dict_in_generate=True)
    found = [layer.keys.device for layer in result.past_key_values.layers]
    expected = [layer.mlp.up_proj.weight.device for layer in model.model.layers]
    assert found == expected
    assert len({device.type for device in found}) == 2
