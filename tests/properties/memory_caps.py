"""Train random models under random memory caps, and measure their peaks: `make caps`.

    python -m tests.properties.memory_caps --cases 150 --seed 1
    python -m tests.properties.memory_caps --hard

Each case draws a model (a Sequential, or a traced one with residual blocks and skips), a schedule,
micro-batches, recomputation and a cap. Hard models also have views, in-place operations, frozen
layers, buffers, BatchNorm, values that are cut off, skips of several kinds and tied weights. A pipe
that is made keeps to its cap by `pipe.memory`, and its forecast is exact. If no pipe can be made,
the error says what is missing.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock import ArgumentError, Pipe
from penstock.runtime.memory_cap import ADAM_STATE_FACTOR
from tests.support import SCHEDULES

WIDTHS = (16, 24, 40, 64)


class Residual(nn.Module):
    """A block with a residual connection, such as that of a transformer."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return y


class Stack(nn.Module):
    """A model that is traced: blocks in a list, and skips from one block to a later one."""

    def __init__(self, width: int, blocks: int, skips: dict[int, int], drop: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width, drop) for _ in range(blocks))
        self.head, self.skips = nn.Linear(width, width), skips

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x + kept[self.skips[index]] if index in self.skips else x)
            kept[index] = x
        y: Tensor = self.head(x)
        return y


class InPlace(nn.Module):
    """A layer with a buffer that adds and clips in place."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y.add_(x).relu_()


class Gated(nn.Module):
    """A layer whose two halves are views of one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.linear(x).chunk(2, -1)
        y: Tensor = value * torch.sigmoid(gate)
        return y


class Frozen(nn.Module):
    """A layer that is not trained, before one that is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Detached(nn.Module):
    """A block whose rows are joined and cut off again, with a residual without gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = torch.cat([y, self.second(y)])[: len(x)] + x.detach()
        return z


