"""The mirror of `torch.distributed.pipeline.sync`, which PyTorch dropped in 2.4."""

from penstock.compat.torch_sync import batchnorm, skip, utils
from penstock.compat.torch_sync.checkpoint import is_checkpointing, is_recomputing
from penstock.compat.torch_sync.microbatch import NoChunk
from penstock.compat.torch_sync.pipe import Pipe, WithDevice

__all__ = [
    "NoChunk",
    "Pipe",
    "WithDevice",
    "batchnorm",
    "is_checkpointing",
    "is_recomputing",
    "skip",
    "utils",
]
