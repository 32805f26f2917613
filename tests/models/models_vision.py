"""Architectures that read patches of images: transformers, mixers, latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- ViT ----------------------------------------------------------------------------------


class EncoderBlock(nn.Module):
    """Pre-norm attention and an MLP."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """Class token and positions are parameters of the root."""

    def __init__(self, dim: int = 8, depth: int = 4, patch: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.1)
        self.blocks = nn.ModuleList(EncoderBlock(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def positions(self, tokens: int) -> Tensor:
        if tokens == self.pos_embed.shape[1] - 1:
            return self.pos_embed
        cls, grid = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        side, wanted = int(grid.shape[1] ** 0.5), int(tokens**0.5)
        grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(wanted, wanted), mode="bilinear")
        return torch.cat([cls, grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        positions = self.positions(x.shape[1])
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TorchViT(nn.Module):
    """nn.TransformerEncoder, with its fast path in eval mode."""

    def __init__(self, dim: int = 8, depth: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.proj = nn.Linear(12, dim)
        layer = nn.TransformerEncoderLayer(
            dim, 2, 2 * dim, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(dim))
        self.fc = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2)
        return self.fc(self.encoder(self.proj(patches)).mean(1))


# ---- Swin ---------------------------------------------------------------------------------


class Window(nn.Module):
    """Window attention with a table of relative positions and a mask for shifted windows."""

    def __init__(self, dim: int, side: int, heads: int = 2) -> None:
        super().__init__()
        self.side, self.heads = side, heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads) * 0.1)
        coords = torch.stack(torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + side - 1
        self.register_buffer("index", relative[..., 0] * (2 * side - 1) + relative[..., 1])

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(windows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        bias = self.table[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)
        scores = scores + bias[None]
        if mask is not None:
            many = mask.shape[0]
            scores = scores.view(-1, many, self.heads, tokens, tokens) + mask[None, :, None]
            scores = scores.view(-1, self.heads, tokens, tokens)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(windows, tokens, dim)
        return self.proj(x)


class SwinBlock(nn.Module):
    """Shifts, splits into windows, and reverses both."""

    def __init__(self, dim: int, side: int, shift: int) -> None:
        super().__init__()
        self.side, self.shift = side, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Window(dim, side)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, h, w, c = x.shape
        s = self.side
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.view(n, h // s, s, w // s, s, c).transpose(2, 3).reshape(-1, s * s, c)
        y = self.attn(y, mask if self.shift else None)
        y = y.view(n, h // s, w // s, s, s, c).transpose(2, 3).reshape(n, h, w, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Merging(nn.Module):
    """Four neighbours become one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """Recomputes the masks of shifted windows for each image size."""

    def __init__(self, dim: int = 8, side: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.side = side
        self.embed = nn.Conv2d(3, dim, 2, 2)
        self.layers = nn.ModuleList(
            nn.ModuleList([SwinBlock(d, side, 0), SwinBlock(d, side, side // 2)])
            for d in (dim, 2 * dim)
        )
        self.merge = Merging(dim)
        self.norm = nn.LayerNorm(2 * dim)
        self.head = nn.Linear(2 * dim, classes)

    def mask(self, h: int, w: int, like: Tensor) -> Tensor:
        s = self.side
        regions = torch.zeros((1, h, w, 1), device=like.device)
        cuts = (slice(0, -s), slice(-s, -(s // 2)), slice(-(s // 2), None))
        for i, rows in enumerate(cuts):
            for j, columns in enumerate(cuts):
                regions[:, rows, columns, :] = 3 * i + j
        windows = regions.view(1, h // s, s, w // s, s, 1).transpose(2, 3).reshape(-1, s * s)
        apart = windows[:, None, :] - windows[:, :, None]
        return apart.to(like.dtype).masked_fill(apart != 0, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for level, blocks in enumerate(self.layers):
            mask = self.mask(x.shape[1], x.shape[2], x)
            for block in blocks:
                x = block(x, mask)
            if level == 0:
                x = self.merge(x)
        return self.head(self.norm(x).mean((1, 2)))


# ---- MLP-Mixer ----------------------------------------------------------------------------


class MixerBlock(nn.Module):
    """Mixes tokens, then channels. The number of tokens is a dimension of its weights."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.within = nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """The blocks are a Sequential."""

    def __init__(self, tokens: int = 4, dim: int = 6, depth: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.side = int(tokens**0.5)
        self.stem = nn.Conv2d(3, dim, 2, 2)
        self.blocks = nn.Sequential(*(MixerBlock(tokens, dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.stem(x), self.side).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


# ---- Perceiver ----------------------------------------------------------------------------


class CrossBlock(nn.Module):
    """Latents attend to the data, then to each other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.itself = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())

    def forward(self, latents: Tensor, data: Tensor, ignored: Tensor | None = None) -> Tensor:
        latents = latents + self.cross(latents, data, data, key_padding_mask=ignored)[0]
        latents = latents + self.itself(latents, latents, latents)[0]
        return latents + self.mlp(latents)


class Perceiver(nn.Module):
    """Latents are a parameter of the root; the data goes to every block."""

    def __init__(self, dim: int = 8, latents: int = 3, depth: int = 4) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, dim) * 0.5)
        self.project = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(CrossBlock(dim) for _ in range(depth))
        self.decode = nn.Linear(dim, 4)

    def forward(self, data: Tensor, mask: Tensor | None = None) -> Tensor:
        data = self.project(data)
        latents = self.latents.unsqueeze(0).repeat(data.size(0), 1, 1)
        ignored = None if mask is None else ~mask
        for block in self.blocks:
            latents = block(latents, data, ignored)
        return self.decode(latents.mean(1))
