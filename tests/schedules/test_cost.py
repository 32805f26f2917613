from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ArgumentError
from penstock.schedules.cost import Cost, track_live_memory
from penstock.schedules.ir import Compute, Op, StageGraph, schedule_of
from penstock.schedules.lowering import lower
from penstock.schedules.notation import loads
from penstock.schedules.timeline import simulate


@pytest.fixture
def cost() -> Cost:
    return Cost(F=(1.0, 10.0), I=(2.0, 20.0), W=(4.0, 40.0), activation=(1.0, 3.0))


@pytest.mark.parametrize(
    ("op", "seconds"), [(Op.F, 10.0), (Op.I, 20.0), (Op.W, 40.0), (Op.B, 60.0), (Op.R, 10.0)]
)
def test_cost_seconds_by_op_and_stage(cost: Cost, op: Op, seconds: float) -> None:
    assert cost.seconds(Compute(op, 1, 7)) == seconds


def test_cost_even_divides_the_share_of_a_rank_among_its_stages() -> None:
    assert Cost.even((0, 1, 1), F=2.0, I=4.0, W=6.0, send=0.5) == Cost(
        F=(2.0, 1.0, 1.0),
        I=(4.0, 2.0, 2.0),
        W=(6.0, 3.0, 3.0),
        activation=(1.0, 0.5, 0.5),
        send=0.5,
    )


def test_cost_even_defaults_to_one() -> None:
    assert Cost.even((0,)) == Cost((1.0,), (1.0,), (1.0,), (1.0,)) == Cost.even((0,), send=0.0)
    assert hash(Cost.even((0,))) == hash(Cost.even((0,)))
    assert Cost.even(()) == Cost((), (), (), ())


@pytest.mark.parametrize("short", ["F", "I", "W", "activation"])
def test_cost_refuses_columns_of_different_lengths(cost: Cost, short: str) -> None:
    changed: dict[str, Any] = {short: (1.0,)}
    with pytest.raises(ArgumentError) as error:
        replace(cost, **changed)
    assert str(error.value).startswith("each column needs one entry per stage, but F has ")
    assert f"{short} has 1" in str(error.value)


@pytest.mark.parametrize("negative", ["F", "I", "W", "activation"])
def test_cost_refuses_negative_values(cost: Cost, negative: str) -> None:
    changed: dict[str, Any] = {negative: (1.0, -1.0)}
    with pytest.raises(ArgumentError) as error:
        replace(cost, **changed)
    assert str(error.value) == f"{negative} of stage 1 is -1.0: a cost is a number from 0 up"


def test_cost_refuses_negative_send() -> None:
    with pytest.raises(ArgumentError, match=r"^send is -0.1: a cost is a number from 0 up$"):
        Cost.even((0, 1), send=-0.1)


def test_cost_keeps_all_for_the_weight_gradient_unless_told() -> None:
    cost = replace(Cost.even((0, 1)), activation=(8, 4))
    assert cost.kept_sizes == (8, 4)
    assert replace(cost, weight_activation=(3, 4)).kept_sizes == (3, 4)
    with pytest.raises(
        ArgumentError, match="weight_activation of stage 1 is 5, more than its activation"
    ):
        replace(cost, weight_activation=(3, 5))
    with pytest.raises(ArgumentError, match="weight_activation has 1"):
        replace(cost, weight_activation=(3,))


def test_recomputation_has_its_own_seconds(cost: Cost) -> None:
    slow = replace(cost, R=(1.5, 15.0))
    assert slow.seconds(Compute(Op.R, 1, 0)) == 15.0
    assert slow.scaled([2, 2]).R == (3.0, 30.0)
    assert cost.scaled([2, 2]).R == ()


def test_messages_between_stages_have_their_own_seconds() -> None:
    cost = replace(Cost.even((0, 1, 2), send=0.5), links={(0, 1): 2.0, (2, 1): 3.0})
    assert cost.send_seconds(0, 1) == 2.0
    assert cost.send_seconds(1, 0) == 0.5
    schedule = schedule_of(loads("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0"))
    # F 1, message 2, F 1, message 0.5, F 1, B 2, message 3, B 2, message 0.5, B 2
    assert simulate(lower(schedule), cost).makespan == 15.0


def test_skip_connection_has_its_own_link() -> None:
    cost = replace(Cost.even((0, 1, 2)), links={(0, 2): 10.0})
    graph = StageGraph.chain(3, skips=[(0, 2)])
    program = lower(schedule_of(loads("0F0\n1F0\n2F0")), graph)
    starts = {span.action: span.start for span in simulate(program, cost).spans}
    assert starts[Compute(Op.F, 2, 0)] == 11.0


def test_recomputed_cell_keeps_its_input_until_it_is_recomputed() -> None:
    lane = schedule_of(loads("0F0 0F1 0R0 0B0 0R1 0B1")).lanes[0]
    cost = Cost((1.0,), (1.0,), (1.0,), activation=(10.0,), stage_input=(1.0,))
    assert [size for *_, size in track_live_memory(lane, cost)] == [1.0, 2.0, 11.0, 1.0, 10.0, 0.0]


def test_cost_refuses_a_link_that_is_not_a_number() -> None:
    with pytest.raises(
        ArgumentError, match=r"^link \(0, 1\) is nan: a cost is a number from 0 up$"
    ):
        replace(Cost.even((0, 1)), links={(0, 1): float("nan")})
