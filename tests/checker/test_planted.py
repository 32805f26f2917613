"""Tests that `penstock.check` finds planted errors and names their location."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import NoChunk, Report
from penstock.runtime import loss_accumulator
from penstock.runtime.execution import Execution
from penstock.stage import stage_runner
from penstock.stage.cell_graph import CellGraph
from penstock.stage.payload import Payload
from tests.support import Do, batch

ROWS = 8
FEW = ("gpipe", "1f1b", "interleaved")


def four(*middle: nn.Module) -> nn.Sequential:
    """Return four linear layers with `middle` between the second and the third."""
    torch.manual_seed(0)
    ends = [nn.Linear(6, 8), nn.Linear(8, 8)], [nn.Linear(8, 8), nn.Linear(8, 3)]
    return nn.Sequential(*ends[0], *middle, *ends[1])


def checked(model: nn.Sequential, *inputs: Any, **options: Any) -> Report:
    x, target = batch(ROWS, torch.float32)
    if "loss_fn" not in options:
        options |= {"target": target, "loss_fn": nn.MSELoss()}
    return penstock.check(
        model, *(inputs or (x,)), quiet=True, **{"schedules": FEW, "stages": 4, **options}
    )


def problems(report: Report) -> str:
    assert not report.ok
    with pytest.raises(penstock.Mismatch):
        report.raise_if_wrong()
    return "\n".join(report.problems)


def hints(report: Report) -> str:
    return "\n".join(report.hints)


def wrong_kinds(report: Report) -> set[str]:
    return {problem.split()[0].rstrip(":") for problem in report.problems}


def test_check_passes_without_a_planted_error() -> None:
    assert checked(four(nn.Tanh())).ok
    assert checked(four(nn.BatchNorm1d(8), nn.Dropout(0.5))).ok


# ---- errors in the model ------------------------------------------------------------------


class _ScaleGradByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.size(0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.rows


class ScaleGradByRows(nn.Module):
    """A layer that divides its gradient by the number of rows it sees."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _ScaleGradByRows.apply(x)  # type: ignore[no-untyped-call]
        return y


def test_check_finds_a_gradient_scaled_by_the_row_count() -> None:
    report = checked(four(ScaleGradByRows()))
    assert wrong_kinds(report) == {"gradients", "inputs", "again"}
    assert "gradients of '0.weight'" in problems(report) or "of '1.weight'" in problems(report)
    assert "a backward depends on the number of rows" in hints(report)
    assert "gradients of '0." in hints(report)


@pytest.mark.parametrize("more", [(), (nn.Dropout(0.5),), (nn.BatchNorm1d(8),)])
def test_check_finds_a_layer_that_mixes_rows(more: Sequence[nn.Module]) -> None:
    """It is found also beside layers for which the reference runs micro-batch by micro-batch."""
    report = checked(four(Do(lambda x: x - x.mean(0)), *more))
    assert {"eval"} <= wrong_kinds(report)
    assert ("outputs" in wrong_kinds(report)) == (not more)
    assert "layer '2' (Do) returns different rows when the batch is split" in hints(report)


def test_check_names_a_nested_layer() -> None:
    report = checked(four(nn.Sequential(nn.Tanh(), Do(lambda x: x / x.norm()))))
    assert "layer '2.1' (Do)" in hints(report)


class Masked(nn.Module):
    """A layer that multiplies columns with a mask, as attention does."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x @ mask


class Biased(nn.Module):
    """A layer that adds the same bias to every row."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.sum(0)


@pytest.mark.parametrize("first", [Masked(), Biased()])
def test_check_finds_a_mask_split_on_the_wrong_dim(first: nn.Module) -> None:
    """Dim 0 of the mask has as many rows as the batch, so it is split as well.

    The layer fails, or returns wrong values without an error.
    """
    x, _ = batch(6, torch.float32)
    mask = torch.rand(6, 6)
    options: Any = {"target": torch.zeros(6, 3), "loss_fn": nn.MSELoss(), "chunks": 3}
    report = checked(nn.Sequential(first, *four()), x, mask, **options)
    assert wrong_kinds(report) >= ({"failed"} if isinstance(first, Masked) else {"outputs"})
    assert "input 1, of shape (6, 6), is split on dim 0" in hints(report)
    assert "NoChunk" in hints(report)
    assert checked(nn.Sequential(first, *four()), x, NoChunk(mask), **options).ok


