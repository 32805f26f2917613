"""The threads behind a `Watch`: one gives signs of life and looks at others', one listens.

Through a store, with a connection for each thread: one that two share blocks both. Keys:

    cause     why all stop, JSON; the first writer wins
    wake/2    set when rank 2 should look at `cause`, or may stop listening
    seen/2    rank 2 knows the cause
    sign/2    the last sign of life of rank 2
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from penstock.run.processes import cause as causes
from penstock.run.processes.cause import Cause
from penstock.run.processes.verdict import Mode, Patience, Peer, Sightings, Sign, judge

_GRACE = 2.0  # seconds for a main thread to come back, once it is known that all stop
_INTERRUPTED = 0.2  # for Python's own handler, which cannot run while a wait is in C
_TERMINATED = 1.5  # a launcher ends all when one has died: the cause is soon known
_ACKNOWLEDGED = 3.0  # for the others to read the cause, before the store's host may go

# The fields of a sign that the watched thread writes.
Doing = tuple[Mode, object, Peer, float]


class Lookout:
    """What the watching thread and the two behind it share."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        patience: Patience,
        poison: Callable[[], object],
        host: int | None,
        near: Sequence[int],
    ) -> None:
        self.rank, self.size, self.patience, self.host = rank, size, patience, host
        self._near = near  # the ranks that it looks at
        self.pid = os.getpid()
        # What the watched thread does now: it writes, the others read.
        self.count, self.label, self.calls = 0, "", 0
        self.now: Doing = (Mode.OUTSIDE, "", None, 1.0)
        self.busy: Doing = self.now  # with what, when it does not wait
        self.inside: threading.Thread | None = None  # the thread that is in a guarded part
        self.cause: Cause | None = None
        self.known, self._settled = threading.Event(), threading.Event()
        self._told: Cause | None = None  # to be published
        self._suspicious = self._over = False
        self._there: set[int] = set()  # ranks that have given a sign
        self._signals: dict[int, float] = {}  # when each came
        self._once, self._since = threading.Lock(), 0.0
        self._sightings = Sightings(most=2 * patience.beat)
        self._beats, self._poison = 0, poison
        self._store = store  # its host's server lives as long as this
        self._ear, self.bell = socket.socketpair()
        self._ear.setblocking(False)
        self.bell.setblocking(False)
        stores = [store.clone() for _ in range(2)]  # type: ignore[attr-defined]
        stores[0].set_timeout(timedelta(seconds=max(patience.heartbeat, 1)))
        self._threads = [
            threading.Thread(target=target, args=(own,), name=f"penstock-{name}", daemon=True)
            for target, own, name in zip(
                (self._look_out, self._listen), stores, ("lookout", "listener"), strict=True
            )
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the thread that is watched ----------------------------------------------------

    def sign(self) -> Sign:
        """What it does now."""
        mode, what, peer, patience = self.now
        return Sign(self._beats, self.count, mode, self.label, str(what), peer, patience)

    def tell_of(self, error: BaseException, was: str) -> Cause:
        """Publish what was raised here, unless another rank was first; which cause it became."""
        self._told = cause = causes.raised(error, self.rank, self.label, was, self.calls)
        self.ring()
        self.known.wait(self.patience.hold)
        return self.cause or cause

    def wait_for_cause(self) -> Cause | None:
        """The one behind a lost connection, if any is found in time."""
        self._suspicious = True
        self.ring()
        # While this process is held up, it cannot see who is quiet: that time does not count.
        until = self._sightings.clock + self.patience.hold
        last = time.monotonic() + 4 * self.patience.hold
        while self._sightings.clock < until and time.monotonic() < last:
            if self.known.wait(self.patience.beat):
                break
        return self.cause

    def wait_until_heard(self) -> None:
        """By the others, if this process hosts the store; no longer than it stays for them."""
        self._settled.wait(_ACKNOWLEDGED + 0.5)

    def ring(self) -> None:
        """Have the lookout look now."""
        with suppress(OSError):
            self.bell.send(b"\0")

    def close(self) -> None:
        """Say that this rank leaves, and end both threads."""
        self._over = True
        self.ring()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=_GRACE)

    # ---- the lookout -----------------------------------------------------------------------

    def _look_out(self, store: Store) -> None:
        try:
            while not self._over and self.cause is None:
                self._beat(store)
                self._hear()
        except RuntimeError:
            self._store_lost()
        while not self._over:
            if self._overdue():
                self._end()
            self._hear()
        with suppress(RuntimeError):
            if self.cause is None:
                self.now = Mode.LEFT, "", None, 1.0
                self._publish_sign(store)
            store.set(f"wake/{self.rank}", "")
        self._ear.close()
        self.bell.close()

    def _beat(self, store: Store) -> None:
        """One sign of life, and a look at the others', if this rank waits for one of them."""
        self._publish_sign(store)
        found = self._told or self._of_signals()
        if found is None and (self.now[0] is Mode.WAITING or self._suspicious):
            found = self._look(store)
        if found is not None:
            self._publish(store, found)

    def _publish_sign(self, store: Store) -> None:
        self._beats += 1
        store.set(f"sign/{self.rank}", self.sign().dumps())

    def _publish(self, store: Store, cause: Cause) -> None:
        store.compare_set("cause", "", cause.dumps())
        for rank in range(self.size):
            store.set(f"wake/{rank}", "")
        self.known.wait(_GRACE)  # the listener reads it back

    def _look(self, store: Store) -> Cause | None:
        """At the others: the cause, if one is to blame."""
        if store.check(["cause"]):  # its writer may have died before it could wake anybody
            return Cause.loads(store.get("cause"))
        keys = {rank: f"sign/{rank}" for rank in self._near}
        self._there |= {r for r in keys.keys() - self._there if store.check([keys[r]])}
        texts = store.multi_get([keys[rank] for rank in self._there]) if self._there else []
        signs = dict(zip(self._there, map(Sign.loads, texts), strict=True))
        signs = {rank: signs.get(rank, Sign(0, 0, Mode.ABSENT)) for rank in keys}
        signs[self.rank] = self.sign()
        sights = self._sightings.see(signs, time.monotonic())
        return judge(self.rank, sights, self.patience, self._suspicious)

    def _hear(self) -> None:
        """Sleep until the next beat, or the bell: Python rings it for signals, by their number."""
        hurry = self._signals or self.cause is not None
        pause = min(0.05, self.patience.beat) if hurry else self.patience.beat
        select.select([self._ear], [], [], pause)
        with suppress(BlockingIOError):
            for number in self._ear.recv(64):
                if number:
                    self._signals.setdefault(number, time.monotonic())

    def _of_signals(self) -> Cause | None:
        """A signal that came while the watched thread cannot hear it: it waits in C."""
        if self.inside is None:
            return None
        for number, pause in ((signal.SIGINT, _INTERRUPTED), (signal.SIGTERM, _TERMINATED)):
            came = self._signals.get(number)
            if came is None or time.monotonic() - came < pause:
                continue
            # Another handler than Python's own may want to go on.
            if number == signal.SIGTERM or signal.getsignal(number) is signal.default_int_handler:
                name = signal.Signals(number).name
                return causes.told_to_end(self.rank, str(self.sign()), name)
        return None

    # ---- the listener ----------------------------------------------------------------------

    def _listen(self, store: Store) -> None:
        try:
            self._wait_to_be_woken(store)
            if store.check(["cause"]):
                cause = Cause.loads(store.get("cause"))
                self._let_finish(cause)
                self._learn(cause)
                store.set(f"seen/{self.rank}", "")
                self._wait_for_others(store)
        except RuntimeError:
            self._store_lost()
        finally:
            self._settled.set()

    def _wait_to_be_woken(self, store: Store) -> None:
        while True:
            with suppress(DistStoreError):  # a day has passed
                store.wait([f"wake/{self.rank}"], timedelta(days=1))
                return

    def _let_finish(self, cause: Cause) -> None:
        """Who fails in a later call has come through this one: so can this rank, first."""
        until = time.monotonic() + _GRACE
        while self.inside is not None and self.calls < cause.call and not self._suspicious:
            if time.monotonic() > until:
                return
            time.sleep(0.005)

    def _wait_for_others(self, store: Store) -> None:
        """The store goes with its host: let everyone read the cause first."""
        cause = self.cause
        gone = {self.rank} if cause is None or cause.kind == "raised" else {self.rank, cause.rank}
        keys = [f"seen/{rank}" for rank in range(self.size) if rank not in gone]
        until = time.monotonic() + _ACKNOWLEDGED
        while self.host == self.rank and keys and time.monotonic() < until:
            if store.check(keys):
                return
            time.sleep(0.01)

    # ---- both ------------------------------------------------------------------------------

    def _learn(self, cause: Cause) -> None:
        """The cause is known: wake the watched thread, whatever it waits for."""
        with self._once:
            if self.cause is not None:
                return
            self._since = time.monotonic()
            self.cause = cause
        self.known.set()
        others = cause.rank != self.rank and cause != causes.store_lost(self.host)
        if self.inside is None and others and not self._over:
            # Its next step raises it; but a launcher may end this process before.
            _say(f"penstock: rank {self.rank} will stop at its next step: {cause.error()}")
        with suppress(Exception):
            self._poison()

    def _store_lost(self) -> None:
        if not self._over:
            self._learn(self._told or causes.store_lost(self.host))
        self._settled.set()

    def _overdue(self) -> bool:
        """Does the watched thread not come back, though it should?"""
        cause = self.cause
        accused = cause is not None and cause.kind == "stalled" and cause.rank == self.rank
        grace = _GRACE
        if not accused and signal.SIGTERM not in self._signals:
            if self.inside is None:
                return False
            grace = max(self.patience.heartbeat, _GRACE)
        return time.monotonic() - self._since > grace

    def _end(self) -> None:
        """End the process, as nothing else can: the watched thread does not listen."""
        thread = self.inside or threading.main_thread()
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        assert self.cause is not None
        _say(
            f"penstock: rank {self.rank} ends, as it does not come back from where it stands:\n"
            f"{stack}\n{self.cause.error()}"
        )
        os._exit(1)


def _say(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
