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

from penstock.errors import RemoteError, RunError
from penstock.run.processes.links import Links, links_of
from penstock.run.processes.peers import Peers
from penstock.run.processes.poison import poison
from penstock.run.processes.standing import Standing
from penstock.run.processes.store import store_of
from penstock.run.processes.watch import Watch
from penstock.run.processes.wire import Learned
from penstock.stage.places import Gpu, Place

GATHERING = 120.0  # seconds for all ranks to come and make a pipe
REMEMBERED = 128  # signatures
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
    def call(self, kind: str) -> Iterator[str]:
        """Within, what is raised is raised on every rank; gives the call's name.

        Threads take turns. The thread that is within may not begin another call.
        """
        if self._caller == threading.get_ident():
            raise RunError(
                f"{kind} of a pipe was called within another call of it, in a layer or a hook: the "
                "other ranks would not know of it; call it after the step"
            )
        with self._turn:
            if self.watch.closed:
                self._open()
            self._calls += 1
            name = f"{kind} (call {self._calls})"
            self._caller = threading.get_ident()
            try:
                with self.watch.guarded(name):
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

        All copies of the pipe are in it.
        """
        if self.watch.closed:
            self._open()
        if len(self._gloo) == 1:
            everyone = self.standing.everyone
            store = self._shared.among(everyone, f"saves{self._number}-{self._openings}")
            _gather(store, everyone.index(dist.get_rank()), len(everyone))
            self._gloo.append(_new_gloo(store, everyone.index(dist.get_rank()), len(everyone)))
        return self._gloo[1]

    def _open(self) -> None:
        store = PrefixStore(f"opening{self._openings}", self._shared.store)
        self._openings += 1
        self._calls = 0
        self._learned.clear()
        _gather(store, self.rank, self.size)
        gloo = _new_gloo(store, self.rank, self.size)
        self._gloo = [gloo]
        self.links = links_of(
            self.rank,
            self.place,
            gloo,
            partial(self._communicators, PrefixStore("nccl", store)) if self._nccl else None,
        )
        self.watch = Watch(
            PrefixStore("watch", store),
            self.rank,
            self.size,
            self._heartbeat,
            _poisoner(self._gloo, self.links),
            self._shared.host,
        )
        self.peers = Peers(gloo, self.watch.waiting)

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


def _poisoner(groups: list[Any], links: Links) -> Callable[[], None]:
    def fail() -> None:
        for gloo in groups:
            poison(gloo)
        links.abort()

    return fail


def _gather(store: Store, rank: int, size: int) -> None:
    """Wait until every rank is here."""
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "yes")
    try:
        store.wait(keys, timedelta(seconds=GATHERING))
    except dist.DistStoreError:
        late = [other for other in range(size) if not store.check([keys[other]])]
        raise RemoteError(
            f"rank {', '.join(map(str, late))} did not come within {GATHERING:g} s to make the "
            "pipe, or to go on with it: make and call it equally often on every rank",
            "left",
            late[0] if late else None,
        ) from None
