"""`penstock.compat.torch_sync` behaves like `torch.distributed.pipeline.sync`, on the CPU."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from penstock.compat.torch_sync.batchnorm import DeferredBatchNorm
from penstock.compat.torch_sync.pipe import PipeSequential, partitions_of
from penstock.compat.torch_sync.skip import Namespace, pop, skippable, stash
from penstock.compat.torch_sync.utils import partition_model
from tests.support import same_gradients
from torch import Tensor, nn
from torch.distributed import rpc

from penstock.compat.torch_sync import NoChunk, Pipe, WithDevice, is_checkpointing, is_recomputing

pytestmark = pytest.mark.usefixtures("rpc_worker")


@skippable(stash=["long"])
class Stash(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        yield stash("long", tensor=x)
        return self.linear(x)


@skippable(pop=["long"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("long"))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


def test_torch_sync_pipe_needs_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_is_current_rpc_agent_set", lambda: False)
    with pytest.raises(RuntimeError, match=r"Please initialize RPC framework for Pipe: .*init_rpc"):
        Pipe(nn.Sequential(nn.Linear(1, 1)))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_torch_sync_pipe_equals_the_plain_model(checkpoint: str, rows: int) -> None:
    layers = nn.Sequential(
        nn.Linear(3, 3), Stash(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), Pop()
    ).double()
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, chunks=4, checkpoint=checkpoint)
    x = torch.randn(rows, 3, dtype=torch.float64)
    answer = pipe(x)
    assert isinstance(answer, rpc.RRef)
    assert answer.to_here() is answer.local_value()
    torch.testing.assert_close(answer.local_value(), plain(x), rtol=0, atol=1e-12)
    answer.local_value().pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    assert same_gradients(pipe, plain)


def test_each_child_on_the_cpu_is_a_partition_with_legacy_state_dict_keys() -> None:
    layers = nn.Sequential(
        OrderedDict(
            a=nn.Linear(2, 2),
            b=nn.ReLU(),
            c=nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
            d=WithDevice(nn.Linear(2, 2), "cpu"),
        )
    )
    pipe = Pipe(layers)
    assert [len(partition) for partition in pipe.partitions] == [1, 1, 3, 1]  # type: ignore[arg-type]
    assert all(isinstance(partition, PipeSequential) for partition in pipe.partitions)
    assert pipe.devices == [torch.device("cpu")] * 4
    assert [key.removesuffix(".weight") for key in pipe.state_dict() if "weight" in key] == [
        "partitions.0.0",
        "partitions.2.0",
        "partitions.2.2",
        "partitions.3.0",
    ]


def test_neighbouring_children_on_one_device_form_one_partition() -> None:
    """The device `meta` stands in for a GPU."""
    a, b, c = (nn.Linear(1, 1, device="meta") for _ in range(3))
    relu = nn.ReLU()  # without parameters: on the CPU, as in PyTorch
    d = nn.Linear(1, 1)
    layers = nn.Sequential(a, nn.Sequential(b, c), relu, WithDevice(d, "meta"))
    parts, devices = partitions_of(layers)
    assert [list(part) for part in parts] == [[a, b, c], [relu], [d]]
    assert [device.type for device in devices] == ["meta", "cpu", "meta"]
    assert d.weight.is_meta


def test_skippable_layers_have_legacy_state_dict_keys() -> None:
    first, second = Namespace(), Namespace()
    layers: list[Any] = [Stash(), Stash(), Pop(), Pop()]
    for at, space in enumerate([first, second, first, second]):
        assert layers[at].isolate(space, only=["long", "unknown"]) is layers[at]
    pipe = Pipe(nn.Sequential(*layers))
    assert set(pipe.state_dict()) == {
        f"partitions.{at}.0.module.linear.{name}" for at in (0, 1) for name in ("weight", "bias")
    }
    assert repr(Pop()) == "@skippable(Pop())"


def test_cells_run_in_clock_order() -> None:
    """The order on one rank, per clock tick `k`:

    k   (micro-batch, stage)
    0   (0, 0)
    1   (1, 0) (0, 1)
    2   (2, 0) (1, 1)
    3          (2, 1)
    """
    log: list[tuple[int, int]] = []

    class Log(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: Tensor) -> Tensor:
            log.append((int(x[0, 0]), self.stage))
            return x

    Pipe(nn.Sequential(Log(0), Log(1)), chunks=3)(torch.arange(3.0).reshape(3, 1))
    assert log == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


def test_several_inputs_and_outputs_of_different_types() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, factor: int, pair: list[Tensor]) -> Any:
            assert x.shape == (2, 3)
            assert mask.shape == (6, 3)
            assert pair[0].shape == (6,)
            return x * factor, mask.sum(), "same"

    x, mask = torch.ones(6, 3), torch.ones(6, 3)
    pipe = Pipe(nn.Sequential(Mixed()), chunks=3)
    product, sums, same = pipe(x, NoChunk(mask), 5, [torch.ones(6)]).local_value()
    assert torch.equal(product, 5 * x)
    assert [float(each) for each in sums] == [18.0] * 3
    assert same == ["same"] * 3


def test_inputs_with_different_batch_sizes_are_each_chunked() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor, both: Tensor) -> Tensor:
            return x + both.view(-1, 2, 1).sum(1)

    x, both = torch.arange(4.0).view(4, 1), torch.arange(8.0).view(8, 1)
    found = Pipe(nn.Sequential(Pairs()), chunks=2)(x, both).local_value()
    assert torch.equal(found, Pairs()(x, both))


def test_tuple_between_layers_is_unpacked_into_arguments() -> None:
    pipe = Pipe(nn.Sequential(Twice(), Sum(), nn.Sequential(Twice(), Sum())), chunks=2)
    assert torch.equal(pipe(torch.ones(4, 1)).local_value(), torch.full((4, 1), 9.0))


def test_pipe_is_a_sequence_of_layers() -> None:
    a, b, c = nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)
    pipe = Pipe(nn.Sequential(nn.Sequential(a, b), c), chunks=8.0, checkpoint="never")  # type: ignore[arg-type]
    assert len(pipe) == 3
    assert list(pipe) == [a, b, c]
    assert pipe[1] is b
    assert pipe[-1] is c
    assert (pipe.chunks, pipe.checkpoint) == (8, "never")
    with pytest.raises(IndexError):
        pipe[3]
    with pytest.raises(AttributeError):
        pipe.chunks = 2  # type: ignore[misc]


def test_is_checkpointing_and_is_recomputing_inside_a_layer() -> None:
    modes = []

    class RecordModes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append((is_checkpointing(), is_recomputing()))
            return x * 2

    pipe = Pipe(nn.Sequential(RecordModes()), chunks=2)
    x = torch.ones(2, 1, requires_grad=True)
    pipe(x).local_value().sum().backward()
    assert modes == [(True, False), (False, False), (False, True)]
    modes.clear()
    pipe.eval()
    pipe(x).local_value().sum().backward()
    assert modes == [(False, False)] * 2
    modes.clear()
    with torch.no_grad():
        pipe.train()(x)
    assert modes == [(False, False)] * 2


def test_deferred_batch_norm() -> None:
    plain = nn.BatchNorm2d(3)
    pipe = Pipe(nn.Sequential(copy.deepcopy(plain)), chunks=2, deferred_batch_norm=True)
    x = torch.rand(5, 3, 4, 4)
    plain(x)
    pipe(x).local_value().sum().backward()
    assert isinstance(pipe[0], DeferredBatchNorm)
    torch.testing.assert_close(pipe[0].running_mean, plain.running_mean)
    torch.testing.assert_close(pipe[0].running_var, plain.running_var)
    old = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    keys = {key.removeprefix("partitions.0.0.") for key in pipe.state_dict()}
    assert keys == old | {"sum", "sum_squares"}


def test_partition_model() -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    placed = partition_model(layers, [3, 1], devices=["cpu", "cpu"])
    assert [len(list(part.children())) for part in placed] == [3, 1]
    assert torch.equal(placed(torch.ones(1, 2)), layers(torch.ones(1, 2)))
    with pytest.raises(ValueError, match="the stages take 3 together"):
        partition_model(layers, [2, 1], devices=["cpu", "cpu"])


def test_deepcopy_and_pickle_of_a_pipe() -> None:
    pipe = Pipe(nn.Sequential(Stash(), nn.Linear(3, 3), Pop()), chunks=2)
    x = torch.randn(4, 3)
    expected = pipe(x).local_value()
    for duplicate in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(duplicate(x).local_value(), expected)
        with torch.no_grad():
            for parameter in duplicate.parameters():
                parameter.zero_()
        assert torch.equal(duplicate(x).local_value(), x)
    assert torch.equal(pipe(x).local_value(), expected)


def test_cast_to_another_dtype() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), chunks=2)
    assert pipe.to(torch.float64) is pipe
    assert pipe(torch.ones(2, 2, dtype=torch.float64)).local_value().dtype == torch.float64
    assert pipe.half()[0].weight.dtype == torch.float16


def test_hooks_on_a_partition_are_called() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), chunks=2)
    rows = []
    pipe.partitions[0].register_forward_hook(lambda _, __, output: rows.append(len(output)))
    with torch.no_grad():
        pipe(torch.ones(5, 2))
    assert rows == [3, 2]
