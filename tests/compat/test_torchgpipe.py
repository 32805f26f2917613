"""`penstock.compat.torchgpipe` behaves like torchgpipe, on the CPU."""

from __future__ import annotations

import copy
from collections import OrderedDict
from threading import get_ident
from time import perf_counter
from typing import Any

import pytest
import torch
from penstock.compat.fairscale.nn import Pipe as FairscalePipe
from penstock.compat.torchgpipe.balance import balance_by_size, balance_by_time
from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm
from penstock.compat.torchgpipe.skip import pop, skippable, stash, verify_skippables
from tests.support import same_gradients
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe


@skippable(stash=["long"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("long", x)
        return x * 3


@skippable(pop=["long"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("long"))


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


@pytest.mark.parametrize("make", [GPipe, FairscalePipe])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_gpipe_and_fairscale_pipe_equal_the_plain_model(checkpoint: str, make: Any) -> None:
    layers = nn.Sequential(nn.Linear(3, 4), Stash(), nn.ReLU(), nn.Linear(4, 4), Pop()).double()
    plain = copy.deepcopy(layers)
    pipe = make(layers, [2, 1, 2], devices=cpus(3), chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(pipe(x), plain(x), rtol=0, atol=1e-12)
    pipe(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    assert same_gradients(pipe, plain)


def test_gpipe_state_dict_keeps_the_names_of_the_layers() -> None:
    layers = nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1), c=nn.Linear(1, 1)))
    named = GPipe(layers, [1, 2], devices=cpus(2))
    assert [key for key in named.state_dict() if "weight" in key] == [
        "partitions.0.a.weight",
        "partitions.1.b.weight",
        "partitions.1.c.weight",
    ]
    plain = GPipe(nn.Sequential(*layers), [1, 2], devices=cpus(2))
    assert [name for name, _ in plain.named_modules()] == [
        "",
        "partitions",
        "partitions.0",
        "partitions.0.0",
        "partitions.1",
        "partitions.1.1",
        "partitions.1.2",
    ]


def test_gpipe_attributes() -> None:
    a, b, c = nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)
    pipe = GPipe(nn.Sequential(a, b, c), (2, 1), devices=cpus(4), chunks=5)
    assert pipe.balance == [2, 1]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert (pipe.chunks, pipe.checkpoint) == (5, "except_last")
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert list(pipe.partitions[0].children()) == [a, b]
    assert list(pipe) == [a, b, c]
    assert (len(pipe), pipe[2], pipe[-3]) == (3, c, a)


def test_partitions_on_one_device_share_a_worker_thread() -> None:
    """`cpu:0` stands in for another device."""
    threads: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}

    class Log(nn.Module):
        def __init__(self, partition: int) -> None:
            super().__init__()
            self.partition = partition

        def forward(self, x: Tensor) -> Tensor:
            threads[self.partition].add(get_ident())
            return x + 1

    pipe = GPipe(
        nn.Sequential(Log(0), Log(1), Log(2)), [1, 1, 1], devices=["cpu", "cpu:0", "cpu"], chunks=2
    )
    assert torch.equal(pipe(torch.zeros(4, 1)), torch.full((4, 1), 3.0))
    assert threads[0] == threads[2] != threads[1]
    assert [len(found) for found in threads.values()] == [1, 1, 1]


