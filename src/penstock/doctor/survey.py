"""A visit: all ranks tell what they know, their clocks are compared, their links are measured.

Everything is told through the launcher's store, so that it can be told whatever is wrong with the
links. Nobody is waited for longer than agreed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import Store

from penstock.doctor.facts import SINGLE_PROCESS, RankInfo, collect_rank_info, parse_rank_info
from penstock.doctor.links import Link, measure_device_copies, measure_link, pair_ranks_in_rounds
from penstock.launch.init import choose_backend, set_gloo_interface
from penstock.launch.store_rendezvous import join_rendezvous, open_store, wait_for_keys
from penstock.launch.torchrun_env import RankEnv, select_device

CLOCK_SAMPLES = 5  # times that a clock is asked


@dataclass(frozen=True)
class SurveyResult:
    """All that a visit has found.

    backend  gloo or nccl; threads, alone
    links    between ranks; alone, between GPUs
    clocks   for each rank, by how many seconds it is ahead of rank 0, and how far that may be wrong
    """

    world_size: int
    backend: str
    patience: float
    rank_infos: dict[int, RankInfo]
    links: list[Link]
    clock_offsets: dict[int, tuple[float, float]]

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks that did not come."""
        return [rank for rank in range(self.world_size) if rank not in self.rank_infos]


def survey_single_process() -> SurveyResult:
    """Of one process that no launcher has started."""
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    return SurveyResult(
        1, "threads", 0.0, {0: collect_rank_info(SINGLE_PROCESS)}, measure_device_copies(gpus), {}
    )


def survey_all_ranks(
    rank_env: RankEnv, patience: float, report: Callable[[SurveyResult], bool]
) -> bool:
    """Of all ranks; rank 0 draws the conclusion, and every rank gives it."""
    store = open_store(rank_env, 3 * patience)
    met = join_rendezvous(
        store,
        rank_env.rank,
        rank_env.world_size,
        collect_rank_info(rank_env).to_json(),
        3 * patience,
    )
    facts = {rank: parse_rank_info(word) for rank, word in sorted(met.rank_info.items())}
    backend = choose_backend([one.gpu for one in facts.values()])
    set_gloo_interface(rank_env)
    _compare_clocks(met.store, rank_env.rank, list(facts), patience)
    _measure_links(met.store, rank_env, list(facts), backend, patience)
    if rank_env.rank:
        wait_for_keys(met.store, ["sound"], compute_max_seconds(rank_env.world_size, patience))
        sound = met.store.get("sound") == b"1"
        met.store.set(f"heard/{rank_env.rank}", "")
        return sound
    links = [
        _combine_measurements(met.store, a, b)
        for pairs in pair_ranks_in_rounds(list(facts))
        for a, b in pairs
    ]
    clocks = _read_clock_offsets(met.store, [rank for rank in facts if rank])
    name = "nccl" if "nccl" in backend else "gloo"
    sound = report(
        SurveyResult(
            rank_env.world_size, name, patience, facts, sorted(links, key=_get_ranks), clocks
        )
    )
    met.store.set("sound", str(int(sound)))
    wait_for_keys(met.store, [f"heard/{rank}" for rank in facts if rank], patience)
    return sound


def compute_max_seconds(world_size: int, patience: float) -> float:
    """Seconds that a visit may take, if everything that can be slow is slow."""
    return (12 + 3 * world_size) * patience + 30


# ---- clocks -------------------------------------------------------------------------------


def _compare_clocks(store: Store, rank: int, ranks: list[int], patience: float) -> None:
    """Rank 0 says its time to each other rank, some times over; the quickest answer counts."""
    limit = timedelta(seconds=patience)
    try:
        if rank == 0:
            for other in (other for other in ranks if other):
                for time_over in range(CLOCK_SAMPLES):
                    store.wait([f"clock/{other}/{time_over}/asked"], limit)
                    store.set(f"clock/{other}/{time_over}/answer", repr(time.time()))
            return
        tries = []
        for time_over in range(CLOCK_SAMPLES):
            before = time.time()
            store.set(f"clock/{rank}/{time_over}/asked", "")
            store.wait([f"clock/{rank}/{time_over}/answer"], limit * len(ranks))
            after = time.time()
            answer = float(store.get(f"clock/{rank}/{time_over}/answer"))
            tries.append(((after - before) / 2, (before + after) / 2 - answer))
    except RuntimeError:  # whoever is late, or gone, is told of by its links
        return
    wrong, ahead = min(tries)
    store.set(f"clock/{rank}", json.dumps([ahead, wrong]))


def _read_clock_offsets(store: Store, ranks: list[int]) -> dict[int, tuple[float, float]]:
    known = [rank for rank in ranks if store.check([f"clock/{rank}"])]
    return {rank: tuple(json.loads(store.get(f"clock/{rank}"))) for rank in known}


# ---- links --------------------------------------------------------------------------------


def _measure_links(
    store: Store, rank_env: RankEnv, ranks: list[int], backend: str, patience: float
) -> None:
    """Round by round, all ranks together, so that nobody is late because of an earlier round."""
    for number, pairs in enumerate(pair_ranks_in_rounds(ranks)):
        store.set(f"round/{number}/{rank_env.rank}", "")
        wait_for_keys(store, [f"round/{number}/{rank}" for rank in ranks], 2 * patience)
        for a, b in pairs:
            if rank_env.rank in (a, b):
                found = measure_link(
                    store, Link(a, b), rank_env.rank, backend, select_device(rank_env), patience
                )
                store.set(f"measured/{a}-{b}/{rank_env.rank}", json.dumps(asdict(found)))
    store.set(f"round/last/{rank_env.rank}", "")
    wait_for_keys(store, [f"round/last/{rank}" for rank in ranks], 2 * patience)


def _combine_measurements(store: Store, a: int, b: int) -> Link:
    """As a has measured it, unless either has a problem."""
    ends = []
    for rank in (a, b):
        key = f"measured/{a}-{b}/{rank}"
        if not store.check([key]):
            return Link(a, b, problem=f"rank {rank} has not told how it went")
        ends.append(Link(**json.loads(store.get(key))))
    return next((end for end in ends if end.problem), ends[0])


def _get_ranks(link: Link) -> tuple[int, int]:
    return link.a, link.b
