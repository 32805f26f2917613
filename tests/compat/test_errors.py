"""Errors that all three legacy pipes raise, with the types they had."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat import fairscale, torch_sync, torchgpipe
from penstock.compat.legacy_pipe import LegacyPipe

pytestmark = pytest.mark.usefixtures("rpc_worker")


def by_balance(make: Any) -> Callable[..., LegacyPipe]:
    def made(module: nn.Module, **options: Any) -> LegacyPipe:
        count = len(module) if isinstance(module, nn.Sequential) else 1
        pipe: LegacyPipe = make(module, [1] * count, devices=["cpu"] * count, **options)
        return pipe

    return made


@pytest.fixture(
    params=[torch_sync.Pipe, by_balance(torchgpipe.GPipe), by_balance(fairscale.nn.Pipe)],
    ids=["torch_sync", "torchgpipe", "fairscale"],
)
def make(request: pytest.FixtureRequest) -> Callable[..., LegacyPipe]:
    made: Callable[..., LegacyPipe] = request.param
    return made


Make = Callable[..., LegacyPipe]


def test_legacy_pipe_refuses_a_module_that_is_not_sequential(make: Make) -> None:
    with pytest.raises(TypeError, match=r"nn\.Sequential, not Linear"):
        make(nn.Linear(1, 1))


@pytest.mark.parametrize("chunks", [0, -1])
def test_legacy_pipe_refuses_invalid_chunks(make: Make, chunks: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        make(nn.Sequential(nn.Linear(1, 1)), chunks=chunks)


def test_legacy_pipe_refuses_an_unknown_checkpoint_mode(make: Make) -> None:
    message = r"checkpoint must be one of .*except_last.* not 'sometimes'"
    with pytest.raises(ValueError, match=message):
        make(nn.Sequential(nn.Linear(1, 1)), checkpoint="sometimes")


def test_legacy_pipe_refuses_duplicate_children(make: Make) -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate children"):
        make(nn.Sequential(layer, layer))


def test_legacy_pipe_refuses_an_input_that_is_not_a_tensor(make: Make) -> None:
    pipe = make(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="tensor"):
        pipe("text")


class Text(nn.Module):
    """A layer whose output has no tensor."""

    def forward(self, x: Tensor) -> str:
        return "text"


def test_legacy_pipe_refuses_an_output_without_tensors(make: Make) -> None:
    with pytest.raises(TypeError, match="tensor"):
        make(nn.Sequential(nn.Identity(), Text()))(torch.ones(2, 1))


def test_gpipe_refuses_an_output_that_is_not_only_tensors() -> None:
    class WithText(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, "text"

    with pytest.raises(TypeError, match="returned a str"):
        torchgpipe.GPipe(nn.Sequential(WithText()), [1], devices=["cpu"])(torch.ones(2, 1))
    output, texts = torch_sync.Pipe(nn.Sequential(WithText()))(torch.ones(2, 1)).local_value()
    assert output.tolist() == [[1], [1]]
    assert texts == ["text"]


def test_no_chunk_refuses_what_is_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="NoChunk"):
        torch_sync.NoChunk("text")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "verify",
    [
        sys.modules["penstock.compat.torch_sync.pipe"].verify_module,
        sys.modules["penstock.compat.torchgpipe.gpipe"].verify_module,
        sys.modules["penstock.compat.fairscale.nn.pipe.pipe"].verify_module,
    ],
)
def test_verify_module(verify: Callable[[nn.Module], None]) -> None:
    verify(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        verify(nn.Linear(1, 1))
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate children"):
        verify(nn.Sequential(layer, layer))


def test_later_cells_do_not_start_after_an_error() -> None:
    seen: list[float] = []

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(x[0]))
            if float(x[0]) == 1:
                raise ZeroDivisionError("one")
            return x

    pipe = torch_sync.Pipe(nn.Sequential(nn.Identity(), Picky()), chunks=4)
    with pytest.raises(ZeroDivisionError, match="one"):
        pipe(torch.arange(4.0)[:, None])
    assert seen == [0, 1]


def test_legacy_pipe_refuses_inputs_on_another_device(make: Make) -> None:
    pipe = make(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="an input is on meta, but the first stage is on cpu"):
        pipe(torch.ones(2, 1, device="meta"))


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.cuda(0),
        lambda pipe: pipe.cpu(),
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to(device="cpu", dtype=torch.float64),
        lambda pipe: pipe.to(torch.ones(1)),
        lambda pipe: pipe.to_empty(device="cpu"),
    ],
)
def test_legacy_pipe_refuses_to_be_moved(make: Make, move: Callable[[LegacyPipe], object]) -> None:
    pipe = make(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="it cannot be moved"):
        move(pipe)


def test_legacy_pipe_raises_the_error_of_a_layer_unchanged(make: Make) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x < 0).any()):
                raise ZeroDivisionError("negative")
            return x

    pipe = make(nn.Sequential(nn.Identity(), Picky()), chunks=2)
    with pytest.raises(ZeroDivisionError, match="negative"):
        pipe(-torch.ones(4, 1))
    answer = pipe(torch.ones(4, 1))
    answer = answer if isinstance(answer, Tensor) else answer.local_value()
    assert torch.equal(answer, torch.ones(4, 1))


def test_inputs_with_different_numbers_of_microbatches() -> None:
    class Sum(nn.Module):
        def forward(self, a: Any, b: Any = None) -> Tensor:
            total: Tensor = a[0] + a[1] if b is None else a + b
            return total

    inputs = torch.ones(4, 1), torch.ones(2, 1)
    with pytest.raises(RuntimeError, match="different numbers of micro-batches"):
        torch_sync.Pipe(nn.Sequential(Sum()), chunks=4)(*inputs)
    with pytest.raises(RuntimeError, match="different numbers of micro-batches"):
        torchgpipe.GPipe(nn.Sequential(Sum()), [1], devices=["cpu"], chunks=4)(inputs)


def test_torch_sync_refuses_a_child_on_two_devices() -> None:
    layer = nn.Linear(1, 1)
    layer.bias = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match="several devices, cpu, meta"):
        torch_sync.Pipe(nn.Sequential(layer))