class Reordered(nn.Module):
    """A view that is copied, and returned as a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 2, -1).transpose(1, 2).contiguous().flatten(1)


class HardStack(nn.Module):
    """A traced model of hard blocks, with skips that are added, multiplied or joined."""

    def __init__(
        self, width: int, blocks: list[nn.Module], skips: dict[int, int], join: str, ties: bool
    ) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks, self.skips, self.join = nn.ModuleList(blocks), skips, join
        if ties:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[int, Tensor] = {}
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index in self.skips:
                skip = kept[self.skips[index]]
                if self.join == "cat":
                    x = torch.cat([x, skip], -1)[:, : x.shape[1]]
                else:
                    x = x + skip if self.join == "add" else x * skip
            x = kept[index] = block(x)
        y: Tensor = self.head(x)
        return y


class Outcome(NamedTuple):
    """What became of a case: "kept" to the cap, or "refused"."""

    kind: str
    text: str


def draw_layers(draw: random.Random, width: int, number: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(number):
        after = draw.choice(WIDTHS)
        kind = draw.choice(["linear", "linear", "act", "norm", "drop", "residual"])
        if kind == "linear":
            layers.append(nn.Linear(width, after, bias=draw.random() < 0.7))
            width = after
        elif kind == "residual":
            layers.append(Residual(width, draw.choice([0.0, 0.2])))
        else:
            others: dict[str, list[nn.Module]] = {
                "act": [nn.ReLU(), nn.GELU(), nn.Tanh()],
                "norm": [nn.LayerNorm(width)],
            }
            layers.append(draw.choice(others.get(kind, [nn.Dropout(0.1)])))
    return nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[0]), *layers, nn.Linear(width, WIDTHS[0]))


def draw_model(draw: random.Random, stages: int) -> nn.Module:
    if draw.random() < 0.6:
        return draw_layers(draw, WIDTHS[0], stages + draw.randint(0, 8))
    blocks = stages + draw.randint(0, 4)
    skips = {draw.randint(1, blocks - 1): 0 for _ in range(draw.randint(0, 2)) if blocks > 1}
    return Stack(WIDTHS[0], blocks, skips, draw.choice([0.0, 0.1]))


def draw_hard_model(draw: random.Random, stages: int) -> nn.Module:
    width = WIDTHS[0]
    makers: list[Callable[[], nn.Module]] = [
        lambda: Residual(width, 0.1),
        lambda: InPlace(width),
        lambda: Gated(width),
        lambda: Frozen(width),
        lambda: Detached(width),
        lambda: nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, width)),
        lambda: nn.Dropout(0.2),
        Reordered,
        nn.Identity,
    ]
    blocks = [draw.choice(makers)() for _ in range(stages + draw.randint(0, 5))]
    if draw.random() < 0.4:
        return nn.Sequential(nn.Linear(width, width), *blocks, nn.Linear(width, width))
    skips = {}
    for _ in range(draw.randint(0, 3) if len(blocks) > 1 else 0):
        target = draw.randint(1, len(blocks) - 1)
        skips[target] = draw.randint(0, target - 1)
    join = draw.choice(["add", "mul", "cat"])
    return HardStack(width, blocks, skips, join, ties=draw.random() < 0.3)


def draw_checkpoint(draw: random.Random, stages: int) -> Any:
    words = ["always", "except_last", "never"]
    by_stage = [draw.choice(words) for _ in range(stages)]
    return draw.choice(["never", *words, by_stage, lambda stage, i: (stage + i) % 2 == 0])


def run_case(seed: int, hard: bool = False) -> Outcome:
    """Make a pipe under a random cap, and assert that it keeps to it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    schedule = draw.choice(list(SCHEDULES))
    ranks = draw.randint(1, 4)
    stages = ranks * SCHEDULES[schedule]
    model = (draw_hard_model if hard else draw_model)(draw, stages)
    chunks = draw.randint(1, 6)
    rows = chunks * draw.randint(1, 12) + draw.randint(0, 2)
    # BatchNorm needs two rows, also in the last micro-batch.
    x = torch.randn(chunks * (rows // chunks + 1) if hard else rows, WIDTHS[0])
    classes = draw.random() < 0.5
    target = torch.randint(WIDTHS[0], (len(x),)) if classes else torch.randn(len(x), WIDTHS[0])
    options: dict[str, Any] = {
        "chunks": chunks,
        "checkpoint": draw_checkpoint(draw, stages),
        "stages": stages,
        "devices": ["cpu"] * ranks,
        "schedule": schedule,
        "runtime": draw.choice(["inline", "threads"]),
        "loss_fn": nn.CrossEntropyLoss() if classes else nn.MSELoss(),
        "example": x,
        "target": target,
        "audit": "off",
    }
    free = Pipe(model, **options, memory="1 TB")._memory_forecast
    assert free is not None
    cap = max(free.total) * draw.uniform(0.8, 1.3)
    try:
        pipe = Pipe(model, **options, memory=cap)
    except ArgumentError as error:
        text = str(error)
        assert "too " in text, text  # "too much", or "too little"
        assert "would fit" in text or "alone" in text, text
        return Outcome("refused", text)
    measured, forecast = pipe.memory(x, target=target), pipe._memory_forecast
    assert forecast is not None
    parameters: list[set[nn.Parameter]] = [set() for _ in range(ranks)]  # tied ones count once
    for stage, rank in zip(
        pipe._placed_partition.partition.stages, pipe._placed_partition.placement, strict=True
    ):
        parameters[rank].update(p for layer in stage.layers for p in layer.parameters())
    assert measured.peak == forecast.peak, f"measured {measured.peak}, forecast {forecast.peak}"
    for rank, (held, peak) in enumerate(zip(measured.held, measured.peak, strict=True)):
        gradients = sum(p.nbytes for p in parameters[rank] if p.requires_grad)
        used = held + ADAM_STATE_FACTOR * gradients + peak
        assert used <= cap, f"rank {rank} uses {used} of {cap}"
    return Outcome("kept", f"{max(forecast.total)} of {cap:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hard", action="store_true")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.cases):
        try:
            outcomes[run_case(seed, options.hard).kind] += 1
        except AssertionError as error:
            outcomes["failed"] += 1
            print(f"seed {seed}: {error}", flush=True)
    print(
        f"{outcomes['kept']} models keep to their caps with exact forecasts, "
        f"{outcomes['refused']} refused with a reason, {outcomes['failed']} failed"
    )
    sys.exit(outcomes["failed"] > 0)


if __name__ == "__main__":
    main()
