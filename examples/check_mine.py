"""A model and a batch to check; `broken` has a layer that a pipe cannot compute as it is.

cd examples
penstock check check_mine:make
penstock check check_mine:broken --schedules gpipe,1f1b
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Centred(nn.Module):
    """Takes the mean of the batch away, so each row depends on all the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def make() -> tuple[nn.Sequential, Tensor, Tensor, nn.Module]:
    """(model, batch, target, loss_fn), and nothing special about them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 24),
        nn.GELU(),
        nn.Linear(24, 24),
        nn.LayerNorm(24),
        nn.Dropout(0.1),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 5),
    )
    return model, torch.randn(14, 12), torch.randint(5, (14,)), nn.CrossEntropyLoss()


def broken() -> dict[str, Any]:
    """The same, as a dict, with a layer that looks across rows."""
    layers, batch, target, loss_fn = make()
    layers[4] = Centred()
    return {"model": layers, "batch": batch, "target": target, "loss_fn": loss_fn}
