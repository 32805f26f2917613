from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from penstock.errors import ArgumentError
from penstock.schedules.ir import (
    Action,
    Compute,
    Message,
    Op,
    Program,
    Recv,
    Schedule,
    Send,
    StageGraph,
    consumes,
    follows,
    lifetimes,
    produces,
)
from penstock.schedules.notation import loads

CHAIN = StageGraph.chain(4)
SKIP = StageGraph.chain(4, skips=[(0, 2), (1, 3)])


def action(word: str) -> Compute:
    """`2F0` as a value."""
    return Compute(Op(word[1]), int(word[0]), int(word[2]))


def words(values: list[Message] | list[Compute]) -> str:
    return " ".join(map(str, values))


def schedule(text: str) -> Schedule:
    found = loads(text)
    assert isinstance(found, Schedule)
    return found


# ---- actions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Compute(Op.F, 2, 0), "2F0"),
        (Compute(Op.B, 10, 31), "10B31"),
        (Compute(Op.I, 0, 1), "0I1"),
        (Compute(Op.W, 1, 2), "1W2"),
        (Compute(Op.R, 3, 4), "3R4"),
        (Message(0, 1, 3), "0>1:3"),
        (Send(Message(0, 1, 3)), "!0>1:3"),
        (Recv(Message(11, 2, 0)), "?11>2:0"),
    ],
)
def test_text_form_of_an_action(value: Action | Message, text: str) -> None:
    assert str(value) == text


def test_actions_are_equal_and_hash_by_value() -> None:
    assert len({action("2F0"), action("2F0"), action("2F1")}) == 2
    assert len({Send(Message(0, 1, 3)), Send(Message(0, 1, 3))}) == 1


def test_a_send_is_not_its_receive() -> None:
    message = Message(0, 1, 3)
    ends: set[Action] = {Send(message), Recv(message)}
    assert len(ends) == 2


def test_actions_are_ordered() -> None:
    assert sorted([action("1F0"), action("0F1"), action("0F0")]) == [
        action("0F0"),
        action("0F1"),
        action("1F0"),
    ]
    assert Message(0, 1, 3) < Message(0, 2, 0) < Message(1, 0, 0)
    assert Send(Message(0, 1, 3)) < Send(Message(0, 1, 4))
    assert Recv(Message(0, 1, 3)) < Recv(Message(0, 1, 4))


@pytest.mark.parametrize("field", ["op", "stage", "microbatch"])
def test_a_compute_cannot_be_changed(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(action("2F0"), field, 1)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (Send(Message(0, 1, 3)), "message"),
        (Recv(Message(0, 1, 3)), "message"),
        (CHAIN, "edges"),
        (schedule("0F0"), "lanes"),
        (Program(schedule("0F0"), CHAIN, ((),)), "lanes"),
    ],
)
def test_values_are_frozen(value: object, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, ())


# ---- the stage graph ----------------------------------------------------------------------


def test_a_chain_feeds_each_stage_from_the_one_before() -> None:
    assert CHAIN.edges == ((0, 1), (1, 2), (2, 3))
    assert [CHAIN.before(stage) for stage in range(4)] == [(), (0,), (1,), (2,)]
    assert [CHAIN.after(stage) for stage in range(4)] == [(1,), (2,), (3,), ()]


def test_a_skip_is_one_more_edge() -> None:
    assert SKIP.edges == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    assert SKIP.before(2) == (0, 1)
    assert SKIP.after(1) == (2, 3)


def test_edges_are_a_set_in_order() -> None:
    assert StageGraph(((1, 2), (0, 1), (1, 2))) == StageGraph(((0, 1), (1, 2)))


@pytest.mark.parametrize("stages", [0, 1])
def test_a_short_chain_has_no_edges(stages: int) -> None:
    assert StageGraph.chain(stages).edges == ()


def test_a_stage_that_is_in_no_edge_has_no_neighbours() -> None:
    assert (CHAIN.before(9), CHAIN.after(9)) == ((), ())


def test_all_backward_edges_are_refused_at_once() -> None:
    with pytest.raises(ArgumentError) as error:
        StageGraph(((1, 0), (0, 1), (2, 2), (-1, 0)))
    assert str(error.value) == (
        "edge 1>0, 2>2, -1>0: an edge goes from a stage to a later one; number the stages in the "
        "order in which data passes through them"
    )


