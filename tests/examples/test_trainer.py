"""examples/train_trainer.py in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_trainer.py"


def test_example_equals_the_unsplit_trainer(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--check", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    difference = done.stdout.splitlines()[-1].removeprefix(
        "largest difference from the unsplit Trainer: "
    )
    assert float(difference) < 1e-5
    assert (tmp_path / "checkpoint-20" / "model.safetensors").exists()
