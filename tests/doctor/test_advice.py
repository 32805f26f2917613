"""The advice that `penstock doctor` prints for each problem it finds, one case each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.doctor.advice import GIB, advise
from penstock.doctor.facts import (
    SINGLE_PROCESS,
    FreeSpace,
    RankInfo,
    collect_rank_info,
    parse_rank_info,
)
from penstock.doctor.links import Link
from penstock.doctor.survey import SurveyResult

WELL = RankInfo(
    rank=0,
    host="a",
    local_size=1,
    versions={"penstock": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu"},
    device="cpu x86_64",
    gpu="",
    gpus=0,
    cores=8,
    threads=4,
    memory={"host": FreeSpace(20 * GIB, 32 * GIB)},
    disk={"/tmp": FreeSpace(20 * GIB, 32 * GIB)},
    settings={},
    interfaces=["lo", "eth0"],
    interface="eth0",
)
GPU = {"gpu": "one", "gpus": 1, "device": "cuda:0 H200"}


def found(*changes: dict[str, Any], **more: Any) -> SurveyResult:
    """Return the survey of ranks on hosts a, b, c, d that differ from a healthy one as given."""
    facts = {
        rank: replace(WELL, rank=rank, host="abcd"[rank], **change)
        for rank, change in enumerate(changes)
    }
    given = {
        "world_size": len(facts),
        "backend": "gloo",
        "patience": 10.0,
        "links": [],
        "clock_offsets": {},
    }
    return SurveyResult(rank_infos=facts, **{**given, **more})


def with_version(name: str, version: str) -> dict[str, Any]:
    return {"versions": {**WELL.versions, name: version}}


CASES = {
    "nothing wrong": (found({}, {}), []),
    "a rank is missing": (
        found({}, {}, world_size=4),
        [
            "broken: ranks 2 and 3 of 4 did not join within 30 s. Look at their output: a rank "
            "that hangs, or cannot reach rank 0, looks like this"
        ],
    ),
    "PyTorch lacks a private API": (
        found({"missing_apis": ["pipe.to needs torch._C._x, which PyTorch 3.0 does not have."]}),
        ["look: rank 0: pipe.to needs torch._C._x, which PyTorch 3.0 does not have"],
    ),
    "torch differs": (
        found({}, with_version("torch", "2.11.0"), {}),
        [
            "broken: torch differs between ranks: 2.13.0+cpu on ranks 0, 2; 2.11.0 on rank 1. "
            "Install the same version on every host"
        ],
    ),
    "torch differs on the last of four": (
        found({}, {}, {}, with_version("torch", "2.11.0")),
        [
            "broken: torch differs between ranks: 2.13.0+cpu on ranks 0 to 2; 2.11.0 on rank 3. "
            "Install the same version on every host"
        ],
    ),
    "torch is old": (
        found(with_version("torch", "2.9.1")),
        ["broken: rank 0 has torch 2.9.1, but Penstock needs 2.10 or newer"],
    ),
    "nccl on one host only": (
        found({}, with_version("nccl", "2.27.3")),
        [
            "broken: nccl differs between ranks: none on rank 0; 2.27.3 on rank 1. Install the "
            "same version on every host"
        ],
    ),
    "the driver is too old": (
        found({"versions": {**WELL.versions, "driver": "470.1", "cuda": "13.0"}}),
        [
            "broken: rank 0: torch 2.13.0+cpu finds no GPU on host a, which has the NVIDIA driver "
            "470.1. The driver is too old for CUDA 13.0, or CUDA_VISIBLE_DEVICES names no "
            "GPU of this host"
        ],
    ),
    "the GPUs are hidden on purpose": (
        found(
            {
                "versions": {**WELL.versions, "driver": "470.1", "cuda": "13.0"},
                "settings": {"CUDA_VISIBLE_DEVICES": ""},
            }
        ),
        [],
    ),
    "no such interface": (
        found({"settings": {"GLOO_SOCKET_IFNAME": "ib0"}}),
        [
            "broken: rank 0: GLOO_SOCKET_IFNAME=ib0, but host a has no interface ib0 (it has lo, "
            "eth0). Set it to one of these, or unset it"
        ],
    ),
    "loopback between hosts": (
        found({}, {"settings": {"GLOO_SOCKET_IFNAME": "lo"}}),
        [
            "broken: rank 1: GLOO_SOCKET_IFNAME=lo is loopback, which reaches no other host. Unset "
            "it, or set it to the interface that reaches the other hosts"
        ],
    ),
    "a dead link": (
        found({}, {}, links=[Link(0, 1, problem="no answer within 10 s")]),
        [
            "broken: rank 0 on a (eth0) and rank 1 on b (eth0) cannot reach each other over gloo: "
            "no answer within 10 s. Open all ports between the hosts, and set GLOO_SOCKET_IFNAME "
            "or NCCL_SOCKET_IFNAME to the interface that connects them"
        ],
    ),
    "python differs": (
        found({}, with_version("python", "3.12.1")),
        ["look: python differs between ranks: 3.11 on rank 0; 3.12 on rank 1"],
    ),
    "python differs in the patch version": (found({}, with_version("python", "3.11.9")), []),
    "one rank without a GPU": (
        found(GPU, {}),
        ["look: no GPU on rank 1, so all ranks would compute on the CPU"],
    ),
    "two ranks on one GPU": (
        found(GPU, GPU),
        [
            "look: ranks 0 and 1 share a GPU. NCCL refuses that, so a pipe computes on the CPU "
            "unless it is given devices=[...]. Start one rank for each GPU"
        ],
    ),
    "a CPU build of torch": (
        found(with_version("driver", "570.1")),
        ["look: rank 0: host a has GPUs, but torch is a build for CPUs only. Install a CUDA build"],
    ),
    "too many threads": (
        found({"local_size": 4, "threads": 8}),
        ["look: 4 ranks with 8 threads each share the 8 cores of host a. Set OMP_NUM_THREADS=2"],
    ),
    "too many ranks": (
        found({"local_size": 9, "threads": 1}),
        ["look: 9 ranks share the 8 cores of host a. Start fewer ranks"],
    ),
    "a GPU in use": (
        found({**GPU, "memory": {"cuda:0": FreeSpace(10 * GIB, 80 * GIB)}}),
        [
            "look: rank 0: 70.0 GiB of cuda:0 are already in use. nvidia-smi shows by which "
            "processes"
        ],
    ),
    "little memory": (
        found({"memory": {"host": FreeSpace(GIB // 2, 8 * GIB)}}),
        ["look: host a has only 0.50 GiB of free memory"],
    ),
    "little disk": (
        found({"disk": {"/home": FreeSpace(GIB // 4, 8 * GIB)}}),
        ["look: host a has only 0.25 GiB left on the disk of /home"],
    ),
    "clocks differ": (
        found({}, {}, {}, clock_offsets={1: (-3.21, 0.01), 2: (0.4, 0.01)}),
        [
            "look: the clock of rank 1 on b is 3.2 s behind rank 0's, so their logs will not line "
            "up. Synchronise the clocks of the hosts (chrony, ntpd)"
        ],
    ),
    "a slow setting": (
        found(*[{"settings": {"NCCL_P2P_DISABLE": "1"}}] * 2),
        [
            "look: NCCL_P2P_DISABLE=1 on ranks 0 and 1 sends between GPUs through the host. Unset "
            "it for speed"
        ],
    ),
    "settings that differ": (
        found({"settings": {"NCCL_DEBUG": "INFO", "MASTER_PORT": "1"}}, {}),
        ["look: NCCL_DEBUG differs between ranks: INFO on rank 0; not set on rank 1"],
    ),
    "a link at half speed": (
        found({}, {}, {}, links=[Link(0, 1, 1, 4e9), Link(0, 2, 1, 4e9), Link(1, 2, 1, 2e9)]),
        [],
    ),
    "a slow link": (
        found({}, {}, {}, links=[Link(0, 1, 1, 4e9), Link(0, 2, 1, 4e9), Link(1, 2, 1, 5e8)]),
        [
            "look: the link between ranks 1 and 2 carries 0.50 GB/s, but a typical link between "
            "hosts carries 4.00 GB/s"
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_advice_for_survey(case: str) -> None:
    given, expected = CASES[case]
    assert [str(advice) for advice in advise(given)] == expected


def test_rank_info_survives_json() -> None:
    facts = collect_rank_info(SINGLE_PROCESS)
    assert parse_rank_info(facts.to_json()) == facts
    assert facts.versions["python"].startswith("3.")
    assert facts.interface in facts.interfaces
    assert facts.memory["host"].free <= facts.memory["host"].total
