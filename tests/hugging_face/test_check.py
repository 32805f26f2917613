"""`penstock.check` of transformers models with their default dropout, which draw between blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    TrOCRConfig,
    TrOCRForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

import penstock

TEXT: dict[str, Any] = {"vocab_size": 40, "max_position_embeddings": 16}
DECODER: dict[str, Any] = {
    **TEXT,
    "d_model": 8,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 8,
}
SEQUENCES: dict[str, Any] = {
    **DECODER,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
}


def opt() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8}
    config = OPTConfig(**TEXT, **sizes, num_hidden_layers=2, num_attention_heads=2)
    return OPTForCausalLM(config)


def mbart() -> Any:
    return MBartForConditionalGeneration(MBartConfig(**SEQUENCES))


def blenderbot() -> Any:
    return BlenderbotForConditionalGeneration(BlenderbotConfig(**SEQUENCES))


def trocr() -> Any:
    return TrOCRForCausalLM(TrOCRConfig(**DECODER))


def xlnet() -> Any:
    return XLNetLMHeadModel(XLNetConfig(vocab_size=40, d_model=8, n_layer=2, n_head=2, d_inner=8))


@pytest.mark.parametrize("build", [opt, mbart, blenderbot, trocr, xlnet])
def test_check_of_models_with_their_default_dropout(build: Any) -> None:
    torch.manual_seed(0)
    ids = torch.randint(3, 40, (4, 5))
    batch = {"input_ids": ids, "labels": ids}
    report = penstock.check(build().train(), batch, stages=2, chunks=2, quick=True, quiet=True)
    assert report.ok, str(report)
    assert "draws random numbers" in report.reference
