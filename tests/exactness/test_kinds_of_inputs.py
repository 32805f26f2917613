"""Inputs of unusual kinds: equal to the unsplit model, or refused with what to write instead."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import NoChunk, Pipe, PipeSequential
from penstock.torch_compat import pytree
from tests.support import same_gradients

ROWS, WIDTH = 8, 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@dataclass
class Batch:
    x: Tensor
    mask: Tensor
    scale: float = 2.0


class BatchLayer(nn.Module):
    """A layer of a Sequential that takes a dataclass and returns one, or its result."""

    def __init__(self, is_last: bool = False) -> None:
        super().__init__()
        self.linear, self.is_last = nn.Linear(WIDTH, WIDTH), is_last

    def forward(self, batch: Batch) -> Any:
        y = self.linear(batch.x) * batch.mask * batch.scale
        return y if self.is_last else Batch(y, batch.mask, batch.scale)


class TwoLayers(nn.Module):
    """A model that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class BatchModel(TwoLayers):
    def forward(self, batch: Batch) -> Tensor:
        result: Tensor = self.last(self.first(batch.x) * batch.mask) * batch.scale
        return result


class Masked(TwoLayers):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.last((self.first(x) * mask).tanh())
        return result


class Attention(TwoLayers):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        result: Tensor = self.last((h @ h.transpose(1, 2) + mask).softmax(-1) @ h)
        return result


class Selection(TwoLayers):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x)[index])
        return result


class RowList(TwoLayers):
    def forward(self, rows: list[Tensor]) -> Tensor:
        result: Tensor = self.last(self.first(torch.stack([row.mean(0) for row in rows])).tanh())
        return result


class Mean(nn.Module):
    """The means of the rows of a nested tensor."""

    def forward(self, rows: Any) -> Tensor:
        return torch.stack([row.mean(0) for row in rows.unbind()])


