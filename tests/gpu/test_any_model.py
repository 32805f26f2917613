"""Any module on the GPU: virtual GPUs, the host and the GPU mixed, masks between units."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Pipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, WORDS = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + torch.tanh(self.inner(x))


class Language(nn.Module):
    """Positions and masks are made between units, on the device that the input says; tied head."""

    frequencies: Tensor

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("frequencies", torch.rand(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        places = torch.arange(ids.shape[1], device=x.device)
        x = x + torch.sin(places[:, None] * self.frequencies)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=self.words.weight.device).triu(1)
        first = x
        for block in self.blocks:
            x = block(x, mask) * self.scale
        x = x + first
        logits = functional.linear(x, self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def devices(kind: str) -> list[Any]:
    if kind == "virtual":
        return list(penstock.virtual_devices("cuda:0", 3))
    return {"one": ["cuda:0"] * 3, "mixed": ["cpu", "cuda:0", "cpu"]}[kind]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("runtime", ["threads", "inline"])
@pytest.mark.parametrize("kind", ["virtual", "one", "mixed"])
def test_gradients_are_the_unsplit_models(kind: str, runtime: str, schedule: str) -> None:
    torch.manual_seed(3)
    model = Language().double()
    unsplit = copy.deepcopy(model).cuda()
    where = devices(kind)
    first = "cpu" if kind == "mixed" else "cuda:0"
    example = torch.randint(0, WORDS, (4, 6))
    pipe = Pipe(
        model,
        2,
        stages=3,
        devices=where,
        example=example,
        schedule=schedule,
        runtime=runtime,
        balance="parameters",
    )
    for length in (6, 9):
        ids = torch.randint(0, WORDS, (4, length), device=first)
        unsplit.zero_grad()
        pipe.zero_grad()
        loss = unsplit(ids.cuda())
        loss.backward()
        found = pipe.step(ids)
        assert abs(found.loss.item() - loss.item()) < 1e-10
        grads = dict(pipe.named_parameters())
        for name, parameter in unsplit.named_parameters():
            mine = grads[name].grad
            assert mine is not None
            assert parameter.grad is not None
            assert (mine.cuda() - parameter.grad).abs().max() < 1e-10, name
        with torch.no_grad():
            assert abs(pipe.step(ids).loss.item() - unsplit(ids.cuda()).item()) < 1e-10


def test_units_are_measured_on_the_gpu_and_devices_by_their_speed() -> None:
    model = Language()
    example = torch.randint(0, WORDS, (8, 16))
    pipe = Pipe(model, 2, stages=2, devices=["cuda:0", "cpu"], example=example)
    assert sum(pipe._split.partition.counts) == 5
    assert "stage 0" in pipe.summary()


def test_autocast_and_recomputation() -> None:
    model = Language()
    ids = torch.randint(0, WORDS, (4, 8), device="cuda")
    where = devices("virtual")
    pipe = Pipe(model, 2, "always", stages=3, devices=where, example=ids, schedule="1f1b")
    with torch.autocast("cuda", torch.bfloat16):
        loss = pipe.step(ids).loss
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in pipe.parameters())
