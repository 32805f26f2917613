"""For layers that ask."""

from penstock.stage.recompute import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
