"""`pipe.memory`: the bytes alive on each rank over the actions of a step, measured and forecast."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Action, Compute, Message, Op, Pipe, Recv, Send, lower, schedules
from penstock.device.device import Gpu
from penstock.errors import RunError
from penstock.runtime.distributed.session import DistributedEngine
from penstock.runtime.memory import AllocatorProbe, Memory, MemoryReading
from tests.support import each_runtime

ROWS, SIZE = 16, 8  # of one micro-batch
CELL = 2 * ROWS * SIZE * 4  # bytes kept for tanh, and the output


class Block(nn.Module):
    """A layer that keeps two tensors: that of tanh, and its output, which the next stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * 2


def made(chunks: int = 4, stages: int = 3, **options: Any) -> Pipe:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(stages)))
    return Pipe(
        model, chunks, options.pop("checkpoint", "never"), stages=stages,
        devices=["cpu"] * options.pop("ranks", stages), loss_fn=mse_loss, **options,
    )  # fmt: skip


def measured_memory(pipe: Pipe) -> Memory:
    x = torch.randn(pipe.chunks * ROWS, SIZE)
    return pipe.memory(x, target=-x)


# ---- measured against the forecast --------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "alive"), [("gpipe", [4, 4, 4]), ("1f1b", [3, 2, 1]), ("naive", [1, 1, 1])]
)
def test_memory_peak_matches_the_schedule(schedule: str, alive: list[int]) -> None:
    memory = measured_memory(made(schedule=schedule))
    assert memory.activation[:2] == (CELL, CELL)
    assert memory.forecast.peak[:2] == (alive[0] * CELL, alive[1] * CELL)
    for peak, cells in zip(memory.peak, alive, strict=True):
        assert cells * CELL <= peak <= (cells + 1) * CELL  # messages in flight come on top
    assert memory.forecast.program == memory.program


def test_memory_curve_names_each_action_and_returns_to_its_start() -> None:
    memory = measured_memory(made(chunks=2, stages=2, schedule="gpipe"))
    curve = memory.curve(0)
    assert [str(action) for action, _ in curve] == ["0F0", "0F1", "0B1", "0B0"]
    sizes = [size for _, size in curve]
    assert sizes[:2] == [CELL, 2 * CELL]
    assert sizes[-1] < CELL / 8  # at most the loss
    assert max(sizes) == memory.peak[0]
    ends = [memory.forecast.memory(0)[at] for at in (1, 2)]
    assert [size for _, size in ends] == [CELL, 2 * CELL]


def test_memory_of_recomputed_cells_counts_from_the_recomputation() -> None:
    memory = measured_memory(made(checkpoint="always", schedule="gpipe"))
    half = CELL / 2
    assert memory.forecast.peak[:2] == (half, half)  # the output is not read again
    # The inputs are kept, on the first rank for the second, and the forecast does not count them.
    assert 4 * half <= memory.peak[0] <= 4 * half + CELL


def test_memory_of_larger_stages() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(Block(), Block(), Block())
    pipe = Pipe(
        nn.Sequential(wide, Block()), 2, "never", stages=2, devices=["cpu"] * 2, loss_fn=mse_loss
    )
    memory = measured_memory(pipe)
    assert memory.activation[0] == 3 * CELL


def test_memory_with_several_stages_per_rank() -> None:
    memory = measured_memory(made(stages=4, ranks=2, schedule="interleaved"))
    assert len(memory.peak) == 2
    assert memory.activation[:3] == (CELL,) * 3
    assert all(peak >= CELL for peak in memory.peak)


def test_memory_held_counts_parameters_gradients_and_buffers() -> None:
    pipe = made(stages=2)
    numbers = SIZE * SIZE + SIZE
    assert measured_memory(pipe).held == (2 * 4 * numbers,) * 2
    for parameter in pipe[1].parameters():
        parameter.requires_grad_(False)
    assert measured_memory(pipe).held == (2 * 4 * numbers, 4 * numbers)


def test_memory_with_micro_batches_of_unequal_size() -> None:
    pipe = made(chunks=3, stages=2)
    x = torch.randn(3 * ROWS - 2, SIZE)
    assert pipe.memory(x, target=-x).activation[0] == CELL


# ---- messages between devices -------------------------------------------------------------


def test_memory_of_a_message_counts_for_the_receiving_stage() -> None:
    """Between separate devices, a message is in the receiver's memory from when it is sent."""
    program = lower(schedules.gpipe(ranks=2, chunks=1))
    message = Message(0, 1, 0)
    rows: list[tuple[int, Action, tuple[int, int]]] = [
        (0, Compute(Op.F, 0, 0), (100, 0)),  # of which 30 are the output
        (0, Send(message), (70, 30)),
        (1, Recv(message), (70, 30)),
        (1, Compute(Op.F, 1, 0), (70, 80)),
    ]
    readings = tuple(MemoryReading(rank, 0, action, alive) for rank, action, alive in rows)
    assert Memory(program, readings, (0, 0)).activation == (70, 80)


