"""The processes of one pipe: their groups, their watch, and what they have learned of each other.

After a fault the groups are poisoned and the watch is closed. The next call opens new ones, so that
whoever caught the error on every rank may go on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import RunError
from penstock.run.processes.gathering import gather
from penstock.run.processes.links import Links, links_of
from penstock.run.processes.peers import Peers
from penstock.run.processes.poison import poison
from penstock.run.processes.saves import SavesGroup
from penstock.run.processes.standing import Standing
from penstock.run.processes.store import store_of
from penstock.run.processes.watch import Watch
from penstock.run.processes.wire import Learned
from penstock.stage.places import Gpu, Place

REMEMBERED = 128  # signatures
# Heartbeats that it may take before it is a stall:
LEARNING = 6.0  # an action in the first call of its kind, where it may compile or load
SLOW = 60.0  # to make a pipe, to save or to load it: disks are slow
_OPERATION = timedelta(minutes=30)  # a wait ends by the watch, long before

_pipes: dict[tuple[int, ...], int] = {}  # made so far in this process, by the ranks of their group


class Team:
    """This process among those of a pipe. A copy of the pipe belongs to the same team."""

    peers: Peers
    watch: Watch
    links: Links

    def __init__(self, standing: Standing, place: Place, heartbeat: float, nccl: bool) -> None:
        group = standing.group
        self.standing = standing
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = tuple(dist.get_process_group_ranks(group))
        self._number = _pipes[members] = _pipes.get(members, -1) + 1
        self._shared = store_of(group, f"pipe{self._number}")
        self.place, self._heartbeat, self._nccl = place, heartbeat, nccl
        self._openings = 0
        self._calls = 0
        self._turn = threading.Lock()
        self._caller: int | None = None
        self._learned: OrderedDict[str, Learned] = OrderedDict()
        self._open()

    def __deepcopy__(self, memo: Any) -> Team:
        return self

    def __reduce__(self) -> Any:
        raise RunError(
            "a pipe over several processes cannot be pickled, as its other stages are elsewhere: "
            "use pipe.save(folder), or pipe.state_dict() for what is on this rank"
        )

    @contextmanager
    def call(self, kind: str, patience: float = 1.0) -> Iterator[str]:
        """Within, what is raised is raised on every rank; gives the call's name.

        Threads take turns. The thread that is within may not begin another call. `patience` is
        in heartbeats.
        """
        if self._calls_now():
            raise RunError(
                f"{kind} of a pipe was called within another call of it, in a layer or a hook: the "
                "other ranks would not know of it; call it after the step"
            )
        with self._turn:
            if self.watch.closed:
                self._open_again()
            self._calls += 1
            name = f"{kind} (call {self._calls})"
            self._caller = threading.get_ident()
            try:
                with self.watch.guarded(name, patience):
                    yield name
                self.watch.outside()
            finally:
                self._caller = None

    def learned(self, key: str) -> Learned:
        """What is known of calls with this key; all ranks remember and forget the same."""
        found = self._learned.setdefault(key, Learned())
        self._learned.move_to_end(key)
        if len(self._learned) > REMEMBERED:
            self._learned.popitem(last=False)
        return found

    def group_for_saves(self) -> Any:
        """One of their own: a save may go on in the background of steps. All ranks ask together.

        All copies of the pipe are in it. Within a call.
        """
        if len(self._gloo) == 1:
            everyone = self.standing.everyone
            mine = everyone.index(dist.get_rank())
            store = self._shared.among(everyone, f"saves{self._number}-{self._openings}")
            gather(store, mine, len(everyone))
            self._gloo.append(_new_gloo(store, mine, len(everyone)))
        return SavesGroup(self._gloo[1], self.watch, self._calls_now)

    def _calls_now(self) -> bool:
        """Does this thread?"""
        return self._caller == threading.get_ident()

    def _open_again(self) -> None:
        """After a failure; not if some rank is not there any more."""
        cause = self.watch.cause
        if cause is not None and cause.kind in ("died", "left"):
            raise cause.error()
        self._open()

    def _open(self) -> None:
        store = PrefixStore(f"opening{self._openings}", self._shared.store)
        self._openings += 1
        self._calls = 0
        self._learned.clear()
        gather(store, self.rank, self.size, self.standing.group)
        self._gloo: list[Any] = []
        poisoned: list[Links] = []
        self.watch = Watch(
            PrefixStore("watch", store),
            self.rank,
            self.size,
            self._heartbeat,
            _poisoner(self._gloo, poisoned),
            self._shared.host,
        )
        with self.watch.guarded("meeting", LEARNING):
            self.watch.waiting("a connection")
            gloo = _new_gloo(store, self.rank, self.size)
            self._gloo.append(gloo)
            nccl = PrefixStore("nccl", store)
            open_nccl = partial(self._communicators, nccl) if self._nccl else None
            self.links = links_of(self.rank, self.place, gloo, open_nccl)
            poisoned.append(self.links)
        self.watch.outside()
        self.peers = Peers(gloo, self.watch)

    def _communicators(self, store: Store) -> dict[tuple[int, int], Any]:
        """One for each pair of ranks and direction, opened now, in the same order on every rank."""
        assert isinstance(self.place, Gpu)
        pairs = [(src, dst) for src in range(self.size) for dst in range(self.size) if src != dst]
        made = {}
        for src, dst in pairs:
            if self.rank in (src, dst):
                options = dist.ProcessGroupNCCL.Options()
                ours = PrefixStore(f"{src}-{dst}", store)
                group = dist.ProcessGroupNCCL(ours, int(self.rank == dst), 2, options)
                group.eager_connect_single_device(self.place.device)
                made[src, dst] = group
        return made


def _new_gloo(store: Store, rank: int, size: int) -> Any:
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, _OPERATION)


def _poisoner(groups: list[Any], links: list[Links]) -> Callable[[], None]:
    def fail() -> None:
        for gloo in groups:
            poison(gloo)
        for one in links:
            one.abort()

    return fail