def root_mean_square(y: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(y, functional.one_hot(target, 3).to(y.dtype)).sqrt()


def test_check_finds_a_loss_that_is_not_a_mean_over_rows() -> None:
    labels = torch.tensor([0, 1, 0, 0, 0, 2, 1, 0])
    report = checked(four(), target=labels, loss_fn=root_mean_square)
    assert "loss" in problems(report)
    assert "outputs" not in wrong_kinds(report)
    assert "The loss is not a mean over rows" in hints(report)


def test_check_finds_a_loss_that_is_not_a_mean_over_rows_beside_dropout() -> None:
    labels = torch.tensor([0, 1, 0, 0, 0, 2, 1, 0])
    report = checked(four(nn.Dropout(0.5)), target=labels, loss_fn=root_mean_square)
    assert wrong_kinds(report) == {"eval"}
    assert "eval loss of" in problems(report)
    assert "The loss is not a mean over rows" in hints(report)


class Counting(nn.Module):
    """A layer whose result depends on how often it was called."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_check_finds_state_in_a_python_attribute() -> None:
    model = four(Counting())
    report = checked(model)
    assert {"loss", "outputs", "gradients"} <= wrong_kinds(report)
    assert "attribute 'calls' of layer '2' changes when its layer is called" in hints(report)
    assert model[2].calls == 0  # the check left the model of the caller alone


class Tallied(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


def test_check_finds_a_buffer_that_counts_calls() -> None:
    report = checked(four(Tallied()))
    assert "buffers '2.seen'" in problems(report)
    assert "buffer '2.seen' advances with every call" in hints(report)


def test_check_finds_randomness_outside_of_torch() -> None:
    report = checked(four(Do(lambda x: x * (1 + time.perf_counter()))))
    assert "layer '2' (Do) returns a different result each time" in hints(report)
    assert "outside of torch's generator" in hints(report)
    assert not report.ok


# ---- errors in the pipe -------------------------------------------------------------------


def test_check_finds_a_gradient_scaled_by_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    right = loss_accumulator.LossAccumulator._compute_loss_gradient
    monkeypatch.setattr(
        loss_accumulator.LossAccumulator, "_compute_loss_gradient", lambda *given: right(*given) * 2
    )
    report = checked(four())
    assert wrong_kinds(report) == {"gradients", "inputs", "again"}
    assert "the pipe is wrong" in hints(report)
    assert report.worst is not None
    assert report.worst[1].size > 0.01


def test_check_finds_a_dropped_input_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped between stages 1 and 0, in one micro-batch of recomputed runs."""
    right = stage_runner.StageRunner.backward

    def dropped(
        self: stage_runner.StageRunner, microbatch: int, gradients: Any, retain: bool
    ) -> Any:
        found = right(self, microbatch, gradients, retain)
        if self.stage.index == 1 and microbatch == 2 and self.has_recomputed:
            return {source: Payload((None,) * len(p.tensors)) for source, p in found.items()}
        return found

    monkeypatch.setattr(stage_runner.StageRunner, "backward", dropped)
    report = checked(four())
    assert "gradients of '0.weight'" in problems(report)
    assert "only with checkpoint always" in hints(report)
    assert "gradients of '1.weight'" not in problems(report)
    assert all(run.case.checkpoint == "always" for runs in report.problems.values() for run in runs)


def test_check_finds_a_buffer_updated_twice_by_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recomputation must restore the buffers that it changes."""
    monkeypatch.setattr(stage_runner, "restore_state", lambda *_: nullcontext())
    report = checked(four(nn.BatchNorm1d(8)))
    assert "buffers '2.num_batches_tracked'" in problems(report)
    assert "only with checkpoint always" in hints(report)


def test_check_finds_memory_kept_after_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stage_runner.StageRunner.backward
    kept: list[CellGraph] = []

    def keeping(
        self: stage_runner.StageRunner, microbatch: int, gradients: Any, retain: bool
    ) -> Any:
        kept.append(self._graphs[microbatch])
        return right(self, microbatch, gradients, True)

    monkeypatch.setattr(stage_runner.StageRunner, "backward", keeping)
    report = checked(four(nn.Tanh()), runtimes=["inline"])
    assert wrong_kinds(report) == {"memory"}
    assert "memory: more is kept than forecast on rank 0" in problems(report)
    assert "after its last backward" in hints(report)


def test_check_finds_a_recomputation_that_draws_new_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Execution.__init__

    def drawing(self: Execution, *args: Any, **named: Any) -> None:
        right(self, *args, **named)
        for each in self.stage_runners:
            seeded: Any = each.rng_source
            each.rng_source = lambda m, seeded=seeded: seeded(m) + penstock.is_recomputing()  # type: ignore[misc]

    monkeypatch.setattr(Execution, "__init__", drawing)
    report = checked(four(nn.Dropout(0.5)))
    assert "gave another output for micro-batch" in str(report)
