"""Tests of traced models on virtual GPUs, on one GPU, and on CPU and GPU mixed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from penstock import Pipe
from tests.gpu.support import WORDS, Language, needs_gpu, virtual_gpus
from tests.pairs import each_pair

pytestmark = needs_gpu


def devices(kind: str) -> list[Any]:
    if kind == "virtual":
        return virtual_gpus(3)
    return {"one": ["cuda:0"] * 3, "mixed": ["cpu", "cuda:0", "cpu"]}[kind]


@each_pair(
    kind=["virtual", "one", "mixed"], runtime=["threads", "inline"], schedule=["1f1b", "zb-h1"]
)
def test_traced_model_on_gpu_equals_the_unsplit_model(
    kind: str, runtime: str, schedule: str
) -> None:
    torch.manual_seed(3)
    model = Language().double()
    unsplit = copy.deepcopy(model).cuda()
    device_list = devices(kind)
    first = "cpu" if kind == "mixed" else "cuda:0"
    example = torch.randint(0, WORDS, (4, 6))
    pipe = Pipe(
        model,
        2,
        stages=3,
        devices=device_list,
        example=example,
        schedule=schedule,
        runtime=runtime,
        balance="parameters",
    )
    for length in (6, 9):
        ids = torch.randint(0, WORDS, (4, length), device=first)
        unsplit.zero_grad()
        pipe.zero_grad()
        loss = unsplit(ids.cuda())
        loss.backward()
        found = pipe.step(ids)
        assert abs(found.loss.item() - loss.item()) < 1e-10
        grads = dict(pipe.named_parameters())
        for name, parameter in unsplit.named_parameters():
            mine = grads[name].grad
            assert mine is not None
            assert parameter.grad is not None
            assert (mine.cuda() - parameter.grad).abs().max() < 1e-10, name
        with torch.no_grad():
            assert abs(pipe.step(ids).loss.item() - unsplit(ids.cuda()).item()) < 1e-10


def test_balance_by_time_on_gpu_and_cpu() -> None:
    model = Language()
    example = torch.randint(0, WORDS, (8, 16))
    pipe = Pipe(model, 2, stages=2, devices=["cuda:0", "cpu"], example=example)
    assert sum(pipe._placed_partition.partition.counts) == 5
    assert "stage 0" in pipe.summary()


def test_traced_model_on_gpu_with_autocast_and_recomputation() -> None:
    model = Language()
    ids = torch.randint(0, WORDS, (4, 8), device="cuda")
    device_list = devices("virtual")
    pipe = Pipe(model, 2, "always", stages=3, devices=device_list, example=ids, schedule="1f1b")
    with torch.autocast("cuda", torch.bfloat16):
        loss = pipe.step(ids).loss
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in pipe.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_model_is_captured(name: str, schedule: str) -> None:
    """It asks whether it is captured, and its batch is on the GPU before its weights are."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=4, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0
        )
        config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=4,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            vocab_size=64,
        )
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(64, (8, 16), device="cuda:0")
    unsplit = copy.deepcopy(model).cuda()
    expected = unsplit(input_ids=ids, labels=ids).loss
    pipe = Pipe(
        model,
        4,
        devices=virtual_gpus(2),
        example={"input_ids": ids, "labels": ids},
        schedule=schedule,
        runtime="graph",
    )
    for _ in range(4):
        found = pipe.step(input_ids=ids, labels=ids).loss
        assert abs(found.item() - expected.item()) < 1e-5
