"""`Pipe`."""

from penstock.compat.gpipe import BalancedLegacyPipe

__all__ = ["Pipe"]


class Pipe(BalancedLegacyPipe):
    """A Sequential cut by `balance` into partitions on `devices`."""
