"""Train a GPT on lines such as "7 x 8 = 56", and let it write some.

    python -m nanogpt.train             in the folder examples; a few seconds on a CPU

The loop has what nanoGPT's has: batches drawn at random, gradient accumulation, clipping, a cosine
schedule with warm-up, an estimate of both losses every few steps, and a sample at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from nanogpt.model import GPT, GPTConfig


@dataclass
class Settings:
    """The options of a run."""

    steps: int = 100
    rows: int = 8
    accumulation: int = 4
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 25
    evaluation_batches: int = 4
    sample: int = 80
    dtype: torch.dtype = torch.float32


@dataclass
class Run:
    """What a run prints: (training loss, gradient norm) by step, both losses, and a text."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    text: str = ""


def train(settings: Settings) -> Run:
    """Train a model, and return its losses and a sample."""
    torch.manual_seed(1337)
    text = "".join(f"{i} x {j} = {i * j}\n" for i in range(1, 40) for j in range(1, 40))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}
    config = GPTConfig(vocabulary=len(letters))

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        source = splits[split]
        starts = torch.randint(len(source) - config.context, (settings.rows,)).tolist()
        x = torch.stack([source[i : i + config.context] for i in starts])
        y = torch.stack([source[i + 1 : i + 1 + config.context] for i in starts])
        return x, y

    def get_learning_rate(step: int) -> float:
        if step < settings.warmup:
            return settings.learning_rate * (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
        return settings.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    x, y = get_batch("train")
    model: Any = GPT(config).to(settings.dtype)
    optimizer = model.configure_optimizers(settings.weight_decay, settings.learning_rate)

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        model.eval()
        means = {}
        for split in splits:
            losses = []
            for _ in range(settings.evaluation_batches):
                _, loss = model(*get_batch(split))
                losses.append(loss.item())
            means[split] = sum(losses) / len(losses)
        model.train()
        return means

    run = Run()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_learning_rate(step)
        if step % settings.evaluate_every == 0:
            run.evaluations.append(estimate_loss())
            print(f"step {step}: {run.evaluations[-1]}")
        total = 0.0
        for _ in range(settings.accumulation):
            _, loss = model(x, y)
            (loss / settings.accumulation).backward()
            total += loss.item() / settings.accumulation
            x, y = get_batch("train")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        run.steps.append((total, norm.item()))

    model.eval()
    start = torch.tensor([[letters.index("\n")]])
    ids = model.generate(start, max_new_tokens=settings.sample, temperature=0.8, top_k=10)
    run.text = "".join(letters[i] for i in ids[0].tolist())
    print(run.text)
    return run


if __name__ == "__main__":
    train(Settings())
