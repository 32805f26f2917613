"""`Pipe`."""

from penstock.compat.gpipe import Balanced

__all__ = ["Pipe"]


class Pipe(Balanced):
    """A Sequential cut by `balance` into partitions on `devices`."""
