"""The failure detector decides which rank failed from heartbeats alone, without processes."""

from __future__ import annotations

import pickle

import pytest

from penstock.errors import ErrorLocation, RemoteError
from penstock.runtime.distributed.failure import report as causes
from penstock.runtime.distributed.failure.detector import (
    AwaitedRanks,
    Heartbeat,
    HeartbeatTracker,
    PeerStatus,
    RankState,
    Timeouts,
    diagnose,
)
from penstock.runtime.distributed.failure.report import Failure

PATIENCE = Timeouts(10.0)
LONG = 9.8  # nearly a heartbeat, because a failure is reported just before it is over


def at(what: str, quiet: float = 0.0, still: float = 0.0) -> PeerStatus:
    return PeerStatus(Heartbeat(1, 1, RankState.COMPUTING, "step 4", what), quiet, still)


def waits(
    what: str, peer: AwaitedRanks = None, quiet: float = 0.0, still: float = LONG
) -> PeerStatus:
    return PeerStatus(Heartbeat(1, 1, RankState.WAITING, "step 4", what, peer), quiet, still)


def outside(
    quiet: float = 0.0, still: float = 0.0, mode: RankState = RankState.OUTSIDE_CALL
) -> PeerStatus:
    return PeerStatus(Heartbeat(1, 1, mode, "step 3"), quiet, still)


def diagnosed(*statuses: PeerStatus, suspicious: bool = False, me: int = 0) -> str:
    found = diagnose(me, dict(enumerate(statuses)), PATIENCE, suspicious)
    return "nobody" if found is None else f"{found.rank} {found.kind}"


@pytest.mark.parametrize(
    ("statuses", "found"),
    [
        # While all ranks send heartbeats and make progress, nobody has failed.
        ([waits("1>0:0", 1), at("1F0"), at("2F0", still=LONG)], "nobody"),
        # Only the rank that is waited for is checked.
        ([waits("1>0:0", 1), at("1F0", still=LONG), at("2F0", still=LONG)], "1 stalled"),
        ([waits("1>0:0", 1), at("1F0", quiet=LONG, still=LONG), at("2F0")], "1 died"),
        ([waits("1>0:0", 1), at("1F0"), at("2F0", quiet=LONG)], "nobody"),
        ([at("0F0"), at("1F0", quiet=LONG, still=LONG), at("2F0")], "nobody"),
        # A rank that waits for another is not at fault; it diagnoses the other itself.
        ([waits("1>0:0", 1), waits("2>1:0", 2, still=15), at("2F0", still=LONG)], "nobody"),
        # All ranks are waited for: those that have arrived are not diagnosed.
        ([waits("step 4"), waits("step 4", still=15), outside(still=LONG)], "2 stalled"),
        ([waits("step 4"), waits("step 4"), outside(mode=RankState.LEFT, still=1)], "2 left"),
        # A rank that has left sends no more heartbeats, and has not died.
        ([waits("step 4"), waits("step 4"), outside(LONG, LONG, RankState.LEFT)], "2 left"),
        # Time outside of calls counts only from when some rank waits.
        ([waits("step 4", still=1), outside(still=3600), outside()], "nobody"),
        # A message sent before the rank left may still be in flight.
        ([waits("1>0:0", 1), outside(mode=RankState.LEFT, still=0.1), at("2F0")], "nobody"),
        # A rank that has not started yet has a minute.
        ([waits("step 4"), outside(30, 30, RankState.NOT_STARTED), outside()], "nobody"),
        ([waits("step 4"), outside(61, 61, RankState.NOT_STARTED), outside()], "1 died"),
        # Only some ranks are waited for: the others are ignored.
        ([waits("the end", (0, 1)), at("1F0"), outside(still=LONG)], "nobody"),
        ([waits("the end", (0, 2)), at("1F0", still=LONG), outside(still=LONG)], "2 stalled"),
        ([waits("the end", (0, 1)), waits("the end", (0, 1)), outside(still=LONG)], "nobody"),
        # A rank that has arrived, too, and falls silent then: its host is lost.
        ([waits("step 4"), waits("step 4", quiet=LONG), outside()], "1 died"),
        # The most severe failure comes first.
        ([waits("step 4"), at("1F0", still=LONG), at("2F0", quiet=LONG, still=LONG)], "2 died"),
    ],
)
def test_diagnose_names_the_failed_rank(statuses: list[PeerStatus], found: str) -> None:
    assert diagnosed(*statuses) == found


def test_diagnose_dead_rank_sooner_after_a_lost_connection() -> None:
    statuses = [waits("1>0:0", 1, still=1), at("1F0"), at("2F0", quiet=2.1)]
    assert diagnosed(*statuses) == "nobody"
    assert diagnosed(*statuses, suspicious=True) == "2 died"
    statuses[1] = at("1F0", quiet=1.05)  # alive, but late on a busy machine
    assert diagnosed(*statuses, suspicious=True) == "2 died"


