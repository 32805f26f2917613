"""Audio and time series models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.models.architecture import numbers, one_of, squares, tokens
from tests.models.hugging_face import BASE, IMAGE, SEQ2SEQ, exhibit, noise

WAVE: dict[str, Any] = {
    **BASE,
    "conv_dim": [8, 8, 8],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 3,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 3,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "layerdrop": 0.0,
}
NORM = "BatchNorm normalises what it sees"


def sounds(rows: int, size: int) -> dict[str, Any]:
    """Return waveforms with their transcripts."""
    return {"input_values": numbers(rows, 40 * size), "labels": tokens(rows, 3)}


def classified_sounds(rows: int, size: int) -> dict[str, Any]:
    """Return waveforms with a class for each."""
    return {"input_values": numbers(rows, 40 * size), "labels": one_of(rows, 2)}


def waves(rows: int, size: int) -> dict[str, Any]:
    """Return waveforms of one channel."""
    return {"input_values": noise(rows, 1, 32 * size)}


def spectra(rows: int, size: int) -> dict[str, Any]:
    """Return spectrograms of the length that Whisper needs, with transcripts."""
    return {"input_features": numbers(rows, 8, 24), "labels": tokens(rows, size)}


def turned_spectra(rows: int, size: int) -> dict[str, Any]:
    """Return the same with time first."""
    return {"input_features": noise(rows, 4 * size, 8), "labels": tokens(rows, size)}


def spectrograms(rows: int, size: int) -> dict[str, Any]:
    """Return spectrograms of one size, with a class for each."""
    return {"input_values": noise(rows, 12, 16), "labels": one_of(rows, 2)}


def history(rows: int, size: int) -> dict[str, Any]:
    """Return two channels over time, and their continuation."""
    return {"past_values": noise(rows, 16, 2), "future_values": noise(rows, 4, 2)}


def sales(rows: int, size: int) -> dict[str, Any]:
    """Return one channel over time, with features of each day."""
    return {
        "past_values": noise(rows, 15).abs(),
        "past_time_features": noise(rows, 15, 1),
        "past_observed_mask": torch.ones(rows, 15, dtype=torch.float64),
        "future_values": noise(rows, 4).abs(),
        "future_time_features": noise(rows, 4, 1),
    }


def games(rows: int, size: int) -> dict[str, Any]:
    """Return states, actions, rewards and time steps."""
    return {
        "states": noise(rows, size, 5),
        "actions": noise(rows, size, 2),
        "rewards": noise(rows, size, 1),
        "returns_to_go": noise(rows, size, 1),
        "timesteps": torch.arange(size).repeat(rows, 1),
        "attention_mask": torch.ones(rows, size, dtype=torch.long),
    }


ctc = partial(exhibit, batch=sounds, base=WAVE)
patches = partial(
    exhibit,
    batch=history,
    base={"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "loss": "mse"},
    patch_length=4,
    patch_stride=4,
)

SOUNDS = [
    exhibit(
        "Whisper",
        "WhisperForConditionalGeneration",
        spectra,
        base=SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
    ),
    exhibit(
        "Speech2Text",
        "Speech2TextForConditionalGeneration",
        turned_spectra,
        base=SEQ2SEQ,
        input_feat_per_channel=8,
        num_conv_layers=1,
        conv_kernel_sizes=[3],
        conv_channels=8,
        max_source_positions=64,
        max_target_positions=32,
    ),
    ctc("Wav2Vec 2, CTC", "Wav2Vec2ForCTC"),
    ctc("HuBERT, CTC", "HubertForCTC"),
    ctc("WavLM, CTC", "WavLMForCTC", num_buckets=8, max_bucket_distance=8),
    ctc("SEW, CTC", "SEWForCTC", squeeze_factor=2),
    ctc(
        "Conformer, CTC",
        "Wav2Vec2ConformerForCTC",
        conv_depthwise_kernel_size=3,
        position_embeddings_type="relative",
        made={"meets": NORM},
    ),
    exhibit(
        "Wav2Vec 2, a class a sound",
        "Wav2Vec2ForSequenceClassification",
        classified_sounds,
        base=WAVE,
    ),
    exhibit(
        "Audio Spectrogram Transformer",
        "ASTForAudioClassification",
        spectrograms,
        base={**IMAGE, "max_length": 12, "num_mel_bins": 16},
        made={"sizes": (1, 1)},
    ),
    exhibit(
        "EnCodec",
        "EncodecModel",
        waves,
        base={"num_filters": 4, "hidden_size": 8, "codebook_size": 8, "codebook_dim": 8},
        upsampling_ratios=[2, 2],
        num_lstm_layers=1,
        made={"loss": squares},
    ),
    # time series
    patches(
        "PatchTST",
        "PatchTSTForPrediction",
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=3,
        ffn_dim=24,
        made={"sizes": (1, 1), "meets": NORM},
    ),
    patches(
        "PatchTSMixer", "PatchTSMixerForPrediction", d_model=8, num_layers=3, made={"sizes": (1, 1)}
    ),
    exhibit(
        "Time Series Transformer",
        "TimeSeriesTransformerForPrediction",
        sales,
        base={key: value for key, value in SEQ2SEQ.items() if key != "vocab_size"},
        prediction_length=4,
        context_length=8,
        num_time_features=1,
        made={"sizes": (1, 1)},
    ),
    exhibit(
        "Decision Transformer",
        "DecisionTransformerModel",
        games,
        state_dim=5,
        act_dim=2,
        max_ep_len=20,
        made={"loss": squares},
    ),
]
