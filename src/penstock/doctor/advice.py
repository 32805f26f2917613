"""What is wrong with what was found, and what to do about it: one function a kind.

Each gives its advice as text. What is *broken* must be fixed before anything runs; the rest is
worth a look.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from penstock.doctor.facts import RankInfo
from penstock.doctor.survey import SurveyResult
from penstock.launch.torchrun_env import is_loopback

MIN_TORCH_VERSION = (2, 10)  # torch
GIB = 1 << 30
MAX_CLOCK_SKEW = 1.0  # seconds
SLOW_LINK_FACTOR = 4.0  # times slower than the usual link of its kind

_SLOW_SETTINGS = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "waits for every kernel: unset it for speed",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "checks every collective: unset it for speed",
    ("NCCL_P2P_DISABLE", "1"): "sends between GPUs through the host: unset it for speed",
    ("NCCL_SHM_DISABLE", "1"): "sends within a host through the network: unset it for speed",
    ("NCCL_IB_DISABLE", "1"): "leaves InfiniBand unused: unset it for speed",
}

# What may well differ from rank to rank.
_PER_RANK_SETTINGS = ("MASTER_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")


class Advice(NamedTuple):
    """One thing to fix."""

    broken: bool
    text: str

    def __str__(self) -> str:
        return f"{'broken' if self.broken else 'look'}: {self.text}"


def advise(survey: SurveyResult) -> list[Advice]:
    """Everything, what is broken first."""
    given = [Advice(True, text) for kind in _BROKEN_CHECKS for text in kind(survey)]
    return given + [Advice(False, text) for kind in _WARNING_CHECKS for text in kind(survey)]


# ---- broken -------------------------------------------------------------------------------


def _check_missing_ranks(survey: SurveyResult) -> Iterator[str]:
    if survey.missing_ranks:
        yield (
            f"{_format_ranks(survey.missing_ranks)} of {survey.world_size} did not come within {3 * survey.patience:g} s:"
            " see what they print; a host that hangs, or does not reach rank 0, looks like this"
        )


def _check_versions(survey: SurveyResult) -> Iterator[str]:
    for rank, facts in survey.rank_infos.items():
        version = facts.versions["torch"]
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_TORCH_VERSION:
            oldest = ".".join(map(str, MIN_TORCH_VERSION))
            yield f"rank {rank} has torch {version}: Penstock needs {oldest} or newer"
    for name in ("torch", "penstock", "nccl"):
        texts = _group_ranks(
            {rank: f.versions.get(name, "none") for rank, f in survey.rank_infos.items()}
        )
        if len(texts) > 1:
            yield f"{name} differs: {_format_groups(texts)}; install the same version on every host"


def _check_gpus_visible(survey: SurveyResult) -> Iterator[str]:
    for rank, facts in iter_first_rank_of_hosts(survey):
        driver = facts.versions.get("driver")
        if driver and not facts.gpus and "cuda" in facts.versions:
            yield (
                f"rank {rank}: torch {facts.versions['torch']} finds no GPU on {facts.host}, where "
                f"there is a driver, {driver}: it is too old for CUDA {facts.versions['cuda']}, or "
                "CUDA_VISIBLE_DEVICES hides the GPUs"
            )


def _check_interfaces(survey: SurveyResult) -> Iterator[str]:
    hosts = {facts.host for facts in survey.rank_infos.values()}
    several = len(hosts) > 1 or any(
        f.local_size < survey.world_size for f in survey.rank_infos.values()
    )
    for rank, facts in survey.rank_infos.items():
        name = facts.settings.get("GLOO_SOCKET_IFNAME")
        if name is None:
            continue
        unknown = [one for one in name.split(",") if one not in facts.interfaces]
        if unknown:
            yield (
                f"rank {rank}: GLOO_SOCKET_IFNAME={name}, and {facts.host} has no interface "
                f"{unknown[0]}, but {', '.join(facts.interfaces)}: name one of them, or unset it"
            )
        elif several and is_loopback(name):
            yield (
                f"rank {rank}: GLOO_SOCKET_IFNAME={name} is loopback, which leads to no other host:"
                " unset it, or name the interface that leads there"
            )


def _check_dead_links(survey: SurveyResult) -> Iterator[str]:
    for link in survey.links:
        if link.problem:
            a, b = (survey.rank_infos[rank] for rank in (link.a, link.b))
            yield (
                f"rank {link.a} on {a.host} ({a.interface}) and rank {link.b} on {b.host} "
                f"({b.interface}) do not reach each other over {survey.backend}: {link.problem}; "
                "open all ports between the hosts, and name the interface that joins them with "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
            )


_BROKEN_CHECKS: tuple[Callable[[SurveyResult], Iterator[str]], ...] = (
    _check_missing_ranks,
    _check_versions,
    _check_gpus_visible,
    _check_interfaces,
    _check_dead_links,
)


# ---- worth a look -------------------------------------------------------------------------


def _check_python_versions(survey: SurveyResult) -> Iterator[str]:
    texts = _group_ranks(
        {r: f.versions["python"].rpartition(".")[0] for r, f in survey.rank_infos.items()}
    )
    if len(texts) > 1:
        yield f"python differs: {_format_groups(texts)}"


def _check_gpu_assignment(survey: SurveyResult) -> Iterator[str]:
    gpus = _group_ranks({rank: facts.gpu for rank, facts in survey.rank_infos.items()})
    without = gpus.pop("", [])
    if gpus and without:
        yield f"no GPU on {_format_ranks(without)}: all ranks would compute on the CPU"
    for shared in gpus.values():
        if len(shared) > 1:
            yield (
                f"{_format_ranks(shared)} share a GPU: NCCL refuses that, so a pipe computes on the CPU,"
                " unless it is given devices=[...]; start one rank for each GPU"
            )
    for rank, facts in iter_first_rank_of_hosts(survey):
        if "driver" in facts.versions and "cuda" not in facts.versions:
            yield f"rank {rank}: {facts.host} has GPUs, and torch is a build for CPUs"


def _check_threads(survey: SurveyResult) -> Iterator[str]:
    for _, facts in iter_first_rank_of_hosts(survey):
        ranks, cores = facts.local_size, facts.cores
        if facts.gpu:
            continue
        if ranks > cores:
            yield f"{ranks} ranks compute on {cores} cores of {facts.host}: start fewer"
        elif ranks > 1 and ranks * facts.threads > cores:
            yield (
                f"{ranks} ranks with {facts.threads} threads each on {cores} cores of "
                f"{facts.host}: set OMP_NUM_THREADS={cores // ranks}"
            )


def _check_free_space(survey: SurveyResult) -> Iterator[str]:
    for rank, facts in survey.rank_infos.items():
        for name, room in facts.memory.items():
            if name != "host" and room.free < room.total / 2:
                used = (room.total - room.free) / GIB
                yield f"rank {rank}: {used:.1f} GiB of {name} are in use: by whom? (nvidia-smi)"
    for _, facts in iter_first_rank_of_hosts(survey):
        host = facts.memory.get("host")
        if host and host.free < GIB:
            yield f"{facts.host} has {host.free / GIB:.2f} GiB of memory left"
        for place, room in facts.disk.items():
            if room.free < GIB:
                yield f"{facts.host} has {room.free / GIB:.2f} GiB left on the disk of {place}"


def _check_clocks(survey: SurveyResult) -> Iterator[str]:
    for rank, (ahead, wrong) in survey.clock_offsets.items():
        if abs(ahead) - wrong > MAX_CLOCK_SKEW:
            way = "ahead of" if ahead > 0 else "behind"
            yield (
                f"the clock of rank {rank} on {survey.rank_infos[rank].host} is {abs(ahead):.1f} s {way} "
                "rank 0's: logs will not line up; synchronise the hosts' clocks (chrony, ntpd)"
            )


def _check_settings(survey: SurveyResult) -> Iterator[str]:
    for (name, value), why in _SLOW_SETTINGS.items():
        ranks = [rank for rank, f in survey.rank_infos.items() if f.settings.get(name) == value]
        if ranks:
            yield f"{name}={value} on {_format_ranks(ranks)} {why}"
    names = {name for facts in survey.rank_infos.values() for name in facts.settings}
    for name in sorted(name for name in names if not name.startswith(_PER_RANK_SETTINGS)):
        texts = _group_ranks(
            {rank: f.settings.get(name, "not set") for rank, f in survey.rank_infos.items()}
        )
        if len(texts) > 1:
            yield f"{name} differs: {_format_groups(texts)}"


def _check_slow_links(survey: SurveyResult) -> Iterator[str]:
    kinds = defaultdict(list)
    for link in survey.links:
        if not link.problem and survey.world_size > 1:
            near = survey.rank_infos[link.a].host == survey.rank_infos[link.b].host
            kinds["within a host" if near else "between hosts"].append(link)
    for kind, links in kinds.items():
        usual = median(link.bandwidth for link in links)
        for link in links:
            if link.bandwidth * SLOW_LINK_FACTOR < usual:
                yield (
                    f"the link between ranks {link.a} and {link.b} carries "
                    f"{link.bandwidth / 1e9:.2f} GB/s, and the usual one {kind} {usual / 1e9:.2f}"
                )


_WARNING_CHECKS: tuple[Callable[[SurveyResult], Iterator[str]], ...] = (
    _check_python_versions,
    _check_gpu_assignment,
    _check_threads,
    _check_free_space,
    _check_clocks,
    _check_settings,
    _check_slow_links,
)


# ---- in words -----------------------------------------------------------------------------


def _group_ranks(text_by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks for each text."""
    ranks = defaultdict(list)
    for rank, text in text_by_rank.items():
        ranks[text].append(rank)
    return dict(ranks)


def iter_first_rank_of_hosts(survey: SurveyResult) -> Iterator[tuple[int, RankInfo]]:
    """With its rank."""
    seen = set()
    for rank, facts in survey.rank_infos.items():
        if facts.host not in seen:
            seen.add(facts.host)
            yield rank, facts


def _format_groups(ranks_by_text: dict[str, list[int]]) -> str:
    return ", ".join(f"{text} on {_format_ranks(ranks)}" for text, ranks in ranks_by_text.items())


def _format_ranks(ranks: Iterable[int]) -> str:
    """In words: rank 3; ranks 0 to 2, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [
        str(run[0]) if len(run) == 1 else f"{run[0]} {'to' if len(run) > 2 else 'and'} {run[-1]}"
        for run in runs
    ]
    return ("rank " if texts == [str(runs[0][0])] else "ranks ") + ", ".join(texts)
