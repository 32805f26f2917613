"""Tests of operations between units that are more than one function of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from penstock import ArgumentError, CutError, Pipe
from tests.model.traced.splitting import Four, assert_same, batches, made, piped
from tests.models.architecture import squares
from tests.support import same_gradients


class Packed(nn.Module):
    """Packs sequences once for three networks, and reads their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.LSTM(4, 4, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        lengths = (x[:, :, 0] > -10).sum(1) - torch.arange(len(x)) % 2
        packed = rnn.pack_padded_sequence(
            self.inner(x), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        for layer in self.layers:
            packed, _ = layer(packed)
        return rnn.pad_packed_sequence(packed, batch_first=True)[0]


class Mapped(Four):
    """Uses `vmap` over tensors of earlier stages, and for a condition."""

    def forward(self, x: Tensor) -> Any:
        signs = torch.vmap(lambda row: row * x.mean() > 0)(x)
        y = self.a(x) * (2 if signs.all() else 1)
        values = [y, self.b(y), self.c(self.b(y))]
        turns = torch.arange(3, dtype=x.dtype)
        found = torch.vmap(lambda turn: values[2] * turn + values[0])(turns)
        return self.d(found.sum(0))


class Rounded(torch.autograd.Function):
    """An autograd function with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Asking(Four):
    """Branches on the result of an autograd function of the inputs."""

    def forward(self, x: Tensor) -> Any:
        rounded: Tensor = Rounded.apply(x)  # type: ignore[no-untyped-call]
        y = self.a(x) if (rounded > 1).any() else self.a(x) * 2
        return self.d(self.c(self.b(y)))


class FromNumpy(Four):
    """Converts a NumPy array to a tensor, which PyTorch does not report."""

    def forward(self, x: Tensor) -> Any:
        ramp = torch.from_numpy((x.detach() > 0).numpy()).to(x.dtype)
        return self.d(self.c(self.b(self.a(x))) * ramp)


@pytest.mark.parametrize(
    "kind", [Packed, Mapped, Asking, FromNumpy], ids=lambda kind: kind.__name__
)
def test_traced_operations_between_units(kind: type[nn.Module]) -> None:
    """Tracing crashed, or a stage that records random draws took it for another path."""
    assert_same(kind)


class Forces(Four):
    """Returns the gradient of what all units compute."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.d(self.c(self.b(self.a(x)))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Transformed(Four):
    """Calls a unit inside a torch.func transform."""

    def forward(self, x: Tensor) -> Any:
        y = self.c(self.b(self.a(x)))
        return torch.func.grad(lambda z: self.d(z).square().sum())(y)


class Ragged(Four):
    """Uses a nested tensor of rows with different lengths."""

    def forward(self, x: Tensor) -> Any:
        rows = torch.nested.nested_tensor([*x], layout=torch.jagged)
        return self.d(self.c(self.b(self.a(rows)))).to_padded_tensor(0.0)


class Replaced(Four):
    """Calls a unit with weights that another unit has computed."""

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        weight = y.mean((0, 1)).outer(y.sum((0, 1)))
        y = torch.func.functional_call(self.c, {"weight": weight}, (y,))
        return self.d(y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forces, "grad runs a backward inside the forward, through operations of stages 0, 1"),
        (Transformed, "the forward computes inside a transform of torch.func"),
        (Ragged, "the forward makes a nested tensor"),
        (Replaced, "unit 'c' is called with other tensors in place of its parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unsupported_operations_between_units_are_refused(
    kind: type[nn.Module], words: str
) -> None:
    """These raised internal errors of PyTorch."""
    (x,) = batches(5)
    with pytest.raises(CutError, match=words):
        piped(made(kind), x, stages=2)


class Penalised(Four):
    """Returns the gradient through one unit alone."""

    def forward(self, x: Tensor) -> Any:
        y = self.c(self.b(self.a(x)))
        score = self.d(y).square().sum()
        return torch.autograd.grad(score, y, create_graph=True)[0] + y


def test_autograd_grad_within_one_stage() -> None:
    """It works without recomputation; the forward of a recomputed cell has no graph."""
    (x,) = batches(5)
    model, unsplit = made(Penalised), made(Penalised)
    pipe = Pipe(
        model,
        chunks=2,
        stages=[2, 2],
        devices=["cpu"] * 2,
        example=x,
        loss_fn=squares,
        checkpoint="never",
        runtime="inline",
    )
    pipe.step(x)
    for piece in x.chunk(2):
        (squares(unsplit(piece)) / 2).backward()
    assert same_gradients(model, unsplit)


def test_lazy_module_is_refused() -> None:
    (x,) = batches(5)
    lazy = nn.ModuleList([nn.LazyLinear(4), nn.LazyLinear(4)])
    model = Four()
    model.add_module("a", lazy[0])
    with pytest.raises(ArgumentError, match=r"'a\.weight' has no shape yet"):
        piped(model, x, stages=2)


class Quiet(nn.Module):
    """A codebook-like layer that updates a buffer by `.data`, which no version counts."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x)) - self.mean
        if self.training:
            self.mean.data.lerp_(x.detach().mean((0, 1)), 0.1)
        return x


class Codebooks(nn.Module):
    """Updates buffers by `.data` inside units and between them."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Quiet() for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        self.calls.data.add_(1)
        return x


def test_buffers_written_through_data() -> None:
    """The recomputation wrote them a second time, and between units the operation was left out."""
    assert_same(Codebooks)


class FlexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        heads = torch.dropout(self.linear(x), 0.0, train=True)[:, None].contiguous()
        return flex_attention(heads, heads, heads)[:, 0]


class FlexModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FlexBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_in_units_that_draw_random_numbers() -> None:
    """PyTorch refuses higher-order operators under a dispatch mode that does not ask for them."""
    model, (x,) = made(FlexModel).float().requires_grad_(False), batches(5)
    pipe = piped(model, x.float(), 2)
    torch.testing.assert_close(pipe(x.float()), model(x.float()))


class CalledTwice(nn.Module):
    """Calls a unit on two stages, and uses its weight between units as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(self.a(self.b(self.a(x))), self.a.weight)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("runtime", ["inline", "threads"])
@pytest.mark.parametrize("stages", [[1, 2], [2, 1], [1, 1, 1]])
def test_weight_of_a_unit_on_two_stages_that_is_used_between_units(
    stages: list[int], runtime: str
) -> None:
    model = CalledTwice().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe = Pipe(
        copy.deepcopy(model),
        chunks=3,
        stages=stages,
        devices=["cpu"] * len(stages),
        example=x,
        runtime=runtime,
        loss_fn=mean_square,
        audit="first",
    )
    for _ in range(2):
        pipe.step(x)
        mean_square(model(x)).backward()
    assert same_gradients(pipe, model)
