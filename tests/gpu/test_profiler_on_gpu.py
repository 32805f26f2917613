"""Tests of the profiler on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from time import sleep as sleep_on_host
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.device.contention import SharedDevice
from penstock.device.device import Gpu
from penstock.model.profiler import measure_unit_layers, profile_call
from tests.gpu.support import GPU, needs_gpu, virtual_gpus
from tests.model.test_profiler import Watched, brief_times, nothing

pytestmark = needs_gpu


def test_profile_call_on_a_gpu_keeps_its_random_state() -> None:
    before = torch.cuda.get_rng_state()
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LSTM(4, 4))
    found = profile_call(module, (torch.ones(10, 4),), device="cuda")
    assert found.forward > 0
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def sleep() -> None:
    torch.cuda._sleep(100_000_000)  # cycles: 30 ms at least


@pytest.mark.parametrize("calls", [(sleep, nothing), (nothing, sleep)], ids=["forward", "backward"])
def test_layer_times_on_a_gpu_measure_kernels_not_launches(
    calls: tuple[Callable[[], object], Callable[[], object]],
) -> None:
    layers = [nn.Tanh(), Watched(*calls), nn.Tanh()]
    example = torch.ones(3, requires_grad=True)
    before, sleeper, after = brief_times(layers, (example,), device="cuda")
    assert sleeper > 0.02 > max(before, after)


class SlowToLaunch(nn.Module):
    """A layer whose kernels take microseconds, and for which Python takes 10 ms."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            sleep_on_host(2e-3)
            x = x + 1.0
        return x


def test_profile_is_device_time_where_the_host_is_slower() -> None:
    x = torch.ones(8, device="cuda")
    assert profile_call(SlowToLaunch(), (x,), device="cuda").forward < 5e-3


def test_profile_inside_a_virtual_gpu_is_that_of_its_multiprocessors() -> None:
    layer = nn.Linear(4096, 4096).to("cuda", torch.bfloat16)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    whole = profile_call(layer, (x,), device="cuda").forward
    with virtual_gpus(8)[0].activate():
        part = profile_call(layer, (x,), device="cuda").forward
    assert part > 2 * whole  # an eighth of the GPU; tests of other processes may disturb both


# ---- devices that share the GPU ------------------------------------------------------------------


def measure_slowdowns(layer: nn.Module, x: Tensor, devices: Sequence[Gpu]) -> Any:
    shared = SharedDevice.find(devices[0], devices)
    assert shared is not None
    with devices[0].activate():
        (unit,) = measure_unit_layers([layer], (x,), GPU, False, shared=shared)
    return unit.slowdowns


def test_ranks_on_a_whole_gpu_slow_each_other_down() -> None:
    layer = nn.Linear(4096, 4096).to("cuda", torch.bfloat16)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    always, with_pauses = measure_slowdowns(layer, x, [Gpu(GPU) for _ in range(3)])
    assert always > 2  # three of them share all multiprocessors
    assert with_pauses < always


class ReadsNumbers(nn.Module):
    """A layer that waits for the device, and cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum().item())


def test_slowdown_of_work_that_reads_numbers_is_unknown_and_harms_nothing() -> None:
    devices = virtual_gpus(4)
    x = torch.ones(512, 512, device="cuda", requires_grad=True)
    assert measure_slowdowns(ReadsNumbers(), x, devices) is None
    assert torch.equal(torch.rand(3, device="cuda"), torch.rand(3, device="cuda")) is False
    assert measure_slowdowns(nn.Linear(512, 512).cuda(), x, devices) is not None


def test_slowdown_leaves_the_layer_as_it_was() -> None:
    layer = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.5)).cuda()
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(512, 256, device="cuda")
    random_state = torch.cuda.get_rng_state()
    assert measure_slowdowns(layer, x, virtual_gpus(4)) is not None
    after = layer.state_dict()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    assert all(p.grad is None for p in layer.parameters())
    assert torch.equal(torch.cuda.get_rng_state(), random_state)


def test_workspace_on_a_gpu_has_what_lives_during_an_action_only() -> None:
    layers = [nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()]
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    for unit in measure_unit_layers(layers, (x,), GPU, False, timeout=0.0):
        gradients = 2 * x.nbytes + layers[0].weight.nbytes
        assert gradients <= unit.workspace_bytes <= gradients + layers[0].weight.nbytes
