"""A sample of `make caps`."""

from __future__ import annotations

from collections import Counter

from tests.properties.memory_caps import run_case


def test_random_models_keep_to_their_memory_caps_with_exact_forecasts() -> None:
    outcomes = Counter(run_case(seed).kind for seed in range(5000, 5008))
    assert set(outcomes) == {"kept", "refused"}
