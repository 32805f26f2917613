"""The mirror of what `fairscale` has for pipelines, and of nothing else."""

from penstock.compat.fairscale import nn
from penstock.compat.fairscale.nn import Pipe

__all__ = ["Pipe", "nn"]

__version__ = "0.4.13"  # the release that is mirrored
