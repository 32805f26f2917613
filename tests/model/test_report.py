"""Tests of `penstock.split` and of the report that describes a partition."""

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
from penstock.model.cut import _choose_units_to_open
from penstock.model.report import suggest_improvement
from penstock.model_summary import ComputeSeconds, ModelSummary, Transfer, UnitSummary


class Net(nn.Module):
    """Blocks with a skip over all of them, and a head that is tied to the embedding."""

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


def test_report_lists_parameters_and_messages_of_each_stage() -> None:
    partition = penstock.split(Net(), 3, IDS, chunks=2, balance="parameters")
    assert str(partition).startswith(TEXT)


def test_pipe_summary_equals_the_split_report() -> None:
    pipe = penstock.Pipe(
        Net(), chunks=2, stages=3, devices=["cpu"] * 3, example=IDS, balance="parameters"
    )
    partition = penstock.split(Net(), 3, IDS, chunks=2, balance="parameters")
    # Two micro-batches do not fill three stages, which the pipe says in a line of its own.
    report, _, last = pipe.summary().rpartition("\n")
    assert report == str(partition)
    assert last == (
        "chunks   2 for 3 stages: the ranks are idle for 46% of the time. Use chunks=6 or more."
    )


def test_split_counts_can_be_passed_as_stages() -> None:
    partition = penstock.split(Net(), 3, IDS, balance="parameters")
    again = penstock.split(Net(), partition.counts, IDS)
    assert again.counts == partition.counts == (2, 2, 2)


def test_split_leaves_the_model_unchanged() -> None:
    model = Net().train()
    state, before = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    penstock.split(model, 3, IDS)
    assert dict(model.named_modules()) == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_split_of_a_meta_model() -> None:
    with torch.device("meta"):
        model = Net()
    assert penstock.split(model, 2, IDS, balance="parameters").counts == (3, 3)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_report_of_a_sequential(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    partition = penstock.split(layers, [2, 2], torch.zeros(6, 4), chunks=2)
    assert "sends    stage 0 to 1: 1, 96 B" in str(partition)
    partition.draw(tmp_path / "cut.svg")
    assert (tmp_path / "cut.svg").exists()


def test_report_sizes_of_skips_in_a_sequential() -> None:
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


def test_report_groups_equal_messages() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8 * n, 8) for n in range(1, 7)])

        def forward(self, x: Tensor) -> Any:
            kept = [x]
            for block in self.blocks:
                kept.append(torch.relu(block(torch.cat(kept, -1))))
            return kept[-1]

    report = str(penstock.split(Dense(), [3, 1, 2], torch.randn(4, 8)))
    assert re.search(r"stage 0 to 1: relu \(test_report.py:\d+\), 128 B, 2 times\n", report)
    skip = r"relu \(test_report.py:\d+\), 128 B: stage 0 straight to stage 2, 2 times\n"
    assert re.search(skip, report)


def test_operation_stays_where_its_result_is_smaller_than_its_arguments() -> None:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(1, 8)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x).sum(-1, keepdim=True))

    report = str(penstock.split(Summing(), 2, torch.randn(4, 8), balance="parameters"))
    assert re.search(r"stage 0 to 1: sum \(test_report.py:\d+\), 16 B\n", report)


def test_largest_unit_is_expanded_if_there_are_too_few() -> None:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    assert _choose_units_to_open({"small": Block(8), "large": Block(16)}) == {"large"}


def test_report_of_a_sequential_without_an_example_has_no_sizes() -> None:
    partition = penstock.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
    assert "sends    stage 0 to 1: 0\n" in str(partition)
    assert "receives" not in str(partition)


def test_split_with_an_unused_buffer() -> None:
    """The dry run took an unused buffer for an unknown constant. Llama has such a buffer."""
    model = Net()
    model.register_buffer("spare", torch.zeros(3))
    assert penstock.split(model, 2, IDS, balance="parameters").counts == (3, 3)


def test_split_of_a_module_without_an_example_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Pass a batch as example="):
        penstock.split(Net(), 2)


def test_report_of_a_unit_shared_by_several_stages() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.first(self.second(self.first(x)))

    report = str(penstock.split(Twice(), [1, 1, 1], torch.zeros(2, 8)))
    assert "shared   all 2 of first, 288 B: on stages 0 and 2, their gradients are summed" in report


# ---- advice -------------------------------------------------------------------------------


def timed(*stages: tuple[float, ...], flows: tuple[Transfer, ...] = ()) -> ModelSummary:
    """Return a summary of units that take the given seconds, stage by stage."""
    pieces = tuple(
        UnitSummary(f"unit.{stage}.{at}", stage, 1, 4, ComputeSeconds(time, 0.0, 0.0), 0)
        for stage, times in enumerate(stages)
        for at, time in enumerate(times)
    )
    return ModelSummary("Net", pieces, flows, (), (1,) * len(stages), (4,) * len(stages))


@pytest.mark.parametrize(
    ("stages", "advice"),
    [
        (((1.0, 1.0), (2.0,)), "none: the stages are even"),
        (
            ((1.0,), (0.4, 0.4, 0.4, 0.5), (1.0,), (0.4,)),
            "stage 1 takes 1.7 times the mean: stages=[1, 2, 2, 2] would be more even, 1.4 times",
        ),
        (
            ((0.7,), (0.7, 0.7), (0.7,)),
            "stage 1 takes 1.5 times the mean, and no cut between units is more even: use fewer "
            "stages, or smaller units",
        ),
    ],
)
def test_advice_about_uneven_stages(stages: tuple[tuple[float, ...], ...], advice: str) -> None:
    assert suggest_improvement(timed(*stages)) == advice


def test_advice_names_a_unit_that_is_too_large() -> None:
    advice = suggest_improvement(timed((1.0,), (5.0, 0.1), (1.0,)))
    assert advice.startswith("stage 1 takes 2.2 times the mean, and its unit 'unit.1.0' alone 2.1")
    assert "split the unit with units=" in advice


def test_advice_names_a_heavy_skip() -> None:
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


def test_report_says_when_nothing_was_measured() -> None:
    report = str(penstock.split(Net(), 2, IDS, balance="parameters"))
    assert "advice   nothing was measured" in report
