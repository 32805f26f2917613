from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipe, schedules
from penstock.runtime import program_cache
from penstock.runtime.program_cache import ProgramKey
from penstock.schedules import lowering, simulator
from penstock.schedules.families import FAMILIES
from penstock.schedules.ir import StageGraph


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_first_step_builds_lowers_and_plays_the_schedule_once(
    monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        return call

    family = FAMILIES["1f1b"]
    monkeypatch.setitem(FAMILIES, "1f1b", replace(family, build=counted("build", family.build)))
    monkeypatch.setattr(program_cache, "lower", counted("lower", lowering.lower))
    monkeypatch.setattr(simulator, "_run_lanes", counted("play", simulator._run_lanes))
    pipe = Pipe(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
        chunks=4,
        stages=2,
        devices=["cpu", "cpu"],
        schedule="1f1b",
        checkpoint=checkpoint,
        loss_fn=nn.functional.mse_loss,
        runtime="inline",
    )
    for _ in range(2):
        pipe.step(torch.randn(8, 3), target=torch.randn(8, 2))
        assert calls == {"build": 1, "lower": 1, "play": 1}


def test_recomputation_in_a_schedule_is_left_out_in_eval_mode() -> None:
    schedule = lowering.recompute(schedules.gpipe(ranks=2, chunks=2), lambda *cell: True)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], schedule=schedule)
    for training, ops in ((True, "FRB"), (False, "FB")):
        lanes = pipe.train(training).forecast().program.schedule.lanes
        assert {str(action.op) for lane in lanes for action in lane} == set(ops)


def test_programs_of_several_stage_graphs_are_kept_apart() -> None:
    pipe = Pipe(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]), stages=3, devices=["cpu"] * 3)
    cache = pipe._prepared_pipe.program_cache
    skips = [StageGraph.chain(3, skips=skip) for skip in ((), [(0, 2)], [(1, 2), (0, 2)])]
    for graph in (*skips, StageGraph(((0, 2), (1, 2)))):
        other = cache.for_graph(graph)
        assert other is cache.for_graph(graph)
        program, _ = other.get_step_phase(ProgramKey(2, True, "never"))
        assert program.graph == graph
    assert cache.for_graph(skips[0]) is cache
