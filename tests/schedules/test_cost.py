from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ArgumentError
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Op


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
