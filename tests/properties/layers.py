"""The layers of random models. Each maps rows of four numbers to rows of four numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock import add_loss
from tests.features.rows import Remembering

WIDTH = 4


class Weighted(nn.Module):
    """A layer with a square weight and a function of the input and the weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class InParts(nn.Module):
    """A module that gets each row reshaped, by default to two by two; its output is flattened."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape or (2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.inner(x.reshape(-1, *self.shape))
        y: Tensor = found[0] if isinstance(found, tuple) else found
        return y.reshape(-1, WIDTH)


class Attention(nn.MultiheadAttention):
    """Self-attention between the parts of a row."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = super().forward(x, x, x, need_weights=False)[0]
        return y


class Embedded(nn.Embedding):
    """A residual embedding, looked up by the sum of the absolute values of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward((x.detach().abs().sum(1) * 2).long() % WIDTH)


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.up(self.down(x))
        return y


class Penalised(nn.Linear):
    """A layer that calls `add_loss`."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        add_loss(0.1 * y.square().mean())
        return y


class Checkpointed(nn.Linear):
    """A layer that uses `torch.utils.checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._again, x, use_reentrant=False)
        return y

    def _again(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


def _by_hand(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return y


def _twice(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(functional.linear(x, weight).tanh(), weight.t())


def _batched(x: Tensor, weight: Tensor) -> Tensor:
    pieces = x.reshape(-1, 2, 2).transpose(0, 1)
    return torch.bmm(pieces, weight.view(4, 2, 2)[:2]).transpose(0, 1).reshape(-1, WIDTH)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": nn.Tanh,
    "nothing": nn.Identity,
    "in place": lambda: nn.LeakyReLU(
        0.5, inplace=True
    ),  # applying it twice differs from applying it once
    "dropout": nn.Dropout,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm of parts": lambda: InParts(nn.BatchNorm1d(2)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "product": lambda: Weighted(lambda x, weight: x @ weight),
    "sum": lambda: Weighted(lambda x, weight: torch.addmm(x, x, weight)),
    "batched": lambda: Weighted(_batched),
    "each": lambda: Weighted(lambda x, weight: x * weight[1] + weight.sum(0)),
    "twice": lambda: Weighted(_twice),
    "both ways": lambda: Weighted(lambda x, weight: x @ weight + x * weight[0]),
    "by hand": lambda: Weighted(_by_hand),
    "embedding": lambda: Embedded(WIDTH, WIDTH),
    "convolution": lambda: InParts(nn.Conv1d(2, 2, 3, padding=1)),
    "plane": lambda: InParts(nn.Conv2d(1, 1, 3, padding=1, bias=False), 1, 2, 2),
    "transposed": lambda: InParts(nn.ConvTranspose1d(2, 2, 1)),
    "attention": lambda: InParts(Attention(2, 1, batch_first=True)),
    "attention with dropout": lambda: InParts(Attention(2, 1, 0.5, batch_first=True)),
    "block": lambda: InParts(nn.TransformerEncoderLayer(2, 1, 4, 0.3, batch_first=True)),
    "recurrent": lambda: InParts(nn.GRU(2, 2, batch_first=True)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "adapter": Adapted,
    "added": lambda: Penalised(WIDTH, WIDTH),
    "memory": lambda: Remembering(replaces=False),
    "new memory": lambda: Remembering(replaces=True),
    "checkpointed": lambda: Checkpointed(WIDTH, WIDTH),
    "inner chain": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH)),
}

# Layers whose square weight can be tied to that of another layer.
TIED = (
    *("linear", "without bias", "product", "sum", "batched", "each", "twice", "both ways"),
    *("by hand", "embedding"),
)
# Layers whose output for a row depends on other rows, on random numbers, or on earlier calls.
MIXING = (
    *("dropout", "attention with dropout", "block", "batch norm", "batch norm of parts"),
    *("spectral norm", "memory", "new memory"),
)
# Layers whose output is a new tensor that no backward needs: it may be changed in place.
FRESH = ("linear", "without bias", "batch norm", "layer norm", "convolution", "adapter")
# Layers whose gradients have the same order and formulas in a full and in a split backward.
EXACT = (
    *("linear", "tanh", "nothing", "in place", "dropout", "batch norm", "layer norm", "product"),
    *("without bias", "convolution", "weight norm", "memory", "skip"),
)
