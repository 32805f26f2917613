"""Tests of blocks and stages compiled by inductor on a GPU, under each runtime."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.functional import mse_loss

from penstock import Pipe
from tests.gpu.support import needs_gpu, nothing_compiled, virtual_gpus
from tests.pairs import each_pair

pytestmark = [
    needs_gpu,
    pytest.mark.filterwarnings("ignore"),  # caused by the compiler
]

RANKS, CHUNKS, SIZE = 2, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.b(torch.tanh(self.a(x))))


class Counting:
    def __init__(self) -> None:
        self.compiled = 0
        self._inductor = lookup_backend("inductor")

    def __call__(self, graph: Any, example: Any) -> Any:
        self.compiled += 1
        return self._inductor(graph, example)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    with nothing_compiled():
        yield


def made(model: nn.Module, by: str, counting: Counting | None, **options: Any) -> Pipe:
    fn: Any = None
    if counting is not None and by == "stage":
        fn = lambda module, index: torch.compile(module, backend=counting)  # noqa: E731
    elif counting is not None:
        for block in model.children():
            block.compile(backend=counting)
    devices = virtual_gpus(RANKS)
    return Pipe(
        model, CHUNKS, options.pop("checkpoint"), stages=RANKS, devices=devices, loss_fn=mse_loss,
        stage_fn=fn, **options,
    )  # fmt: skip


@each_pair(
    runtime=["inline", "threads", "graph"],
    by=["block", "stage"],
    checkpoint=["never", "always"],
    schedule=["1f1b", "zb-h1"],
)
def test_no_recompilation_on_gpu_after_the_first_step(
    runtime: str, by: str, checkpoint: str, schedule: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2 * RANKS)))
    options = {"checkpoint": checkpoint, "schedule": schedule}
    plain = made(copy.deepcopy(model), by, None, runtime="inline", **options)
    counting = Counting()
    pipe = made(model, by, counting, runtime=runtime, **options)
    found = []
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(CHUNKS * 32, SIZE, device="cuda:0")
        before = counting.compiled
        result = pipe.step(x, target=-x)
        found.append(counting.compiled - before)
        assert result.ran.runtime == runtime
        wanted = plain.step(x, target=-x)
        torch.testing.assert_close(result.loss, wanted.loss, rtol=1e-4, atol=1e-5)
    assert found[0] > 0
    assert found[1:] == [0] * 4
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("runtime", ["inline", "threads", "graph"])
def test_no_recompilation_on_gpu_with_uneven_micro_batches(runtime: str) -> None:
    model = nn.Sequential(*(Block() for _ in range(RANKS)))
    counting = Counting()
    pipe = made(model, "block", counting, runtime=runtime, checkpoint="never", schedule="1f1b")
    found = []
    for _ in range(4):
        x = torch.randn(CHUNKS * 32 - 5, SIZE, device="cuda:0")
        before = counting.compiled
        pipe.step(x, target=-x)
        found.append(counting.compiled - before)
    assert found[1:] == [0, 0, 0]


def test_dropout_in_compiled_blocks_differs_in_each_graph_replay() -> None:
    """Inductor draws its seeds on the device, from the generator of the cell."""
    model = nn.Sequential(*(nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(RANKS)))
    counting = Counting()
    pipe = made(model, "block", counting, runtime="graph", checkpoint="always", schedule="1f1b")
    x = torch.randn(CHUNKS * 32, SIZE, device="cuda:0")
    losses = [pipe.step(x, target=-x).loss.item() for _ in range(5)]
    assert len(set(losses)) == 5
