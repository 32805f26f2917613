"""A pipe with captured steps beside an inline pipe, on the host, with an emulated graph."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock import Pipe
from penstock.runtime import local_engine
from penstock.runtime.cuda_graph import graph_cache
from penstock.runtime.local_engine import LocalEngine
from penstock.runtime.step import StepResult
from tests.runtime.cuda_graph.emulated import EmulatedGraph


def emulate(monkeypatch: pytest.MonkeyPatch, record: Any = EmulatedGraph) -> None:
    """Let pipes on the host capture their steps with an emulated graph."""
    monkeypatch.setattr(local_engine, "_find_graph_obstacle", lambda places, replicas: None)
    monkeypatch.setattr(graph_cache.GraphCache.__init__, "__defaults__", (record,))


def batch(seed: int, rows: int = 11, size: int = 8, out: int = 4) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=made, dtype=torch.float64)
    return x, torch.randn(rows, out, generator=made, dtype=torch.float64)


def stack(*between: nn.Module) -> nn.Sequential:
    """Return four linear layers, with other layers after the first."""
    torch.manual_seed(0)
    sizes = [(8, 8), (8, 8), (8, 8), (8, 4)]
    first, *rest = [nn.Linear(*size) for size in sizes]
    return nn.Sequential(first, *between, *rest).double()


def captures_of(pipe: Pipe) -> graph_cache.GraphCache:
    assert isinstance(pipe._engine, LocalEngine)
    return pipe._engine._graph_cache


def recordings(pipe: Pipe) -> list[int]:
    """Return how often each recorded graph was replayed."""
    return [one.replay_count for one in captures_of(pipe)._history.graphs.values()]


def same_value(found: Any, expected: Any) -> None:
    mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert a.requires_grad == b.requires_grad
            assert torch.equal(a, b)
        else:
            assert a == b


def same_state(pipe: nn.Module, other: nn.Module) -> None:
    """Check that parameters, gradients and buffers are bit-identical."""
    for (name, a), (_, b) in zip(pipe.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]
    for (name, x), (_, y) in zip(pipe.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(x, y), name


@dataclass
class PipePair:
    """Two pipes over copies of one model: one with captured steps, and one inline."""

    graph: Pipe
    inline: Pipe

    @property
    def both(self) -> tuple[Pipe, Pipe]:
        return self.graph, self.inline

    def each(self, do: Callable[[Pipe], Any]) -> None:
        for pipe in self.both:
            do(pipe)

    def step(
        self,
        *inputs: Any,
        seed: int = 0,
        ran: str = "graph",
        before: Callable[[], object] = lambda: None,
        **named: Any,
    ) -> StepResult:
        """Take the same step with both pipes, and check that results, state and RNG are equal."""
        before()
        torch.manual_seed(seed)
        found = self.graph.step(*pytree.tree_map_only(Tensor, _copy, inputs), **named)
        state = torch.get_rng_state()
        before()
        torch.manual_seed(seed)
        expected = self.inline.step(*pytree.tree_map_only(Tensor, _copy, inputs), **named)
        assert torch.equal(state, torch.get_rng_state())
        same_value(found.loss, expected.loss)
        same_value(found.outputs, expected.outputs)
        same_value(found.metrics, expected.metrics)
        same_state(*self.both)
        assert found.ran.runtime == ran, str(found.ran)
        return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.clone()


def pipe_pair(model: nn.Module, runtime: str = "graph", **options: Any) -> PipePair:
    given: dict[str, Any] = {
        "chunks": 4,
        "stages": 4,
        "schedule": "1f1b",
        "loss_fn": nn.functional.mse_loss,
    } | options
    given.setdefault("devices", ["cpu"] * given["stages"])
    pipes = [Pipe(copy.deepcopy(model), runtime=how, **given) for how in (runtime, "inline")]
    return PipePair(*pipes)


def steps(pair: PipePair, runtimes: str, text: str, **named: Any) -> None:
    """Take one step per letter, g in a graph and t in threads, and expect one such warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number, runtime in enumerate(runtimes):
            x, y = batch(number)
            ran = "graph" if runtime == "g" else "threads"
            random.seed(number)
            state = random.getstate()
            pair.step(x, target=y, seed=number, ran=ran, before=lambda: random.setstate(state))  # noqa: B023
    assert [bool(re.search(text, str(one.message))) for one in found] == [True], found
    assert found[0].filename == __file__
