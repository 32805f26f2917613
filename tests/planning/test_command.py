"""`penstock plan` on a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.plan import run, run_split
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


def test_target_that_is_neither_a_profile_nor_a_factory_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'models.py' is neither a profile"):
        run("models.py", None, None, "makespan", 0.0, None, None)
    with pytest.raises(ArgumentError, match="there is no module 'no_such_module'"):
        run("no_such_module:make", None, None, "makespan", 0.0, None, None)


def test_factory_is_measured_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own output goes to stderr, so that stdout has the plan alone."""
    (tmp_path / "planned_factory.py").write_text(
        "import torch\n"
        "def make():\n"
        "    print('made')\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers), torch.zeros(8, 8)\n"
        "def both():\n"
        "    return {'model': make()[0], 'batch': torch.zeros(8, 8), 'side': {'mask': None}}\n"
    )
    monkeypatch.chdir(tmp_path)
    run("planned_factory:make", 2, "1GB", "makespan", 0.0, tmp_path / "plan.json", None, "sgd")
    printed = capsys.readouterr()
    assert printed.out.startswith("plan for Sequential: ")
    assert "made" in printed.err
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.ranks, plan.memory, plan.profile.optimizer_factor) == (2, (1e9, 1e9), 0.0)
    run_split("planned_factory:make", 2, 1, "parameters")
    assert capsys.readouterr().out.startswith("Sequential in 2 stages of 2 + 2 units")
    with pytest.raises(ArgumentError, match="inputs by position and by name"):
        run_split("planned_factory:both", 2, 1, None)
