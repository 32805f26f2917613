"""Every feature under every schedule is equal or refused, as docs/features.md says."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import ArgumentError, Pipe
from penstock.checker.case import StepArguments
from tests.features.asked import ASKED, blocks
from tests.features.matrix import SCHEDULES, Equal, InBetween, Refused, Verdict, verdict
from tests.features.page import FEATURES, PAGE, read, shown, written
from tests.features.trainee import Feature, stepped
from tests.support import SCHEDULES as SUPPORTED

pytestmark = [  # raised by torch.compile
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FEATURES)
def test_feature_under_schedule_is_as_documented(name: str, schedule: str) -> None:
    """After an intended change, run `make features` to rewrite the page."""
    found = verdict(FEATURES[name], schedule)
    assert shown(found) == read(PAGE.read_text())[name, schedule]


def test_features_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    cells = read(page)
    assert cells.keys() == {(name, schedule) for name in FEATURES for schedule in SCHEDULES}
    verdicts: dict[tuple[str, str], Verdict] = {
        key: Equal() if cell == "equal" else Refused(cell) for key, cell in cells.items()
    }
    assert written(verdicts) == page


def test_features_page_covers_all_requested_features_and_schedules() -> None:
    assert ", ".join(feature.name for feature in ASKED) == (
        "checkpointing, autocast, tied, frozen, skip, BatchNorm, dropout, uneven batch, in-place, "
        "accumulate, compile"
    )
    assert set(SCHEDULES) == set(SUPPORTED)


# ---- the comparison itself can fail --------------------------------------------------------

PLAIN = Feature("plain", "", blocks)


def grown(pipe: Pipe) -> None:
    with torch.no_grad():
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1 + 1e-8


def off_by_little(pipe: Pipe, values: StepArguments) -> tuple[Tensor, Any]:
    found = stepped(pipe, values)
    grown(pipe)
    return found


def without_one(pipe: Pipe, values: StepArguments) -> tuple[Tensor, Any]:
    found = stepped(pipe, values)
    next(pipe.parameters()).grad = None
    return found


def fails(pipe: Pipe, values: StepArguments) -> tuple[Tensor, Any]:
    raise ZeroDivisionError


def refuses_in_threads(pipe: Pipe, values: StepArguments) -> tuple[Tensor, Any]:
    if pipe.runtime == "threads":
        raise ArgumentError("not in threads")
    return stepped(pipe, values)


def test_verdict_fails_on_a_small_gradient_difference() -> None:
    with pytest.raises(InBetween, match=r"gradients of '0.norm.weight': .*e-0\d apart"):
        verdict(replace(PLAIN, step=off_by_little), "1f1b")


def test_verdict_fails_on_a_missing_gradient() -> None:
    with pytest.raises(InBetween, match=r"gradients of '0.norm.weight': is missing"):
        verdict(replace(PLAIN, step=without_one), "1f1b")


def test_verdict_fails_on_other_weights() -> None:
    def changed(model: nn.Sequential) -> None:
        model[1].load_state_dict(copy.deepcopy(model[2].state_dict()))

    with pytest.raises(InBetween, match="loss"):
        verdict(replace(PLAIN, changed=changed), "1f1b")


def test_verdict_raises_errors_that_are_not_refusals() -> None:
    with pytest.raises(ZeroDivisionError):
        verdict(replace(PLAIN, step=fails), "1f1b")


def test_verdict_fails_if_only_one_runtime_refuses() -> None:
    with pytest.raises(InBetween, match="not in threads"):
        verdict(replace(PLAIN, step=refuses_in_threads), "1f1b")
    assert verdict(PLAIN, "1f1b") == Equal()
