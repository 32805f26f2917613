"""The processes of one pipe: their groups, their watch, and what they have learned of each other.

After a fault the groups are poisoned and the watch is closed. The next call opens new ones, so that
whoever caught the error on every rank may go on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.data_parallel.all_reduce import ReplicaGroup
from penstock.device.device import Device, Gpu
from penstock.errors import RunError
from penstock.runtime.distributed.channels import CallCacheEntry
from penstock.runtime.distributed.control_channel import ControlChannel
from penstock.runtime.distributed.failure.abort import abort_gloo
from penstock.runtime.distributed.failure.watchdog import SubgroupWatchdog, Watchdog
from penstock.runtime.distributed.links import Links, build_links
from penstock.runtime.distributed.store import open_shared_store, wait_for_all_ranks
from penstock.runtime.distributed.topology import Topology

# -------------------------------------------------------------------------------------------------
# The group that saves speak over: watched in a call, and not in the background of others.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchedProcessGroup:
    """A gloo group of a pipe, or of all its copies; `in_call` says whether this thread calls it."""

    group: Any
    watchdog: Watchdog
    is_in_call: Callable[[], bool]

    def rank(self) -> int:
        """This process's."""
        found: int = self.group.rank()
        return found

    def size(self) -> int:
        """How many there are."""
        found: int = self.group.size()
        return found

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> PendingAllGather:
        """Starts to give everyone everything."""
        return PendingAllGather(
            self.group.allgather(outputs, inputs), self.watchdog, self.is_in_call()
        )


@dataclass(frozen=True)
class PendingAllGather:
    """What was started."""

    work: Any
    watchdog: Watchdog
    is_watched: bool

    def wait(self) -> None:
        """Until it has arrived from all."""
        if self.is_watched:
            self.watchdog.mark_waiting("what they have to save, or have saved,")
            self.work.wait()
            self.watchdog.mark_arrived()
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.watchdog.explain_lost_connection(error) from None


# -------------------------------------------------------------------------------------------------

MAX_CACHED_CALLS = 128  # signatures
# Heartbeats that it may take before it is a stall:
FIRST_CALL_TIMEOUT_FACTOR = (
    6.0  # an action in the first call of its kind, where it may compile or load
)
SLOW_CALL_TIMEOUT_FACTOR = 60.0  # to make a pipe, to save or to load it: disks are slow
_GROUP_TIMEOUT = timedelta(minutes=30)  # a wait ends by the watch, long before

_pipe_counts: dict[tuple[int, ...], int] = {}  # made so far in this process, by who they are among


