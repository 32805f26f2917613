"""Inputs of captured steps: other shapes and types, overlapping memory, inputs with gradients."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Chunk, NoChunk, Pipe
from tests.runtime.cuda_graph.support import batch, pipe_pair, recordings, same_state, stack


def test_graph_cache_reuses_recordings_of_earlier_batch_sizes() -> None:
    pair = pipe_pair(stack())
    for number, rows in enumerate([11, 11, 8, 11, 8, 5, 8, 11]):
        pair.train(1, number, rows)
    assert recordings(pair.graph) == [2, 3]


def test_graph_cache_reuses_recordings_of_earlier_settings() -> None:
    pair = pipe_pair(stack(nn.Dropout(0.2)))
    settings = [(4, "never"), (2, "never"), (4, "always")]
    for number in range(9):
        chunks, checkpoint = settings[number % 3]
        for pipe in pair.both:
            pipe.chunks, pipe.checkpoint = chunks, checkpoint
        pair.train(1, number)
    assert recordings(pair.graph) == [2, 2, 2]


def test_deterministic_algorithms_select_another_recording() -> None:
    pair = pipe_pair(stack())
    try:
        for number in range(6):
            torch.use_deterministic_algorithms(number > 2)
            pair.train(1, number)
    finally:
        torch.use_deterministic_algorithms(False)
    assert recordings(pair.graph) == [2, 2]


def test_graph_cache_drops_old_recordings_and_captures_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.runtime.cuda_graph.graph_cache.MAX_GRAPHS", 2)
    pair = pipe_pair(stack())
    for number, rows in enumerate([8, 8, 9, 9, 10, 10, 8, 8, 10]):
        pair.train(1, number, rows)
        assert len(recordings(pair.graph)) <= 2
    # for 8 rows, recorded again after it was dropped, and for 10
    assert recordings(pair.graph) == [2, 2]


def test_captured_gradients_flow_to_a_layer_before_the_pipe() -> None:
    pair = pipe_pair(stack())
    torch.manual_seed(1)
    before = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    before[1].load_state_dict(before[0].state_dict())
    for number in range(4):
        x, y = batch(number)
        for layer, pipe in zip(before, pair.both, strict=True):
            pipe.step(layer(x), target=y)
        same_state(*pair.both)
        same_state(*before)
    assert recordings(pair.graph) == [3]


def test_captured_input_that_is_a_parameter() -> None:
    pair = pipe_pair(stack(), chunks=1)
    x, y = batch(0)
    learned = [nn.Parameter(x.clone()) for _ in pair.both]
    for _ in range(4):
        for parameter, pipe in zip(learned, pair.both, strict=True):
            pipe.step(parameter, target=y)
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        assert torch.equal(learned[0], learned[1])
    assert recordings(pair.graph) == [3]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("alias", [False, True])
def test_captured_input_changed_in_place_by_the_first_layer(checkpoint: str, alias: bool) -> None:
    """If the target shares the memory of the input, it changes too, as in the unsplit model."""
    model = nn.Sequential(nn.ReLU(inplace=True), *list(stack())[:3])
    pair = pipe_pair(model, checkpoint=checkpoint)
    for number in range(4):
        x, y = batch(number, 12, out=8)
        mine, other = x.clone(), x.clone()
        found = pair.graph.step(mine, target=mine.detach() if alias else y)
        expected = pair.inline.step(other, target=other.detach() if alias else y)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(mine, other)
        assert mine._version == other._version
        assert torch.equal(mine, x.relu())
        same_state(*pair.both)
    assert recordings(pair.graph) == [3]


def test_overlapping_inputs_fall_back_to_threads() -> None:
    """With several micro-batches, threads would write and read the same rows in any order."""
    pair = pipe_pair(nn.Sequential(nn.ReLU(inplace=True), *list(stack())[:3]), "auto", chunks=1)
    for number in range(4):
        x, _ = batch(number, 13)
        wide = [x.clone(), x.clone()]
        with pytest.warns(match="several inputs share memory") if number == 1 else nullcontext():
            found = pair.graph.step(wide[0][:12], target=wide[0][1:])
        expected = pair.inline.step(wide[1][:12], target=wide[1][1:])
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(wide[0], wide[1])
        assert str(found.ran.runtime) == ("threads" if number else "graph")


class Added(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Any:
        return x.relu_() + other


def test_overlapping_inputs_in_a_later_step_fall_back_to_threads() -> None:
    """Each input looks as before by itself, but an earlier recording would not see the overlap."""
    pair = pipe_pair(nn.Sequential(Added(), *list(stack())[:3]), "auto")
    for number in range(5):
        x, _ = batch(number, 13)
        results = []
        for pipe in pair.both:
            wide = x.clone()
            first, row = wide[:12], wide[11] if number > 2 else wide[11].clone()
            refused = number == 4 and pipe is pair.graph
            with pytest.warns(match="several inputs share memory") if refused else nullcontext():
                results.append(pipe.step(first, NoChunk(row), target=x[1:]))
        assert torch.equal(results[0].loss, results[1].loss)
        assert str(results[0].ran.runtime) == ("threads" if number == 4 else "graph")
        same_state(*pair.both)


def test_captured_conjugated_and_negated_views() -> None:
    """Both views have the same memory layout, but different values."""
    pair = pipe_pair(nn.Sequential(*list(stack())[:3], nn.Tanh()))
    for number in range(4):
        x, y = batch(number, 12, out=8)
        both = torch.complex(x, y)
        found, expected = (p.step(both.imag, target=both.conj().imag) for p in pair.both)
        assert torch.equal(found.loss, expected.loss)
        same_state(*pair.both)
    assert recordings(pair.graph) == [3]


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.linear(x) + y.T


def test_captured_inputs_chunked_on_another_dim() -> None:
    pair = pipe_pair(nn.Sequential(Columns(), *stack()))
    for number in range(4):
        x, y = batch(number, 12)
        other = torch.randn(8, 12, generator=torch.Generator().manual_seed(number)).double()
        pair.step(x, Chunk(other, dim=1), target=y)
    assert recordings(pair.graph) == [3]


def test_captured_integer_and_non_tensor_inputs() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8).double()

        def forward(self, ids: Tensor, how: dict[str, Any]) -> Any:
            return self.table(ids) * how["factor"] if how["on"] else self.table(ids)

    pair = pipe_pair(nn.Sequential(Tokens(), *stack()))
    for number in range(8):
        _, y = batch(number)
        ids = torch.randint(10, (11,), generator=torch.Generator().manual_seed(number))
        pair.step(ids, {"factor": 2.0, "on": number not in (2, 5, 6)}, target=y)
    assert sum(recordings(pair.graph)) == 6


@pytest.mark.parametrize(("stages", "ranks"), [(4, 2), (1, 1)])
def test_captured_steps_with_fewer_ranks_than_stages(stages: int, ranks: int) -> None:
    schedule = "interleaved" if (stages, ranks) == (4, 2) else "1f1b"
    pair = pipe_pair(
        stack(nn.Dropout(0.2)), stages=stages, devices=["cpu"] * ranks, schedule=schedule
    )
    pair.train(4)
    assert recordings(pair.graph) == [3]


def test_deepcopy_and_pickle_of_a_pipe_drop_its_recordings() -> None:
    pair = pipe_pair(stack(nn.BatchNorm1d(8)))
    pair.train(3)
    for made in (copy.deepcopy(pair.graph), pickle.loads(pickle.dumps(pair.graph))):
        assert recordings(made) == []
        assert all(map(torch.equal, made.parameters(), pair.graph.parameters()))
        made.zero_grad()
        mine = type(pair)(made, copy.deepcopy(pair.inline))
        mine.inline.zero_grad()
        mine.train(3)
        assert recordings(made) == [2]
    x, y = batch(5)
    pair.step(x, target=y)
    assert recordings(pair.graph) == [3]


def test_captured_nested_pipe() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
            self.pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu"] * 2)

        def forward(self, x: Tensor) -> Any:
            return self.pipe(x)

    pair = pipe_pair(stack(Inner()))
    for number in range(4):
        x, y = batch(number, 16)
        pair.step(x, target=y)
    assert recordings(pair.graph) == [3]


class Model(nn.Module):
    """A model with a tied head that computes its own loss and reads its mask on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        whole = bool(mask.all())
        for block in self.blocks:
            x = block(x).tanh() if whole else block(x).tanh() * mask[..., None]
        logits = self.head(x)
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_captured_traced_model() -> None:
    torch.manual_seed(0)

    def inputs(seed: int, whole: bool) -> dict[str, Any]:
        made = torch.Generator().manual_seed(seed)
        ids = torch.randint(16, (8, 5), generator=made)
        labels = torch.randint(16, (8, 5), generator=made)
        labels[torch.rand(8, 5, generator=made) < 0.2] = -100
        mask = torch.rand(8, 5, generator=made) < 2 * whole + 0.7
        return {"ids": ids, "mask": mask, "labels": labels}

    options: dict[str, Any] = {
        "stages": 3,
        "example": inputs(0, True),
        "loss_fn": None,
        "chunks": 2,
    }
    pair = pipe_pair(Model().double(), **options)
    for number in range(10):
        if number % 3 == 0:
            pair.each(nn.Module.zero_grad)
        pair.step(**inputs(number, number not in (2, 3, 5, 8)))
    assert sum(recordings(pair.graph)) == 8


def test_captured_traced_model_with_many_stages_and_chunks() -> None:
    """The inputs of a traced model had more entries than a fingerprint looks into.

    No two steps were alike then: every step ran eagerly, on one rank at a time.
    """
    torch.manual_seed(0)
    chunks = 100
    example: dict[str, Any] = {
        "ids": torch.randint(16, (chunks, 2)),
        "mask": torch.ones(chunks, 2, dtype=torch.bool),
        "labels": torch.randint(16, (chunks, 2)),
    }
    pair = pipe_pair(Model().double(), stages=3, example=example, loss_fn=None, chunks=chunks)
    for _ in range(3):
        pair.step(**example)
    assert recordings(pair.graph) == [2]
