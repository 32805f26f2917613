"""Every feature under every schedule: equal, or refused. The page in the docs says which."""

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

pytestmark = [  # the compiler's own
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FEATURES)
def test_a_cell_is_what_the_page_says(name: str, schedule: str) -> None:
    """If it is not, and rightly so: `make features`."""
    found = verdict(FEATURES[name], schedule)
    assert shown(found) == read(PAGE.read_text())[name, schedule]


def test_the_rest_of_the_page_is_as_it_is_written() -> None:
    page = PAGE.read_text()
    cells = read(page)
    assert cells.keys() == {(name, schedule) for name in FEATURES for schedule in SCHEDULES}
    verdicts: dict[tuple[str, str], Verdict] = {
        key: Equal() if cell == "equal" else Refused(cell) for key, cell in cells.items()
    }
    assert written(verdicts) == page


def test_all_that_was_asked_for_is_there() -> None:
    assert ", ".join(feature.name for feature in ASKED) == (
        "checkpointing, autocast, tied, frozen, skip, BatchNorm, dropout, uneven batch, in-place, "
        "accumulate, compile"
    )
    assert set(SCHEDULES) == set(SUPPORTED)


# ---- a cell that cannot go red would say nothing -------------------------------------------

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


def test_a_small_difference_is_in_between() -> None:
    with pytest.raises(InBetween, match=r"gradients of '0.norm.weight': .*e-0\d apart"):
        verdict(replace(PLAIN, step=off_by_little), "1f1b")


def test_a_gradient_that_is_missing_is_in_between() -> None:
    with pytest.raises(InBetween, match=r"gradients of '0.norm.weight': is missing"):
        verdict(replace(PLAIN, step=without_one), "1f1b")


def test_other_weights_are_in_between() -> None:
    def changed(model: nn.Sequential) -> None:
        model[1].load_state_dict(copy.deepcopy(model[2].state_dict()))

    with pytest.raises(InBetween, match="loss"):
        verdict(replace(PLAIN, changed=changed), "1f1b")


def test_an_error_of_another_kind_is_no_refusal() -> None:
    with pytest.raises(ZeroDivisionError):
        verdict(replace(PLAIN, step=fails), "1f1b")


def test_one_runtime_that_refuses_is_in_between() -> None:
    with pytest.raises(InBetween, match="not in threads"):
        verdict(replace(PLAIN, step=refuses_in_threads), "1f1b")
    assert verdict(PLAIN, "1f1b") == Equal()
