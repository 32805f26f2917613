"""The mirror of `fairscale.nn`."""

from penstock.compat.fairscale.nn import pipe
from penstock.compat.fairscale.nn.pipe import Pipe

__all__ = ["Pipe", "pipe"]
