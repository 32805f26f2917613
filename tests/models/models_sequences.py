"""Architectures that read sequences: attention, recurrence, scans, experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- parts --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention with an additive mask."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        def by_head(t: Tensor) -> Tensor:
            return t.view(t.shape[0], t.shape[1], self.heads, -1).transpose(1, 2)

        q, k, v = by_head(self.q(x)), by_head(self.k(memory)), by_head(self.v(memory))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, optional cross-attention, and an MLP."""

    def __init__(self, dim: int, crosses: bool = False) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.cross = Attention(dim) if crosses else None
        self.ln_cross = nn.LayerNorm(dim) if crosses else None
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        y = self.ln1(x)
        x = x + self.attn(y, y, mask)
        if self.cross is not None and self.ln_cross is not None:
            assert memory is not None
            x = x + self.cross(self.ln_cross(x), memory)
        return x + self.mlp(self.ln2(x))


def causal(length: int, like: Tensor) -> Tensor:
    """Return an additive mask: minus infinity above the diagonal."""
    return torch.full((length, length), -torch.inf, dtype=like.dtype).triu(1)


# ---- language models ----------------------------------------------------------------------


class NanoGPT(nn.Module):
    """Tied head, positions by arange, blocks in a ModuleDict, the loss inside."""

    def __init__(self, vocabulary: int = 40, dim: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, dim),
                "wpe": nn.Embedding(32, dim),
                "h": nn.ModuleList(Block(dim) for _ in range(layers)),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, length = idx.size()
        pos = torch.arange(0, length, dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        mask = causal(length, x)
        for block in self.transformer.h:
            x = block(x, mask)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class EncoderDecoder(nn.Module):
    """One embedding for both sides and for the head, which is functional."""

    def __init__(self, vocabulary: int = 40, dim: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.encoder = nn.ModuleList(Block(dim) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(dim, crosses=True) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.scale = math.sqrt(dim)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self.embed(source) * self.scale
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(target) * self.scale
        mask = causal(target.shape[1], x)
        for block in self.decoder:
            x = block(x, mask, memory=memory)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.transpose(1, 2), labels)


class TorchTranslator(nn.Module):
    """nn.Transformer, with its own masks."""

    def __init__(self, vocabulary: int = 40, dim: int = 8) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocabulary, dim), nn.Embedding(vocabulary, dim)
        self.transformer = nn.Transformer(dim, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(dim, vocabulary)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=torch.float64)
        x = self.transformer(self.src(src), self.tgt(tgt), tgt_mask=mask)
        return self.generator(x)


class Albert(nn.Module):
    """One block, called again and again."""

    def __init__(self, vocabulary: int = 40, dim: int = 8, times: int = 5) -> None:
        super().__init__()
        self.times = times
        self.embeddings = nn.Embedding(vocabulary, 4)
        self.mapping = nn.Linear(4, dim)
        self.layer = Block(dim)
        self.pooler = nn.Linear(dim, dim)
        self.classifier = nn.Linear(dim, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.mapping(self.embeddings(input_ids))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for _ in range(self.times):
            x = self.layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


# ---- experts ------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to its two best experts: how many each gets depends on the data."""

    def __init__(self, dim: int, experts: int = 4, best: int = 2) -> None:
        super().__init__()
        self.best = best
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(self.best, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class SparseBlock(nn.Module):
    """Attention, then experts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.moe = Attention(dim), Experts(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.attn(y, y)
        return x + self.moe(self.ln2(x))


class MixtureOfExperts(nn.Module):
    """A stack of sparse blocks."""

    def __init__(self, vocabulary: int = 40, dim: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(SparseBlock(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# ---- recurrence and scans -----------------------------------------------------------------


class LSTMStack(nn.Module):
    """Layers that also return their states."""

    def __init__(self, vocabulary: int = 40, dim: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.lstms = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, states = self.embed(ids), []
        for lstm, norm in zip(self.lstms, self.norms, strict=True):
            y, (h, c) = lstm(x)
            states.append((h.transpose(0, 1), c.transpose(0, 1)))
            x = norm(x + y)
        return self.head(x), states


class Unrolled(nn.Module):
    """Cells called step by step: as many calls as the sequence has steps."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.cells = nn.ModuleList(nn.GRUCell(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequence = list(self.inner(x).unbind(1))
        for cell in self.cells:
            state = x.new_zeros(x.shape[0], sequence[0].shape[-1])
            for at, step in enumerate(sequence):
                state = cell(step, state)
                sequence[at] = state
        return self.out(torch.stack(sequence, 1))


class Scan(nn.Module):
    """A selective scan: a state that decays by what it reads, step by step."""

    def __init__(self, dim: int, state: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.inner = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=2, groups=dim)
        self.select = nn.Linear(dim, 2 * state + 1)
        self.decay = nn.Parameter(torch.rand(dim, state))
        self.skip = nn.Parameter(torch.ones(dim))
        self.outer = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inner(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        n = self.decay.shape[1]
        delta, b, c = self.select(u).split([1, n, n], -1)
        delta = F.softplus(delta)
        state, outs = x.new_zeros(x.shape[0], u.shape[-1], n), []
        for t in range(x.shape[1]):
            keep = torch.exp(-delta[:, t, :, None] * self.decay)
            state = keep * state + (delta[:, t] * u[:, t])[..., None] * b[:, t, None, :]
            outs.append((state * c[:, t, None, :]).sum(-1))
        y = torch.stack(outs, 1) + u * self.skip
        return x + self.outer(y * F.silu(gate))


class Mamba(nn.Module):
    """Scans one after another, the head tied."""

    def __init__(self, vocabulary: int = 40, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Scan(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


class RWKV(nn.Module):
    """Time mixing in the parent: the shift and the decays are computed between units."""

    def __init__(self, vocabulary: int = 40, dim: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.mixing = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(layers))
        self.channel = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(layers))
        self.decays = nn.ParameterList([nn.Parameter(torch.rand(dim)) for _ in range(layers)])
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for mix, channel, decay in zip(self.mixing, self.channel, self.decays, strict=True):
            x = x + mix(torch.cat([x, self.shift(x)], -1)) * torch.exp(-decay)
            x = x + torch.sigmoid(channel(torch.cat([x, self.shift(x)], -1)))
        return self.head(x)
