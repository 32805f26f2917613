"""Multimodal models of transformers (images and texts), and models with LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.models.architecture import Architecture, Batch, numbers, tokens
from tests.models.hugging_face import (
    BASE,
    DECODER,
    IMAGE,
    T5,
    exhibit,
    images,
    model,
    pairs,
    still,
    texts,
)

TEXT = {key: value for key, value in BASE.items() if key != "pad_token_id"}
CONTRAST = {"meets": "its loss compares all rows", "pairs": True}
CLIP_VISION = {"model_type": "clip_vision_model", **IMAGE}
SIGLIP_VISION = {"model_type": "siglip_vision_model", **IMAGE}


# ---- batches ------------------------------------------------------------------------------


def compared(rows: int, size: int) -> dict[str, Any]:
    """Return images and texts for a contrastive loss."""
    return {
        "input_ids": tokens(rows, size),
        "pixel_values": numbers(rows, 3, 8, 8),
        "return_loss": True,
    }


def captions(rows: int, size: int) -> dict[str, Any]:
    """Return images with captions."""
    ids = tokens(rows, size)
    return {"input_ids": ids, "pixel_values": numbers(rows, 3, 8, 8), "labels": ids.clone()}


def written(rows: int, size: int) -> dict[str, Any]:
    """Return images with the text in them."""
    return {"pixel_values": numbers(rows, 3, 8, 8), "labels": tokens(rows, size)}


def chats(rows: int, size: int) -> dict[str, Any]:
    """Return texts that contain the four patches of an image."""
    ids = tokens(rows, size + 4, of=36)
    ids[:, 1:5] = 39
    return {"input_ids": ids, "pixel_values": numbers(rows, 3, 8, 8), "labels": ids.clone()}


def typed_chats(rows: int, size: int) -> dict[str, Any]:
    """Return chats with token types that mark the labels."""
    kinds = torch.zeros(rows, size + 4, dtype=torch.long)
    kinds[:, 6:] = 1
    return {**chats(rows, size), "token_type_ids": kinds}


def plain_chats(rows: int, size: int) -> dict[str, Any]:
    """Return chats with token types that mark the image."""
    kinds = torch.zeros(rows, size + 4, dtype=torch.long)
    kinds[:, 1:5] = 1
    return {**chats(rows, size), "token_type_ids": kinds}


# ---- exhibits -----------------------------------------------------------------------------


def reader() -> nn.Module:
    """Return a ViT encoder with a GPT-2 decoder."""
    import transformers

    seeing = transformers.ViTConfig(**IMAGE)
    writing = transformers.GPT2Config(**BASE, add_cross_attention=True, is_decoder=True)
    still(seeing)
    still(writing)
    both = transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(seeing, add_pooling_layer=False),
        decoder=transformers.GPT2LMHeadModel(writing),
    )
    both.config.decoder_start_token_id, both.config.pad_token_id = 1, 0
    assert isinstance(both, nn.Module)
    return both


def adapted(
    name: str,
    kind: str,
    config: str,
    settings: dict[str, Any],
    batch: Callable[[int, int], Batch],
    targets: list[str],
    **more: Any,
) -> Architecture:
    """Return an entry for a model with LoRA adapters, which alone are trained."""

    def build() -> nn.Module:
        import peft

        lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, **more)
        lora.init_lora_weights = False  # otherwise half of the weights are zero
        wrapped = peft.get_peft_model(model(kind, config, settings), lora)
        assert isinstance(wrapped, nn.Module)
        return wrapped

    return Architecture(name, "peft", build, batch)


towers = partial(exhibit, batch=compared, base={}, vision_config=IMAGE, made=CONTRAST)
chat = partial(exhibit, base={}, image_token_index=39)

BOTH = [
    towers("CLIP", "CLIPModel", text_config={**TEXT, "projection_dim": 8}, projection_dim=8),
    towers("SigLIP", "SiglipModel", text_config={**TEXT, "projection_size": 16}),
    towers("OWL-ViT", "OwlViTModel", text_config=TEXT, projection_dim=8),
    exhibit(
        "BLIP",
        "BlipForConditionalGeneration",
        captions,
        base={"text_config": {**BASE, "encoder_hidden_size": 16}, "vision_config": IMAGE},
        projection_dim=16,
    ),
    exhibit("GIT", "GitForCausalLM", captions, vision_config=IMAGE),
    Architecture("ViT with GPT-2", "transformers", reader, written),
    chat(
        "LLaVA",
        "LlavaForConditionalGeneration",
        chats,
        vision_config=CLIP_VISION,
        text_config={"model_type": "llama", **DECODER},
        vision_feature_layer=-2,
    ),
    chat(
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        typed_chats,
        vision_config=SIGLIP_VISION,
        text_config={"model_type": "gemma", **DECODER},
        projection_dim=16,
    ),
    chat(
        "Gemma 3",
        "Gemma3ForConditionalGeneration",
        plain_chats,
        vision_config=SIGLIP_VISION,
        text_config={"model_type": "gemma3_text", **DECODER},
        mm_tokens_per_image=4,
        boi_token_index=37,
        eoi_token_index=38,
    ),
    chat(
        "BLIP-2",
        "Blip2ForConditionalGeneration",
        chats,
        image_token_id=39,
        num_query_tokens=4,
        vision_config=IMAGE,
        qformer_config={**BASE, "encoder_hidden_size": 16, "cross_attention_frequency": 2},
        text_config={"model_type": "opt", **BASE, "ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    exhibit(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        texts,
        base={
            "text_config": {
                **DECODER,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [1, 1, 2],
                    "rope_theta": 10000.0,
                },
            },
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
        },
    ),
]
ADAPTERS = [
    adapted("Llama, LoRA", "LlamaForCausalLM", "LlamaConfig", DECODER, texts, ["q_proj", "v_proj"]),
    adapted(
        "GPT-2, LoRA", "GPT2LMHeadModel", "GPT2Config", BASE, texts, ["c_attn"], fan_in_fan_out=True
    ),
    adapted(
        "GPT-2, LoRA and a trained head",
        "GPT2LMHeadModel",
        "GPT2Config",
        {**BASE, "tie_word_embeddings": False},
        texts,
        ["c_proj"],
        fan_in_fan_out=True,
        modules_to_save=["lm_head"],
    ),
    adapted("T5, LoRA", "T5ForConditionalGeneration", "T5Config", T5, pairs, ["q", "v"]),
    adapted(
        "ViT, LoRA",
        "ViTForImageClassification",
        "ViTConfig",
        {**IMAGE, "image_size": 12},
        lambda rows, size: images(rows, 12),
        ["q_proj", "v_proj"],
    ),
]
