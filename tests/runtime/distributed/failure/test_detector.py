"""Who is to blame: from signs of life alone, without processes."""

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
LONG = 9.8  # nearly a heartbeat: it is told before it is over


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


def blamed(*sights: PeerStatus, suspicious: bool = False, me: int = 0) -> str:
    found = diagnose(me, dict(enumerate(sights)), PATIENCE, suspicious)
    return "nobody" if found is None else f"{found.rank} {found.kind}"


@pytest.mark.parametrize(
    ("sights", "found"),
    [
        # While all beat and come on, nobody.
        ([waits("1>0:0", 1), at("1F0"), at("2F0", still=LONG)], "nobody"),
        # Only the one waited for.
        ([waits("1>0:0", 1), at("1F0", still=LONG), at("2F0", still=LONG)], "1 stalled"),
        ([waits("1>0:0", 1), at("1F0", quiet=LONG, still=LONG), at("2F0")], "1 died"),
        ([waits("1>0:0", 1), at("1F0"), at("2F0", quiet=LONG)], "nobody"),
        ([at("0F0"), at("1F0", quiet=LONG, still=LONG), at("2F0")], "nobody"),
        # Whoever waits for long itself is not blamed: those whom it waits for are, and by it.
        ([waits("1>0:0", 1), waits("2>1:0", 2, still=15), at("2F0", still=LONG)], "nobody"),
        # All are waited for: those who have come are not blamed.
        ([waits("step 4"), waits("step 4", still=15), outside(still=LONG)], "2 stalled"),
        ([waits("step 4"), waits("step 4"), outside(mode=RankState.LEFT, still=1)], "2 left"),
        # The caller's own time counts only from when somebody waits.
        ([waits("step 4", still=1), outside(still=3600), outside()], "nobody"),
        # What was sent before it left may be on its way.
        ([waits("1>0:0", 1), outside(mode=RankState.LEFT, still=0.1), at("2F0")], "nobody"),
        # A rank that has not come yet has a minute.
        ([waits("step 4"), outside(30, 30, RankState.NOT_STARTED), outside()], "nobody"),
        ([waits("step 4"), outside(61, 61, RankState.NOT_STARTED), outside()], "1 died"),
        # Some are waited for: others may do as they like.
        ([waits("the end", (0, 1)), at("1F0"), outside(still=LONG)], "nobody"),
        ([waits("the end", (0, 2)), at("1F0", still=LONG), outside(still=LONG)], "2 stalled"),
        ([waits("the end", (0, 1)), waits("the end", (0, 1)), outside(still=LONG)], "nobody"),
        # The worst comes first.
        ([waits("step 4"), at("1F0", still=LONG), at("2F0", quiet=LONG, still=LONG)], "2 died"),
    ],
)
def test_who_is_blamed(sights: list[PeerStatus], found: str) -> None:
    assert blamed(*sights) == found


def test_a_lost_connection_makes_suspicious() -> None:
    sights = [waits("1>0:0", 1, still=1), at("1F0"), at("2F0", quiet=2.1)]
    assert blamed(*sights) == "nobody"
    assert blamed(*sights, suspicious=True) == "2 died"
    sights[1] = at("1F0", quiet=1.05)  # alive, and late on a busy machine
    assert blamed(*sights, suspicious=True) == "2 died"


def test_most_likely_it_is_the_one_that_is_waited_for() -> None:
    sights = [waits("1>0:0", 1, still=1), at("1F0", quiet=1.1), at("2F0", quiet=1.3)]
    assert blamed(*sights) == "nobody"
    assert blamed(*sights, suspicious=True) == "1 died"


def test_some_work_may_take_several_heartbeats() -> None:
    def compiles(still: float) -> PeerStatus:
        return PeerStatus(
            Heartbeat(1, 1, RankState.COMPUTING, "step 4", "1F0", None, 6.0), 0.0, still
        )

    assert blamed(waits("1>0:0", 1, still=80), compiles(59)) == "nobody"
    assert blamed(waits("1>0:0", 1, still=80), compiles(60)) == "1 stalled"
    slow = PeerStatus(Heartbeat(1, 1, RankState.WAITING, "saving", "all", None, 60.0), 0.0, 100.0)
    assert blamed(slow, slow) == "nobody"  # a copy of the pipe may write for long


def test_ranks_that_wait_for_one_another() -> None:
    sights = [waits("1>0:0", 1, still=21), waits("0>1:3", 0, still=21), at("2F0")]
    assert blamed(*sights) == blamed(*sights, me=1).replace("1", "0") == "0 stalled"
    found = diagnose(0, dict(enumerate(sights)), PATIENCE, False)
    assert found is not None
    assert (
        "rank 0 in step 4, waiting for 1>0:0 from rank 1; rank 1 in step 4, waiting"
        in found.message
    )
    sights[1] = waits("0>1:3", 0, still=19)
    assert blamed(*sights) == "nobody"


def test_whoever_is_seen_by_others_alone_is_blamed_by_them() -> None:
    sights = [waits("1>0:0", 1, still=21), waits("9>1:3", 9, still=21), at("2F0")]
    assert blamed(*sights) == "nobody"
    sights[1] = waits("2>1:3", 2, still=21)  # a third one computes, and may yet come
    assert blamed(*sights) == "nobody"
    assert blamed(*[waits("the end", still=21)] * 3) == "0 stalled"


def test_time_counts_only_while_one_looks() -> None:
    """A process, or a store, that was held up for long has not seen what others did meanwhile."""
    sightings = HeartbeatTracker(max_gap=0.5)
    sign = Heartbeat(1, 1, RankState.COMPUTING, "step 4", "1F0")
    assert sightings.update({1: sign}, 100.0)[1] == PeerStatus(sign, 0.0, 0.0)
    assert sightings.update({1: sign}, 100.25)[1] == PeerStatus(sign, 0.25, 0.25)
    assert sightings.update({1: sign}, 160.25)[1] == PeerStatus(sign, 0.75, 0.75)
    beaten = Heartbeat(2, 1, RankState.COMPUTING, "step 4", "1F0")
    assert sightings.update({1: beaten}, 160.5)[1] == PeerStatus(beaten, 0.0, 1.0)
    moved = Heartbeat(3, 2, RankState.COMPUTING, "step 4", "1F1")
    assert sightings.update({1: moved}, 160.75)[1] == PeerStatus(moved, 0.0, 0.0)


def test_signs_and_causes_go_through_json() -> None:
    sign = Heartbeat(3, 2, RankState.WAITING, "step 4", "1>0:0", 1, 6.0)
    assert Heartbeat.from_json(sign.to_json()) == sign
    where = ErrorLocation(1, ("a", "b"), 3, "1F3", "stage 1 (layers a to b: Linear)")
    cause = Failure("wrong", "raised", 1, "in step 4, at 1F3", where, "Traceback: \ud800")
    assert Failure.from_json(cause.to_json()) == cause


def test_an_error_can_be_pickled() -> None:
    where = ErrorLocation(1, ("a", "b"), 3, "1F3", "stage 1 (layers a to b: Linear)")
    error = Failure("wrong", "raised", 1, "in step 4, at 1F3", where, "Traceback").to_error()
    error.add_note("here")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RemoteError)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_an_error_that_cannot_be_written_is_published_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    found = causes.describe_exception(Mute(), 1, "step 4", "in step 4, at 1F0", 1)
    assert "Mute: <exception str() failed>" in found.message
