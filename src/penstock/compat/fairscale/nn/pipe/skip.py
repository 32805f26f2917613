"""Skip connections."""

from penstock.compat.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
