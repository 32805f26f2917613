"""An entry of the model zoo: a model, its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Any, ...] | dict[str, Any]  # positional or keyword inputs
OfMicrobatch = Callable[[Any], Tensor]

SEED = 7


@dataclass(frozen=True)
class Architecture:
    """A model, and batches by number of rows and size (a length, or the side of an image)."""

    name: str
    source: str  # here, transformers or peft
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    sizes: tuple[int, int] = (6, 9)
    loss: OfMicrobatch | None = None  # of the output; None if the model returns its loss
    meets: str = ""  # why rows of a batch affect each other, if they do
    pairs: bool = False  # it returns a value for each pair of rows; pipes refuse to join these
    single: bool = False  # part of it, besides its loss, computes in float32
    counts: Callable[[Any], int] | None = None  # weight of a micro-batch; default: rows
    warns: str = ""  # an expected warning
    units: Any = None  # the units, where the default is not suitable
    dtype: torch.dtype = torch.float64  # of the model and its batches

    def made(self) -> nn.Module:
        """Build the model, the same at each call."""
        torch.manual_seed(SEED)
        return self.build().to(self.dtype)


def called(model: nn.Module, batch: Batch) -> Any:
    """Call the model with a batch."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


# ---- losses and outputs -------------------------------------------------------------------


def squares(output: Any) -> Tensor:
    """Return a loss that depends on every number of an output."""
    terms = [_term(tensor) for _, tensor in tensors_in(output) if tensor.is_floating_point()]
    return torch.stack(terms).sum()


def _term(tensor: Tensor) -> Tensor:
    """Return a mean over rows: over equal parts it is the mean of their means."""
    return (tensor - 0.25).square().mean() + (2 * tensor).sin().mean()


def tensors_in(output: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return each tensor of an output with its path, including fields of dataclasses."""
    if isinstance(output, Tensor):
        return [(name, output)]
    if isinstance(output, Mapping):
        pairs = list(output.items())
    elif is_dataclass(output) and not isinstance(output, type):
        pairs = [(field.name, getattr(output, field.name)) for field in fields(output)]
    elif isinstance(output, tuple | list):
        pairs = list(enumerate(output))
    else:
        return []
    return [found for key, value in pairs for found in tensors_in(value, f"{name}.{key}")]


# ---- batches ------------------------------------------------------------------------------


def drawn(rows: int, size: int) -> torch.Generator:
    """Return a generator for a batch of this shape, the same at each call."""
    return torch.Generator().manual_seed(1000 * rows + size)


def numbers(*shape: int) -> Tensor:
    """Return random float64 numbers of a shape."""
    return torch.randn(*shape, generator=drawn(*shape[:2]), dtype=torch.float64)


def tokens(rows: int, size: int, of: int = 40, least: int = 3) -> Tensor:
    """Return token ids, without the special tokens for padding and ends."""
    return torch.randint(least, of, (rows, size), generator=drawn(rows, size))


def one_of(rows: int, many: int) -> Tensor:
    """Return a class for each row."""
    return torch.arange(rows) % many
