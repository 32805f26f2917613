from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from penstock.fingerprint import ModuleSnapshot
from penstock.stage.stage import OUTSIDE, ObservedBehavior, Stage


def stage(*layers: nn.Module) -> Stage:
    def compute(arrived: Any) -> dict[int, tuple[Any, ...]]:
        return {OUTSIDE: arrived[OUTSIDE]}

    return Stage(1, tuple(map(str, range(len(layers)))), layers, compute)


def test_stage_str_names_its_layers() -> None:
    assert str(stage(nn.ReLU())) == "stage 1 (layer 0: ReLU)"
    assert str(stage(nn.ReLU(), nn.Tanh())) == "stage 1 (layers 0 to 1: ReLU, Tanh)"


def behavior_of(one: Stage) -> ObservedBehavior:
    return one.behavior_for(one.read_contents().settings)


def test_stage_modules_lists_each_module_once() -> None:
    tied = nn.ReLU()
    inner = nn.Sequential(tied, nn.Tanh())
    assert stage(inner, tied).modules() == [inner, tied, inner[1]]


def test_stage_behavior_is_cached_per_layer_settings() -> None:
    dropout = nn.Dropout(0.5)
    one = stage(nn.Linear(1, 1), dropout)

    def behavior() -> Any:
        return behavior_of(one)

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
    assert behavior_of(one) is behavior_of(one)


def test_contents_of_a_stage_are_read_again_if_there_is_another_snapshot() -> None:
    layer = nn.Linear(1, 1)
    one, snapshot = stage(layer), ModuleSnapshot([layer])
    contents = one.read_contents(snapshot)
    assert one.read_contents(snapshot) is contents
    assert one.read_contents() is not contents
    layer.weight.requires_grad_(False)
    assert not snapshot.is_unchanged()
    (bias,) = one.read_contents(ModuleSnapshot([layer])).parameters
    assert bias is layer.bias


def test_contents_of_a_stage_are_read_again_if_the_snapshot_does_not_cover_them() -> None:
    inner, outer = nn.Linear(1, 1), nn.Linear(1, 1)
    one, snapshot = stage(inner, outer), ModuleSnapshot([inner])
    assert len(one.read_contents(snapshot).parameters) == 4
    outer.requires_grad_(False)
    assert snapshot.is_unchanged()
    assert len(one.read_contents(snapshot).parameters) == 2


def test_copy_of_a_stage_has_contents_of_its_own() -> None:
    layer = nn.Linear(1, 1)
    one, snapshot = stage(layer), ModuleSnapshot([layer])
    one.read_contents(snapshot)
    copied = copy.deepcopy(one)
    assert copied.read_contents(snapshot).modules == list(copied.layers) != [layer]
