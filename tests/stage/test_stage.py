from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.stage.stage import OUTSIDE, Stage


def stage(*layers: nn.Module) -> Stage:
    def compute(arrived: Any) -> dict[int, tuple[Any, ...]]:
        return {OUTSIDE: arrived[OUTSIDE]}

    return Stage(1, tuple(map(str, range(len(layers)))), layers, compute)


def test_stage_str_names_its_layers() -> None:
    assert str(stage(nn.ReLU())) == "stage 1 (layer 0: ReLU)"
    assert str(stage(nn.ReLU(), nn.Tanh())) == "stage 1 (layers 0 to 1: ReLU, Tanh)"


def test_stage_modules_lists_each_module_once() -> None:
    tied = nn.ReLU()
    inner = nn.Sequential(tied, nn.Tanh())
    assert stage(inner, tied).modules() == [inner, tied, inner[1]]


def test_stage_behavior_is_cached_per_layer_settings() -> None:
    dropout = nn.Dropout(0.5)
    one = stage(nn.Linear(1, 1), dropout)

    def behavior() -> Any:
        return one.behavior_for(one.modules())

    first = behavior()
    first.draws_random = True
    assert behavior() is first
    dropout.p = 0.0
    assert behavior().draws_random is None
    dropout.p = 0.5
    assert behavior() is first
    dropout.eval()
    assert behavior().draws_random is None
    one.reset_behaviors()
    dropout.train()
    assert behavior().draws_random is None


def test_stage_behavior_with_a_parameter_named_p() -> None:
    layer = nn.Linear(1, 1)
    layer.p = nn.Parameter(torch.ones(1))
    one = stage(layer)
    assert one.behavior_for(one.modules()) is one.behavior_for(one.modules())
