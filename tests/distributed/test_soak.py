"""A short run of benchmarks/soak.py: changing batches, evaluations and saves, nothing piles up."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.soak import Row, soak

from tests.distributed.ranks import ranks


def soaked(schedule: str, folder: Path) -> list[Row]:
    return list(soak(60, schedule, folder, evaluate=7, save=20, show=20))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_numbers_stay_those_of_the_unsplit_model_and_nothing_piles_up(
    schedule: str, tmp_path: Path
) -> None:
    first, second = ranks(2).run(soaked, schedule, tmp_path)
    assert [row.step for row in first] == [20, 40, 60]
    for row in (*first, *second):
        assert row.loss < 1e-10
        assert row.parameters < 1e-10
    # Some messages may be on their way still; one more in each step would be 40.
    assert first[-1].tensors < first[0].tensors + 20
