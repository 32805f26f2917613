"""Models that are not Sequentials, for tests of traced models over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, dropout

from penstock import Pipe
from tests.oracle import Batch, Outcome, run_parts, sizes_of

WIDE, WORDS = 8, 13


class Block(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.inner = nn.Linear(WIDE, 2 * WIDE)
        self.outer = nn.Linear(2 * WIDE, WIDE)
        self.register_buffer("scale", torch.full((WIDE,), 0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.outer(torch.tanh(self.inner(self.norm(x)))) * self.scale
        return x + (y if mask is None else y * mask)


class LanguageModel(nn.Module):
    """A model like GPT-2, with learned positions, a list of blocks and a tied embedding."""

    weights: Tensor

    def __init__(self, blocks: int = 4, tied: str = "layer", drop: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.places = nn.Parameter(torch.randn(16, WIDE) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDE)
        self.tied, self.drop = tied, drop
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 16))
        if tied != "glue":
            self.head = nn.Linear(WIDE, WORDS, bias=False)
        if tied == "layer":
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        length = ids.shape[1]
        weights = self.weights[:length, None]
        if mask is not None and not bool(mask.all()):
            weights = weights * mask[..., None]
        x = self.words(ids) + self.places[:length]
        x = dropout(x, self.drop, self.training)
        first = x
        for block in self.blocks:
            x = block(x, weights)
        x = self.norm(x + first)
        scores = x @ self.words.weight.T if self.tied == "glue" else self.head(x)
        if labels is None:
            return {"scores": scores}
        return {"scores": scores, "loss": cross_entropy(scores.flatten(0, 1), labels.flatten())}


class EncoderDecoder(nn.Module):
    """An encoder and a decoder whose blocks all take the encoder's output.

    One block is used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(CrossAttention() for _ in range(3))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, ids: Tensor, said: Tensor, labels: Tensor | None = None) -> Any:
        x = self.words(ids)
        for block in (*self.encoder, self.encoder[0]):
            x = block(x)
        y = self.words(said)
        for block in self.decoder:
            y = block(y, x)
        scores = self.head(y)
        if labels is None:
            return scores
        return cross_entropy(scores.flatten(0, 1), labels.flatten())


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.block = nn.Linear(WIDE, WIDE), Block()

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        found: Tensor = self.block(y + torch.softmax(self.query(y) @ x.mT, -1) @ x)
        return found


def build(kind: str) -> nn.Module:
    torch.manual_seed(7)
    model = EncoderDecoder() if kind == "translator" else LanguageModel(tied=kind)
    return model.double()


def token_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (rows, length), generator=made)


def batches(kind: str) -> Iterator[dict[str, Any]]:
    """Yield batches of two lengths and several sizes, with and without masked positions."""
    for rows, length, seed in ((4, 5, 1), (6, 7, 2), (4, 5, 3), (3, 5, 4)):
        ids = token_ids(rows, length, seed)
        if kind == "translator":
            yield {
                "ids": ids,
                "said": token_ids(rows, length + 1, seed),
                "labels": token_ids(rows, length + 1),
            }
            continue
        mask = torch.ones(rows, length)
        yield {"ids": ids, "mask": mask, "labels": ids}
        mask = mask.clone()
        mask[:, -2:] = 0
        yield {"ids": ids, "mask": mask, "labels": ids}


def first_batch(kind: str) -> dict[str, Any]:
    return next(batches(kind))


def unsplit(model: nn.Module, chunks: int, given: dict[str, Any]) -> Outcome:
    """Train the unsplit model micro-batch by micro-batch, as a step without outputs does."""
    sizes = sizes_of(len(given["ids"]), chunks)
    found = run_parts(model, Batch((), given), sizes=sizes)
    return replace(found, output=None, metrics=None)


def pipe_of(model: nn.Module, example: Any, **options: Any) -> Pipe:
    """Return this rank's part of a pipe over all processes, by default with two stages."""
    given: dict[str, Any] = {"stages": 2, "group": distributed.group.WORLD, **options}
    return Pipe(model, 2, example=example, **given)
