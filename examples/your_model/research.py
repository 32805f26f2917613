"""Train a research model with features that are hard to split into a Sequential.

It has two inputs, experts, a block that runs twice, tied weights, and a dict as its output.

cd examples
python -m your_model.research
penstock check your_model.research:make --schedules 1f1b,zb-h1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock


class Experts(nn.Module):
    """A top-1 mixture of experts, which also returns a load-balancing loss."""

    def __init__(self, width: int, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        weight, best = probabilities.max(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        chosen = outputs.gather(-2, best[..., None].expand(*x.shape[:-1], 1, x.shape[-1]))
        return x + weight * functional.gelu(chosen.squeeze(-2)), probabilities.square().sum(
            -1
        ).mean()


class Research(nn.Module):
    """A model whose forward branches in Python on its mask, its sequence length and its options."""

    def __init__(self, words: int = 32, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(64, width))
        self.layers = nn.ModuleList(Experts(width) for _ in range(depth))
        self.mix = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        if not mask.all():  # the mask is an input, so every stage has it
            x = x * mask[..., None]
        balance = x.new_zeros(())
        for index, layer in enumerate(self.layers):
            x, layer_balance = layer(x)
            balance = balance + layer_balance
            if index % 2:
                x = x + self.mix(x)[0]  # the same block runs in several places
        logits = self.out(x)
        if labels is None:
            return {"logits": logits}
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.01 * balance, "logits": logits}


def riddles(rows: int, length: int) -> dict[str, Any]:
    """Return tokens whose labels are twice their value."""
    tokens = torch.randint(32, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.bool)
    return {"tokens": tokens, "mask": mask, "labels": 2 * tokens % 32}


def make() -> tuple[Research, dict[str, Any]]:
    """Return the model and a batch for `penstock check`."""
    torch.manual_seed(0)
    return Research(), riddles(rows=6, length=5)


def main(steps: int = 30) -> None:
    """Train the model on batches of two sequence lengths."""
    torch.set_num_threads(1)
    model, _ = make()
    pipe = penstock.Pipe(model, chunks=4, stages=3, example=riddles(16, 12), schedule="zb-h1")
    print(pipe.summary())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    for step in range(steps):
        result = pipe.step(**riddles(rows=16, length=12 if step % 2 else 20))
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {result.loss:.3f}")


if __name__ == "__main__":
    main()
