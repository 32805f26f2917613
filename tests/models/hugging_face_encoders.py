"""Encoders and encoder-decoder models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.models.architecture import Architecture, tokens
from tests.models.hugging_face import (
    LEFT_OUT,
    SEQ2SEQ,
    T5,
    classified_texts,
    exhibit,
    labelled_tokens,
    padded_texts,
    pairs,
    texts,
)


def spans(rows: int, size: int) -> dict[str, Any]:
    """Return texts with the first and last token of an answer."""
    at = torch.arange(rows)
    return {"input_ids": tokens(rows, size), "start_positions": at % 2, "end_positions": 2 + at % 2}


def two_sentences(rows: int, size: int) -> dict[str, Any]:
    """Return texts with token types."""
    kinds = torch.zeros(rows, size, dtype=torch.long)
    kinds[:, size // 2 :] = 1
    return {**padded_texts(rows, size), "token_type_ids": kinds}


def partly_labelled(rows: int, size: int) -> dict[str, Any]:
    """Return texts in which only some tokens have labels, more of them in the first rows."""
    batch = padded_texts(rows, size)
    some = torch.arange(size) % (1 + torch.arange(rows)[:, None] // 2) == 0
    return {**batch, "labels": batch["labels"].where(some, -100)}


def padded_pairs(rows: int, size: int) -> dict[str, Any]:
    """Return pairs with answers of different lengths."""
    batch = pairs(rows, size)
    there = torch.arange(size - 1) < 1 + torch.arange(rows)[:, None] % (size - 1)
    return {**batch, "labels": batch["labels"].where(there, -100)}


def answers(batch: dict[str, Any]) -> int:
    """Return the number of labels that count."""
    return int((batch["labels"] != -100).sum())


def shuffled(rows: int, size: int) -> dict[str, Any]:
    """Return texts with labels for replaced-token detection."""
    ids = tokens(rows, size)
    return {"input_ids": ids, "labels": (ids % 3 == 0).long()}


def masked(name: str, family: str, **settings: Any) -> Architecture:
    return exhibit(name, f"{family}ForMaskedLM", padded_texts, **settings)


def translator(name: str, family: str, **settings: Any) -> Architecture:
    return exhibit(name, f"{family}ForConditionalGeneration", pairs, base=SEQ2SEQ, **settings)


t5 = partial(exhibit, batch=pairs, base=T5)
long = {"sizes": (8, 12)}

ENCODERS = [
    exhibit("BERT", "BertForMaskedLM", two_sentences),
    exhibit("BERT, some tokens", "BertForMaskedLM", partly_labelled, made={"counts": answers}),
    exhibit("BERT, a class a text", "BertForSequenceClassification", classified_texts),
    exhibit("BERT, a class a token", "BertForTokenClassification", labelled_tokens),
    exhibit("BERT, spans", "BertForQuestionAnswering", spans),
    masked("RoBERTa", "Roberta", max_position_embeddings=66),
    masked("RoBERTa, norm first", "RobertaPreLayerNorm", max_position_embeddings=66),
    masked("XLM-R", "XLMRoberta", max_position_embeddings=66),
    masked("CamemBERT", "Camembert", max_position_embeddings=66),
    masked("DistilBERT", "DistilBert", dim=16, n_layers=3, n_heads=2, hidden_dim=24),
    masked("ALBERT", "Albert", embedding_size=8),
    exhibit("ELECTRA", "ElectraForPreTraining", shuffled, embedding_size=8),
    masked("DeBERTa", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    masked(
        "DeBERTa-v2",
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        share_att_key=True,
    ),
    masked("MPNet", "MPNet", max_position_embeddings=66),
    masked("ModernBERT", "ModernBert", local_attention=4, global_attn_every_n_layers=2),
    masked("ERNIE", "Ernie"),
    masked("ESM", "Esm", position_embedding_type="rotary", mask_token_id=3, token_dropout=False),
    masked("RoFormer", "RoFormer", embedding_size=16),
    masked("ConvBERT", "ConvBert", embedding_size=16, conv_kernel_size=3, head_ratio=1),
    masked("FNet", "FNet"),
    masked(
        "Funnel",
        "Funnel",
        num_hidden_layers=LEFT_OUT,
        block_sizes=[1, 2],
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=24,
    ),
    masked(
        "MobileBERT",
        "MobileBert",
        embedding_size=16,
        true_hidden_size=16,
        intra_bottleneck_size=16,
        num_feedforward_networks=2,
    ),
    masked("SqueezeBERT", "SqueezeBert", embedding_size=16),
    masked("Nystromformer", "Nystromformer", num_landmarks=2, segment_means_seq_len=2),
    masked("Megatron-BERT", "MegatronBert"),
    masked("RemBERT", "RemBert", input_embedding_size=8, output_embedding_size=8),
    exhibit(
        "XLNet", "XLNetLMHeadModel", texts, d_inner=24, d_head=8, max_position_embeddings=LEFT_OUT
    ),
    exhibit(
        "Longformer",
        "LongformerForMaskedLM",
        padded_texts,
        attention_window=4,
        max_position_embeddings=66,
        made=long,
    ),
    exhibit(
        "BigBird", "BigBirdForMaskedLM", padded_texts, attention_type="original_full", made=long
    ),
    exhibit(
        "Reformer",
        "ReformerForMaskedLM",
        texts,
        attention_head_size=8,
        attn_layers=["local", "local", "local"],
        local_attn_chunk_length=4,
        axial_pos_shape=[4, 4],
        axial_pos_embds_dim=[8, 8],
        feed_forward_size=24,
        is_decoder=False,
        made={
            "sizes": (16, 16),
            "warns": "random numbers were drawn from PyTorch",
        },  # it seeds, for itself
    ),
    # from text to text
    t5("T5", "T5ForConditionalGeneration"),
    exhibit(
        "T5, padded answers",
        "T5ForConditionalGeneration",
        padded_pairs,
        base=T5,
        made={"counts": answers},
    ),
    t5("T5, gated", "T5ForConditionalGeneration", feed_forward_proj="gated-gelu"),
    t5("mT5", "MT5ForConditionalGeneration"),
    t5("UMT5", "UMT5ForConditionalGeneration"),
    t5("LongT5", "LongT5ForConditionalGeneration", local_radius=3),
    t5(
        "Switch Transformers",
        "SwitchTransformersForConditionalGeneration",
        num_experts=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=64,
        router_jitter_noise=0.0,
        made={"meets": "its loss balances the experts over all rows"},
    ),
    translator("BART", "Bart"),
    translator("mBART", "MBart"),
    translator("Pegasus", "Pegasus"),
    translator("PLBART", "PLBart"),
    translator("M2M-100", "M2M100"),
    translator("Blenderbot", "Blenderbot"),
    translator("Blenderbot small", "BlenderbotSmall"),
    exhibit("Marian", "MarianMTModel", pairs, config="MarianConfig", base=SEQ2SEQ),
    exhibit(
        "BART, a class a text",
        "BartForSequenceClassification",
        lambda rows, size: {
            "input_ids": torch.cat([tokens(rows, size), torch.full((rows, 1), 2)], 1),
            "labels": torch.arange(rows) % 2,
        },
        base=SEQ2SEQ,
        num_labels=2,
    ),
    exhibit(
        "LED",
        "LEDForConditionalGeneration",
        pairs,
        base=SEQ2SEQ,
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        made={"sizes": (8, 12)},
    ),
]
