"""Vision models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.models.architecture import Architecture, Batch, numbers, one_of, squares
from tests.models.hugging_face import IMAGE, exhibit, images, noise

NORM = "BatchNorm normalises what it sees"
LARGER = {"sizes": (16, 32)}
RESIZED = {"sizes": (8, 12)}
FOUR: dict[str, Any] = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}  # levels
DETECTOR: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_queries": 3,
    "num_labels": 3,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
}


# ---- batches ------------------------------------------------------------------------------


def masks(rows: int, size: int) -> dict[str, Any]:
    """Return images with a class for each pixel."""
    labels = torch.arange(size * size).reshape(1, size, size).repeat(rows, 1, 1) % 3
    return {"pixel_values": numbers(rows, 3, size, size), "labels": labels}


def pixels(rows: int, size: int) -> dict[str, Any]:
    """Return images without labels."""
    return {"pixel_values": numbers(rows, 3, size, size)}


def stretched(rows: int, size: int) -> dict[str, Any]:
    """Return images of another size, for which position embeddings are interpolated."""
    return {**images(rows, size), "interpolate_pos_encoding": True}


def hidden_patches(rows: int, size: int) -> dict[str, Any]:
    """Return images with the mask of hidden patches."""
    return {
        "pixel_values": numbers(rows, 3, size, size),
        "noise": noise(rows, size * size // 16),
        "interpolate_pos_encoding": True,
    }


def films(rows: int, size: int) -> dict[str, Any]:
    """Return videos of two frames, with a class."""
    return {"pixel_values": numbers(rows, 2, 3, size, size), "labels": one_of(rows, 2)}


# ---- exhibits -----------------------------------------------------------------------------


def image(
    name: str, kind: str, batch: Callable[[int, int], Batch] = images, **settings: Any
) -> Architecture:
    return exhibit(name, kind, batch, base=IMAGE, **settings)


def convolutions(name: str, kind: str, meets: str = "", **settings: Any) -> Architecture:
    made = {**LARGER, "meets": meets}
    return image(name, kind, hidden_sizes=[8, 16], depths=[2, 2], made=made, **settings)


swin = partial(
    exhibit,
    batch=images,
    base={"num_labels": 2, "image_size": 32, "patch_size": 4, "window_size": 2},
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 2],
    made=LARGER,
)
detector = partial(
    exhibit, batch=pixels, base=DETECTOR, made={"sizes": (32, 48), "loss": squares, "meets": NORM}
)

IMAGES = [
    image("ViT", "ViTForImageClassification", stretched, made=RESIZED),
    image("DeiT", "DeiTForImageClassification", stretched, made=RESIZED),
    image("BEiT", "BeitForImageClassification", stretched, made=RESIZED),
    image("DINOv2", "Dinov2ForImageClassification", made={**RESIZED, "single": True}),
    image(
        "DINOv2, registers",
        "Dinov2WithRegistersForImageClassification",
        made={**RESIZED, "single": True},
    ),
    image("YOLOS", "YolosModel", pixels, image_size=[8, 8], made={**RESIZED, "loss": squares}),
    image("I-JEPA", "IJepaForImageClassification", stretched, made=RESIZED),
    image(
        "ViT-MAE",
        "ViTMAEForPreTraining",
        hidden_patches,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=24,
        made=RESIZED,
    ),
    image(
        "TimeSformer",
        "TimesformerForVideoClassification",
        films,
        num_frames=2,
        made={"sizes": (8, 8)},
    ),
    swin("Swin", "SwinForImageClassification"),
    swin("Swin v2", "Swinv2ForImageClassification"),
    convolutions("ConvNeXt", "ConvNextForImageClassification", num_stages=2),
    convolutions("ConvNeXt v2", "ConvNextV2ForImageClassification", num_stages=2),
    convolutions(
        "ResNet", "ResNetForImageClassification", NORM, embedding_size=8, layer_type="basic"
    ),
    image(
        "MobileNet v2",
        "MobileNetV2ForImageClassification",
        depth_multiplier=0.1,
        min_depth=4,
        made={"sizes": (32, 48), "meets": NORM},
    ),
    image("PoolFormer", "PoolFormerForImageClassification", **FOUR, made={"sizes": (32, 64)}),
    image(
        "PVT v2",
        "PvtV2ForImageClassification",
        **FOUR,
        num_attention_heads=[1, 1, 2, 2],
        made={"sizes": (32, 64)},
    ),
    image(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        masks,
        **FOUR,
        num_labels=3,
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
        made={"sizes": (32, 64), "meets": NORM},
    ),
    image(
        "DPT",
        "DPTForDepthEstimation",
        pixels,
        num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        image_size=16,
        made={"sizes": (16, 24), "loss": squares, "meets": NORM},
    ),
    image(
        "MobileViT",
        "MobileViTForImageClassification",
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 8],
        patch_size=2,
        made={"sizes": (64, 96), "meets": NORM},
    ),
    exhibit(
        "UperNet",
        "UperNetForSemanticSegmentation",
        masks,
        base={"num_labels": 3, "hidden_size": 8, "pool_scales": [1, 2]},
        auxiliary_in_channels=8,
        auxiliary_channels=8,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config={
            "model_type": "convnext",
            "num_stages": 4,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
            **FOUR,
        },
        made={"sizes": (32, 64), "meets": NORM},
    ),
    detector("DETR", "DetrForObjectDetection"),
    detector("Conditional DETR", "ConditionalDetrForObjectDetection"),
]