class ProcessGroups:
    """This process among those of a pipe, and of its copies. A copied Pipe is of the same team.

    `peers` are the ranks of the pipe; `twins` those that have the same stages in its copies, and
    `line` those of them over which the pipe averages: each None, if there are no others.
    """

    pipeline_channel: ControlChannel
    replica_channel: ControlChannel | None
    averaging_channel: ControlChannel | None
    averaging_group: ReplicaGroup | None
    watchdog: Watchdog
    pipeline_watchdog: SubgroupWatchdog
    links: Links
    _store: Store  # for all copies, until the next fault
    _save_process_group: Any
    _communicators: dict[tuple[int, int], Any]
    _abort_callbacks: list[Callable[[], object]]

    def __init__(
        self, topology: Topology, device: Device, heartbeat: float, uses_nccl: bool
    ) -> None:
        group, everyone = topology.pipeline_group, topology.all_ranks
        self.topology = topology
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        number = _pipe_counts[everyone] = _pipe_counts.get(everyone, -1) + 1
        self._shared_store = open_shared_store(everyone, f"pipe{number}")
        self.device, self._heartbeat, self._uses_nccl = device, heartbeat, uses_nccl
        self._open_count = 0
        self._call_count = 0
        self._call_lock = threading.Lock()
        self._calling_thread: int | None = None
        self._linked_pairs: frozenset[tuple[int, int]] | None = None
        self._call_cache: OrderedDict[str, CallCacheEntry] = OrderedDict()
        self._open()

    def __deepcopy__(self, memo: Any) -> ProcessGroups:
        return self

    def __reduce__(self) -> Any:
        raise RunError(
            "a pipe over several processes cannot be pickled, as its other stages are elsewhere: "
            "use pipe.save(folder), or pipe.state_dict() for what is on this rank"
        )

    @contextmanager
    def guarded_call(self, operation: str, timeout_factor: float = 1.0) -> Iterator[str]:
        """Within, what is raised is raised on every rank; gives the call's name.

        Threads take turns. The thread that is within may not begin another call. `patience` is
        in heartbeats.
        """
        if self._is_in_call():
            raise RunError(
                f"{operation} of a pipe was called within another call of it, in a layer or a hook: the "
                "other ranks would not know of it; call it after the step"
            )
        with self._call_lock:
            if self.watchdog.closed:
                self._reopen()
            self._call_count += 1
            name = f"{operation} (call {self._call_count}){self._replica_suffix}"
            self._calling_thread = threading.get_ident()
            try:
                with self.watchdog.guarded(name, timeout_factor):
                    yield name
                self.watchdog.mark_outside_call()
            finally:
                self._calling_thread = None

    def get_cache_entry(self, cache_key: str) -> CallCacheEntry:
        """What is known of calls with this key; all ranks remember and forget the same."""
        found = self._call_cache.setdefault(cache_key, CallCacheEntry())
        self._call_cache.move_to_end(cache_key)
        if len(self._call_cache) > MAX_CACHED_CALLS:
            self._call_cache.popitem(last=False)
        return found

    def get_save_process_group(self) -> Any:
        """One of their own: a save may go on in the background of steps. All ranks ask together.

        All copies of the pipe are in it. Within a call.
        """
        if self._save_process_group is None:
            everyone = self.topology.all_ranks
            self._save_process_group = self._open_gloo_group(
                everyone, PrefixStore("saves", self._store)
            )
        return WatchedProcessGroup(self._save_process_group, self.watchdog, self._is_in_call)

    @property
    def _replica_suffix(self) -> str:
        return f" of copy {self.topology.replica_index}" if len(self.topology.replicas) > 1 else ""

    def _is_in_call(self) -> bool:
        """Does this thread?"""
        return self._calling_thread == threading.get_ident()

    def _reopen(self) -> None:
        """After a failure; not if some rank is not there any more."""
        cause = self.watchdog.failure
        if cause is not None and cause.kind in ("died", "left"):
            raise cause.to_error()
        self._open()

    def _open(self) -> None:
        standing, everyone = self.topology, self.topology.all_ranks
        members = standing.replicas[standing.replica_index]
        store = self._store = PrefixStore(f"opening{self._open_count}", self._shared_store.store)
        me = everyone.index(dist.get_rank())
        wait_for_all_ranks(
            store, me, len(everyone), standing.pipeline_group if everyone == members else None
        )
        self._open_count += 1
        self._call_count = 0
        self._call_cache.clear()
        self._abort_callbacks, self._save_process_group, self._communicators = [], None, {}
        self.watchdog = Watchdog(
            PrefixStore("watch", store),
            me,
            len(everyone),
            self._heartbeat,
            _make_abort_callback(self._abort_callbacks),
            self._shared_store.host_rank,
            [everyone.index(other) for other in {*members, *standing.replica_peers}],
        )
        self.pipeline_watchdog = self._watch_subgroup(members)
        with self.watchdog.guarded("meeting", FIRST_CALL_TIMEOUT_FACTOR):
            self.watchdog.mark_waiting("a connection")
            ours = PrefixStore(f"copy{standing.replica_index}", store)
            self.pipeline_channel = ControlChannel(
                self._open_gloo_group(members, ours), self.pipeline_watchdog
            )
            self._open_replica_channels(store)
            linked, self._linked_pairs = self._linked_pairs, None
            if linked is not None:
                self.open_links(linked)
        self.watchdog.mark_outside_call()

    def open_links(self, rank_pairs: frozenset[tuple[int, int]]) -> None:
        """Open links for those pairs of ranks where the one sends to the other. Within a call.

        Those that are open stay so. All ranks ask for the same, at the same time.
        """
        before = self._linked_pairs or frozenset()
        if self._linked_pairs is not None and rank_pairs <= before:
            return
        self._linked_pairs, new = before | rank_pairs, rank_pairs - before
        store = PrefixStore(f"nccl{self.topology.replica_index}", self._store)
        if self._uses_nccl:
            self._communicators |= self._open_communicators(store, new)
        opened = self._communicators if self._uses_nccl else None
        self.links = build_links(self.rank, self.device, self.pipeline_channel.group, opened)
        self._abort_callbacks.append(self.links.abort)

    def _open_replica_channels(self, store: Store) -> None:
        """Those who have the same stages."""
        twins, line = self.topology.replica_peers, self.topology.averaging_ranks
        self.replica_channel = self.averaging_channel = self.averaging_group = None
        if len(twins) > 1:
            self.replica_channel = self._new_replica_channel(
                twins, PrefixStore(f"twins{self.rank}", store)
            )
        if line:
            ours = PrefixStore(f"line{min(line)}", store)
            self.averaging_channel = (
                self.replica_channel if line == twins else self._new_replica_channel(line, ours)
            )
            assert self.averaging_channel is not None
            group = (
                self._open_nccl_group(line, ours)
                if self._uses_nccl
                else self.averaging_channel.group
            )
            waiting = partial(self._watch_subgroup(line).mark_waiting, peer=None)
            self.averaging_group = ReplicaGroup(group, frozenset(line), waiting)

    def _watch_subgroup(self, ranks: Sequence[int]) -> SubgroupWatchdog:
        everyone = self.topology.all_ranks
        return SubgroupWatchdog(self.watchdog, [everyone.index(rank) for rank in ranks])

    def _new_replica_channel(self, ranks: Sequence[int], store: Store) -> ControlChannel:
        return ControlChannel(
            self._open_gloo_group(ranks, store), self._watch_subgroup(ranks), "copy"
        )

    def _open_gloo_group(self, ranks: Sequence[int], store: Store) -> Any:
        """A group that fails when the watch says so."""
        me, store = ranks.index(dist.get_rank()), PrefixStore("gloo", store)
        group: Any = ProcessGroupGloo(store, me, len(ranks), _GROUP_TIMEOUT)
        self._abort_callbacks.append(partial(abort_gloo, group))
        return group

    def _open_nccl_group(self, ranks: Sequence[int], store: Store) -> Any:
        """The same between GPUs, opened now; an abort may wait, so it has a thread of its own."""
        assert isinstance(self.device, Gpu)
        me, options = ranks.index(dist.get_rank()), dist.ProcessGroupNCCL.Options()
        group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), me, len(ranks), options)
        group.eager_connect_single_device(self.device.device)
        end = partial(threading.Thread, target=group.abort, name="penstock-abort", daemon=True)
        self._abort_callbacks.append(lambda: end().start())
        return group

    def _open_communicators(
        self, store: Store, rank_pairs: frozenset[tuple[int, int]]
    ) -> dict[Any, Any]:
        """A communicator for each pair that talks, in the same order on every rank."""
        members = self.topology.replicas[self.topology.replica_index]
        return {
            (src, dst): self._open_nccl_group(
                (members[src], members[dst]), PrefixStore(f"{src}-{dst}", store)
            )
            for src, dst in sorted(rank_pairs)
            if self.rank in (src, dst)
        }


def _make_abort_callback(callbacks: list[Callable[[], object]]) -> Callable[[], None]:
    """It must not hold the team, which holds the watch."""

    def abort_all() -> None:
        for one in callbacks:
            one()

    return abort_all
