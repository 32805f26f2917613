from __future__ import annotations

from itertools import accumulate
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

from penstock import ArgumentError, Cost, Pipe, Schedule, loads, lower, schedules, simulate, split
from penstock.model import placement
from penstock.model.cut import ResourceLimits, find_cut_within
from penstock.model.placement import PlacedPartition, SplitRequest, _move_stages, place_model
from penstock.model.sequential import cut_sequential, group_by_device
from penstock.model.tied import describe_tied_parameters
from penstock.model.traced.traced_partition import UnitCost
from penstock.schedules.balance import DeviceCapacity, UnitOutput, balance_costs
from tests.support import Do


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, width) for width in widths))


def cut_of(
    module: nn.Sequential, schedule: str | Schedule | None = None, **options: Any
) -> PlacedPartition:
    defaults: dict[str, Any] = dict.fromkeys(("stages", "devices", "balance", "example"))
    return place_model(
        module, SplitRequest(**{**defaults, "chunks": 2, "schedule": schedule, **options})
    )


def sizes(found: PlacedPartition) -> list[int]:
    return [len(stage.layers) for stage in found.partition.stages]


# ---- where to cut -------------------------------------------------------------------------


def test_stages_as_a_list_of_layer_counts() -> None:
    """Without options, the model is one stage on the current device."""
    found = cut_of(layers(1, 1, 1))
    assert (sizes(found), found.placement, len(found.devices)) == ([3], (0,), 1)
    found = cut_of(layers(1, 1, 1, 1, 1), stages=[2, 1, 2])
    assert (sizes(found), found.placement) == ([2, 1, 2], (0, 1, 2))


def test_stages_are_balanced_by_parameters() -> None:
    assert sizes(cut_of(layers(1, 1, 1, 30), stages=2)) == [3, 1]
    assert sizes(cut_of(layers(30, 1, 1, 1), stages=2)) == [1, 3]


def test_stages_are_balanced_by_memory() -> None:
    """The wide layer has no parameters, but its activations are large."""
    wide = Do(lambda x: x.repeat(1, 500).exp().log()[:, :4])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), wide)
    found = cut_of(model, stages=2, balance="memory", example=torch.randn(64, 4))
    assert sizes(found) == [3, 1]


def test_stages_are_balanced_by_time_with_an_example() -> None:
    seen: list[int] = []
    model = nn.Sequential(*(Do(lambda x: (seen.append(len(x)), x)[1]) for _ in range(3)))  # type: ignore[func-returns-value]
    assert sum(sizes(cut_of(model, stages=2, example=(torch.randn(6, 4),)))) == 3
    assert seen


