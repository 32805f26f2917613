"""A run of benchmarks/soak.py: changing batches, evaluations and saves leak no tensors.

It is short, except under `make soak`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.soak import Row, soak

from tests.distributed.ranks import SOAK, ranks

STEPS = 3000 if SOAK else 60


def soaked(schedule: str, folder: Path) -> list[Row]:
    show = STEPS // 3
    return list(soak(STEPS, schedule, folder, evaluate=7, save=show, show=show))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_soak_run_stays_exact_and_leaks_no_tensors(schedule: str, tmp_path: Path) -> None:
    first, second = ranks(2).run(soaked, schedule, tmp_path, within=20.0 * STEPS)
    assert [row.step for row in first] == [STEPS // 3, 2 * STEPS // 3, STEPS]
    for row in (*first, *second):
        assert row.loss < 1e-10
        assert row.parameters < 1e-10
    # Some messages may still be in flight. One leaked tensor per step would make 40 more.
    assert first[-1].tensors < first[0].tensors + 20
