"""examples/train_lightning.py in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.launch.hosts import environment, run

pytest.importorskip("lightning")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lightning.py"


def test_example_equals_the_unsplit_module(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--check", "--out", str(tmp_path)]
    done = run(command, environment(OMP_NUM_THREADS="1"))
    assert done.code == 0, done.err
    difference = done.out.splitlines()[-1].removeprefix(
        "largest difference from the unsplit module: "
    )
    assert float(difference) < 1e-5
    assert list(tmp_path.rglob("*.ckpt"))
