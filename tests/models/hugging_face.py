"""Build tiny models of transformers with random weights, and batches for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.architecture import Architecture, Batch, drawn, numbers, one_of, tokens

VOCABULARY = 40
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 2,
}
SEQ2SEQ: dict[str, Any] = {
    **BASE,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    **BASE,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 1,
}
LEFT_OUT = object()  # for a config that does not accept a common setting
DECODER: dict[str, Any] = {**BASE, "num_key_value_heads": 1, "head_dim": 8}


def model(kind: str, config: str, settings: dict[str, Any]) -> nn.Module:
    """Build a model of a class from a config of a class, without dropout."""
    import transformers

    transformers.logging.set_verbosity_error()
    made = getattr(transformers, config)(**settings)
    still(made)
    built = getattr(transformers, kind)(made)
    assert isinstance(built, nn.Module)
    return built


def still(config: Any) -> None:
    """Set all dropout rates of a config and its nested configs to zero."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            still(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def exhibit(
    name: str,
    kind: str,
    batch: Callable[[int, int], Batch],
    config: str = "",
    base: dict[str, Any] | None = None,
    made: dict[str, Any] | None = None,
    **settings: Any,
) -> Architecture:
    """Return an entry for the class `kind`; `settings` go into the config of its family."""
    family = re.split(r"For(?=[A-Z])|LMHeadModel|Model$", kind)[0]
    values = {**(BASE if base is None else base), **settings}
    values = {key: value for key, value in values.items() if value is not LEFT_OUT}
    build = partial(model, kind, config or f"{family}Config", values)
    return Architecture(name, "transformers", build, batch, **(made or {}))


# ---- batches ------------------------------------------------------------------------------


def texts(rows: int, size: int) -> dict[str, Any]:
    """Return a batch for a language model; the loss is a mean over tokens."""
    ids = tokens(rows, size)
    return {"input_ids": ids, "labels": ids.clone()}


def padded_texts(rows: int, size: int) -> dict[str, Any]:
    """Return texts with padding at the end of some rows; the loss counts all tokens."""
    mask = torch.ones(rows, size, dtype=torch.long)
    mask[1::2, -2:] = 0
    return {**texts(rows, size), "attention_mask": mask}


def classified_texts(rows: int, size: int) -> dict[str, Any]:
    """Return texts with a class for each."""
    return {"input_ids": tokens(rows, size), "labels": one_of(rows, 2)}


def labelled_tokens(rows: int, size: int) -> dict[str, Any]:
    """Return texts with a class for each token."""
    ids = tokens(rows, size)
    return {"input_ids": ids, "labels": ids % 2}


def pairs(rows: int, size: int) -> dict[str, Any]:
    """Return texts and their translations, shorter by one token."""
    return {"input_ids": tokens(rows, size), "labels": tokens(rows, size - 1)}


def images(rows: int, size: int) -> dict[str, Any]:
    """Return images with a class for each."""
    return {"pixel_values": numbers(rows, 3, size, size), "labels": one_of(rows, 2)}


def noise(rows: int, size: int, *more: int) -> Tensor:
    """Return random float64 numbers."""
    return torch.randn(rows, size, *more, generator=drawn(rows, size), dtype=torch.float64)
