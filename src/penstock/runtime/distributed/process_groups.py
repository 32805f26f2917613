"""The process groups of a pipe: channels, links, the watchdog, and reopening after a fault.

The groups belong to the pipe. They are not the groups of the user's mesh, so that a pipe can abort
and reopen them without harm to anything else.

    open ──► call ──► call ──► fault: groups aborted, watchdog closed
      ▲                                        │
      └─────────── next call ◄─────────────────┘   if no rank died or left

After a fault every rank raises RemoteError. If the caller catches it on every rank, the next call
opens new groups under a new prefix of the store, and training goes on.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.data_parallel.all_reduce import ReplicaGroup
from penstock.device.accelerator import is_accelerator
from penstock.device.device import Device
from penstock.errors import RunError
from penstock.runtime.distributed.channels import CallCacheEntry
from penstock.runtime.distributed.control_channel import ControlChannel
from penstock.runtime.distributed.failure.watchdog import SubgroupWatchdog, Watchdog
from penstock.runtime.distributed.inherited_descriptors import close_sockets_in_children
from penstock.runtime.distributed.links import GLOO, LinkBackend, Links, PairGroups
from penstock.runtime.distributed.shared_memory import open_shared_memory_links
from penstock.runtime.distributed.store import open_shared_store, wait_for_all_ranks
from penstock.runtime.distributed.topology import Topology

# -------------------------------------------------------------------------------------------------
# The channel for checkpoints
#
# A background save uses it from a thread of its own while steps go on. The watchdog follows one
# thread, the one that is in a call, so only that thread may report its waits to it.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveChannel:
    """A control channel over all replicas that a thread uses inside or outside a call.

    `is_in_call` returns whether the current thread is inside a call of the pipe.
    """

    group: Any
    watchdog: Watchdog
    is_in_call: Callable[[], bool]

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        rank: int = self.group.rank()
        return rank

    def all_gather_value(self, value: Any, description: str) -> list[Any]:
        """Return the values of all ranks. See `ControlChannel.all_gather_value`."""
        if self.is_in_call():
            channel = ControlChannel(self.group, _AllRanksWait(self.watchdog))
            return channel.all_gather_value(value, "the progress of a checkpoint")
        try:
            return ControlChannel(self.group).all_gather_value(value, description)
        except RuntimeError as error:
            raise self.watchdog.explain_lost_connection(error) from None


class _AllRanksWait:
    """Reports every wait as one for all ranks: the watchdog monitors only some of them."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.mark_arrived, self._mark_waiting = watchdog.mark_arrived, watchdog.mark_waiting

    def mark_waiting(self, description: object, peer: int | None) -> None:
        self._mark_waiting(description)


# -------------------------------------------------------------------------------------------------
# All groups of a pipe
# -------------------------------------------------------------------------------------------------

MAX_CACHED_CALLS = 128  # cache keys
# A rank has stalled if one action takes longer than this many heartbeats:
FIRST_CALL_TIMEOUT_FACTOR = 6.0  # in the first call of its kind, where layers may compile or load
SLOW_CALL_TIMEOUT_FACTOR = 60.0  # while a pipe is created, saved or loaded: disks are slow
# Only a backstop: the watchdog ends a wait long before.
_GROUP_TIMEOUT = timedelta(minutes=30)
_CONNECT_INTERVAL = 0.05  # seconds between two looks for a failure while ranks connect

# The number of pipes created in this process, by their global ranks. All ranks create the same
# pipes in the same order, so the count names the store prefix of a pipe on all of them alike.
_pipe_counts: dict[tuple[int, ...], int] = {}