def test_all_skips_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(ArgumentError) as error:
        StageGraph.chain(4, skips=[(3, 1), (0, 2), (2, 4), (1, 1)])
    assert str(error.value) == (
        "skip 3:1, 2:4, 1:1: a skip SRC:DST goes from a stage to a later one, and the stages here "
        "are 0 to 3"
    )


# ---- the one rule -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "needs", "gives"),
    [
        ("0F5", "", "0>1:5"),
        ("2F5", "1>2:5", "2>3:5"),
        ("3F5", "2>3:5", ""),
        ("3B5", "", "3>2:5"),
        ("2B5", "3>2:5", "2>1:5"),
        ("0B5", "1>0:5", ""),
        ("3I5", "", "3>2:5"),
        ("2I5", "3>2:5", "2>1:5"),
        ("0I5", "1>0:5", ""),
        ("2W5", "", ""),
        ("2R5", "", ""),
    ],
)
def test_messages_in_a_chain(word: str, needs: str, gives: str) -> None:
    assert words(consumes(action(word), CHAIN)) == needs
    assert words(produces(action(word), CHAIN)) == gives


@pytest.mark.parametrize(
    ("word", "needs", "gives"),
    [
        ("0F5", "", "0>1:5 0>2:5"),
        ("1F5", "0>1:5", "1>2:5 1>3:5"),
        ("2F5", "0>2:5 1>2:5", "2>3:5"),
        ("3F5", "1>3:5 2>3:5", ""),
        ("3B5", "", "3>1:5 3>2:5"),
        ("2B5", "3>2:5", "2>0:5 2>1:5"),
        ("1I5", "2>1:5 3>1:5", "1>0:5"),
        ("0I5", "1>0:5 2>0:5", ""),
        ("1W5", "", ""),
        ("1R5", "", ""),
    ],
)
def test_messages_over_skips_go_there_directly(word: str, needs: str, gives: str) -> None:
    assert words(consumes(action(word), SKIP)) == needs
    assert words(produces(action(word), SKIP)) == gives


@pytest.mark.parametrize(
    ("word", "earlier"),
    [("2F5", ""), ("2R5", "2F5"), ("2B5", "2F5 2R5"), ("2I5", "2F5 2R5"), ("2W5", "2I5")],
)
def test_what_comes_first_on_the_same_stage(word: str, earlier: str) -> None:
    assert words(follows(action(word))) == earlier


@pytest.mark.parametrize(
    ("lane", "lives"),
    [
        ("0F0 0F1 0B0 0B1", {(0, 0): (0, 2), (0, 1): (1, 3)}),
        ("0F0 0I0 0F1 0W0", {(0, 0): (0, 3), (0, 1): (2, 2)}),
        ("0F0 0F1 0R0 0B0", {(0, 0): (2, 3), (0, 1): (1, 1)}),
        ("0F0 0R0 0I0 0W0", {(0, 0): (1, 3)}),
        ("0F0 1F0 1B0 0B0", {(0, 0): (0, 3), (1, 0): (1, 2)}),
        ("0B0", {(0, 0): (0, 0)}),
        ("", {}),
    ],
)
def test_activations_live_from_f_or_r_to_their_last_use(
    lane: str, lives: dict[tuple[int, int], tuple[int, int]]
) -> None:
    assert lifetimes([action(word) for word in lane.split()]) == lives


# ---- schedules ----------------------------------------------------------------------------

V = schedule("placement: 0 1 1 0 \n 0F0 3F0 3B0 0B0 \n 1F0 2F0 2B0 1B0")


def test_sizes_of_a_schedule() -> None:
    assert (V.ranks, V.stages, V.chunks) == (2, 4, 1)


def test_a_message_crosses_only_between_ranks() -> None:
    assert V.crosses(Message(0, 1, 0))
    assert not V.crosses(Message(1, 2, 0))
    assert not V.crosses(Message(0, 3, 0))


def test_recomputed_are_the_cells_that_have_an_r() -> None:
    assert schedule("0F0 0F1 0R1 0B1 0B0").recomputed == {(0, 1)}


def test_a_placement_on_ranks_without_lanes_is_refused() -> None:
    with pytest.raises(ArgumentError) as error:
        Schedule((0, 2, -1, 2), 1, ((), ()))
    assert str(error.value) == (
        "the placement names rank -1, 2, but there are 2 lanes, for ranks 0 to 1"
    )
