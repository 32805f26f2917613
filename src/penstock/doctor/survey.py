"""A survey of all ranks: their facts, the offsets of their clocks, and the links between them.

All results travel through the launcher's store, which works even if the links between the ranks do
not. Every wait has a time limit. The order of events:

    1. every rank joins a rendezvous, with its facts
    2. every rank compares its clock with that of rank 0
    3. pairs of ranks measure their links, in rounds
    4. rank 0 collects the results and reports; all ranks return its conclusion
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from penstock.device.accelerator import list_accelerators
from penstock.doctor.facts import SINGLE_PROCESS, RankInfo, collect_rank_info, parse_rank_info
from penstock.doctor.links import Link, measure_device_copies, measure_link, pair_ranks_in_rounds
from penstock.launch.init import choose_backend, open_store, set_gloo_interface
from penstock.launch.torchrun_env import RankEnv, select_device
from penstock.runtime.distributed.links import find_link_backend
from penstock.runtime.distributed.store import gather_in_store, join_rendezvous, wait_for_keys

CLOCK_SAMPLES = 5  # readings of rank 0's clock; the quickest answer counts


@dataclass(frozen=True)
class SurveyResult:
    """The result of a survey.

    Attributes:
        backend: gloo or nccl; "threads" for a single process.
        patience: Seconds that one wait for a rank or a link may take.
        links: Links between ranks; for a single process, between its GPUs.
        clock_offsets: For each rank, by how many seconds its clock is ahead of rank 0's, and the
            uncertainty of that number in seconds.
    """

    world_size: int
    backend: str
    patience: float
    rank_infos: dict[int, RankInfo]
    links: list[Link]
    clock_offsets: dict[int, tuple[float, float]]

    @property
    def missing_ranks(self) -> list[int]:
        """Return the ranks that did not join."""
        return [rank for rank in range(self.world_size) if rank not in self.rank_infos]


def survey_single_process() -> SurveyResult:
    """Survey a single process that no launcher has started."""
    links = measure_device_copies(list_accelerators())
    return SurveyResult(1, "threads", 0.0, {0: collect_rank_info(SINGLE_PROCESS)}, links, {})


def survey_all_ranks(
    rank_env: RankEnv, patience: float, report: Callable[[SurveyResult], bool]
) -> bool:
    """Survey all ranks of a launcher. All of them return what `report` returns on rank 0.

    `report` receives the result, on rank 0 alone, and returns True if nothing is broken.
    """
    launcher_store = open_store(rank_env, 3 * patience)
    info = collect_rank_info(rank_env).to_json()
    rendezvous = join_rendezvous(
        launcher_store, rank_env.rank, rank_env.world_size, info, 3 * patience
    )
    store = rendezvous.store
    facts = {rank: parse_rank_info(text) for rank, text in sorted(rendezvous.rank_info.items())}
    backend = choose_backend([info.gpu for info in facts.values()])
    set_gloo_interface(rank_env)
    ranks = list(facts)
    clock = _compare_clocks(store, rank_env.rank, ranks, patience)
    measured = _measure_links(store, rank_env, ranks, backend, patience)
    measurements = gather_in_store(
        store, "measured", rank_env.rank, ranks, (clock, measured), 2 * patience
    )
    if rank_env.rank:
        wait_for_keys(store, ["sound"], compute_max_seconds(rank_env.world_size, patience))
        is_sound = store.get("sound") == b"1"
        store.set(f"heard/{rank_env.rank}", "")
        return is_sound
    links = [
        _combine_measurements(measurements, a, b)
        for pairs in pair_ranks_in_rounds(ranks)
        for a, b in pairs
    ]
    clocks = {rank: (*clock,) for rank, (clock, _) in measurements.items() if clock}
    is_sound = report(
        SurveyResult(
            rank_env.world_size,
            find_link_backend(backend).name,
            patience,
            facts,
            sorted(links, key=lambda link: (link.a, link.b)),
            clocks,
        )
    )
    store.set("sound", str(int(is_sound)))
    # Rank 0 may host the store: it stays until the others have read the conclusion.
    wait_for_keys(store, [f"heard/{rank}" for rank in facts if rank], patience)
    return is_sound


def compute_max_seconds(world_size: int, patience: float) -> float:
    """Return the seconds after which a survey must have ended, even if every wait times out."""
    return (12 + 3 * world_size) * patience + 30


# ---- clocks -------------------------------------------------------------------------------


def _compare_clocks(
    store: Store, rank: int, ranks: list[int], patience: float
) -> tuple[float, float] | None:
    """Return the offset of this rank's clock and its uncertainty. None on rank 0, or if it fails.

    The other ranks ask rank 0 for its time, one after another. Half of the round trip is the
    uncertainty of an answer, so the quickest answer counts.
    """
    limit = timedelta(seconds=patience)
    try:
        if rank == 0:
            for other in (other for other in ranks if other):
                for sample in range(CLOCK_SAMPLES):
                    store.wait([f"clock/{other}/{sample}/asked"], limit)
                    store.set(f"clock/{other}/{sample}/answer", repr(time.time()))
            return None
        samples = []
        for sample in range(CLOCK_SAMPLES):
            before = time.time()
            store.set(f"clock/{rank}/{sample}/asked", "")
            store.wait([f"clock/{rank}/{sample}/answer"], limit * len(ranks))
            after = time.time()
            answer = float(store.get(f"clock/{rank}/{sample}/answer"))
            samples.append(((after - before) / 2, (before + after) / 2 - answer))
    except RuntimeError:  # a rank is late or gone: the measurement of its links will report it
        return None
    uncertainty, ahead = min(samples)
    return ahead, uncertainty


# ---- links --------------------------------------------------------------------------------


def _measure_links(
    store: Store, rank_env: RankEnv, ranks: list[int], backend: str, patience: float
) -> list[dict[str, Any]]:
    """Measure the links of this rank, and return the fields of each `Link`.

    All ranks begin each round together. Otherwise a rank that was held up by a dead link would be
    late for its next link, and that one would look dead, too.
    """
    links = []
    for index, pairs in enumerate(pair_ranks_in_rounds(ranks)):
        gather_in_store(store, f"round/{index}", rank_env.rank, ranks, None, 2 * patience)
        for a, b in pairs:
            if rank_env.rank in (a, b):
                link = measure_link(
                    store, Link(a, b), rank_env.rank, backend, select_device(rank_env), patience
                )
                links.append(asdict(link))
    return links


def _combine_measurements(measurements: Mapping[int, Any], a: int, b: int) -> Link:
    """Return the link as rank a has measured it, or the end that reports a problem."""
    ends = []
    for rank in (a, b):
        if rank not in measurements:
            return Link(a, b, problem=f"rank {rank} did not report a measurement")
        links = [Link(**fields) for fields in measurements[rank][1]]
        ends += [link for link in links if (link.a, link.b) == (a, b)]
    return next((end for end in ends if end.problem), ends[0])
