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

from penstock.doctor.facts import ALONE, Facts, loads, observe
from penstock.doctor.links import Link, measure_copies, measure_link, rounds
from penstock.launch.init import backend_for, prepare_gloo
from penstock.launch.launched import Launched, device_of
from penstock.launch.meeting import meet, open_store, told

ASKED = 5  # times that a clock is asked


@dataclass(frozen=True)
class Found:
    """All that a visit has found.

    backend  gloo or nccl; threads, alone
    links    between ranks; alone, between GPUs
    clocks   for each rank, by how many seconds it is ahead of rank 0, and how far that may be wrong
    """

    size: int
    backend: str
    patience: float
    facts: dict[int, Facts]
    links: list[Link]
    clocks: dict[int, tuple[float, float]]

    @property
    def missing(self) -> list[int]:
        """The ranks that did not come."""
        return [rank for rank in range(self.size) if rank not in self.facts]


def alone() -> Found:
    """Of one process that no launcher has started."""
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    return Found(1, "threads", 0.0, {0: observe(ALONE)}, measure_copies(gpus), {})


def together(seat: Launched, patience: float, conclude: Callable[[Found], bool]) -> bool:
    """Of all ranks; rank 0 draws the conclusion, and every rank gives it."""
    store = open_store(seat, 3 * patience)
    met = meet(store, seat.rank, seat.size, observe(seat).dumps(), 3 * patience)
    facts = {rank: loads(word) for rank, word in sorted(met.words.items())}
    backend = backend_for([one.gpu for one in facts.values()])
    prepare_gloo(seat)
    _compare_clocks(met.store, seat.rank, list(facts), patience)
    _measure_links(met.store, seat, list(facts), backend, patience)
    if seat.rank:
        told(met.store, ["sound"], longest(seat.size, patience))
        sound = met.store.get("sound") == b"1"
        met.store.set(f"heard/{seat.rank}", "")
        return sound
    links = [_both(met.store, a, b) for pairs in rounds(list(facts)) for a, b in pairs]
    clocks = _clocks(met.store, [rank for rank in facts if rank])
    name = "nccl" if "nccl" in backend else "gloo"
    sound = conclude(Found(seat.size, name, patience, facts, sorted(links, key=_pair), clocks))
    met.store.set("sound", str(int(sound)))
    told(met.store, [f"heard/{rank}" for rank in facts if rank], patience)
    return sound


def longest(size: int, patience: float) -> float:
    """Seconds that a visit may take, if everything that can be slow is slow."""
    return (12 + 3 * size) * patience + 30


# ---- clocks -------------------------------------------------------------------------------


def _compare_clocks(store: Store, rank: int, ranks: list[int], patience: float) -> None:
    """Rank 0 says its time to each other rank, some times over; the quickest answer counts."""
    limit = timedelta(seconds=patience)
    try:
        if rank == 0:
            for other in (other for other in ranks if other):
                for time_over in range(ASKED):
                    store.wait([f"clock/{other}/{time_over}/asked"], limit)
                    store.set(f"clock/{other}/{time_over}/answer", repr(time.time()))
            return
        tries = []
        for time_over in range(ASKED):
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


def _clocks(store: Store, ranks: list[int]) -> dict[int, tuple[float, float]]:
    known = [rank for rank in ranks if store.check([f"clock/{rank}"])]
    return {rank: tuple(json.loads(store.get(f"clock/{rank}"))) for rank in known}


# ---- links --------------------------------------------------------------------------------


def _measure_links(
    store: Store, seat: Launched, ranks: list[int], backend: str, patience: float
) -> None:
    """Round by round, all ranks together, so that nobody is late because of an earlier round."""
    for number, pairs in enumerate(rounds(ranks)):
        store.set(f"round/{number}/{seat.rank}", "")
        told(store, [f"round/{number}/{rank}" for rank in ranks], 2 * patience)
        for a, b in pairs:
            if seat.rank in (a, b):
                found = measure_link(
                    store, Link(a, b), seat.rank, backend, device_of(seat), patience
                )
                store.set(f"measured/{a}-{b}/{seat.rank}", json.dumps(asdict(found)))
    store.set(f"round/last/{seat.rank}", "")
    told(store, [f"round/last/{rank}" for rank in ranks], 2 * patience)


def _both(store: Store, a: int, b: int) -> Link:
    """As a has measured it, unless either has a problem."""
    ends = []
    for rank in (a, b):
        key = f"measured/{a}-{b}/{rank}"
        if not store.check([key]):
            return Link(a, b, problem=f"rank {rank} has not told how it went")
        ends.append(Link(**json.loads(store.get(key))))
    return next((end for end in ends if end.problem), ends[0])


def _pair(link: Link) -> tuple[int, int]:
    return link.a, link.b
