"""Operations between units that are more than one function of PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from penstock import ArgumentError, CutError, Pipe
from tests.model.traced.splitting import Four, assert_same, batches, made, piped
from tests.models.architecture import squares


class Packed(nn.Module):
    """Sequences are packed once, and go through three networks; their lengths are asked for."""

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
    """`vmap` captures what stages before have made; another one answers a question."""

    def forward(self, x: Tensor) -> Any:
        signs = torch.vmap(lambda row: row * x.mean() > 0)(x)
        y = self.a(x) * (2 if signs.all() else 1)
        values = [y, self.b(y), self.c(self.b(y))]
        turns = torch.arange(3, dtype=x.dtype)
        found = torch.vmap(lambda turn: values[2] * turn + values[0])(turns)
        return self.d(found.sum(0))


class Rounded(torch.autograd.Function):
    """With a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Asking(Four):
    """Asks about what such a function makes of the inputs."""

    def forward(self, x: Tensor) -> Any:
        rounded: Tensor = Rounded.apply(x)  # type: ignore[no-untyped-call]
        y = self.a(x) if (rounded > 1).any() else self.a(x) * 2
        return self.d(self.c(self.b(y)))


class FromNumpy(Four):
    """An array becomes a tensor: PyTorch tells nobody of it."""

    def forward(self, x: Tensor) -> Any:
        ramp = torch.from_numpy((x.detach() > 0).numpy()).to(x.dtype)
        return self.d(self.c(self.b(self.a(x))) * ramp)


@pytest.mark.parametrize(
    "kind", [Packed, Mapped, Asking, FromNumpy], ids=lambda kind: kind.__name__
)
def test_glue_is_followed(kind: type[nn.Module]) -> None:
    """It crashed; or it was taken for another path, where a stage watches what is drawn."""
    assert_same(kind)


class Forces(Four):
    """The gradient of what all units compute."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.d(self.c(self.b(self.a(x)))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Transformed(Four):
    """A unit inside of a transform."""

    def forward(self, x: Tensor) -> Any:
        y = self.c(self.b(self.a(x)))
        return torch.func.grad(lambda z: self.d(z).square().sum())(y)


class Ragged(Four):
    """Rows of different lengths in one tensor."""

    def forward(self, x: Tensor) -> Any:
        rows = torch.nested.nested_tensor([*x], layout=torch.jagged)
        return self.d(self.c(self.b(self.a(rows)))).to_padded_tensor(0.0)


class Replaced(Four):
    """A unit computes with weights that another one has made."""

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
def test_glue_that_cannot_be_followed(kind: type[nn.Module], words: str) -> None:
    """These were errors of PyTorch's, from inside."""
    (x,) = batches(5)
    with pytest.raises(CutError, match=words):
        piped(made(kind), x, stages=2)


class Penalised(Four):
    """The gradient of one unit alone."""

    def forward(self, x: Tensor) -> Any:
        y = self.c(self.b(self.a(x)))
        score = self.d(y).square().sum()
        return torch.autograd.grad(score, y, create_graph=True)[0] + y


def test_a_gradient_on_one_stage() -> None:
    """There it is; without a recomputation, whose forward has no graph."""
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
    for found, wanted in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=1e-12)


def test_a_lazy_module_has_no_shape_yet() -> None:
    (x,) = batches(5)
    lazy = nn.ModuleList([nn.LazyLinear(4), nn.LazyLinear(4)])
    model = Four()
    model.add_module("a", lazy[0])
    with pytest.raises(ArgumentError, match=r"'a\.weight' has no shape yet"):
        piped(model, x, stages=2)


class Quiet(nn.Module):
    """A codebook's way: buffers are written by their `.data`, which no version counts."""

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
    """In units, and around them."""

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


def test_buffers_that_are_written_by_their_data() -> None:
    """The recomputation wrote them a second time; between units, the step was left out."""
    assert_same(Codebooks)
