"""Problems in the result of a survey, and what to do about them.

Each check is a function that yields one text per problem. A *broken* problem must be fixed before
anything runs. The others are worth a look: a pipe runs, but perhaps slowly.
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
from penstock.text_format import format_bandwidth, format_gib

MIN_TORCH_VERSION = (2, 10)
GIB = 1 << 30
MAX_CLOCK_SKEW = 1.0  # seconds
SLOW_LINK_FACTOR = 4.0  # times slower than the usual link of its kind

_SLOW_SETTINGS = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "waits for every kernel. Unset it for speed",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "checks every collective. Unset it for speed",
    ("NCCL_P2P_DISABLE", "1"): "sends between GPUs through the host. Unset it for speed",
    ("NCCL_SHM_DISABLE", "1"): "sends within a host through the network. Unset it for speed",
    ("NCCL_IB_DISABLE", "1"): "leaves InfiniBand unused. Unset it for speed",
}

# Settings that differ from rank to rank as a matter of course.
_PER_RANK_SETTINGS = ("MASTER_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")


class Advice(NamedTuple):
    """One problem, and what to do about it."""

    broken: bool
    text: str

    def __str__(self) -> str:
        return f"{'broken' if self.broken else 'look'}: {self.text}"


def advise(survey: SurveyResult) -> list[Advice]:
    """Return all advice for a survey, broken things first."""
    broken = [Advice(True, text) for check in _BROKEN_CHECKS for text in check(survey)]
    return broken + [Advice(False, text) for check in _WARNING_CHECKS for text in check(survey)]


# ---- broken: nothing runs before these are fixed --------------------------------------------


def _check_missing_ranks(survey: SurveyResult) -> Iterator[str]:
    if survey.missing_ranks:
        yield (
            f"{_format_ranks(survey.missing_ranks)} of {survey.world_size} did not join within "
            f"{3 * survey.patience:g} s. Look at their output: a rank that hangs, or cannot reach "
            "rank 0, looks like this"
        )


def _check_versions(survey: SurveyResult) -> Iterator[str]:
    for rank, facts in survey.rank_infos.items():
        version = facts.versions["torch"]
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_TORCH_VERSION:
            oldest = ".".join(map(str, MIN_TORCH_VERSION))
            yield f"rank {rank} has torch {version}, but Penstock needs {oldest} or newer"
    for name in ("torch", "penstock", "nccl"):
        versions = {rank: f.versions.get(name, "none") for rank, f in survey.rank_infos.items()}
        for difference in _find_difference(name, versions):
            yield f"{difference}. Install the same version on every host"


def _check_gpus_visible(survey: SurveyResult) -> Iterator[str]:
    for rank, facts in iter_first_rank_of_hosts(survey):
        driver = facts.versions.get("driver")
        is_hidden = facts.settings.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # on purpose
        if driver and not facts.gpus and "cuda" in facts.versions and not is_hidden:
            yield (
                f"rank {rank}: torch {facts.versions['torch']} finds no GPU on host {facts.host}, "
                f"which has the NVIDIA driver {driver}. The driver is too old for CUDA "
                f"{facts.versions['cuda']}, or CUDA_VISIBLE_DEVICES names no GPU of this host"
            )


def _check_interfaces(survey: SurveyResult) -> Iterator[str]:
    hosts = {facts.host for facts in survey.rank_infos.values()}
    # Two hosts may have the same name. The launcher's count of local ranks shows that, too.
    has_several_hosts = len(hosts) > 1 or any(
        f.local_size < survey.world_size for f in survey.rank_infos.values()
    )
    for rank, facts in survey.rank_infos.items():
        name = facts.settings.get("GLOO_SOCKET_IFNAME")
        if name is None:
            continue
        unknown = [part for part in name.split(",") if part not in facts.interfaces]
        if unknown:
            yield (
                f"rank {rank}: GLOO_SOCKET_IFNAME={name}, but host {facts.host} has no interface "
                f"{unknown[0]} (it has {', '.join(facts.interfaces)}). Set it to one of these, or "
                "unset it"
            )
        elif has_several_hosts and is_loopback(name):
            yield (
                f"rank {rank}: GLOO_SOCKET_IFNAME={name} is loopback, which reaches no other host. "
                "Unset it, or set it to the interface that reaches the other hosts"
            )


def _check_dead_links(survey: SurveyResult) -> Iterator[str]:
    for link in survey.links:
        if link.problem:
            a, b = (survey.rank_infos[rank] for rank in (link.a, link.b))
            yield (
                f"rank {link.a} on {a.host} ({a.interface}) and rank {link.b} on {b.host} "
                f"({b.interface}) cannot reach each other over {survey.backend}: {link.problem}. "
                "Open all ports between the hosts, and set GLOO_SOCKET_IFNAME or "
                "NCCL_SOCKET_IFNAME to the interface that connects them"
            )


_BROKEN_CHECKS: tuple[Callable[[SurveyResult], Iterator[str]], ...] = (
    _check_missing_ranks,
    _check_versions,
    _check_gpus_visible,
    _check_interfaces,
    _check_dead_links,
)


# ---- worth a look ---------------------------------------------------------------------------


def _check_python_versions(survey: SurveyResult) -> Iterator[str]:
    return _find_difference(
        "python", {r: f.versions["python"].rpartition(".")[0] for r, f in survey.rank_infos.items()}
    )


def _check_missing_apis(survey: SurveyResult) -> Iterator[str]:
    for rank, facts in iter_first_rank_of_hosts(survey):
        for text in facts.missing_apis:
            yield f"rank {rank}: {text.removesuffix('.')}"


def _check_gpu_assignment(survey: SurveyResult) -> Iterator[str]:
    gpus = _group_ranks({rank: facts.gpu for rank, facts in survey.rank_infos.items()})
    without = gpus.pop("", [])
    if gpus and without:
        yield f"no GPU on {_format_ranks(without)}, so all ranks would compute on the CPU"
    for shared in gpus.values():
        if len(shared) > 1:
            yield (
                f"{_format_ranks(shared)} share a GPU. NCCL refuses that, so a pipe computes on "
                "the CPU unless it is given devices=[...]. Start one rank for each GPU"
            )
    for rank, facts in iter_first_rank_of_hosts(survey):
        if "driver" in facts.versions and "cuda" not in facts.versions:
            yield (
                f"rank {rank}: host {facts.host} has GPUs, but torch is a build for CPUs only. "
                "Install a CUDA build"
            )


def _check_threads(survey: SurveyResult) -> Iterator[str]:
    for _, facts in iter_first_rank_of_hosts(survey):
        ranks, cores = facts.local_size, facts.cores
        if facts.gpu:
            continue
        if ranks > cores:
            yield f"{ranks} ranks share the {cores} cores of host {facts.host}. Start fewer ranks"
        elif ranks > 1 and ranks * facts.threads > cores:
            yield (
                f"{ranks} ranks with {facts.threads} threads each share the {cores} cores of host "
                f"{facts.host}. Set OMP_NUM_THREADS={cores // ranks}"
            )


def _check_free_space(survey: SurveyResult) -> Iterator[str]:
    for rank, facts in survey.rank_infos.items():
        for name, space in facts.memory.items():
            if name != "host" and space.free < space.total / 2:
                used = format_gib(space.total - space.free)
                yield (
                    f"rank {rank}: {used} of {name} are already in use. nvidia-smi shows "
                    "by which processes"
                )
    for _, facts in iter_first_rank_of_hosts(survey):
        host = facts.memory.get("host")
        if host and host.free < GIB:
            yield f"host {facts.host} has only {format_gib(host.free, 2)} of free memory"
        for path, space in facts.disk.items():
            if space.free < GIB:
                free = format_gib(space.free, 2)
                yield f"host {facts.host} has only {free} left on the disk of {path}"


def _check_clocks(survey: SurveyResult) -> Iterator[str]:
    for rank, (ahead, uncertainty) in survey.clock_offsets.items():
        if abs(ahead) - uncertainty > MAX_CLOCK_SKEW:
            direction = "ahead of" if ahead > 0 else "behind"
            yield (
                f"the clock of rank {rank} on {survey.rank_infos[rank].host} is {abs(ahead):.1f} s "
                f"{direction} rank 0's, so their logs will not line up. Synchronise the clocks of "
                "the hosts (chrony, ntpd)"
            )


def _check_settings(survey: SurveyResult) -> Iterator[str]:
    for (name, value), effect in _SLOW_SETTINGS.items():
        ranks = [rank for rank, f in survey.rank_infos.items() if f.settings.get(name) == value]
        if ranks:
            yield f"{name}={value} on {_format_ranks(ranks)} {effect}"
    names = {name for facts in survey.rank_infos.values() for name in facts.settings}
    for name in sorted(name for name in names if not name.startswith(_PER_RANK_SETTINGS)):
        values = {rank: f.settings.get(name, "not set") for rank, f in survey.rank_infos.items()}
        yield from _find_difference(name, values)


def _check_slow_links(survey: SurveyResult) -> Iterator[str]:
    # Links within a host are faster than those between hosts: each is compared with its own kind.
    links_by_kind = defaultdict(list)
    for link in survey.links:
        if not link.problem and survey.world_size > 1:
            same_host = survey.rank_infos[link.a].host == survey.rank_infos[link.b].host
            links_by_kind["within a host" if same_host else "between hosts"].append(link)
    for kind, links in links_by_kind.items():
        typical = median(link.bandwidth for link in links)
        for link in links:
            if link.bandwidth * SLOW_LINK_FACTOR < typical:
                yield (
                    f"the link between ranks {link.a} and {link.b} carries "
                    f"{format_bandwidth(link.bandwidth)}, but a typical link {kind} carries "
                    f"{format_bandwidth(typical)}"
                )


_WARNING_CHECKS: tuple[Callable[[SurveyResult], Iterator[str]], ...] = (
    _check_missing_apis,
    _check_python_versions,
    _check_gpu_assignment,
    _check_threads,
    _check_free_space,
    _check_clocks,
    _check_settings,
    _check_slow_links,
)


# ---- ranks in messages ----------------------------------------------------------------------


def _group_ranks(text_by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have the same text, by text."""
    ranks = defaultdict(list)
    for rank, text in text_by_rank.items():
        ranks[text].append(rank)
    return dict(ranks)


def iter_first_rank_of_hosts(survey: SurveyResult) -> Iterator[tuple[int, RankInfo]]:
    """Yield the first rank of each host, with its facts, for problems of the host as a whole."""
    hosts = set()
    for rank, facts in survey.rank_infos.items():
        if facts.host not in hosts:
            hosts.add(facts.host)
            yield rank, facts


def _find_difference(name: str, text_by_rank: Mapping[int, str]) -> Iterator[str]:
    """Yield which ranks have which text, if not all have the same."""
    groups = _group_ranks(text_by_rank)
    if len(groups) > 1:
        listed = "; ".join(f"{text} on {_format_ranks(ranks)}" for text, ranks in groups.items())
        yield f"{name} differs between ranks: {listed}"


def _format_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0 to 2, 5", with runs of consecutive ranks joined."""
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
