"""The mirror of `fairscale.nn.pipe`."""

from penstock.compat.fairscale.nn.pipe import balance, batchnorm, skip
from penstock.compat.fairscale.nn.pipe.checkpoint import is_checkpointing, is_recomputing
from penstock.compat.fairscale.nn.pipe.pipe import Pipe

__all__ = ["Pipe", "balance", "batchnorm", "is_checkpointing", "is_recomputing", "skip"]
