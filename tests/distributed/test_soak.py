"""A short run of benchmarks/soak.py: changing batches, evaluations and saves leak no tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.soak import Row, soak

from tests.distributed.ranks import ranks


def soaked(schedule: str, folder: Path) -> list[Row]:
    return list(soak(60, schedule, folder, evaluate=7, save=20, show=20))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_soak_run_stays_exact_and_leaks_no_tensors(schedule: str, tmp_path: Path) -> None:
    first, second = ranks(2).run(soaked, schedule, tmp_path)
    assert [row.step for row in first] == [20, 40, 60]
    for row in (*first, *second):
        assert row.loss < 1e-10
        assert row.parameters < 1e-10
    # Some messages may still be in flight. One leaked tensor per step would make 40 more.
    assert first[-1].tensors < first[0].tensors + 20
