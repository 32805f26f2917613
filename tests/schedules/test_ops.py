"""Every op is known wherever ops are told apart, so that a new one cannot be forgotten."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from penstock.device.device import Cpu
from penstock.draw.style import SHADES
from penstock.runtime.worker import BoundAction, CellIO, Worker
from penstock.schedules.cost import Cost
from penstock.schedules.ir import OP_RULES, Compute, Op
from penstock.schedules.notation import dumps, loads

HOW_IT_WORKS = Path(__file__).parents[2] / "docs" / "how-it-works.md"


@pytest.mark.parametrize("op", Op)
def test_every_op_has_a_rule_a_text_a_cost_a_colour_and_a_way_to_run(op: Op) -> None:
    action = Compute(op, stage=2, microbatch=0)
    assert OP_RULES[op].name
    assert dumps(loads(f"placement: 0 0 0\n{action}")).endswith(f"{action}\n")
    assert Cost.even((0, 0, 0)).seconds(action) >= 0
    assert len({*SHADES[op]}) == 2
    assert f"`{action}`" in HOW_IT_WORKS.read_text()

    stage_runner = MagicMock()
    worker = Worker(0, Cpu(), {2: stage_runner}, MagicMock(), CellIO())
    worker.execute(BoundAction(0, action, (), ()))
    assert [call for call in stage_runner.method_calls if action.microbatch in call.args]
