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
    is_forward,
    lifetimes,
    produces,
)
from tests.schedules.texts import action, schedule

CHAIN = StageGraph.chain(4)
SKIP = StageGraph.chain(4, skips=[(0, 2), (1, 3)])


def words(values: list[Message] | list[Compute]) -> str:
    return " ".join(map(str, values))


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


def test_actions_are_compared_by_value() -> None:
    assert len({action("2F0"), action("2F0"), action("2F1")}) == 2
    message = Message(0, 1, 3)
    ends: list[Action] = [Send(message), Send(Message(0, 1, 3)), Recv(message)]
    assert len(set(ends)) == 2
    assert action("0F0") < action("0F1") < action("1F0")
    assert message < Message(0, 2, 0) < Message(1, 0, 0)
    assert Send(message) < Send(Message(0, 1, 4))
    assert Recv(message) < Recv(Message(0, 1, 4))


@pytest.mark.parametrize("field", ["op", "stage", "microbatch"])
def test_compute_is_immutable(field: str) -> None:
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
def test_schedule_types_are_frozen(value: object, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, ())


# ---- the stage graph ----------------------------------------------------------------------


def test_chain_graph_connects_neighbouring_stages() -> None:
    assert CHAIN.edges == ((0, 1), (1, 2), (2, 3))
    assert [CHAIN.before(stage) for stage in range(4)] == [(), (0,), (1,), (2,)]
    assert [CHAIN.after(stage) for stage in range(4)] == [(1,), (2,), (3,), ()]


def test_graph_edges_are_sorted_and_unique() -> None:
    assert StageGraph(((1, 2), (0, 1), (1, 2))) == StageGraph(((0, 1), (1, 2)))
    assert SKIP.edges == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    assert SKIP.before(2) == (0, 1)
    assert SKIP.after(1) == (2, 3)


def test_stage_without_edges_has_no_neighbours() -> None:
    assert StageGraph.chain(0).edges == StageGraph.chain(1).edges == ()
    assert (CHAIN.before(9), CHAIN.after(9)) == ((), ())


def test_graph_reports_all_backward_edges() -> None:
    with pytest.raises(ArgumentError) as error:
        StageGraph(((1, 0), (0, 1), (2, 2), (-1, 0)))
    assert str(error.value) == (
        "edge 1>0, 2>2, -1>0: an edge goes from a stage to a later one; number the stages in the "
        "order in which data passes through them"
    )


def test_graph_reports_all_invalid_skips() -> None:
    with pytest.raises(ArgumentError) as error:
        StageGraph.chain(4, skips=[(3, 1), (0, 2), (2, 4), (1, 1)])
    assert str(error.value) == (
        "skip 3:1, 2:4, 1:1: a skip SRC:DST goes from a stage to a later one, and the stages here "
        "are 0 to 3"
    )


# ---- consumes, produces, follows ----------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "word", "needs", "gives"),
    [
        (CHAIN, "0F5", "", "0>1:5"),
        (CHAIN, "2F5", "1>2:5", "2>3:5"),
        (CHAIN, "3F5", "2>3:5", ""),
        (CHAIN, "3B5", "", "3>2:5"),
        (CHAIN, "2B5", "3>2:5", "2>1:5"),
        (CHAIN, "0B5", "1>0:5", ""),
        (CHAIN, "3I5", "", "3>2:5"),
        (CHAIN, "2I5", "3>2:5", "2>1:5"),
        (CHAIN, "0I5", "1>0:5", ""),
        (CHAIN, "2W5", "", ""),
        (CHAIN, "2R5", "", ""),
        (SKIP, "1F5", "0>1:5", "1>2:5 1>3:5"),
        (SKIP, "2F5", "0>2:5 1>2:5", "2>3:5"),
        (SKIP, "3B5", "", "3>1:5 3>2:5"),
        (SKIP, "1I5", "2>1:5 3>1:5", "1>0:5"),
        (SKIP, "1W5", "", ""),
    ],
)
def test_consumes_and_produces(graph: StageGraph, word: str, needs: str, gives: str) -> None:
    assert words(consumes(action(word), graph)) == needs
    assert words(produces(action(word), graph)) == gives


@pytest.mark.parametrize(
    ("word", "earlier"),
    [("2F5", ""), ("2R5", "2F5"), ("2B5", "2F5 2R5"), ("2I5", "2F5 2R5"), ("2W5", "2I5")],
)
def test_follows_lists_earlier_actions_of_the_same_cell(word: str, earlier: str) -> None:
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
def test_lifetimes_of_activations_from_f_or_r_to_the_last_use(
    lane: str, lives: dict[tuple[int, int], tuple[int, int]]
) -> None:
    assert lifetimes([action(word) for word in lane.split()]) == lives


# ---- schedules ----------------------------------------------------------------------------

V = schedule("placement: 0 1 1 0 \n 0F0 3F0 3B0 0B0 \n 1F0 2F0 2B0 1B0")


def test_schedule_sizes_crossings_and_recomputed_cells() -> None:
    assert (V.ranks, V.stages, V.chunks) == (2, 4, 1)
    crossing = [V.crosses(Message(src, dst, 0)) for src, dst in ((0, 1), (1, 2), (0, 3))]
    assert crossing == [True, False, False]
    assert schedule("0F0 0F1 0R1 0B1 0B0").recomputed == {(0, 1)}


def test_schedule_refuses_a_placement_on_ranks_without_lanes() -> None:
    with pytest.raises(ArgumentError) as error:
        Schedule((0, 2, -1, 2), 1, ((), ()))
    assert str(error.value) == (
        "the placement names rank -1, 2, but there are 2 lanes, for ranks 0 to 1"
    )


def test_messages_to_later_stages_are_part_of_the_forward() -> None:
    activations, gradients = Message(0, 2, 1), Message(2, 0, 1)
    assert is_forward(Send(activations))
    assert is_forward(Recv(activations))
    assert not is_forward(Send(gradients))
    assert not is_forward(Recv(gradients))
