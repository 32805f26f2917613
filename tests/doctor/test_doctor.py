"""`penstock doctor` in one process, under a launcher, with a missing rank, and on two hosts."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from penstock import cli
from tests.launch.hosts import (
    TORCHRUN,
    Ended,
    end,
    environment,
    free_port,
    rank_environment,
    run,
    start,
    start_on,
    two_hosts,
)

DOCTOR = ["-m", "penstock", "doctor", "--json"]


def findings(ended: Ended) -> dict[str, Any]:
    assert ended.out, ended.err
    found = json.loads(ended.out)
    assert isinstance(found, dict)
    return found


def run_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["penstock", "doctor", *words])
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), *capsys.readouterr()


def test_doctor_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_doctor(monkeypatch, capsys)
    assert (code, err) == (0, "")
    for words in ("one process", "versions  penstock", "torch 2.", "free      memory"):
        assert words in out
    code, out, err = run_doctor(monkeypatch, capsys, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["broken"] == []


def test_doctor_prints_problems_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.doctor.advice.MIN_TORCH_VERSION", (9, 0))
    code, out, _ = run_doctor(monkeypatch, capsys)
    assert code == 1
    assert "broken: rank 0 has torch 2." in out
    assert "Penstock needs 9.0 or newer" in out


def test_doctor_refuses_invalid_patience(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_doctor(monkeypatch, capsys, "--patience", "0")
    assert said == (2, "", "penstock: --patience takes seconds above 0 and up to 600, not 0\n")


def test_doctor_under_torchrun_prints_on_rank_0_only() -> None:
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *DOCTOR]
    ended = run(words, environment(OMP_NUM_THREADS="1"))
    assert ended.err == ""
    found = findings(ended)
    assert (found["size"], found["backend"], found["broken"]) == (2, "gloo", [])
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    (link,) = found["links"]
    assert (link["a"], link["b"], link["problem"]) == (0, 1, "")
    assert link["latency"] > 0
    assert link["bandwidth"] > 0
    assert abs(found["clocks"]["1"]) < 1


def test_doctor_reports_a_missing_rank() -> None:
    """Start two of three ranks."""
    port = free_port()
    words = [sys.executable, *DOCTOR, "--patience", "4"]
    first, second = end([start(words, rank_environment(rank, 3, port)) for rank in range(2)])
    assert (first.code, second.code) == (1, 1)
    assert second.out == ""
    found = findings(first)
    assert found["missing"] == [2]
    assert found["broken"][0].startswith("rank 2 of 3 did not join within 12 s")
    assert [link["problem"] for link in found["links"]] == [""]


def test_doctor_reports_a_dead_link_between_hosts() -> None:
    """The ranks meet at the launcher's store, but GLOO_SOCKET_IFNAME names loopback."""
    with two_hosts() as hosts:
        env = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        first, second = end(start_on(hosts, [*DOCTOR, "--patience", "5"], env, restarts=0))
    assert (first.code, second.code) == (1, 1)
    found = findings(max(first, second, key=lambda ended: len(ended.out)))
    assert found["links"][0]["problem"]
    loopback, _, dead = found["broken"]
    assert "GLOO_SOCKET_IFNAME=lo is loopback, which reaches no other host" in loopback
    assert "cannot reach each other over gloo" in dead
