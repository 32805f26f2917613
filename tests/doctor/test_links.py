"""Links are measured pair by pair, and a dead link does not block the survey."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.doctor import links
from penstock.doctor.links import (
    Link,
    measure_device_copies,
    measure_link,
    pair_ranks_in_rounds,
    run_with_timeout,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LARGE_BYTES", links.SMALL_BYTES)
    monkeypatch.setattr(links, "PINGS", 3)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize("count", range(10))
def test_every_pair_is_measured_once_and_no_rank_is_in_two_pairs_at_a_time(count: int) -> None:
    ranks = [3 * rank for rank in range(count)]
    made = pair_ranks_in_rounds(ranks)
    pairs = [pair for pairs in made for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in ranks for b in ranks if a < b]
    for pairs in made:
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy)
    assert len(made) == max(0, count - 1 + count % 2)


def test_measure_link_from_both_ends() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        going = [
            pool.submit(measure_link, store, Link(2, 5), me, "gloo", CPU, 20.0) for me in (2, 5)
        ]
        for found in (one.result() for one in going):
            assert (found.a, found.b, found.problem) == (2, 5, "")
            assert 0 < found.latency < 20
            assert 1e3 < found.bandwidth < 1e12


def test_measure_link_reports_a_missing_peer_without_waiting_for_long() -> None:
    start = time.monotonic()
    found = measure_link(HashStore(), Link(0, 1), 0, "gloo", CPU, 0.5)
    assert found.problem
    assert time.monotonic() - start < 10


def test_run_with_timeout_abandons_a_hanging_function() -> None:
    def hang() -> Link:
        time.sleep(3)
        return Link(0, 1)

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        run_with_timeout(0.05, hang)
    assert time.monotonic() - start < 2


def test_run_with_timeout_raises_the_error_of_the_function() -> None:
    def fail() -> Link:
        raise ArithmeticError("in the thread")

    with pytest.raises(ArithmeticError, match="in the thread"):
        run_with_timeout(5.0, fail)


def test_measure_copies_between_devices_of_one_process() -> None:
    found = measure_device_copies([CPU, CPU, CPU])
    assert [(link.a, link.b) for link in found] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.latency > 0 and link.bandwidth > 0 and not link.problem for link in found)
    assert measure_device_copies([CPU]) == []


def test_latency_is_half_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_time_round_trip", lambda *_: 4.0)
    (found,) = measure_device_copies([CPU, CPU])
    assert (found.latency, found.bandwidth) == (2.0, links.SMALL_BYTES / 2)
