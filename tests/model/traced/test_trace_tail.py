"""Tests of the operations after the last unit: they count in the cost of the last stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.model import cut
from penstock.model.cut import ExampleMicrobatch, ResourceLimits, choose_unit_counts
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.trace_tail import TraceTail

WORDS, WIDTH = 11, 8


class Language(nn.Module):
    """A model that returns its own loss with `labels`, and logits without."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        logits = logits.float()
        logits /= 2.0
        flat = logits[:, :-1].flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(flat, labels[:, 1:].flatten())}


def trace(**batch: Tensor) -> TracedModel:
    example = ExampleMicrobatch.from_batch(batch, 1)
    assert isinstance(example, ExampleMicrobatch)
    return cut.trace_with_enough_units(Language(), example, None, 2, torch.device("cpu"))


def limits(stages: int) -> ResourceLimits:
    devices = (torch.device("cpu"),) * stages
    return ResourceLimits(devices, (1,) * stages, tuple(range(stages)), (float("inf"),) * stages)


IDS = torch.randint(WORDS, (4, 5))


def test_tail_computes_the_model_loss_from_the_output_of_the_last_unit() -> None:
    tail = TraceTail(trace(ids=IDS, labels=IDS).trace, None)
    logits, labels = torch.randn(4, 5, WORDS), IDS[:, 1:].flatten()
    tensors = [logits.clone() if t.is_floating_point() else labels for t in tail.make_arguments()]
    (loss,) = tail(*tensors)
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1) / 2, labels)
    torch.testing.assert_close(loss, expected)


def test_tail_computes_a_loss_fn_of_the_output() -> None:
    tail = TraceTail(trace(ids=IDS).trace, lambda output: output["logits"].square().mean())
    (logits,) = tail.make_arguments()
    torch.testing.assert_close(tail(logits), logits.square().mean())


def test_tail_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="no loss"):
        TraceTail(trace(ids=IDS).trace, None)


def test_slow_loss_makes_the_last_stage_shorter() -> None:
    def slow_loss(output: dict[str, Tensor]) -> Tensor:
        for _ in range(300):
            output["logits"] = output["logits"] * 1.0
        return output["logits"].mean()

    counts, costs = choose_unit_counts(trace(ids=IDS), 2, "time", limits(2), slow_loss)
    assert counts[1] == 1
    assert costs[-1].seconds > 5 * costs[-2].seconds


def test_loss_that_cannot_be_measured_counts_nothing() -> None:
    def broken_loss(output: Any) -> Tensor:
        raise LookupError("planted")

    counts, costs = choose_unit_counts(trace(ids=IDS), 2, "time", limits(2), broken_loss)
    assert sum(counts) == len(costs) == 5
