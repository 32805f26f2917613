"""What the processes of a pipe give each other, as the user wishes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataPolicy:
    """Who has the data, who gets the outputs, and whether shapes are learned or sent each time."""

    data: str = "all"
    outputs: str = "last"
    shapes: str = "learned"
