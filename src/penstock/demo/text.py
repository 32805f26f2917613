"""Text to learn from: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ArgumentError

ByteBatch = tuple[Tensor, Tensor]  # bytes, and for each of them the one that comes next


def load_stdlib_text(directory: Path | None = None) -> Tensor:
    """Every module at the top of the standard library, in order of their names, as bytes.

    >>> len(stdlib_text()) > 1_000_000
    True
    """
    directory = directory or Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    if not text:
        raise ArgumentError(f"there is nothing to learn from: no Python sources in {directory}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def iter_random_batches(text: Tensor, rows: int, context: int, seed: int) -> Iterator[ByteBatch]:
    """Random pieces of the text, without end."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
        pieces = text[starts + within].long()
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def move_batch(device: torch.device, batch: ByteBatch) -> ByteBatch:
    """The same batch, there."""
    return batch[0].to(device), batch[1].to(device)
