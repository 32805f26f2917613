"""Provide models for `penstock check`; `broken` has a layer that a pipe cannot reproduce.

cd examples
penstock check check_mine:make
penstock check check_mine:broken --schedules gpipe,1f1b
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Centred(nn.Module):
    """Subtract the mean over the batch, so that each row depends on all others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def make() -> tuple[nn.Sequential, Tensor, Tensor, nn.Module]:
    """Return (model, batch, target, loss_fn) of an ordinary model."""
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
    """Return the same as a dict, with a layer that mixes the rows of a batch."""
    layers, batch, target, loss_fn = make()
    layers[4] = Centred()
    return {"model": layers, "batch": batch, "target": target, "loss_fn": loss_fn}
