"""The models of the zoo that are written here, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import models_forms as forms
from tests.models import models_habits as habits
from tests.models import models_images as images
from tests.models import models_sequences as sequences
from tests.models import models_vision as vision
from tests.models.architecture import Architecture, Batch, numbers, one_of, squares, tokens

IMAGES = (16, 24)
NORM = "BatchNorm normalises what it sees"


def image(rows: int, size: int) -> Batch:
    return (numbers(rows, 3, size, size),)


def ids(rows: int, size: int) -> Batch:
    return (tokens(rows, size),)


def of_width(width: int) -> Callable[[int, int], Batch]:
    return lambda rows, size: (numbers(rows, size, width),)


def here(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int, int], Batch],
    loss: Callable[[Any], Tensor] | None = squares,
    **more: Any,
) -> Architecture:
    return Architecture(name, "here", build, batch, loss=loss, **more)


# ---- batches with several inputs ----------------------------------------------------------


def noisy_images(rows: int, size: int) -> Batch:
    return {"sample": numbers(rows, 3, size, size), "timestep": torch.arange(rows) * 7}


def with_mask(rows: int, size: int) -> Batch:
    mask = torch.ones(rows, size, dtype=torch.bool)
    mask[::2, -2:] = False
    return {"data": numbers(rows, size, 5), "mask": mask}


def texts_with_mask(rows: int, size: int) -> Batch:
    mask = torch.ones(rows, size, dtype=torch.long)
    mask[1::2, size // 2 :] = 0
    return {"input_ids": tokens(rows, size), "attention_mask": mask}


def texts_with_targets(rows: int, size: int) -> Batch:
    return (tokens(rows, size), tokens(rows, size).roll(-1, 1))


def pairs_of_texts(rows: int, size: int) -> Batch:
    after = tokens(rows, size + 1)
    return (tokens(rows, size), after, after.roll(-1, 1))


def source_and_target(rows: int, size: int) -> Batch:
    return (tokens(rows, size), tokens(rows, size - 1))


def features(rows: int, size: int) -> Batch:
    return {"features": numbers(rows, size, 3), "target": numbers(rows, size, 2)}


def modalities(rows: int, size: int) -> Batch:
    parts = {"image": {"data": numbers(rows, 4, 5)}, "text": {"data": tokens(rows, size)}}
    mask = torch.ones(rows, size + 4, dtype=torch.bool)
    mask[:, -1] = False
    return ({"inputs": parts, "mask": mask}, {"pool": "mean", "depth": 3})


def graph(rows: int, size: int) -> Batch:
    adjacency = (numbers(rows, size, size) > 0.3).double()
    return {"nodes": numbers(rows, size, 3), "adjacency": adjacency}


def captioned(rows: int, size: int) -> Batch:
    return {"image": numbers(rows, 3, 8, 8), "text": tokens(rows, size)}


def two(rows: int, size: int) -> Batch:
    return (numbers(rows, size, 5), numbers(rows, size + 1, 5)[:, 1:])


def tasks(rows: int, size: int) -> Batch:
    return (numbers(rows, size, 3), one_of(rows, 40))


def waves(rows: int, size: int) -> Batch:
    return (numbers(rows, 1, 2 * size),)


def options(rows: int, size: int) -> Batch:
    mask = torch.ones(rows, size)
    mask[:, -1] = 0 if size > 7 else 1
    return {"x": numbers(rows, size, 4), "mask": mask, "twice": True}


HERE = [
    here("ResNet", images.ResNet, image, sizes=IMAGES, meets=NORM),
    here("U-Net", images.UNet, image, sizes=(16, 20)),
    here("DenseNet", images.DenseNet, image, sizes=(8, 12), meets=NORM),
    here("diffusion U-Net", images.DiffusionUNet, noisy_images, sizes=(8, 12)),
    here("detector with a pyramid", images.Detector, image, sizes=IMAGES),
    here("ViT", vision.ViT, image, sizes=IMAGES),
    here("nn.TransformerEncoder", vision.TorchViT, image, sizes=(8, 12)),
    here("Swin", vision.Swin, image, sizes=(16, 24)),
    here("MLP-Mixer", vision.Mixer, image, sizes=(8, 12)),
    here("Perceiver", vision.Perceiver, with_mask),
    here("nanoGPT", sequences.NanoGPT, texts_with_targets, lambda output: output[1]),
    here("encoder-decoder, tied", sequences.EncoderDecoder, pairs_of_texts, None),
    here("nn.Transformer", sequences.TorchTranslator, source_and_target),
    here("ALBERT", sequences.Albert, texts_with_mask),
    here("mixture of experts", sequences.MixtureOfExperts, ids),
    here("LSTM stack", sequences.LSTMStack, ids),
    here("GRU cells, unrolled", sequences.Unrolled, of_width(4), sizes=(4, 5)),
    here("Mamba", sequences.Mamba, ids),
    here("RWKV", sequences.RWKV, ids),
    here("dataclass, keyword-only inputs", forms.Regression, features, None),
    here("NamedTuple of heads", forms.ActorCritic, of_width(4)),
    here("nested dicts, ModuleDict", forms.Multimodal, modalities),
    here("graph net", forms.GraphNet, graph),
    here("CLIP towers", forms.TwoTowers, captioned, None, meets="its loss compares all rows"),
    here("Siamese", forms.Siamese, two),
    here("branches", forms.Branches, of_width(4)),
    here("WaveNet", forms.WaveNet, waves),
    here("hypernetwork, a task a row", forms.HyperNetwork, tasks),
    here("hypernetwork", forms.SharedHyperNetwork, of_width(3)),
    here("autoencoder", forms.Autoencoder, of_width(6), None),
    here("attributes set in forward", habits.Remembering, of_width(4)),
    here("in-place glue", habits.InPlace, ids),
    here("checkpoint around blocks", habits.Checkpointed, of_width(5)),
    here("checkpoint around all blocks", habits.Region, of_width(6)),
    here("compiled blocks", habits.Compiled, of_width(5), warns="The .grad attribute of a Tensor"),
    here("hooks", habits.Hooked, of_width(4)),
    here("features by hooks", habits.Features, of_width(4)),
    here("buffers that count", habits.Counting, of_width(4), meets=NORM),
    here("blocks in a generator", habits.Generated, of_width(4)),
    here("options and side inputs", habits.Configured, options),
]
