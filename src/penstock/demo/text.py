"""Text to learn from: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ArgumentError

Batch = tuple[Tensor, Tensor]  # bytes, and for each of them the one that comes next


def stdlib_text(folder: Path | None = None) -> Tensor:
    """Every module at the top of the standard library, in order of their names, as bytes.

    >>> len(stdlib_text()) > 1_000_000
    True
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise ArgumentError(f"there is nothing to learn from: no Python sources in {folder}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, rows: int, context: int, seed: int) -> Iterator[Batch]:
    """Random pieces of the text, without end."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
        pieces = text[starts + within].long()
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def on(device: torch.device, batch: Batch) -> Batch:
    """The same batch, there."""
    return batch[0].to(device), batch[1].to(device)