def test_diagnose_dead_rank_while_the_gpu_may_wait_for_it() -> None:
    statuses = dict(enumerate([at("0F0"), at("1F0", still=LONG), at("2F0", quiet=LONG)]))
    assert diagnose(0, statuses, PATIENCE, False) is None
    found = diagnose(0, statuses, PATIENCE, False, may_wait_on_device=True)
    assert found is not None
    assert (found.rank, found.kind) == (2, "died")
    del statuses[2]  # a slow rank is not blamed: this rank may not wait for it
    assert diagnose(0, statuses, PATIENCE, False, may_wait_on_device=True) is None
    statuses = dict(enumerate([outside(), at("1F0", quiet=LONG)]))
    assert diagnose(0, statuses, PATIENCE, False, may_wait_on_device=True) is None


def test_diagnose_prefers_the_awaited_rank_after_a_lost_connection() -> None:
    statuses = [waits("1>0:0", 1, still=1), at("1F0", quiet=1.1), at("2F0", quiet=1.3)]
    assert diagnosed(*statuses) == "nobody"
    assert diagnosed(*statuses, suspicious=True) == "1 died"


def test_diagnose_allows_slow_actions_several_heartbeats() -> None:
    def compiles(still: float) -> PeerStatus:
        return PeerStatus(
            Heartbeat(1, 1, RankState.COMPUTING, "step 4", "1F0", None, 6.0), 0.0, still
        )

    assert diagnosed(waits("1>0:0", 1, still=80), compiles(59)) == "nobody"
    assert diagnosed(waits("1>0:0", 1, still=80), compiles(60)) == "1 stalled"
    slow = PeerStatus(Heartbeat(1, 1, RankState.WAITING, "saving", "all", None, 60.0), 0.0, 100.0)
    assert diagnosed(slow, slow) == "nobody"  # a replica may take long to write


def test_diagnose_ranks_that_wait_for_each_other() -> None:
    statuses = [waits("1>0:0", 1, still=21), waits("0>1:3", 0, still=21), at("2F0")]
    assert diagnosed(*statuses) == diagnosed(*statuses, me=1).replace("1", "0") == "0 stalled"
    found = diagnose(0, dict(enumerate(statuses)), PATIENCE, False)
    assert found is not None
    assert (
        "rank 0 in step 4, waiting for 1>0:0 from rank 1; rank 1 in step 4, waiting"
        in found.message
    )
    statuses[1] = waits("0>1:3", 0, still=19)
    assert diagnosed(*statuses) == "nobody"


def test_diagnose_leaves_a_waiting_rank_to_the_ranks_that_see_its_peer() -> None:
    statuses = [waits("1>0:0", 1, still=21), waits("9>1:3", 9, still=21), at("2F0")]
    assert diagnosed(*statuses) == "nobody"
    statuses[1] = waits("2>1:3", 2, still=21)  # a third rank computes, and may still send
    assert diagnosed(*statuses) == "nobody"
    statuses[2] = at("2F0", still=21)  # for long: that is for rank 1 to say
    assert diagnosed(*statuses) == "nobody"
    assert diagnosed(*[waits("the end", still=21)] * 3) == "0 stalled"


def test_heartbeat_tracker_ignores_time_in_which_it_did_not_look() -> None:
    """A process or a store that was held up has not seen what others did in the meantime."""
    tracker = HeartbeatTracker(max_gap=0.5)
    heartbeat = Heartbeat(1, 1, RankState.COMPUTING, "step 4", "1F0")
    assert tracker.update({1: heartbeat}, 100.0)[1] == PeerStatus(heartbeat, 0.0, 0.0)
    assert tracker.update({1: heartbeat}, 100.25)[1] == PeerStatus(heartbeat, 0.25, 0.25)
    assert tracker.update({1: heartbeat}, 160.25)[1] == PeerStatus(heartbeat, 0.75, 0.75)
    second_heartbeat = Heartbeat(2, 1, RankState.COMPUTING, "step 4", "1F0")
    assert tracker.update({1: second_heartbeat}, 160.5)[1] == PeerStatus(second_heartbeat, 0.0, 1.0)
    with_progress = Heartbeat(3, 2, RankState.COMPUTING, "step 4", "1F1")
    assert tracker.update({1: with_progress}, 160.75)[1] == PeerStatus(with_progress, 0.0, 0.0)


def test_heartbeat_and_failure_survive_json() -> None:
    heartbeat = Heartbeat(3, 2, RankState.WAITING, "step 4", "1>0:0", 1, 6.0)
    assert Heartbeat.from_json(heartbeat.to_json()) == heartbeat
    where = ErrorLocation(1, ("a", "b"), 3, "1F3", "stage 1 (layers a to b: Linear)")
    cause = Failure("wrong", "raised", 1, "in step 4, at 1F3", where, "Traceback: \ud800")
    assert Failure.from_json(cause.to_json()) == cause


def test_remote_error_can_be_pickled() -> None:
    where = ErrorLocation(1, ("a", "b"), 3, "1F3", "stage 1 (layers a to b: Linear)")
    error = Failure("wrong", "raised", 1, "in step 4, at 1F3", where, "Traceback").to_error()
    error.add_note("here")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RemoteError)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_describe_exception_whose_str_fails() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    found = causes.describe_exception(Mute(), 1, "step 4", "in step 4, at 1F0", 1)
    assert "Mute: <exception str() failed>" in found.message
