"""What one process has of a model, and under which names it is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.saving.team import Alone, Team

_COMPILED = "_orig_mod."  # torch.compile puts it into names; PyTorch's checkpoints leave it out


@dataclass(frozen=True)
class Holding:
    """The layers of this process, under the unsplit model's names, and with whom it saves.

    same     every further name of a tied tensor, with the one that it is saved under: of the
             whole model, and alike on every rank
    replica  which copy of the model this is part of, where there are several
    first    whether random numbers of that copy begin here
    """

    module: nn.Module
    same: Mapping[str, str]
    team: Team = field(default_factory=Alone)
    replica: int = 0
    first: bool = True

    def name(self, name: str) -> str:
        """The one that it is saved under."""
        return self.same.get(name, name)

    def names(self, name: str) -> list[str]:
        """All that the tensor has, the one that it is saved under first."""
        kept = self.name(name)
        return [kept, *(other for other, one in self.same.items() if one == kept)]

    def state(self) -> dict[str, tuple[str, Any]]:
        """What the state_dict has, each tied tensor once: its key there, and the value.

        A rank that has only another name's copy of a tied tensor has it under that name.
        """
        values = {plain(key): (key, value) for key, value in self.module.state_dict().items()}
        return {n: v for n, v in values.items() if self.name(n) == n or self.name(n) not in values}

    def parameters(self) -> dict[nn.Parameter, str]:
        """The name that each is saved under."""
        found = self.module.named_parameters(remove_duplicate=False)
        return {parameter: self.name(plain(name)) for name, parameter in found}


def plain(name: str) -> str:
    """The name without what torch.compile adds to it."""
    return name.replace(_COMPILED, "")


def tied_names(module: nn.Module) -> dict[str, str]:
    """The further names of tensors that have several, each with the first.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> layers[1].weight = layers[0].weight
    >>> tied_names(layers)
    {'1.weight': '0.weight'}
    """
    first: dict[torch.Tensor, str] = {}
    return {
        plain(name): kept
        for name, tensor in _tensors(module)
        if (kept := first.setdefault(tensor, plain(name))) != plain(name)
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
