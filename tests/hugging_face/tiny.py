"""Tiny random transformers models, and the comparison of a pipe with the unsplit model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from penstock import Pipe
from tests.oracle import Batch, differences, run_parts, run_pipe, within

WORDS = 40
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
}
TEXT: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}


def llama(**more: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **TEXT, num_key_value_heads=1, **more))


def gpt2(**more: Any) -> Any:
    still = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, **TEXT, **{**still, **more}))


def t5(**more: Any) -> Any:
    sizes: dict[str, Any] = {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
    begins = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **sizes, **begins, **more))


def bert(**more: Any) -> Any:
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **SIZES, **still, **more))


def mixtral(**more: Any) -> Any:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    plain = {"experts_implementation": "eager"}  # the other implementations do not support float64
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts, **{**TEXT, **plain, **more}))


def vit(**more: Any) -> Any:
    config = ViTConfig(**SIZES, image_size=8, patch_size=4, **more)
    config.problem_type = "single_label_classification"  # otherwise the first forward sets it
    return ViTForImageClassification(config)


TEXTS = {"llama": llama, "gpt2": gpt2, "t5": t5, "bert": bert}
ALL = {**TEXTS, "mixtral": mixtral, "vit": vit}


def words(rows: int = 4, length: int = 6) -> Tensor:
    return torch.randint(3, WORDS, (rows, length))


def batch_for(name: str) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 1, 0])}
    ids = words()
    return {"input_ids": ids, "labels": ids}


def piped(model: nn.Module, example: dict[str, Any], **options: Any) -> Pipe:
    chosen = {"stages": 3, "schedule": "1f1b", "balance": "parameters", **options}
    return Pipe(model, chunks=2, example=example, **chosen)


def agree(model: nn.Module, *batches: dict[str, Any], **options: Any) -> Pipe:
    """Assert that loss, gradients and outputs equal those of the model by micro-batch."""
    model = model.double()
    reference = copy.deepcopy(model)
    cache = {"use_cache": False} if hasattr(reference.config, "use_cache") else {}
    pipe = piped(model, batches[0], **options)
    for batch in batches:
        reference.zero_grad()
        pipe.zero_grad()
        expected = run_parts(reference, Batch((), {**batch, **cache}), sizes=[2, 2])
        found = run_pipe(pipe, Batch((), batch))
        found.metrics = expected.metrics = None
        assert type(found.output) is type(expected.output)
        assert differences(found, expected, close) == []
    return pipe


def close(a: Tensor, b: Tensor) -> bool:
    """Compare; many models compute the loss in float32, whatever their own dtype is."""
    return within(1e-6 if torch.float32 in (a.dtype, b.dtype) else 1e-10)(a, b)


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of the entries that differ between two state dicts."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert set(ours) == set(theirs)
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
