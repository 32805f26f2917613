"""`GPipe`."""

from penstock.compat.gpipe import BalancedLegacyPipe

__all__ = ["GPipe"]


class GPipe(BalancedLegacyPipe):
    """A Sequential cut by `balance` into partitions on `devices`."""
