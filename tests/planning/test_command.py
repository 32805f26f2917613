"""`penstock plan` on a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.plan import run
from penstock.errors import ArgumentError
from penstock.planning import Plan
from tests.planning.problems import even_profile


@pytest.fixture
def profile(tmp_path: Path) -> str:
    even_profile(units=6, ranks=2).save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_plan_is_printed_saved_and_drawn(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    plan = run(profile, 3, "2KB", "makespan", 0.0, saved, picture)
    assert capsys.readouterr().out == f"{plan}\n"
    assert len(plan.profile.devices) == 3
    assert plan.memory == (2000.0,) * 3
    assert Plan.load(saved) == plan
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("devices", "memory", "objective", "message"),
    [
        (0, None, "makespan", "devices is 0"),
        (2, "24 zebras", "makespan", "'24 zebras' is not a number of bytes"),
        (2, "10B", "makespan", "no plan fits"),
        (2, None, "speed", "objective 'speed' is unknown"),
    ],
)
def test_wrong_options_are_refused(
    profile: str, devices: int, memory: str | None, objective: str, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(profile, devices, memory, objective, 0.0, None, None)


def test_target_that_is_not_a_profile_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"is not a profile: pass a .json file"):
        run("models:make", None, None, "makespan", 0.0, None, None)
