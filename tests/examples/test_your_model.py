"""The three models of docs/your-model.md: training them as pipes, and `penstock check`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock import cli

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

MODELS = ("language_model", "research", "u_net")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_your_model_example_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"your_model.{name}").main(steps=6)
    out = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step ")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "advice   " in out


@pytest.mark.parametrize("name", MODELS)
def test_your_model_example_passes_penstock_check(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"penstock check your_model.{name}:make --schedules 1f1b --stages 2 --chunks 2"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--runtimes", "inline"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr().out
    assert end.value.code in (0, None), out
    assert "equal in all 2 runs, to 1e-10" in out
