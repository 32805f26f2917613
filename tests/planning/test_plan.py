from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ArgumentError, FormatError, InvalidScheduleError
from penstock.planning import DeviceProfile, Plan, search_plan
from penstock.planning.schedule_timer import ScheduleTimer
from penstock.schedules.families import make
from tests.planning.problems import even_profile, with_memory


@pytest.fixture
def plan() -> Plan:
    return search_plan(even_profile(units=8, ranks=2, send=0.5), chunks=[4], solver_seconds=0)


@pytest.fixture
def simple() -> Plan:
    """Return a plan by hand: 1f1b, two stages."""
    return Plan(
        profile=even_profile(units=8, ranks=2),
        cut=(4, 4),
        placement=(0, 1),
        chunks=4,
        recompute=(False, True),
        schedule_name="1f1b",
        schedule=make("1f1b", 2, 4),
        runtime="threads",
        memory=(float("inf"),) * 2,
    )


def edit(plan: Plan, **fields: Any) -> Plan:
    return Plan.from_json(json.loads(json.dumps(plan.to_json() | fields)))


def test_plan_survives_json(plan: Plan, simple: Plan, tmp_path: Path) -> None:
    for original in (plan, simple):
        original.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == original
        assert loaded.forecast == original.forecast
        assert str(loaded) == str(original)


def test_forecast_of_a_plan_by_hand(simple: Plan) -> None:
    # Two rows a micro-batch, four units a stage: F, I and W take 8 s each, R another 8 s.
    # Rank 1: 8 s of fill, then 4 x 32 s, then the last backward of rank 0, 16 s.
    assert simple.forecast.step == 8 + 4 * 32 + 16
    # Parameters, gradients and Adam's state of 4 units; two micro-batches on rank 0. Each keeps
    # 4 x 20 bytes, and the 3 values of 2 bytes between its units.
    assert simple.forecast.resident == (4 * 400.0, 4 * 400.0)
    assert simple.forecast.peak == (1600 + 2 * 86, 1600 + 80 + 4 * 2)
    causes = simple.forecast.bubble
    assert set(causes) == {"fill", "drain", "messages", "waits"}
    assert sum(causes.values()) == pytest.approx(simple.timeline.bubble)


def test_schedule_of_a_plan_is_compiled_once(simple: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an idle gain, the costs and the forecast each compiled it."""
    compiled: list[str] = []

    def compile_schedule(name: str, *args: Any) -> ScheduleTimer:
        compiled.append(name)
        return ScheduleTimer(name, *args)

    monkeypatch.setattr("penstock.planning.plan.ScheduleTimer", compile_schedule)
    devices = (DeviceProfile("cpu", idle_gain=0.5),) * 2
    plan = simple.with_profile(simple.profile.with_devices(devices))
    assert plan.forecast.step < simple.forecast.step
    assert plan.costs.cost.F[0] < simple.costs.cost.F[0]
    assert compiled == ["1f1b"]


def test_messages_are_a_cause_of_the_bubble() -> None:
    profile = even_profile(units=2, ranks=2, rows=1, send=5.0)
    plan = search_plan(profile, schedules=["1f1b"], stages_per_rank=[1], solver_seconds=0)
    # Rank 0 waits from 1 s to 14 s: 5 s for each message, and 3 s while rank 1 computes.
    assert plan.forecast.step == 16
    assert plan.forecast.bubble["messages"] == pytest.approx(5 / 32)
    assert plan.forecast.bubble["waits"] == pytest.approx(8 / 32)


def test_edited_schedule_that_deadlocks_is_refused(simple: Plan) -> None:
    actions = ["0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", "1F0 1F1 1B1 1B0 1F2 1B2 1F3 1B3"]
    with pytest.raises(InvalidScheduleError, match="0B0 waits for 1B0"):
        edit(simple, schedule="mine", actions=actions)


def test_edited_plan_that_does_not_fit_is_refused(simple: Plan) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"does not fit in memory: rank 0 needs 1.77 KB, 72 B more than its cap of 1.7 KB",
    ):
        edit(simple, memory=[1700, None])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cut": [4, 3]}, r"\[4, 3\] is not a cut of 8 units"),
        ({"cut": [4, 2, 2]}, "cuts 3 stages, but placement has 2"),
        ({"placement": [1, 0]}, "places its stages on ranks"),
        ({"recompute": [True]}, "recompute has 1"),
        ({"chunks": 5}, "8 rows cannot be split into 5 micro-batches, only into 4"),
        ({"runtime": "rocket"}, "runtime 'rocket' is not one of the profile's"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"memory": [None]}, "1 memory caps"),
        ({"cut": None}, "this plan is damaged: TypeError"),
        ({"format": "x"}, "this is not a penstock plan"),
    ],
)
def test_edited_plan_with_a_mistake_is_refused(
    simple: Plan, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        edit(simple, **fields)


def test_edited_actions_that_are_no_schedule_are_refused(simple: Plan) -> None:
    with pytest.raises(FormatError, match="line 1"):
        edit(simple, schedule="mine", actions=["nonsense"])


def test_plan_for_another_model_is_refused(simple: Plan) -> None:
    simple.check_model([f"layer.{index}" for index in range(8)])
    with pytest.raises(ArgumentError, match=r"\(even\): it has 7 units, and the plan is for 8"):
        simple.check_model([f"layer.{index}" for index in range(7)])
    with pytest.raises(
        ArgumentError, match=r"its unit 0 is 'h', and that of the plan is 'layer.0'"
    ):
        simple.check_model(["h", *(f"layer.{index}" for index in range(1, 8))])


def test_gap_is_how_far_a_plan_may_be_from_the_best(plan: Plan, simple: Plan) -> None:
    assert plan.certificate is not None
    assert plan.gap == pytest.approx(plan.seconds / plan.certificate.bound - 1)
    assert simple.gap is None
    assert f"this one is within {plan.gap:.1%}" in str(plan)


def test_gap_is_infinite_if_nothing_is_proved(plan: Plan) -> None:
    """A bound of 0 was a gap of 0: nothing was proved, and the plan was said to be the best."""
    assert plan.certificate is not None
    unproved = replace(plan.certificate, bound=0.0, schedule_bound=0.0)
    plan = replace(plan, certificate=unproved)
    assert plan.gap == inf
    text = str(plan)
    assert (
        f"it is not known how much faster a plan in the searched space ({unproved.space})" in text
    )
    assert "It is not known how far this schedule is from the best for its cut and memory." in text
    assert "within" not in text


def test_plan_as_text_says_choice_forecast_and_certificate(plan: Plan) -> None:
    text = str(plan)
    assert text.startswith("plan for even: ")
    assert "layer.0" in text
    for words in (
        "next best:",
        "idle (fill",
        "certificate: no plan in the searched space",
        "no cap",
    ):
        assert words in text
    capped = replace(plan, profile=with_memory(plan.profile, 1e4), memory=(1e4, 1e4))
    assert "of 10 KB" in str(capped)
