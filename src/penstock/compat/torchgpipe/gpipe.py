"""`GPipe`."""

from penstock.compat.gpipe import Balanced

__all__ = ["GPipe"]


class GPipe(Balanced):
    """A Sequential cut by `balance` into partitions on `devices`."""
