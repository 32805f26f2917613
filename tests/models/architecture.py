"""What an exhibit of the zoo is: a model, batches for it, and what its loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Any, ...] | dict[str, Any]  # inputs by place, or by name
OfMicrobatch = Callable[[Any], Tensor]

SEED = 7


@dataclass(frozen=True)
class Architecture:
    """A model, and batches of so many rows and such a size (a length, or that of an image)."""

    name: str
    source: str  # where it comes from: here, transformers, peft
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    sizes: tuple[int, int] = (6, 9)
    loss: OfMicrobatch | None = None  # of the output; without it the model gives its own
    meets: str = ""  # why rows of a batch meet, so that parts of it give other numbers
    single: bool = False  # some of it, beside its loss, computes in float32
    counts: Callable[[Any], int] | None = None  # what a part of a batch counts for; its rows
    warns: str = ""  # what it is warned of, rightly
    units: Any = None  # what a unit is, where the rule does not say it well

    def made(self) -> nn.Module:
        """The model, in float64: the same at each call."""
        torch.manual_seed(SEED)
        return self.build().double()


def called(model: nn.Module, batch: Batch) -> Any:
    """What the model gives for it."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


# ---- losses and outputs -------------------------------------------------------------------


def squares(output: Any) -> Tensor:
    """A loss that every number of an output takes part in, each in another way."""
    terms = [_term(tensor) for _, tensor in tensors_in(output) if tensor.is_floating_point()]
    return torch.stack(terms).sum()


def _term(tensor: Tensor) -> Tensor:
    """A mean over rows: of so many equal parts it is the mean of their means."""
    return (tensor - 0.25).square().mean() + (2 * tensor).sin().mean()


def tensors_in(output: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Each tensor of an output with its place; in fields of dataclasses, too."""
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
    """Each batch has numbers of its own, the same at each call."""
    return torch.Generator().manual_seed(1000 * rows + size)


def numbers(*shape: int) -> Tensor:
    """Floats of float64, by shape."""
    return torch.randn(*shape, generator=drawn(*shape[:2]), dtype=torch.float64)


def tokens(rows: int, size: int, of: int = 40, least: int = 3) -> Tensor:
    """Ids of tokens, without those that models have for padding and ends."""
    return torch.randint(least, of, (rows, size), generator=drawn(rows, size))


def one_of(rows: int, many: int) -> Tensor:
    """A class for each row."""
    return torch.arange(rows) % many
