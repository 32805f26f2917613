"""Random forwards equal the unsplit model, or are refused. `make fuzz` tries thousands of them."""

from __future__ import annotations

import random

import pytest

from penstock.microbatch import MicrobatchRows
from penstock.stage.loss_terms import TermComparison
from tests.properties import fuzz_forwards
from tests.properties.fuzz_forwards import Case, Step, attempt, describe, judge
from tests.properties.random_forwards import (
    ANYWHERE,
    IN_BLOCKS,
    IN_MODEL,
    Body,
    Forward,
    Statement,
    draw_forward,
)


def test_random_forwards_equal_the_unsplit_model_or_are_refused() -> None:
    verdicts = [attempt(seed) for seed in range(10)]
    assert not [one for one in verdicts if one.kind == "failed"], describe(verdicts)
    assert sum(one.kind == "equal" for one in verdicts) > 5, describe(verdicts)


@pytest.mark.filterwarnings("ignore:the forward changes .* on modules around:UserWarning")
@pytest.mark.parametrize(
    "seed",
    [
        6002589,  # an operation in place on a result that was taken for one that needs a gradient
        6012562,  # a sum of random numbers was drawn once more for the whole batch
        6012678,  # a model that mixes rows only after it has changed
        8005171,  # the memory of a tensor that another stage computes, in a recomputed stage
    ],
)
def test_forward_that_has_failed_before(seed: int) -> None:
    verdict = attempt(seed)
    assert verdict.kind != "failed", verdict.report


def test_random_forwards_have_every_kind_of_statement() -> None:
    draw = random.Random(0)
    found = {name for _ in range(200) for name in draw_forward(draw, 3).features}
    assert {*ANYWHERE, *IN_BLOCKS, *IN_MODEL} <= found


def test_wrong_numbers_are_reported_with_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The injected bug gives all micro-batches the same weight, however many rows they have."""

    def alike(rows: MicrobatchRows) -> list[float]:
        return [1 / len(rows.counts)] * len(rows.counts)

    block = Body((Statement("", "v1 = self.lin(x)", "v1", "x"), Statement("", "return v1")), "")
    body = Body(
        (
            Statement("", "v1 = self.blocks[0](x)", "v1", "x"),
            Statement("", "v2 = v1 * self.ramp", "v2", "v1"),
            Statement("", "v3 = self.blocks[1](v2)", "v3", "v2"),
            Statement("", "return v3"),
        ),
        "tensor",
    )
    forward = Forward((block, block), body)
    options = ("gpipe", 2, 2, (1, 1), 2, "never", "inline", "step", (Step(3),), 3)
    case = Case(forward, *options)
    monkeypatch.setattr(fuzz_forwards, "draw_case", lambda seed: case)
    assert attempt(0).kind == "equal"
    monkeypatch.setattr(MicrobatchRows, "fractions", alike)
    monkeypatch.setattr(TermComparison, "note", lambda *_: None)  # it would find the bug
    verdict = attempt(0)
    assert (verdict.kind, verdict.reason) == ("failed", "the numbers differ")
    assert "the gradient of blocks.1.lin.bias differs by" in verdict.report
    assert "self.ramp" not in verdict.report
    monkeypatch.undo()
    assert judge(case)[0] == "equal"