class Product(nn.Module):
    """A product with a weight, or with the matrix of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, graph: Tensor | None = None) -> Tensor:
        y = x @ self.weight
        return y if graph is None else y @ graph.to_dense()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def tied() -> nn.Sequential:
    layer = linear()
    return nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer), nn.Tanh(), linear())


def build(model: nn.Module, inputs: tuple[Any, ...], chunks: int) -> Pipe:
    example = None if isinstance(model, nn.Sequential) else inputs
    return Pipe(model, chunks=chunks, stages=2, devices=["cpu"] * 2, example=example)


def compare(model: nn.Module, inputs: tuple[Any, ...], chunks: int) -> None:
    """Train a model and a pipe of it through both doors."""
    model.double()
    pipe = build(copy.deepcopy(model), inputs, chunks)
    plain = [value.tensor if isinstance(value, NoChunk) else value for value in inputs]
    for calls_step in (False, True):
        expected = model(*plain).square().mean()
        expected.backward()
        if calls_step:
            loss = pipe.step(*inputs, loss_fn=lambda output: output.square().mean()).loss
        else:
            loss = pipe(*inputs).square().mean()
            loss.backward()
        assert torch.allclose(loss, expected, rtol=1e-12)
    assert same_gradients(pipe, model)


def build_csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that these are in beta state
        return draw(ROWS, WIDTH).relu().to_sparse_csr()


def build_nested(rows: list[Tensor], **options: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(rows, **options)


UNEVEN_ROWS = [draw(count + 1, WIDTH) for count in range(ROWS)]
GRAPH = torch.eye(WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "inputs", "chunks"),
    [
        (BatchModel(), (Batch(draw(ROWS, WIDTH), draw(ROWS, WIDTH)),), 3),
        (
            nn.Sequential(BatchLayer(), BatchLayer(is_last=True)),
            (Batch(draw(ROWS, WIDTH), draw(ROWS, WIDTH)),),
            3,
        ),
        (Masked(), (draw(ROWS, WIDTH), NoChunk(draw(WIDTH))), 4),
        (Masked(), (draw(WIDTH, WIDTH), NoChunk(draw(WIDTH))), 2),
        (Attention(), (draw(ROWS, ROWS, WIDTH), NoChunk(draw(ROWS, ROWS))), 4),
        (PipeSequential(Product(), linear()), (draw(ROWS, WIDTH), NoChunk(GRAPH.to_sparse())), 4),
        (tied(), (draw(ROWS, WIDTH),), 4),
        # With one micro-batch nothing is split.
        (Masked(), (draw(ROWS, WIDTH), draw(WIDTH)), 1),
        (Selection(), (draw(ROWS, WIDTH), torch.arange(ROWS).flip(0)), 1),
        (Selection(), (draw(ROWS, WIDTH), torch.tensor([0, 3, 5])), 1),
        (RowList(), (UNEVEN_ROWS,), 1),
        (nn.Sequential(Product(), linear()), (draw(ROWS, WIDTH).relu().to_sparse(),), 1),
        (nn.Sequential(Product(), linear()), (build_csr(),), 1),
    ],
)
def test_input_of_an_unusual_kind(model: nn.Module, inputs: tuple[Any, ...], chunks: int) -> None:
    compare(model, inputs, chunks)


def test_jagged_tensor_is_split() -> None:
    rows = build_nested(UNEVEN_ROWS, layout=torch.jagged)
    compare(nn.Sequential(Mean(), linear(), linear()), (rows,), 3)


def test_dataclass_is_split_as_a_target() -> None:
    def loss_fn(output: Tensor, target: Batch) -> Tensor:
        return ((output - target.x).square() * target.mask).mean() * target.scale

    model = nn.Sequential(linear(), linear()).double()
    pipe = Pipe(copy.deepcopy(model), 3, stages=2, devices=["cpu"] * 2, loss_fn=loss_fn)
    x, target = draw(ROWS, WIDTH), Batch(draw(ROWS, WIDTH), draw(ROWS, 1))
    pipe.step(x, target=target)
    loss_fn(model(x), target).backward()
    assert same_gradients(pipe, model)


class Record:
    """An object that is no dataclass."""

    def __init__(self) -> None:
        self.x, self.mask = draw(ROWS, WIDTH), draw(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("model", "inputs", "texts"),
    [
        (BatchModel(), (Record(),), ["A Record has tensors", "a tuple, a dict or a dataclass"]),
        (
            nn.Sequential(BatchLayer(), BatchLayer(is_last=True)),
            (Record(),),
            ["but got Record", "A Record has tensors", "a tuple, a dict or a dataclass"],
        ),
        (Masked(), (draw(ROWS, WIDTH), draw(WIDTH)), ["input 1, of shape (4,)", "Use NoChunk(x)"]),
        (Masked(), (draw(WIDTH, WIDTH), draw(WIDTH)), ["shape (4,) is split", "NoChunk(mask)"]),
        (
            Attention(),
            (draw(ROWS, ROWS, WIDTH), draw(ROWS, ROWS)),
            ["shape (8, 8) is split into micro-batches", "penstock.NoChunk(mask)"],
        ),
        (
            PipeSequential(Attention(), linear()),
            (draw(ROWS, ROWS, WIDTH), draw(ROWS, ROWS)),
            ["shape (8, 8) is split into micro-batches", "penstock.NoChunk(mask)"],
        ),
        (
            Selection(),
            (draw(ROWS, WIDTH), torch.arange(ROWS).flip(0)),
            ["whole numbers below 8", "use chunks=1"],
        ),
        (
            PipeSequential(Selection(), linear()),
            (draw(ROWS, WIDTH), torch.arange(ROWS).flip(0)),
            ["whole numbers below 8", "use chunks=1"],
        ),
        (RowList(), (UNEVEN_ROWS,), ["a list of 8 tensors", "pad_sequence", "use chunks=1"]),
        (
            nn.Sequential(Product(), linear()),
            (draw(ROWS, WIDTH).to_sparse(),),
            ["a sparse_coo tensor", "x.to_dense()", "use chunks=1"],
        ),
        (
            nn.Sequential(Product(), linear()),
            (build_csr(),),
            ["a sparse_csr tensor", "x.to_dense()", "use chunks=1"],
        ),
    ],
)
def test_error_says_what_to_write_instead(
    model: nn.Module, inputs: tuple[Any, ...], texts: list[str]
) -> None:
    with pytest.raises(Exception) as caught:
        build(model.double(), inputs, 2)(*inputs)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [text for text in texts if text not in message] == []


def test_nested_tensors_that_are_refused() -> None:
    strided = build_nested(UNEVEN_ROWS)
    for chunks in (1, 2):
        pipe = build(nn.Sequential(Mean(), linear()).double(), (), chunks)
        with pytest.raises(ValueError, match=r"nested tensor without layout=torch\.jagged"):
            pipe(strided)
    with pytest.raises(Exception) as caught:
        build(RowList(), (build_nested(UNEVEN_ROWS, layout=torch.jagged),), 2)
    assert "nested tensor cannot be traced" in "".join(caught.value.__notes__)


def test_layer_in_two_places_says_how_to_share_it() -> None:
    layer = linear()
    with pytest.raises(ValueError, match=r"0 and 1: .* nn.Sequential\(layer\) in all but the fir"):
        build(nn.Sequential(layer, layer), (), 2)


def test_dataclass_that_pytree_knows_already() -> None:
    """Penstock registers a dataclass with PyTorch when it first sees one."""
    pipe = build(nn.Sequential(BatchLayer(), BatchLayer(is_last=True)).double(), (), 2)
    batch = Batch(draw(ROWS, WIDTH), draw(ROWS, WIDTH))
    for _ in range(2):
        pipe(batch)
    assert Batch in pytree.SUPPORTED_NODES
