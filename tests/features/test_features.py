"""Every feature under every schedule is equal or refused, as docs/features.md says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import nn

from penstock import ArgumentError, Pipe
from tests.features.common import COMMON, blocks
from tests.features.more import MORE
from tests.features.page import FEATURES, PAGE, read, shown, written
from tests.features.table import (
    SCHEDULES,
    Equal,
    Feature,
    InBetween,
    Refused,
    Trainee,
    Verdict,
    Way,
    called,
    verdict,
    verdict_of_way,
)
from tests.oracle import Batch, Outcome, run_pipe
from tests.runtime.cuda_graph.support import emulate, recordings
from tests.support import SCHEDULES as SUPPORTED

pytestmark = [  # raised by torch.compile
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FEATURES)
def test_feature_under_schedule_is_as_documented(name: str, schedule: str) -> None:
    """Each cell runs in one of its ways, and its neighbours in the others.

    `make features` runs all ways. After an intended change, use it to rewrite the page.
    """
    feature = FEATURES[name]
    number = list(FEATURES).index(name) + SCHEDULES.index(schedule)
    way = Way(schedule, *feature.ways[number % len(feature.ways)])
    assert shown(verdict_of_way(feature, way)) == read(PAGE.read_text())[name, schedule]


GRAPH = [feature.name for feature in (*COMMON, *MORE)]


@pytest.mark.parametrize("name", GRAPH)
def test_feature_under_an_emulated_cuda_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script runs twice, so that the graph of the first steps is replayed for the others."""
    emulate(monkeypatch)
    replays: list[int] = []
    feature = FEATURES[name]

    def script(trainee: Trainee) -> Iterator[Outcome]:
        yield from feature.script(trainee)
        trainee.module.zero_grad()
        yield from feature.script(trainee)

    repeated = replace(
        feature, script=script, after=lambda pipe, way: replays.extend(recordings(pipe))
    )
    schedule = SCHEDULES[GRAPH.index(name) % len(SCHEDULES)]
    found = verdict_of_way(repeated, Way(schedule, "graph", "except_last"))
    if name == "checkpointing":  # its layers count their calls in attributes
        assert shown(found).startswith("the step cannot be captured as a CUDA graph")
    else:
        assert found == Equal()
        assert bool(replays) == (feature.step is not called)


def test_features_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    cells = read(page)
    assert cells.keys() == {(name, schedule) for name in FEATURES for schedule in SCHEDULES}
    verdicts: dict[tuple[str, str], Verdict] = {
        key: Equal() if cell == "equal" else Refused(cell) for key, cell in cells.items()
    }
    assert written(verdicts) == page


def test_features_page_covers_all_requested_features_and_schedules() -> None:
    assert ", ".join(feature.name for feature in COMMON) == (
        "checkpointing, autocast, tied, frozen, skip, BatchNorm, dropout, uneven batch, in-place, "
        "accumulate, compile"
    )
    assert set(SCHEDULES) == set(SUPPORTED)


# ---- the comparison itself can fail --------------------------------------------------------

PLAIN = Feature("plain", "", blocks)


def off_by_little(pipe: Pipe, batch: Batch) -> Outcome:
    found = run_pipe(pipe, batch)
    for gradient in found.gradients.values():
        if gradient is not None:
            gradient *= 1 + 1e-8
    return found


def without_one(pipe: Pipe, batch: Batch) -> Outcome:
    found = run_pipe(pipe, batch)
    found.gradients["0.norm.weight"] = None
    return found


def fails(pipe: Pipe, batch: Batch) -> Outcome:
    raise ZeroDivisionError


def refuses_in_threads(pipe: Pipe, batch: Batch) -> Outcome:
    if pipe.runtime == "threads":
        raise ArgumentError("not in threads")
    return run_pipe(pipe, batch)


def test_verdict_fails_on_a_small_gradient_difference() -> None:
    with pytest.raises(InBetween, match=r"gradient of 0.norm.weight differs by .*e-0"):
        verdict(replace(PLAIN, step=off_by_little), "1f1b")


def test_verdict_fails_on_a_missing_gradient() -> None:
    with pytest.raises(InBetween, match=r"gradient of 0.norm.weight is missing"):
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
