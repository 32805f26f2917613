"""A GPT that computes its own loss, builds its own optimizer and generates, in one small file.

Nothing here knows about pipelines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class GPTConfig:
    """The sizes of a GPT."""

    vocabulary: int
    context: int = 32
    layers: int = 4
    heads: int = 4
    width: int = 64
    dropout: float = 0.0


class Attention(nn.Module):
    """Each token looks at itself and at those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.project_in = nn.Linear(config.width, 3 * config.width)
        self.project_out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.project_in(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=dropout
        )
        output: Tensor = self.project_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return output


class Block(nn.Module):
    """Attention and a small network for each token, both added to the input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.network = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.network(self.norm_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A language model. The embedding and the output layer share their weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith(("project_out.weight", "network.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1]]), None  # the next token is all that `generate` needs
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.AdamW:
        """Return an optimizer that decays matrices, and neither biases nor norms."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(
        self, ids: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        """Continue each row by this many tokens, sampled from the likeliest `top_k`."""
        for _ in range(max_new_tokens):
            logits, _ = self(ids[:, -self.config.context :])
            logits = logits[:, -1] / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, [-1]]
                logits[logits < least] = -float("inf")
            next_ids = torch.multinomial(functional.softmax(logits, dim=-1), num_samples=1)
            ids = torch.cat([ids, next_ids], dim=1)
        return ids