class ProcessGroups:
    """The groups through which one process talks to the others of its pipe and its replicas.

    | attribute           | connects this rank with                                       |
    |---------------------|---------------------------------------------------------------|
    | `pipeline_channel`  | the other ranks of its pipeline                               |
    | `links`             | the same ranks, for the payloads of messages                  |
    | `replica_channel`   | the ranks with the same stages in other replicas, or None     |
    | `averaging_channel` | those of them over which the pipe averages gradients, or None |
    | `averaging_group`   | the same ranks, for the all-reduce of gradients, or None      |
    | `watchdog`          | all ranks of all replicas                                     |

    A deep copy of a Pipe shares this object: both talk over the same groups.
    """

    pipeline_channel: ControlChannel
    replica_channel: ControlChannel | None
    averaging_channel: ControlChannel | None
    averaging_group: ReplicaGroup | None
    watchdog: Watchdog
    pipeline_watchdog: SubgroupWatchdog
    links: Links
    _store: Store  # for all replicas, until the next fault
    _save_process_group: Any
    _pair_groups: PairGroups
    _abort_callbacks: list[Callable[[], object]]

    def __init__(
        self, topology: Topology, device: Device, heartbeat: float, link_backend: LinkBackend
    ) -> None:
        group, all_ranks = topology.pipeline_group, topology.all_ranks
        self.topology = topology
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        number = _pipe_counts[all_ranks] = _pipe_counts.get(all_ranks, -1) + 1
        self._shared_store = open_shared_store(all_ranks, f"pipe{number}")
        self.device, self._heartbeat, self._link_backend = device, heartbeat, link_backend
        self._open_count = 0
        self._call_counts: Counter[str] = Counter()  # by operation, as the user counts them
        self._call_lock = threading.Lock()
        self._calling_thread: int | None = None
        self._linked_pairs: frozenset[tuple[int, int]] | None = None
        self._call_cache: OrderedDict[str, CallCacheEntry] = OrderedDict()
        self._open()

    def __deepcopy__(self, memo: Any) -> ProcessGroups:
        return self

    def __reduce__(self) -> Any:
        raise RunError(
            "a pipe over several processes cannot be pickled, because its other stages live in "
            "other processes. Use pipe.save(folder), or pipe.state_dict() for this rank's stages."
        )

    @contextmanager
    def guarded_call(self, operation: str, timeout_factor: float = 1.0) -> Iterator[str]:
        """Run a call of the pipe: an error inside is raised on every rank. Yield the call's name.

        Calls from several threads run one after the other. A call inside a call is refused.
        `timeout_factor` is the number of heartbeats that one action may take.
        """
        if self._is_in_call():
            raise RunError(
                f"{operation} of a pipe was called inside another call of the same pipe, in a "
                "layer or a hook. The other ranks would not take part in it. Call it after the "
                "step."
            )
        with self._call_lock:
            if self.watchdog.closed:
                self._reopen()
            self._call_counts[operation] += 1
            name = f"{operation} (call {self._call_counts[operation]}){self._replica_suffix}"
            self._calling_thread = threading.get_ident()
            try:
                with self.watchdog.guarded(name, timeout_factor):
                    yield name
            finally:
                self._calling_thread = None

    def get_cache_entry(self, cache_key: str) -> CallCacheEntry:
        """Return the cached facts about calls with this key, or a new empty entry.

        This is an LRU cache. All ranks look up the same keys in the same order, so all of them have
        and drop the same entries: a sender that knows a shape never meets a receiver that does not.
        """
        entry = self._call_cache.setdefault(cache_key, CallCacheEntry())
        self._call_cache.move_to_end(cache_key)
        if len(self._call_cache) > MAX_CACHED_CALLS:
            self._call_cache.popitem(last=False)
        return entry

    def get_save_channel(self) -> SaveChannel:
        """Return the channel between all ranks of all replicas for checkpoints.

        It has a group of its own because a save may run in the background of steps. All ranks call
        this together, inside a call of the pipe.
        """
        if self._save_process_group is None:
            self._save_process_group = self._open_group(
                GLOO, self.topology.all_ranks, PrefixStore("saves", self._store)
            )
        return SaveChannel(self._save_process_group, self.watchdog, self._is_in_call)

    @property
    def _replica_suffix(self) -> str:
        return (
            f" of replica {self.topology.replica_index}" if len(self.topology.replicas) > 1 else ""
        )

    def _is_in_call(self) -> bool:
        """Return whether the current thread is inside a call of this pipe."""
        return self._calling_thread == threading.get_ident()

    def _reopen(self) -> None:
        """Open new groups after a failure. Raise the failure again if a rank died or left."""
        failure = self.watchdog.failure
        if failure is not None and failure.kind in ("died", "left"):
            raise failure.to_error()
        self._open()

    def _open(self) -> None:
        topology, all_ranks = self.topology, self.topology.all_ranks
        members = topology.replicas[topology.replica_index]
        # A prefix per opening: keys of the groups before the fault are never read again.
        store = self._store = PrefixStore(f"opening{self._open_count}", self._shared_store.store)
        rank = all_ranks.index(dist.get_rank())
        wait_for_all_ranks(
            store, rank, len(all_ranks), topology.pipeline_group if all_ranks == members else None
        )
        self._open_count += 1
        self._call_cache.clear()
        self._abort_callbacks, self._save_process_group, self._pair_groups = [], None, {}
        self.watchdog = Watchdog(
            PrefixStore("watch", store),
            rank,
            len(all_ranks),
            self._heartbeat,
            _make_abort_callback(self._abort_callbacks),
            self._shared_store.host_rank,
            [all_ranks.index(other) for other in {*members, *topology.replica_peers}],
            may_wait_on_device=self._link_backend.device_waits,
        )
        self.pipeline_watchdog = self._watch_subgroup(members)
        with self.watchdog.guarded("opening connections", FIRST_CALL_TIMEOUT_FACTOR):
            replica_store = PrefixStore(f"replica{topology.replica_index}", store)
            self.pipeline_channel = ControlChannel(
                self._open_group(GLOO, members, replica_store), self.pipeline_watchdog
            )
            self._open_replica_channels(store)
            self._agree_on_call_counts()
            rank_pairs, self._linked_pairs = self._linked_pairs, None
            if rank_pairs is not None:  # after a fault: open the links that were there
                self.open_links(rank_pairs)

    def _agree_on_call_counts(self) -> None:
        """Take the largest counts of all ranks: after a failure they may differ by one."""
        for counts in self.pipeline_channel.all_gather_value(
            dict(self._call_counts), "the numbers of calls"
        ):
            self._call_counts |= Counter(counts)

    def open_links(self, rank_pairs: frozenset[tuple[int, int]]) -> None:
        """Open links for these pairs of ranks (sender, receiver). Open ones stay open.

        All ranks call this together with the same pairs, inside a call of the pipe. gloo groups
        connect all pairs anyway. NCCL gets one group for each pair that exchanges messages, because
        each group costs memory on the GPU. CPU ranks of one host get shared memory for each pair.
        """
        open_pairs = self._linked_pairs or frozenset()
        if self._linked_pairs is not None:
            if rank_pairs <= open_pairs:
                return
            self._abort_callbacks.remove(self.links.abort)
        self._linked_pairs, new_pairs = open_pairs | rank_pairs, rank_pairs - open_pairs
        self.links = self._open_shared_memory() or self._open_backend_links(new_pairs)
        self._abort_callbacks.append(self.links.abort)

    def _open_shared_memory(self) -> Links | None:
        """Return links through shared memory, or None if the ranks cannot have them."""
        if is_accelerator(self.device.device) or not self._linked_pairs:
            return None
        return open_shared_memory_links(self.pipeline_channel, self._linked_pairs)

    def _open_backend_links(self, new_pairs: frozenset[tuple[int, int]]) -> Links:
        if self._link_backend.uses_pairs:
            self._pair_groups |= self._open_pair_groups(new_pairs)
        return self._link_backend.build_links(
            self.rank, self.device, self.pipeline_channel.group, self._pair_groups
        )

    def _open_replica_channels(self, store: Store) -> None:
        """Connect this rank to the ranks of other replicas that have the same stages."""
        peers, averaging_ranks = self.topology.replica_peers, self.topology.averaging_ranks
        self.replica_channel = self.averaging_channel = self.averaging_group = None
        if len(peers) > 1:
            self.replica_channel = self._new_replica_channel(
                peers, PrefixStore(f"peers{self.rank}", store)
            )
        if averaging_ranks:
            averaging_store = PrefixStore(f"averaging{min(averaging_ranks)}", store)
            channel = self.replica_channel
            if channel is None or averaging_ranks != peers:
                channel = self._new_replica_channel(averaging_ranks, averaging_store)
            self.averaging_channel, group = channel, channel.group
            if self._link_backend is not GLOO:
                group = self._open_group(self._link_backend, averaging_ranks, averaging_store)
            mark_waiting = partial(self._watch_subgroup(averaging_ranks).mark_waiting, peer=None)
            self.averaging_group = ReplicaGroup(group, frozenset(averaging_ranks), mark_waiting)

    def _watch_subgroup(self, ranks: Sequence[int]) -> SubgroupWatchdog:
        all_ranks = self.topology.all_ranks
        return SubgroupWatchdog(self.watchdog, [all_ranks.index(rank) for rank in ranks])

    def _new_replica_channel(self, ranks: Sequence[int], store: Store) -> ControlChannel:
        return ControlChannel(
            self._open_group(GLOO, ranks, store), self._watch_subgroup(ranks), "replica"
        )

    def _open_group(self, backend: LinkBackend, ranks: Sequence[int], store: Store) -> Any:
        """Return a new group that is connected and that the watchdog can abort."""
        connect = partial(
            backend.open_group,
            PrefixStore(backend.name, store),
            ranks.index(dist.get_rank()),
            len(ranks),
            self.device.device,
            _GROUP_TIMEOUT,
        )
        watchdog = self._watch_subgroup(ranks)
        watchdog.mark_waiting("a connection")
        with close_sockets_in_children():
            # Other libraries use the current device of the thread.
            group = self._connect_gloo(connect) if backend is GLOO else connect()
        watchdog.mark_arrived()
        self._abort_callbacks.append(partial(backend.abort_group, group))
        return group

    def _connect_gloo(self, connect: Callable[[], Any]) -> Any:
        """Return the group that `connect` opens. Raise if a rank fails meanwhile.

        gloo cannot be told to stop: it waits for a dead rank until `_GROUP_TIMEOUT`. So another
        thread connects, and is left behind after a failure.
        """
        connected: Future[Any] = Future()

        def run() -> None:
            try:
                connected.set_result(connect())
            except BaseException as error:
                connected.set_exception(error)

        threading.Thread(target=run, name="penstock-connect", daemon=True).start()
        while not wait([connected], timeout=_CONNECT_INTERVAL).done:
            if self.watchdog.failure is not None:
                raise self.watchdog.failure.to_error()
        return connected.result()

    def _open_pair_groups(self, rank_pairs: frozenset[tuple[int, int]]) -> PairGroups:
        """Return a group for each pair that this rank is in.

        A group opens when both ranks connect. All ranks open their pairs in sorted order, so none
        waits for a rank that waits for another pair.
        """
        topology = self.topology
        members = topology.replicas[topology.replica_index]
        store = PrefixStore(f"links{topology.replica_index}", self._store)
        return {
            (src, dst): self._open_group(
                self._link_backend, (members[src], members[dst]), PrefixStore(f"{src}-{dst}", store)
            )
            for src, dst in sorted(rank_pairs)
            if self.rank in (src, dst)
        }


def _make_abort_callback(callbacks: list[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that calls all callbacks, those that are added later too.

    A method of ProcessGroups would not do: the threads of the watchdog would keep ProcessGroups
    alive, and so the watchdog, which closes when nothing refers to it any more.
    """

    def abort_all() -> None:
        for callback in callbacks:
            callback()

    return abort_all