def test_tuple_between_layers_is_passed_as_one_argument() -> None:
    class Swap(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            a, b = pair
            return b + 1, a

    pipe = GPipe(nn.Sequential(Swap(), Swap(), Swap()), [2, 1], devices=cpus(2), chunks=2)
    a, b = torch.zeros(4, 1), torch.ones(4, 2)
    first, second = pipe((a, b))
    assert torch.equal(first, b + 2)
    assert torch.equal(second, a + 1)


@pytest.mark.parametrize("value", ["text", [torch.ones(2)], (torch.ones(2), 3), None])
def test_gpipe_refuses_inputs_that_are_not_tensors(value: object) -> None:
    pipe = GPipe(nn.Sequential(nn.ReLU()), [1], devices=cpus(1))
    with pytest.raises(TypeError, match="a tensor or a tuple of tensors"):
        pipe(value)


def test_gpipe_refuses_an_invalid_balance() -> None:
    layers = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())
    with pytest.raises(ValueError, match="It says how many layers"):
        GPipe(layers)
    with pytest.raises(ValueError, match="the stages take 2 together"):
        GPipe(layers, [1, 1], devices=cpus(2))
    with pytest.raises(ValueError, match="each takes at least one"):
        GPipe(layers, [3, 0], devices=cpus(2))
    with pytest.raises(IndexError, match="makes 2 partitions, but there are 1 devices"):
        GPipe(layers, [1, 2], devices=cpus(1))


def test_gpipe_devices_default_to_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(IndexError, match="there are 1 GPUs, the default for devices"):
        GPipe(nn.Sequential(nn.ReLU(), nn.ReLU()), [1, 1])


def test_balance_by_time_and_size() -> None:
    class Slow(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            for _ in range(200):
                pair = (pair[0] + 1, pair[1])
            return pair

    quick = nn.Identity
    layers = nn.Sequential(Slow(), quick(), quick(), quick())
    sample = torch.rand(8, 3), torch.rand(8, 3)
    start = perf_counter()
    assert balance_by_time(2, layers, sample, timeout=0.05, device="cpu") == [1, 3]
    assert perf_counter() - start >= 0.05
    wide = nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 4), *(nn.Linear(4, 4) for _ in range(3)))
    assert balance_by_size(2, wide, torch.rand(8, 4), chunks=2, param_scale=4.0) == [1, 4]
    with pytest.raises(ValueError, match="cannot be cut into 9 stages"):
        balance_by_time(9, layers, sample, timeout=0.0, device="cpu")


def test_skips_outside_a_pipe_and_verify_skippables() -> None:
    x = torch.ones(2)
    assert torch.equal(nn.Sequential(Stash(), Pop())(x), 4 * x)
    with pytest.raises(TypeError, match="no layer pops 'long'"):
        verify_skippables(nn.Sequential(Stash()))
    with pytest.raises(TypeError, match="no layer before it stashes it"):
        GPipe(nn.Sequential(nn.ReLU(), Pop()), [1, 1], devices=cpus(2))


def test_balance_measures_in_training_mode_and_restores_the_mode_of_each_layer() -> None:
    modes = set()

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.add(self.training)
            return x * 1

    layers = nn.Sequential(Look(), Look()).eval()
    layers[1].train()
    balance_by_time(2, layers, torch.rand(2, 3), timeout=0.0, device="cpu")
    balance_by_size(2, layers, torch.rand(2, 3), device="cpu")
    assert modes == {True}
    assert [layer.training for layer in (layers, *layers)] == [False, False, True]


def test_converting_a_deferred_batch_norm_to_other_chunks_leaves_the_given_one() -> None:
    first = DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm1d(3), 2)
    assert isinstance(first, DeferredBatchNorm)
    assert DeferredBatchNorm.convert_deferred_batch_norm(first, 2) is first
    second = DeferredBatchNorm.convert_deferred_batch_norm(first, 4)
    assert isinstance(second, DeferredBatchNorm)
    assert (first.chunks, second.chunks) == (2, 4)
    assert second.running_mean is first.running_mean
    assert second.weight is first.weight


def test_partitions_may_share_a_parameter() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    layers[2].weight = layers[0].weight
    plain = copy.deepcopy(layers)
    pipe = GPipe(layers, [1, 2], devices=cpus(2), chunks=2)
    x = torch.rand(4, 3).double()
    pipe(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    weight, expected = next(pipe.parameters()).grad, next(plain.parameters()).grad
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)
