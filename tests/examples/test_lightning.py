"""examples/train_lightning.py in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lightning.py"


def test_example_equals_the_unsplit_module(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--check", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    difference = done.stdout.splitlines()[-1].removeprefix(
        "largest difference from the unsplit module: "
    )
    assert float(difference) < 1e-5
    assert list(tmp_path.rglob("*.ckpt"))
