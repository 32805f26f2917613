"""Every feature under every schedule over processes is equal or refused, as in one process."""

from __future__ import annotations

import warnings

import pytest

from penstock.errors import PenstockError
from tests.distributed.ranks import SOAK, ranks
from tests.features.limits import differentiated
from tests.features.page import FEATURES, PAGE, read, shown
from tests.features.table import (
    SCHEDULES,
    Equal,
    Feature,
    InBetween,
    Piped,
    Refused,
    Verdict,
    Way,
    called,
    compared,
)
from tests.oracle import Outcome, merged

# Features that need `pipe(x)` with gradients, which is refused over processes
DOORS = [name for name, feature in FEATURES.items() if feature.step in (called, differentiated)]
# A ninth of all combinations: each feature runs under one or two schedules, and the choice shifts
# from feature to feature. A soak run tries all.
CELLS = [
    (name, schedule, list(feature.ways)[at % len(feature.ways)][1])
    for row, (name, feature) in enumerate(FEATURES.items())
    for at, schedule in enumerate(SCHEDULES)
    if name not in DOORS and (SOAK or (row + at) % 9 == 0)
]


def on_rank(name: str, way: Way) -> list[Outcome] | Refused:
    """Run the feature on one rank."""
    feature = FEATURES[name]
    for of_the_compiler in (
        ".*is deprecated",
        "The .grad attribute of a Tensor that is not a leaf",
    ):
        warnings.filterwarnings("ignore", of_the_compiler)
    try:
        piped = Piped(feature, way)
        found = list(feature.script(piped))
    except PenstockError as error:
        return Refused(str(error))
    feature.after(piped.module, way)
    return found


def verdict(feature: Feature, way: Way) -> Verdict:
    """Return the verdict of all ranks together."""
    told = ranks(feature.ranks(way.schedule)).run(on_rank, feature.name, way)
    refusals = [one for one in told if isinstance(one, Refused)]
    if refusals:
        if len(refusals) < len(told):
            raise InBetween(f"{len(refusals)} of {len(told)} ranks refuse: {refusals[0].message}")
        return Refused("\n".join(dict.fromkeys(one.message for one in refusals)))
    outcomes = [merged(each, feature.model()) for each in zip(*told, strict=True)]
    return compared(feature, way, outcomes)


@pytest.mark.parametrize(("name", "schedule", "checkpoint"), CELLS)
def test_feature_over_processes_matches_the_feature_page(
    name: str, schedule: str, checkpoint: str
) -> None:
    found = verdict(FEATURES[name], Way(schedule, "processes", checkpoint))
    page = read(PAGE.read_text())[name, schedule]
    if page == "equal":
        assert found == Equal()
    else:
        assert page in shown(found)


@pytest.mark.parametrize("name", DOORS)
def test_pipe_call_with_gradients_is_refused_over_processes(name: str) -> None:
    found = verdict(FEATURES[name], Way("1f1b", "processes", "never"))
    assert "pipe(x) cannot be differentiated over several processes" in shown(found)
