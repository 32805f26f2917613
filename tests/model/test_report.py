"""A cut in words, and `penstock.split`: what a model consists of, before anything is made of it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ArgumentError
from penstock.model.report import suggest_improvement
from penstock.model_summary import ComputeSeconds, ModelSummary, Transfer, UnitSummary


class Net(nn.Module):
    """Blocks with a skip over all of them, and a head that shares the first one's weight."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(blocks)])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x + first)


IDS = torch.zeros(4, 3, dtype=torch.long)
TEXT = """\
Net in 3 stages of 2 + 2 + 2 units, 368 parameters

stage  parameters  bytes  receives  sends  units
    0         152  608 B         -  384 B  embed, blocks.0
    1         144  576 B     192 B  192 B  blocks.1 to blocks.2
    2         152  608 B     384 B      -  blocks.3, head

sends    stage 0 to 1: blocks.0, 192 B
         stage 1 to 2: blocks.2, 192 B
skips    embed, 192 B: stage 0 straight to stage 2
shared   embed.weight = head.weight, 320 B: on stages 0 and 2, their gradients are summed
"""


def test_every_stage_is_told_with_what_it_takes_and_gives() -> None:
    partition = penstock.split(Net(), 3, IDS, chunks=2, balance="parameters")
    assert str(partition).startswith(TEXT)


def test_a_pipe_says_the_same() -> None:
    pipe = penstock.Pipe(
        Net(), chunks=2, stages=3, devices=["cpu"] * 3, example=IDS, balance="parameters"
    )
    said = penstock.split(Net(), 3, IDS, chunks=2, balance="parameters")
    assert pipe.summary() == str(said)


def test_its_counts_are_what_stages_takes() -> None:
    partition = penstock.split(Net(), 3, IDS, balance="parameters")
    again = penstock.split(Net(), partition.counts, IDS)
    assert again.counts == partition.counts == (2, 2, 2)


def test_the_model_stays_as_it_is() -> None:
    model = Net().train()
    state, before = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    penstock.split(model, 3, IDS)
    assert dict(model.named_modules()) == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_on_meta_can_be_looked_at() -> None:
    with torch.device("meta"):
        model = Net()
    assert penstock.split(model, 2, IDS, balance="parameters").counts == (3, 3)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_sequential_is_told_alike(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    partition = penstock.split(layers, [2, 2], torch.zeros(6, 4), chunks=2)
    assert "sends    stage 0 to 1: 1, 96 B" in str(partition)
    partition.draw(tmp_path / "cut.svg")
    assert (tmp_path / "cut.svg").exists()


def test_skips_of_a_sequential_have_their_size() -> None:
    from unet import unet

    model = unet(B=2, C=4, levels=2)
    partition = penstock.split(model, 4, torch.zeros(2, 3, 16, 16), balance="parameters")
    skips = [flow for flow in partition.outline.transfers if flow.is_skip]
    assert skips
    assert {flow.nbytes for flow in partition.outline.transfers if flow.name == "skip"} == {
        8192,
        4096,
    }
    assert "skips    skip, 8.19 KB: stage 0 straight to stage" in str(partition)


def test_values_that_look_alike_are_counted() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8 * n, 8) for n in range(1, 7)])

        def forward(self, x: Tensor) -> Any:
            kept = [x]
            for block in self.blocks:
                kept.append(torch.relu(block(torch.cat(kept, -1))))
            return kept[-1]

    said = str(penstock.split(Dense(), [3, 1, 2], torch.randn(4, 8)))
    assert re.search(r"stage 0 to 1: relu \(test_report.py:\d+\), 128 B, 2 times\n", said)
    skip = r"relu \(test_report.py:\d+\), 128 B: stage 0 straight to stage 2, 2 times\n"
    assert re.search(skip, said)


def test_without_an_example_a_sequential_has_no_sizes() -> None:
    partition = penstock.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
    assert "sends    stage 0 to 1: 0\n" in str(partition)
    assert "receives" not in str(partition)


def test_a_buffer_that_nobody_uses_does_not_matter() -> None:
    """The dry run took it for a constant that it had not seen; Llama has such a buffer."""
    model = Net()
    model.register_buffer("spare", torch.zeros(3))
    assert penstock.split(model, 2, IDS, balance="parameters").counts == (3, 3)


def test_any_module_needs_an_example() -> None:
    with pytest.raises(ArgumentError, match="Pass a batch as example="):
        penstock.split(Net(), 2)


def test_what_a_unit_of_several_stages_shares_is_told_at_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.first(self.second(self.first(x)))

    said = str(penstock.split(Twice(), [1, 1, 1], torch.zeros(2, 8)))
    assert "shared   all 2 of first, 288 B: on stages 0 and 2, their gradients are summed" in said


# ---- advice -------------------------------------------------------------------------------


def timed(*stages: tuple[float, ...], flows: tuple[Transfer, ...] = ()) -> ModelSummary:
    """Units that take so many seconds, stage by stage."""
    pieces = tuple(
        UnitSummary(f"unit.{stage}.{at}", stage, 1, 4, ComputeSeconds(time, 0.0, 0.0), 0)
        for stage, times in enumerate(stages)
        for at, time in enumerate(times)
    )
    return ModelSummary("Net", pieces, flows, (), (1,) * len(stages), (4,) * len(stages))


def test_even_stages_need_no_advice() -> None:
    assert suggest_improvement(timed((1.0, 1.0), (2.0,))) == "none: the stages are even"


def test_the_slowest_stage_is_named() -> None:
    assert suggest_improvement(timed((1.0,), (0.4, 0.4, 0.4, 0.5), (1.0,), (0.4,))) == (
        "stage 1 takes 1.7 times the mean: stages=[1, 2, 2, 2] would be more even, 1.4 times"
    )


def test_a_cut_that_cannot_be_better_is_said() -> None:
    assert suggest_improvement(timed((0.7,), (0.7, 0.7), (0.7,))) == (
        "stage 1 takes 1.5 times the mean, and no cut between units is more even: use fewer "
        "stages, or smaller units"
    )


def test_a_unit_that_is_too_large_is_named() -> None:
    said = suggest_improvement(timed((1.0,), (5.0, 0.1), (1.0,)))
    assert said.startswith("stage 1 takes 2.2 times the mean, and its unit 'unit.1.0' alone 2.1")
    assert "split the unit with units=" in said


def test_a_heavy_skip_is_named() -> None:
    flows = (
        *(Transfer("x", n, n + 1, n, n + 1, 1000) for n in range(3)),
        Transfer("x", 0, 3, 0, 3, 12_000_000),
    )
    even = timed((1.0,), (1.0,), (1.0,), (1.0,), flows=flows)
    assert suggest_improvement(even) == (
        "stage 0 sends 12 MB straight to stage 3 in every micro-batch: a schedule such as zb-v has "
        "both on one rank, and sends nothing"
    )
    other = replace(even, transfers=(*flows[:3], Transfer("x", 0, 2, 0, 2, 12_000_000)))
    assert suggest_improvement(other).endswith(
        "to avoid it, put all units from 'unit.0.0' to 'unit.2.0' into one stage"
    )


def test_what_was_not_measured_is_said() -> None:
    said = str(penstock.split(Net(), 2, IDS, balance="parameters"))
    assert "advice   nothing was measured" in said