# ---- measuring changes nothing ------------------------------------------------------------


class Restless(nn.Module):
    """A layer that counts calls, tracks statistics and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = nn.functional.dropout(self.norm(self.linear(x)), 0.5)
        return y


@each_runtime
@pytest.mark.parametrize("deferred", [False, True])
def test_measuring_memory_leaves_no_trace(runtime: str, deferred: bool) -> None:
    """Steps after the measurement give what they give without it."""
    torch.manual_seed(0)
    model = nn.Sequential(Restless(), Restless())
    x = torch.randn(32, SIZE)
    found = []
    for looks in (False, True):
        pipe = Pipe(
            copy.deepcopy(model), 2, "always", deferred, stages=2, devices=["cpu"] * 2,
            schedule="1f1b", loss_fn=mse_loss, runtime=runtime,
        )  # fmt: skip
        torch.manual_seed(3)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(x, target=-x).loss)
            if looks:
                timeline = pipe.forecast()
                assert max(pipe.memory(x, target=-x).peak) > 0
                assert pipe.forecast() == timeline
        gradients = [p.grad for p in pipe.parameters()]
        calls = [layer.calls for layer in pipe]
        found.append([*losses, *gradients, *pipe.buffers(), torch.tensor(calls)])
    assert all(map(torch.equal, *found))


def test_measuring_memory_under_no_grad_runs_a_training_step() -> None:
    pipe = made()
    with torch.no_grad():
        memory = measured_memory(pipe)
    assert {a.op for a, _ in memory.curve(0)} == {Op.F, Op.B}
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_measuring_memory_runs_compiled_layers_eagerly_and_keeps_them_compiled() -> None:
    runs: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*values: Any) -> Any:
            runs.append(1)
            return graph(*values)

        return run

    torch._dynamo.reset()
    plain, pipe = measured_memory(made(schedule="1f1b")), made(schedule="1f1b")
    for layer in pipe:
        layer.compile(backend=backend)
    assert measured_memory(pipe).peak == plain.peak
    assert runs == []
    x = torch.randn(4 * ROWS, SIZE)
    pipe.step(x, target=x)
    assert len(runs) == 3 * 4
    assert measured_memory(pipe).peak == plain.peak
    pipe.step(x, target=x)
    assert len(runs) == 2 * 3 * 4
    torch._dynamo.reset()


# ---- printing and drawing -----------------------------------------------------------------


def test_memory_prints_a_table_and_draws(tmp_path: Path) -> None:
    memory = measured_memory(made(schedule="1f1b"))
    head, *rows = str(memory).splitlines()
    assert head.split() == ["rank", "held", "peak", "of", "a", "step", "forecast"]
    assert rows[0].split() == ["0", "576", "B", "3.07", "KB", "3.07", "KB"]
    assert repr(memory).startswith("Memory(peak=(3072,")
    memory.draw(tmp_path / "memory.svg", title="Mine")
    drawn = (tmp_path / "memory.svg").read_text()
    assert all(word in drawn for word in ("Mine", "measured", "forecast", "3.07 KB"))


def test_measuring_memory_with_ddp_stages_is_refused() -> None:
    pipe = made()
    pipe._replicas.is_empty = False
    with pytest.raises(RunError, match=r"pipe.memory undoes the effects of its steps"):
        measured_memory(pipe)


def test_measuring_memory_over_processes_is_refused() -> None:
    nobody: Any = None
    with pytest.raises(RunError, match=r"but the ranks of this pipe are processes"):
        DistributedEngine.measure_memory(nobody, nobody)


# ---- a fake GPU allocator -----------------------------------------------------------------


class _Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number


def gpu(index: int, streams: tuple[int, int]) -> Gpu:
    place = object.__new__(Gpu)
    place.device = torch.device("cuda", index)
    place.compute_stream, place.copy_stream = map(_Stream, streams)
    return place


def test_allocator_probe_separates_ranks_on_one_gpu_by_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def segment(stream: int, size: int) -> dict[str, int]:
        return {"stream": stream, "allocated_size": size}

    segments = [segment(0, 1000), segment(11, 10), segment(11, 20), segment(12, 3), segment(21, 5)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    probe = AllocatorProbe({0: gpu(0, (11, 12)), 1: gpu(0, (21, 22))})
    assert probe.read_live_bytes() == {0: 33, 1: 5}


def test_allocator_probe_of_a_rank_with_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 + device.index)
    probe = AllocatorProbe({0: gpu(0, (1, 2)), 1: gpu(1, (3, 4))})
    assert probe.read_live_bytes() == {0: 100, 1: 101}
