"""The processes of one pipe: their groups, their watch, and what they have learned of each other.

After a fault the groups are poisoned and the watch is closed. The next call opens new ones, so that
whoever caught the error on every rank may go on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import RunError
from penstock.gradients.average import Line
from penstock.run.processes.gathering import gather
from penstock.run.processes.links import Links, links_of
from penstock.run.processes.peers import Peers
from penstock.run.processes.poison import poison
from penstock.run.processes.saves import SavesGroup
from penstock.run.processes.standing import Standing
from penstock.run.processes.store import store_of
from penstock.run.processes.watch import Among, Watch
from penstock.run.processes.wire import Learned
from penstock.stage.places import Gpu, Place

REMEMBERED = 128  # signatures
# Heartbeats that it may take before it is a stall:
LEARNING = 6.0  # an action in the first call of its kind, where it may compile or load
SLOW = 60.0  # to make a pipe, to save or to load it: disks are slow
_OPERATION = timedelta(minutes=30)  # a wait ends by the watch, long before

_pipes: dict[tuple[int, ...], int] = {}  # made so far in this process, by who they are among


class Team:
    """This process among those of a pipe, and of its copies. A copied Pipe is of the same team.

    `peers` are the ranks of the pipe; `twins` those that have the same stages in its copies, and
    `line` those of them over which the pipe averages: each None, if there are no others.
    """

    peers: Peers
    twins: Peers | None
    line: Peers | None
    averaging: Line | None
    watch: Watch
    watched: Among
    links: Links
    _store: Store  # for all copies, until the next fault
    _saves: Any
    _communicators: dict[tuple[int, int], Any]
    _wakers: list[Callable[[], object]]

    def __init__(self, standing: Standing, place: Place, heartbeat: float, nccl: bool) -> None:
        group, everyone = standing.group, standing.everyone
        self.standing = standing
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        number = _pipes[everyone] = _pipes.get(everyone, -1) + 1
        self._shared = store_of(everyone, f"pipe{number}")
        self.place, self._heartbeat, self._nccl = place, heartbeat, nccl
        self._openings = 0
        self._calls = 0
        self._turn = threading.Lock()
        self._caller: int | None = None
        self._linked: frozenset[tuple[int, int]] | None = None
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
            name = f"{kind} (call {self._calls}){self._of_copy}"
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
        if self._saves is None:
            everyone = self.standing.everyone
            self._saves = self._gloo_of(everyone, PrefixStore("saves", self._store))
        return SavesGroup(self._saves, self.watch, self._calls_now)

    @property
    def _of_copy(self) -> str:
        return f" of copy {self.standing.copy}" if len(self.standing.copies) > 1 else ""

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
        standing, everyone = self.standing, self.standing.everyone
        members = standing.copies[standing.copy]
        store = self._store = PrefixStore(f"opening{self._openings}", self._shared.store)
        me = everyone.index(dist.get_rank())
        gather(store, me, len(everyone), standing.group if everyone == members else None)
        self._openings += 1
        self._calls = 0
        self._learned.clear()
        self._wakers, self._saves, self._communicators = [], None, {}
        self.watch = Watch(
            PrefixStore("watch", store),
            me,
            len(everyone),
            self._heartbeat,
            _waking(self._wakers),
            self._shared.host,
            [everyone.index(other) for other in {*members, *standing.twins}],
        )
        self.watched = self._among(members)
        with self.watch.guarded("meeting", LEARNING):
            self.watch.waiting("a connection")
            ours = PrefixStore(f"copy{standing.copy}", store)
            self.peers = Peers(self._gloo_of(members, ours), self.watched)
            self._meet_copies(store)
            linked, self._linked = self._linked, None
            if linked is not None:
                self.link(linked)
        self.watch.outside()

    def link(self, talking: frozenset[tuple[int, int]]) -> None:
        """Open links for those pairs of ranks where the one sends to the other. Within a call.

        Those that are open stay so. All ranks ask for the same, at the same time.
        """
        before = self._linked or frozenset()
        if self._linked is not None and talking <= before:
            return
        self._linked, new = before | talking, talking - before
        store = PrefixStore(f"nccl{self.standing.copy}", self._store)
        if self._nccl:
            self._communicators |= self._opened(store, new)
        opened = self._communicators if self._nccl else None
        self.links = links_of(self.rank, self.place, self.peers.group, opened)
        self._wakers.append(self.links.abort)

    def _meet_copies(self, store: Store) -> None:
        """Those who have the same stages."""
        twins, line = self.standing.twins, self.standing.line
        self.twins = self.line = self.averaging = None
        if len(twins) > 1:
            self.twins = self._others(twins, PrefixStore(f"twins{self.rank}", store))
        if line:
            ours = PrefixStore(f"line{min(line)}", store)
            self.line = self.twins if line == twins else self._others(line, ours)
            assert self.line is not None
            group = self._nccl_of(line, ours) if self._nccl else self.line.group
            waiting = partial(self._among(line).waiting, peer=None)
            self.averaging = Line(group, frozenset(line), waiting)

    def _among(self, ranks: Sequence[int]) -> Among:
        everyone = self.standing.everyone
        return Among(self.watch, [everyone.index(rank) for rank in ranks])

    def _others(self, ranks: Sequence[int], store: Store) -> Peers:
        return Peers(self._gloo_of(ranks, store), self._among(ranks), "copy")

    def _gloo_of(self, ranks: Sequence[int], store: Store) -> Any:
        """A group that fails when the watch says so."""
        me, store = ranks.index(dist.get_rank()), PrefixStore("gloo", store)
        group: Any = ProcessGroupGloo(store, me, len(ranks), _OPERATION)
        self._wakers.append(partial(poison, group))
        return group

    def _nccl_of(self, ranks: Sequence[int], store: Store) -> Any:
        """The same between GPUs, opened now; an abort may wait, so it has a thread of its own."""
        assert isinstance(self.place, Gpu)
        me, options = ranks.index(dist.get_rank()), dist.ProcessGroupNCCL.Options()
        group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), me, len(ranks), options)
        group.eager_connect_single_device(self.place.device)
        end = partial(threading.Thread, target=group.abort, name="penstock-abort", daemon=True)
        self._wakers.append(lambda: end().start())
        return group

    def _opened(self, store: Store, pairs: frozenset[tuple[int, int]]) -> dict[Any, Any]:
        """A communicator for each pair that talks, in the same order on every rank."""
        members = self.standing.copies[self.standing.copy]
        return {
            (src, dst): self._nccl_of(
                (members[src], members[dst]), PrefixStore(f"{src}-{dst}", store)
            )
            for src, dst in sorted(pairs)
            if self.rank in (src, dst)
        }


def _waking(wakers: list[Callable[[], object]]) -> Callable[[], None]:
    """It must not hold the team, which holds the watch."""

    def wake() -> None:
        for one in wakers:
            one()

    return wake
