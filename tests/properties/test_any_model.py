"""Any model gives its own numbers as a pipe: `make fuzz` tries ten times as many."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.properties.cases import Case, cases
from tests.properties.comparing import compare


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_model_gives_its_own_numbers(case: Case) -> None:
    compare(case)
