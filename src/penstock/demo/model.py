"""The model and the data of the demo.

The model is a byte-level transformer. It is a flat `nn.Sequential`, so it can be cut between any
two layers. The data are the sources of Python's standard library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ArgumentError

# ---- data -----------------------------------------------------------------------------------

ByteBatch = tuple[Tensor, Tensor]  # bytes, and for each of them the next byte


def load_stdlib_text(directory: Path | None = None) -> Tensor:
    """Return all top-level modules of the standard library, sorted by name, as one byte tensor.

    >>> len(load_stdlib_text()) > 1_000_000
    True
    """
    directory = directory or Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    if not text:
        raise ArgumentError(f"there is no text to train on: no Python sources in {directory}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def iter_random_batches(text: Tensor, rows: int, context: int, seed: int) -> Iterator[ByteBatch]:
    """Yield batches of random pieces of the text, without end."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
        pieces = text[starts + offsets].long()
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def move_batch(device: torch.device, batch: ByteBatch) -> ByteBatch:
    """Return the batch on the device."""
    return batch[0].to(device), batch[1].to(device)


# ---- model ----------------------------------------------------------------------------------

VOCABULARY_SIZE = 256


@dataclass(frozen=True)
class DemoSize:
    """The size of the model and of the batches that it is trained on."""

    width: int
    blocks: int
    heads: int
    context: int
    rows: int


# A hundred steps take half a minute on two cores, or on a GPU. With micro-batches much smaller than
# an eighth of these batches, the overhead between operations dominates and a pipeline gains little.
CPU_SIZE = DemoSize(width=192, blocks=2, heads=4, context=64, rows=64)
GPU_SIZE = DemoSize(width=512, blocks=8, heads=8, context=256, rows=64)


class ByteEmbedding(nn.Module):
    """The sum of a byte embedding and a position embedding."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY_SIZE, size.width)
        self.position = nn.Embedding(size.context, size.width)

    def forward(self, text: Tensor) -> Tensor:
        """Return a vector for each byte."""
        vectors: Tensor = self.byte(text) + self.position.weight[: text.shape[1]]
        return vectors


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each with a pre-norm and a residual connection."""

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
        """Return a tensor of the same shape."""
        x = x + self._attend(self.attention_norm(x))
        residual: Tensor = self.mlp(self.mlp_norm(x))
        return x + residual

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.projection(heads.transpose(1, 2).reshape(rows, length, width))
        return output


def build_byte_transformer(size: DemoSize, seed: int = 0) -> nn.Sequential:
    """Return the model: embedding, blocks, norm, and a head that predicts the next byte.

    >>> model = build_byte_transformer(DemoSize(width=8, blocks=2, heads=2, context=16, rows=4))
    >>> model(torch.zeros(4, 16, dtype=torch.long)).shape
    torch.Size([4, 16, 256])
    """
    # The caller's random state stays as it is. The model is built on the CPU, so no GPU state is
    # touched.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            ByteEmbedding(size),
            *(TransformerBlock(size) for _ in range(size.blocks)),
            nn.LayerNorm(size.width),
            nn.Linear(size.width, VOCABULARY_SIZE),
        )


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy over all positions. A uniform guess costs log(256) = 5.5."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