def test_measured_times_decide_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers have equal parameters, but the first one takes longer."""
    costs = [UnitCost(seconds, 0.0, 0.0, 0, 0) for seconds in (3.0, 1.0, 1.0, 1.0)]
    monkeypatch.setattr(placement, "profile_layers", lambda *_, **__: costs)
    model = layers(4, 4, 4, 4)
    assert sizes(cut_of(model, stages=2, example=torch.randn(6, 4))) == [1, 3]
    assert sizes(cut_of(model, stages=2)) == [2, 2]


def test_ranks_communicate_in_both_directions() -> None:
    found = cut_of(layers(4, 4, 4), stages=3, devices=["cpu"] * 3)
    assert found.communicating_ranks == {(0, 1), (1, 0), (1, 2), (2, 1)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": [2, 2]}, r"\[2, 2\] is not a cut of 3 units"),
        ({"stages": [0, 3]}, "stage 0 takes 0"),
        ({"stages": 4}, "3 units cannot be cut into 4 stages"),
        ({"stages": 0}, "stages=0: a pipe has at least one stage"),
        ({"stages": -1}, "stages=-1: a pipe has at least one stage"),
        ({"stages": []}, r"stages=\[\]: a pipe has at least one stage"),
        (
            {"stages": 2, "balance": "luck"},
            "balance must be one of time, memory, parameters, not 'luck'",
        ),
        ({"stages": 2, "balance": "time"}, "balance='time' measures the layers on a batch"),
        ({"stages": 2, "balance": "memory"}, "balance='memory' measures the layers on a batch"),
        ({"stages": [1, 2], "balance": "time"}, "already says where to cut, so balance does not"),
        ({"stages": 3, "devices": ["cpu"] * 2}, "3 stages do not divide among 2 devices"),
        ({"devices": ["cpu", "meta"]}, "a stage cannot run on 'meta'"),
    ],
)
def test_invalid_split_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cut_of(layers(1, 1, 1), **options)


# ---- placement of stages on ranks ---------------------------------------------------------


def test_each_device_is_a_rank() -> None:
    found = cut_of(layers(1, 1, 1), devices=["cpu"] * 3)
    assert (sizes(found), found.placement, len(found.devices)) == ([1, 1, 1], (0, 1, 2), 3)
    found = cut_of(layers(1, 1, 1, 1), stages=4, devices=["cpu", torch.device("cpu")])
    assert found.placement == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("schedule", "stages", "devices", "placement"),
    [
        ("interleaved", 4, None, (0, 1, 0, 1)),
        ("interleaved", None, 2, (0, 1, 0, 1)),
        ("interleaved", 6, 2, (0, 1, 0, 1, 0, 1)),
        ("looped-bfs", 4, None, (0, 1, 0, 1)),
        ("1f1b", 4, None, (0, 1, 2, 3)),
        ("gpipe", 4, 2, (0, 1, 0, 1)),
        (None, 4, 2, (0, 1, 0, 1)),
    ],
)
def test_schedule_determines_the_placement(
    schedule: str | None, stages: int | None, devices: int | None, placement: tuple[int, ...]
) -> None:
    device_list = None if devices is None else ["cpu"] * devices
    found = cut_of(layers(1, 1, 1, 1, 1, 1), schedule, stages=stages, devices=device_list)
    assert found.placement == placement


def test_custom_schedule_determines_the_placement() -> None:
    by_hand = loads("0F0 1F0 1B0 0B0 \n 2F0 2B0")
    assert isinstance(by_hand, Schedule)
    found = cut_of(layers(1, 1, 1), by_hand, stages=3, devices=["cpu"] * 2)
    assert found.placement == (0, 0, 1)
    with pytest.raises(ArgumentError, match="3 stages on 2 ranks, but there are 2 on 2"):
        cut_of(layers(1, 1, 1), by_hand, stages=2, devices=["cpu"] * 2)


def test_custom_schedule_without_stages_and_devices_is_refused() -> None:
    with pytest.raises(ArgumentError, match="give stages= and devices="):
        Pipe(layers(1, 1), 2, schedule=schedules.one_f_one_b(2, 2))


# ---- shared parameters --------------------------------------------------------------------


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model[2][0].weight = model[0].weight  # type: ignore[index]
    return model


def test_describe_parameters_tied_across_ranks() -> None:
    for devices, words in ((None, ["2.0.weight on rank 2 is 0.weight of rank 0"]), (["cpu"], [])):
        found = cut_of(tied(), stages=3, devices=devices)
        assert describe_tied_parameters(found.partition.stages, found.placement) == words


def test_shared_parameters_stay_on_the_device_of_their_first_layer() -> None:
    """As between two GPUs. Here the second device is meta, which cannot compute."""
    model = tied()
    shared, table = model.get_parameter("0.weight"), torch.zeros(3)
    shared.grad = torch.ones_like(shared)
    for layer in (model[0], model[2]):
        layer.register_buffer("table", table)
    partition = cut_sequential(model, [1, 1, 1])
    _move_stages(partition.stages, [torch.device(name) for name in ("cpu", "meta", "meta")])
    assert model[2][0].weight is model[0].weight is shared  # type: ignore[index]
    assert model[2].table is model[0].table is table
    assert shared.device == shared.grad.device == torch.device("cpu")
    assert {str(p.device) for p in model[1].parameters()} == {"meta"}
    assert str(model[2][0].bias.device) == "meta"  # type: ignore[index]


def test_placed_layer_may_share_a_parameter_of_another_device() -> None:
    model = tied()
    model[2][0].bias = nn.Parameter(torch.zeros(4, device="meta"))  # type: ignore[index]
    counts, devices = group_by_device(list(model))
    assert (counts, [str(device) for device in devices]) == ([2, 1], ["cpu", "meta"])
    alone = nn.Linear(4, 4, bias=False)
    alone.weight = model.get_parameter("0.weight")
    assert group_by_device([model[0], nn.Linear(4, 4, device="meta"), alone])[0] == [1, 1, 1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"memory": 1e9}, "memory= is a cap on what a step needs, which is measured on a batch"),
        ({"units": [nn.Linear]}, "units= does not apply to an nn.Sequential"),
    ],
)
def test_options_that_do_not_apply_to_a_sequential_are_refused(
    option: dict[str, Any], message: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match=message):
        Pipe(model, 2, stages=2, devices=["cpu"] * 2, **option)


def test_lazy_layers_cannot_be_balanced_by_parameters() -> None:
    layers = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 3))
    with pytest.raises(ArgumentError, match=r"'0\.weight' has no shape yet"):
        Pipe(layers, stages=2, devices=["cpu"] * 2)


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_one_device", "counts"), [(True, (2, 1)), (False, (1, 2))])
def test_messages_between_ranks_on_one_gpu_do_not_move_the_cut(
    on_one_device: bool, counts: tuple[int, ...]
) -> None:
    """Virtual GPUs share their memory. A large value was as dear as between two GPUs."""
    devices = (torch.device("cuda", 0),) * 2
    limits = ResourceLimits(devices, (1, 1), (0, 1), (inf, inf), on_one_device=on_one_device)
    costs = [UnitCost(seconds, 0.0, 0.0, 0, 0) for seconds in (1.0, 1.0, 1.5)]
    large = UnitOutput(src=1, dsts=(2,), size=40e9)
    assert find_cut_within(limits, costs, (DeviceCapacity(),) * 2, (large,)) == counts


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_cut_for_several_stages_a_rank_is_the_faster_one_in_a_simulation(name: str) -> None:
    """With a long head, the slowest stage alone made zb-v slower than 1f1b."""
    seconds = [0.5] * 24 + [4.0]
    costs = [UnitCost(cost, cost, cost, 0, 0) for cost in seconds]
    schedule = schedules.make(name, 4, 16)
    stages = len(schedule.placement)
    unlimited = (1,) * stages, schedule.placement, (inf,) * 4
    limits = ResourceLimits((torch.device("cpu"),) * stages, *unlimited, schedule=schedule)

    def simulate_cut(counts: tuple[int, ...]) -> float:
        ends = accumulate(counts)
        F = tuple(sum(seconds[end - count : end]) for count, end in zip(counts, ends, strict=True))
        return simulate(lower(schedule), Cost(F, F, F, (1.0,) * stages)).makespan

    even_stages = balance_costs(seconds, stages)
    counts = find_cut_within(limits, costs, (DeviceCapacity(),) * 4)
    gain = simulate_cut(even_stages) / simulate_cut(counts)
    assert counts == even_stages if name == "1f1b" else gain > {"zb-v": 1.15}.get(name, 1.0)


def test_report_of_a_sequential_that_was_cut_by_time_has_the_times() -> None:
    """It advised to measure what had been measured."""
    model = layers(4, 4, 4, 4)
    partition = split(model, 2, torch.zeros(8, 4), balance="time")
    assert partition.outline.is_measured
    assert "ms of F/I/W" in str(partition)
    assert "nothing was measured" not in str(partition)
    assert not split(model, 2, balance="parameters").outline.is_measured
