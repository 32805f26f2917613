"""`result.metrics()`: the numbers of a step as plain numbers, and hooks that get every result."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, StepResult
from penstock.torch_compat import pytree

OPTIONS: dict[str, Any] = {"stages": 2, "devices": ["cpu", "cpu"], "schedule": "1f1b"}


def test_metrics_of_a_step_are_plain_numbers() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), chunks=2, **OPTIONS)
    result = pipe.step(torch.zeros(6, 4), target=torch.zeros(6, 2), loss_fn=nn.MSELoss())
    numbers = result.metrics()
    assert all(type(number) in (int, float) for number in numbers.values())
    assert numbers["loss"] == result.loss.item()
    assert numbers["step_seconds"] == result.timeline.makespan > 0
    assert numbers["bubble"] == result.timeline.bubble
    assert numbers["rows"] == 6
    assert numbers["rows_per_second"] == 6 / result.timeline.makespan
    assert numbers["peak_bytes"] > 1e6  # this process
    assert "tokens" not in numbers
    assert json.loads(json.dumps(numbers)) == numbers
    assert result.metrics("train/") == {f"train/{name}": n for name, n in numbers.items()}


def test_metrics_of_the_loss_join_those_of_the_step() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> dict[str, Any]:
        return {
            "loss": (output - target).square().mean(),
            "accuracy": torch.tensor(0.5),
            "hit": output[:, 0] > 0,
            "parts": {"first": torch.tensor(2.0)},
        }

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), chunks=2, **OPTIONS)
    result = pipe.step(torch.zeros(6, 4), target=torch.zeros(6, 2), loss_fn=loss_fn)
    assert result.metrics["hit"].shape == (6,)
    numbers = result.metrics()
    assert numbers["accuracy"] == 0.5
    assert numbers["parts/first"] == 2.0
    assert "hit" not in numbers
    doubled = pytree.tree_map_only(Tensor, lambda tensor: tensor * 2, result.metrics)
    assert (doubled["accuracy"], doubled["parts"]["first"]) == (1.0, 4.0)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(result.metrics)[0]]
    assert paths == ["['accuracy']", "['hit']", "['parts']['first']"]
    copied = pickle.loads(pickle.dumps(result.metrics))
    assert type(copied) is dict
    assert copied.keys() == {"accuracy", "hit", "parts"}


def test_metrics_count_tokens_of_ids() -> None:
    layers = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    pipe = Pipe(layers, chunks=2, **OPTIONS)
    ids = torch.randint(8, (6, 5))
    result = pipe.step(ids, target=ids, loss_fn=lambda o, t: o.sum() / o.numel())
    numbers = result.metrics()
    assert (numbers["rows"], numbers["tokens"]) == (6, 30)
    assert numbers["tokens_per_second"] == 30 / numbers["step_seconds"]


def test_result_is_freed_without_the_garbage_collector() -> None:
    """The metrics know the run and not the result, which would keep outputs alive in a cycle."""
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), chunks=2, **OPTIONS)
    result = pipe.step(
        torch.zeros(6, 4), target=torch.zeros(6, 2), loss_fn=nn.MSELoss(), outputs=True
    )
    outputs = weakref.ref(result.outputs)
    gc.disable()
    try:
        del result
        assert outputs() is None
    finally:
        gc.enable()


def test_wandb_block_of_the_docs_runs_with_an_object_like_wandb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """wandb is not among the libraries of the tests, so its two calls are made to an object."""
    pytest.importorskip("matplotlib", reason="the block draws timelines")
    logged: list[tuple[int, dict[str, Any]]] = []

    def log(line: dict[str, Any], step: int) -> None:
        logged.append((step, line))

    def init(project: str, mode: str) -> SimpleNamespace:
        assert mode == "offline"
        return SimpleNamespace(log=log, finish=lambda: None)

    wandb = SimpleNamespace(init=init, Image=lambda figure: figure.get_axes())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    page = (Path(__file__).parents[2] / "docs" / "recipes" / "logging.md").read_text()
    [block] = re.findall(r"```text\n(import wandb\n.*?)```", page, re.DOTALL)
    pipe = make_pipe(loss_fn=nn.MSELoss())
    names = {
        "pipe": pipe,
        "penstock": penstock,
        "optimizer": torch.optim.SGD(pipe.parameters(), lr=0.1),
        "batches": [(torch.zeros(6, 4), torch.zeros(6, 2))] * 3,
    }
    exec(block, names)
    assert [step for step, line in logged if "pipe/loss" in line] == [0, 1, 2]
    assert [step for step, line in logged if "pipe/timeline" in line] == [0, 2]


# ---- hooks ---------------------------------------------------------------------------------------


def make_pipe(**options: Any) -> Pipe:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return Pipe(layers, chunks=2, **OPTIONS, **options)


def run(pipe: Pipe) -> StepResult:
    return pipe.step(torch.zeros(6, 4), target=torch.zeros(6, 2), loss_fn=nn.MSELoss())


def test_step_hook_gets_the_result_of_every_step_until_it_is_removed() -> None:
    pipe, results = make_pipe(), list[StepResult]()
    handle = pipe.register_step_hook(results.append)
    first, second = run(pipe), run(pipe)
    handle.remove()
    run(pipe)
    assert results == [first, second]


def test_step_hook_does_not_run_for_a_forward_alone() -> None:
    pipe, results = make_pipe(), list[StepResult]()
    pipe.register_step_hook(results.append)
    pipe(torch.zeros(6, 4))
    assert results == []


def test_step_hook_may_remove_itself_and_copies_have_hooks_of_their_own() -> None:
    pipe, results = make_pipe(), list[StepResult]()
    handle = pipe.register_step_hook(lambda result: handle.remove())
    run(pipe)
    duplicate = copy.deepcopy(pipe)
    duplicate.register_step_hook(results.append)
    run(pipe)
    assert results == []
    run(duplicate)
    assert len(results) == 1


def test_error_of_a_step_hook_reaches_the_caller_after_the_step() -> None:
    pipe = make_pipe()

    def fail(result: StepResult) -> None:
        raise LookupError("no logger")

    pipe.register_step_hook(fail)
    with pytest.raises(LookupError, match="no logger"):
        run(pipe)
    assert pipe[0].weight.grad is not None
