"""Where to cut."""

from penstock.compat.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
