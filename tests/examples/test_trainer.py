"""examples/train_trainer.py in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.launch.hosts import environment, run

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_trainer.py"


def test_example_equals_the_unsplit_trainer(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--check", "--out", str(tmp_path)]
    done = run(command, environment(OMP_NUM_THREADS="1"))
    assert done.code == 0, done.err
    difference = done.out.splitlines()[-1].removeprefix(
        "largest difference from the unsplit Trainer: "
    )
    assert float(difference) < 1e-5
    assert (tmp_path / "checkpoint-20" / "model.safetensors").exists()
