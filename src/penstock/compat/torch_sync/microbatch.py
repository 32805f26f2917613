"""What is not to be cut."""

from penstock.microbatch import NoChunk

__all__ = ["NoChunk"]
