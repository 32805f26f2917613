"""A byte-level transformer, as a flat Sequential, so that it can be cut between any two layers."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ArgumentError

# -------------------------------------------------------------------------------------------------
# Text to learn from: the sources of Python's standard library.
# -------------------------------------------------------------------------------------------------

ByteBatch = tuple[Tensor, Tensor]  # bytes, and for each of them the one that comes next


def load_stdlib_text(directory: Path | None = None) -> Tensor:
    """Every module at the top of the standard library, in order of their names, as bytes.

    >>> len(load_stdlib_text()) > 1_000_000
    True
    """
    directory = directory or Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    if not text:
        raise ArgumentError(f"there is nothing to learn from: no Python sources in {directory}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def iter_random_batches(text: Tensor, rows: int, context: int, seed: int) -> Iterator[ByteBatch]:
    """Random pieces of the text, without end."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
        pieces = text[starts + within].long()
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def move_batch(device: torch.device, batch: ByteBatch) -> ByteBatch:
    """The same batch, there."""
    return batch[0].to(device), batch[1].to(device)


# -------------------------------------------------------------------------------------------------

VOCABULARY_SIZE = 256


@dataclass(frozen=True)
class DemoSize:
    """Of the model, and of the batches it learns from."""

    width: int
    blocks: int
    heads: int
    context: int
    rows: int


# A hundred steps take half a minute on two cores, or on a GPU. Micro-batches much smaller than
# an eighth of these spend their time between operations, and gain little from a pipeline.
CPU_SIZE = DemoSize(width=192, blocks=2, heads=4, context=64, rows=64)
GPU_SIZE = DemoSize(width=512, blocks=8, heads=8, context=256, rows=64)


class ByteEmbedding(nn.Module):
    """What a byte is, and where it stands."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY_SIZE, size.width)
        self.position = nn.Embedding(size.context, size.width)

    def forward(self, text: Tensor) -> Tensor:
        """Rows of bytes become rows of vectors."""
        vectors: Tensor = self.byte(text) + self.position.weight[: text.shape[1]]
        return vectors


class TransformerBlock(nn.Module):
    """Attention to what came before, and a small network, each after a norm and beside a bypass."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        x = x + self._attend(self.attention_norm(x))
        added: Tensor = self.mlp(self.mlp_norm(x))
        return x + added

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        apart = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = apart.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        answer: Tensor = self.projection(found.transpose(1, 2).reshape(rows, length, width))
        return answer


def build_byte_transformer(size: DemoSize, seed: int = 0) -> nn.Sequential:
    """Embedding, blocks, a norm, and the head that says which byte comes next.

    >>> model = build_byte_transformer(DemoSize(width=8, blocks=2, heads=2, context=16, rows=4))
    >>> model(torch.zeros(4, 16, dtype=torch.long)).shape
    torch.Size([4, 16, 256])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            ByteEmbedding(size),
            *(TransformerBlock(size) for _ in range(size.blocks)),
            nn.LayerNorm(size.width),
            nn.Linear(size.width, VOCABULARY_SIZE),
        )


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all positions; log(256) = 5.5 is what guessing costs."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
