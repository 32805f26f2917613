"""The nanoGPT example: the pipe has the curve and the text of the unsplit model."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nanogpt import train, train_pipe
from nanogpt.model import GPT, GPTConfig
from tests.distributed.ranks import ranks
from torch import distributed

from penstock import Pipe

SHORT: dict[str, Any] = {"steps": 8, "evaluate_every": 4, "evaluation_batches": 2, "sample": 24}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str
)
def test_nanogpt_as_a_pipe_equals_the_unsplit_run(dtype: torch.dtype, tolerance: float) -> None:
    expected = train.train(train.Settings(**SHORT, dtype=dtype))
    run = train_pipe.train(train_pipe.Settings(**SHORT, dtype=dtype))
    assert len(run.steps) == 8
    assert len(run.evaluations) == 2
    for step, expected_step in zip(run.steps, expected.steps, strict=True):
        assert step == pytest.approx(expected_step, rel=tolerance, abs=tolerance)
    for losses, expected_losses in zip(run.evaluations, expected.evaluations, strict=True):
        assert losses == pytest.approx(expected_losses, rel=tolerance, abs=tolerance)
    assert run.text == expected.text
    assert len(run.text) == 25


def test_nanogpt_differs_in_three_lines() -> None:
    before, after = (inspect.getsource(m.train).splitlines() for m in (train, train_pipe))
    difference = [line for line in difflib.ndiff(before, after) if line.startswith(("+", "-"))]
    added = [line[2:].strip() for line in difference if line.startswith("+")]
    removed = [line[2:].strip() for line in difference if line.startswith("-")]
    assert [line.partition("(")[0] for line in added] == [
        "model = penstock.Pipe",
        "loss = model.step",
    ]  # and the import of penstock
    assert removed == ["_, loss = model(x, y)", "(loss / settings.accumulation).backward()"]


# ---- both ways to call a pipe ----------------------------------------------------------------


def make() -> tuple[GPT, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=20, width=16, layers=2)).double()
    x = torch.randint(20, (6, 9))
    y = x.roll(-1, 1)
    y[:, -1] = -1
    y[0] = -1  # the micro-batches count different numbers of targets
    return model, x, y


class LossFirst(GPT):
    """Returns (loss, logits)."""

    def forward(self, ids: Any, targets: Any = None) -> Any:
        logits, loss = super().forward(ids, targets)
        return loss, logits


class LossInDict(GPT):
    """Returns a dict with a loss."""

    def forward(self, ids: Any, targets: Any = None) -> Any:
        logits, loss = super().forward(ids, targets)
        return {"logits": logits, "loss": loss}


def read(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and logits, wherever a model puts them."""
    values = list(output.values()) if isinstance(output, dict) else list(output)
    loss, logits = sorted(values, key=torch.Tensor.dim)
    return loss, logits


@pytest.mark.parametrize("form", [GPT, LossFirst, LossInDict])
def test_model_with_a_loss_means_the_same_in_both_ways_to_call(form: type[GPT]) -> None:
    model, x, y = make()
    model.__class__ = form
    loss, logits = read(model(x, y))
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    options: dict[str, Any] = {"chunks": 3, "stages": 2, "devices": ["cpu", "cpu"]}
    for call in ("forward", "step"):
        model, x, y = make()
        model.__class__ = form
        pipe = Pipe(model, example=(x, y), balance="parameters", **options)
        if call == "forward":
            value, outputs = read(pipe(x, y))
            value.backward()
        else:
            result = pipe.step(x, y, outputs=True)
            value, outputs = result.loss, read(result.outputs)[1]
        assert torch.allclose(value, loss, rtol=1e-12)
        assert torch.allclose(outputs, logits, rtol=1e-12)
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-14)
        # Evaluation in the loop.
        pipe.eval()
        with torch.no_grad():
            assert torch.allclose(read(pipe(x, y))[0], loss, rtol=1e-12)


# ---- processes -------------------------------------------------------------------------------


def generate_on_ranks() -> None:
    model, x, y = make()
    unsplit, _, _ = make()
    pipe = Pipe(model, 2, group=distributed.group.WORLD, example=(x, y), balance="parameters")
    for mode in (pipe, unsplit):
        mode.eval()
    calls: list[dict[str, Any]] = [{"top_k": 5, "temperature": 0.7}, {}]
    for options in calls:
        torch.manual_seed(1)
        expected = unsplit.generate(x, 6, **options)
        torch.manual_seed(1)
        assert torch.equal(pipe.generate(x, 6, **options), expected)


def test_nanogpt_generates_over_processes() -> None:
    ranks(2).run(generate_on_ranks)
