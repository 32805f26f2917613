"""Any model gives its own numbers as a pipe: `make fuzz` tries forty times as many."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from penstock.microbatch import MicrobatchRows
from tests.properties.cases import Case, cases
from tests.properties.comparing import compare
from tests.properties.fuzz import Failed, attempt, read_case


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_model_gives_its_own_numbers(case: Case) -> None:
    compare(case)


def test_a_failure_is_told_with_a_case_that_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here micro-batches count the same, however many rows they have."""

    def alike(rows: MicrobatchRows) -> list[float]:
        return [1 / len(rows.counts)] * len(rows.counts)

    monkeypatch.setattr(MicrobatchRows, "fractions", alike)
    told: list[object] = []
    attempt(0, 200, told.append)
    (failed,) = (one for one in told if isinstance(one, Failed))
    assert "differs by" in failed.text
    with pytest.raises(AssertionError, match="differs by"):
        compare(read_case(failed.case))
    monkeypatch.undo()
    assert compare(read_case(failed.case)) < 1e-10
