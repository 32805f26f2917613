"""Architectures with unusual inputs, outputs or graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.models_sequences import Block


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.GELU(), nn.Linear(8, outputs))


# ---- outputs ------------------------------------------------------------------------------


@dataclass
class Prediction:
    """An output as a dataclass, one field of which may be missing."""

    mean: Tensor
    spread: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


class Regression(nn.Module):
    """Returns a dataclass, with a loss if there is a target; keyword-only inputs."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))
        self.mean, self.spread = nn.Linear(dim, 2), nn.Linear(dim, 2)

    def forward(self, *, features: Tensor, target: Tensor | None = None) -> Prediction:
        x, hidden = self.inner(features), []
        for block in self.blocks:
            x = x + block(x)
            hidden.append(x)
        mean, spread = self.mean(x), F.softplus(self.spread(x)) + 0.1
        loss = None
        if target is not None:
            loss = (((target - mean) / spread).square() / 2 + spread.log()).mean()
        return Prediction(mean, spread, tuple(hidden), loss)


class Heads(NamedTuple):
    """An output by name and by place."""

    policy: Tensor
    value: Tensor


class ActorCritic(nn.Module):
    """Two heads on one trunk."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())
        self.policy, self.value = mlp(dim, 3), mlp(dim, 1)

    def forward(self, state: Tensor) -> Heads:
        h = self.trunk(state)
        return Heads(policy=self.policy(h).log_softmax(-1), value=self.value(h).squeeze(-1))


# ---- inputs -------------------------------------------------------------------------------


class Multimodal(nn.Module):
    """Takes nested dicts; an encoder for each modality is chosen by name."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({"image": mlp(5, dim), "text": nn.Embedding(40, dim)})
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.heads = nn.ModuleDict({"score": nn.Linear(dim, 1), "label": nn.Linear(dim, 3)})

    def forward(self, batch: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
        parts = [self.encoders[name](part["data"]) for name, part in batch["inputs"].items()]
        x = torch.cat(parts, dim=1)
        if "mask" in batch:
            x = x * batch["mask"][:, :, None].to(x.dtype)
        for block in self.blocks:
            x = block(x)
        pooled = x.mean(1) if options["pool"] == "mean" else x[:, 0]
        return {name: head(pooled) for name, head in self.heads.items()}


class GraphNet(nn.Module):
    """Message passing along an adjacency matrix that every layer takes as a side input."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(3, dim)
        self.messages = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.updates = nn.ModuleList(nn.GRUCell(dim, dim) for _ in range(layers))
        self.outer = nn.Linear(dim, 2)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        x = self.inner(nodes)
        for message, update in zip(self.messages, self.updates, strict=True):
            m = adjacency @ message(x) / degree
            x = update(m.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return self.outer(x)


# ---- graphs -------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """CLIP: a tower for images, one for texts, and a learned temperature at the root."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.GELU(), nn.Conv2d(4, dim, 3, 2, 1))
        self.token_embedding = nn.Embedding(40, dim)
        self.transformer = nn.ModuleList(Block(dim) for _ in range(3))
        self.ln_final = nn.LayerNorm(dim)
        self.text_projection = nn.Parameter(torch.randn(dim, 6) * 0.3)
        self.image_projection = nn.Parameter(torch.randn(dim, 6) * 0.3)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.0)

    def encode_image(self, image: Tensor) -> Tensor:
        return self.visual(image).mean((2, 3)) @ self.image_projection

    def encode_text(self, text: Tensor) -> Tensor:
        x = self.token_embedding(text)
        for block in self.transformer:
            x = block(x)
        last = text.argmax(dim=-1)
        return self.ln_final(x)[torch.arange(x.shape[0]), last] @ self.text_projection

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        images = F.normalize(self.encode_image(image), dim=1)
        texts = F.normalize(self.encode_text(text), dim=1)
        logits = self.logit_scale.exp() * images @ texts.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class Siamese(nn.Module):
    """One encoder for both inputs."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, dim), nn.ReLU(), nn.Linear(dim, dim), nn.Tanh())
        self.head = nn.Linear(dim, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        apart = (self.encoder(left) - self.encoder(right)).abs()
        return torch.sigmoid(self.head(apart)).squeeze(-1)


class Branches(nn.Module):
    """A diamond in a diamond: branches of different depths, which rejoin."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(4, dim)
        self.deep = nn.Sequential(*(mlp(dim, dim) for _ in range(3)))
        self.shallow = mlp(dim, dim)
        self.left, self.right = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(2 * dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        both = torch.cat([self.deep(stem), self.shallow(stem)], -1)
        left, right = self.left(both), self.right(both)
        left = left * torch.sigmoid(self.gate(stem)) + stem
        return self.out(torch.cat([left, right.relu()], -1))


class WaveNet(nn.Module):
    """Gated, dilated convolutions; the skip outputs of all layers are summed at the end."""

    def __init__(self, dim: int = 4, layers: int = 5) -> None:
        super().__init__()
        self.causal = nn.Conv1d(1, dim, 1)
        self.filters, self.gates = nn.ModuleList(), nn.ModuleList()
        self.residuals, self.skips = nn.ModuleList(), nn.ModuleList()
        for layer in range(layers):
            self.filters.append(nn.Conv1d(dim, dim, 2, dilation=2 ** (layer % 3)))
            self.gates.append(nn.Conv1d(dim, dim, 2, dilation=2 ** (layer % 3)))
            self.residuals.append(nn.Conv1d(dim, dim, 1))
            self.skips.append(nn.Conv1d(dim, dim, 1))
        self.end = nn.Conv1d(dim, 2, 1)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.causal(wave)
        total: Tensor | int = 0
        parts = zip(self.filters, self.gates, self.residuals, self.skips, strict=True)
        for filter_, gate, residual, skip in parts:
            padded = F.pad(x, (filter_.dilation[0], 0))
            z = torch.tanh(filter_(padded)) * torch.sigmoid(gate(padded))
            total = total + skip(z)
            x = x + residual(z)
        return self.end(F.relu(total))


class HyperNetwork(nn.Module):
    """The weights of the main network are computed by other units."""

    def __init__(self, dim: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.dim = dim
        self.task = nn.Embedding(40, 5)
        self.makers = nn.ModuleList(nn.Linear(5, dim * dim + dim) for _ in range(layers))
        self.inner, self.outer = nn.Linear(3, dim), nn.Linear(dim, 2)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        code = self.task(task)
        made = [maker(code).split([self.dim**2, self.dim], -1) for maker in self.makers]
        h = self.inner(x)
        for weight, bias in made:
            weight = weight.unflatten(-1, (self.dim, self.dim))
            h = torch.tanh(torch.baddbmm(bias.unsqueeze(1), h, weight))
        return self.outer(h)


class SharedHyperNetwork(nn.Module):
    """One set of computed weights for the whole batch, used by F.linear."""

    def __init__(self, dim: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(layers, 5))
        self.maker = nn.Linear(5, dim * dim)
        self.biases = nn.ParameterDict(
            {f"b{at}": nn.Parameter(torch.zeros(dim)) for at in range(3)}
        )
        self.inner, self.middle = nn.Linear(3, dim), nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for at, code in enumerate(self.codes):
            weight = self.maker(code).view(h.shape[-1], h.shape[-1])
            h = F.linear(h, weight, self.biases[f"b{at}"]).tanh()
            if at == 1:
                h = h + self.middle(h)
        return self.outer(h)


class Autoencoder(nn.Module):
    """A VAE without noise: two halves of one layer's output, and a loss of two terms."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2 * dim))
        self.decoder = nn.Sequential(nn.Linear(dim, 8), nn.ReLU(), nn.Linear(8, 6))
        self.register_buffer("prior", torch.ones(dim))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log = self.encoder(x).chunk(2, dim=-1)
        found = self.decoder(mean)
        divergence = 0.5 * (mean.square() / self.prior + log.exp() - log - 1).sum(-1).mean()
        loss = F.mse_loss(found, x) + 0.1 * divergence
        return {"loss": loss, "reconstruction": found, "mean": mean}
