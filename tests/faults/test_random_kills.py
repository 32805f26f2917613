"""A sample of `python -m tests.faults.random_kills`, which `make soak` runs whole."""

from __future__ import annotations

from tests.faults.random_kills import search


def test_run_that_was_killed_at_a_random_moment_resumes_bit_for_bit() -> None:
    assert search(1) == []
