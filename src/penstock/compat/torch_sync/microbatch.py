"""What is not to be cut."""

from penstock.batch import NoChunk

__all__ = ["NoChunk"]
