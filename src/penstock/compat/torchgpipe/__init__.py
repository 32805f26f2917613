"""The mirror of `torchgpipe`."""

from penstock.compat.torchgpipe import balance, batchnorm, skip
from penstock.compat.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from penstock.compat.torchgpipe.gpipe import GPipe

__all__ = ["GPipe", "balance", "batchnorm", "is_checkpointing", "is_recomputing", "skip"]

__version__ = "0.0.7"  # the release that is mirrored
