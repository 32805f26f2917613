"""State that goes by an id or a count, and numbers that the code around the units reads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe, PipeSequential

ROWS, WIDTH = 8, 4
each_door = pytest.mark.parametrize("door", ["call", "step"])


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def build(*layers: nn.Module, **options: Any) -> Pipe:
    torch.manual_seed(0)
    last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    options = {"loss_fn": functional.mse_loss, "checkpoint": "never", **options}
    return Pipe(
        PipeSequential(*layers, last), 4, stages=2, devices=["cpu"] * 2, schedule="1f1b", **options
    )


def train(pipe: Pipe, door: str, *inputs: Any) -> None:
    if door == "step":
        pipe.step(*inputs, target=rows())
    else:
        functional.mse_loss(pipe(*inputs), rows()).backward()


# ---- state by id ----------------------------------------------------------------------------


class Memory(nn.Module):
    """A layer that keeps a vector for each user."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(16, WIDTH, dtype=torch.float64))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, user: Tensor) -> Tensor:
        memory: Any = self.memory
        output: Tensor = self.linear(x) + memory[user]
        with torch.no_grad():
            memory[user] = 0.5 * memory[user] + x.detach()
        return output


@each_door
def test_state_of_users_that_several_micro_batches_have_is_found(door: str) -> None:
    """The rows that are tried first, those of the first two micro-batches, have other users."""
    pipe = build(Memory())
    with pytest.raises(AuditError, match=r"changes 0\.memory"):
        train(pipe, door, rows(), torch.tensor([0, 1, 2, 3, 4, 5, 1, 6]))


@each_door
def test_state_of_users_is_equal_as_long_as_micro_batches_have_different_ones(door: str) -> None:
    pipe = build(Memory())
    for _ in range(3):
        train(pipe, door, rows(), torch.randperm(16)[:ROWS])
    for _ in range(2):  # also after the error
        with pytest.raises(AuditError, match=r"changes 0\.memory"):
            train(pipe, door, rows(), torch.tensor([0, 1, 2, 3, 4, 5, 1, 6]))
    train(pipe, door, rows(), torch.arange(ROWS))


class Codebook(nn.Module):
    """A layer that replaces each row by the nearest code, and moves that code to the row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        codes = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
        self.register_buffer("codes", codes)

    def forward(self, x: Tensor) -> Tensor:
        codes: Any = self.codes
        index = torch.cdist(x, codes).argmin(1)
        nearest: Tensor = codes[index]
        with torch.no_grad():
            codes[index] = 0.9 * nearest + 0.1 * x
        return x + (nearest - x).detach()


class HashedMemory(nn.Module):
    """A layer that keeps a vector for each of a few numbers that it computes of a row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(count, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        memory: Any = self.memory
        index = (x.detach().sum(1) * 100).long() % len(memory)
        output: Tensor = x + memory[index]
        with torch.no_grad():
            memory[index] = x.detach()
        return output


@each_door
@pytest.mark.parametrize("count", [8, 64, 512])
@pytest.mark.parametrize("layer", [Codebook, HashedMemory])
def test_state_by_a_number_that_the_layer_computes_is_found(
    layer: Callable[[int], nn.Module], count: int, door: str
) -> None:
    """No two micro-batches need have one in common in the first batch."""
    torch.manual_seed(0)
    pipe = build(layer(count), audit="first")
    with pytest.raises(AuditError, match="and that of the next one computes with it"):
        train(pipe, door, rows())


class CentreLoss(nn.Module):
    """A loss with a centre for each class, which follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(16, WIDTH, dtype=torch.float64))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        centres: Any = self.centres
        loss = functional.mse_loss(output, centres[label])
        with torch.no_grad():
            centres[label] += 0.5 * (output.detach() - centres[label])
        return loss


def test_centres_of_classes_in_a_loss_are_found() -> None:
    pipe = build(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), loss_fn=CentreLoss())
    with pytest.raises(AuditError, match=r"changes CentreLoss\.centres"):
        pipe.step(rows(), target=torch.tensor([0, 1, 2, 3, 4, 5, 1, 6]))


# ---- counters -------------------------------------------------------------------------------


class Counter:
    """Tells whether it was asked more than eight times, in one of several ways."""

    calls = 0

    def __init__(self, way: str) -> None:
        self.way = way
        self.history: list[float] = []
        self.numbers = itertools.count()

    def has_grown(self) -> bool:
        if self.way == "list":
            self.history.append(1.0)
            return len(self.history) > 8
        if self.way == "iterator":
            return next(self.numbers) > 8
        self.calls += 1
        return self.calls > 8


class Counting(nn.Module):
    """A layer that counts its calls in attributes of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.way, self.history, self.numbers = way, list[float](), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if self.way == "list":
            self.history.append(1.0)
            return output * (1 + (len(self.history) > 8))
        return output * (1 + (next(self.numbers) > 8))


class RunningMaximum(nn.Module):
    """A layer that divides by the largest number so far, if that is above a limit."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.register_buffer("maximum", torch.zeros((), dtype=torch.float64))
        self.linear, self.is_read = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), is_read

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        maximum: Any = self.maximum
        if self.is_read:
            output = output / maximum.clamp(min=5.0)
        with torch.no_grad():
            maximum.copy_(torch.maximum(maximum, output.abs().max()))
        return output


@each_door
def test_state_that_is_read_only_above_a_limit_is_found(door: str) -> None:
    train(build(RunningMaximum(is_read=False)), door, rows())
    with pytest.raises(AuditError, match="computes something else once it has grown"):
        train(build(RunningMaximum(is_read=True)), door, rows())


@each_door
@pytest.mark.parametrize("way", ["list", "iterator"])
def test_layer_that_counts_its_calls_is_found(way: str, door: str) -> None:
    with pytest.raises(AuditError, match="computes something else once it has grown"):
        train(build(Counting(way)), door, rows())


@pytest.mark.parametrize("way", ["list", "iterator", "attribute"])
def test_loss_that_counts_its_calls_is_found(way: str) -> None:
    """All micro-batches of a step may be on the same side of the threshold."""
    counter = Counter(way)

    def compute_loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) * (1 + counter.has_grown())

    pipe = build(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), loss_fn=compute_loss)
    with pytest.raises(AuditError, match="computes something else once it has grown"):
        pipe.step(rows(), target=rows())


def test_list_in_which_a_loss_keeps_its_history_is_no_counter() -> None:
    history: list[float] = []

    def compute_loss(output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        history.append(float(loss.detach()))
        return loss

    pipe = build(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), loss_fn=compute_loss)
    pipe.step(rows(), target=rows())
    assert len(history) == 4


# ---- numbers that are read from inputs ------------------------------------------------------


class Reads(nn.Module):
    """A model that multiplies by a number, which Python reads from an input between units."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.read = read

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x) * self.read(lengths))
        return output


READS: dict[str, Callable[[Tensor], float]] = {
    "item": lambda lengths: lengths.max().item(),
    "branch": lambda lengths: 1.0 if (lengths == 6).all() else 2.0,
    "list": lambda lengths: max(lengths.tolist()),
    "array": lambda lengths: float(lengths.numpy().max()),
    "count": lambda lengths: float(torch.unique(lengths).numel()),
    "threshold of the batch": lambda lengths: 2.0 if lengths.sum() > 100 else 1.0,
}


@each_door
@pytest.mark.parametrize("read", READS)
def test_number_that_is_read_from_an_input_between_units_is_found_later(
    read: str, door: str
) -> None:
    torch.manual_seed(0)
    equal = torch.full((ROWS,), 6)
    pipe = Pipe(
        Reads(READS[read]), 4, stages=2, devices=["cpu"] * 2, example=(rows(), equal),
        balance="parameters", loss_fn=functional.mse_loss,
    )  # fmt: skip
    for _ in range(3):
        train(pipe, door, rows(), equal)
    other = torch.tensor([20] * ROWS if "batch" in read else [1, 2, 3, 3, 6, 1, 6, 6])
    for _ in range(2):  # also after the error
        with pytest.raises(AuditError):
            train(pipe, door, rows(), other)


@each_door
def test_number_that_is_read_and_makes_no_difference(door: str) -> None:
    """A mask is skipped where it masks nothing."""
    torch.manual_seed(0)

    class Masked(Reads):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            if not (lengths == 6).all():
                y = y * (lengths == 6).double()[:, None]
            output: Tensor = self.last(y)
            return output

    model = Masked(READS["item"])
    equal, other = torch.full((ROWS,), 6), torch.tensor([1, 2, 3, 3, 6, 6, 6, 6])
    pipe = Pipe(
        model, 4, stages=2, devices=["cpu"] * 2, example=(rows(), equal), balance="parameters"
    )
    for lengths in (equal, other, equal, other):
        x = rows()
        with torch.no_grad():
            assert torch.allclose(pipe(x, lengths), model(x, lengths))
        if door == "step":
            pipe.step(x, lengths, target=rows(), loss_fn=functional.mse_loss)


def test_rows_that_are_trimmed_to_the_longest_of_a_micro_batch_are_equal() -> None:
    """Rows of one length are tried with gradients, as the forward takes rows by a number."""
    torch.manual_seed(0)

    class Trims(Reads):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x = x[:, : int(lengths.max())]
            mask = torch.arange(x.shape[1]) < lengths[:, None]
            output: Tensor = self.last((self.first(x) * mask[..., None]).sum(1))
            return output

    model = Trims(READS["item"])
    unsplit = copy.deepcopy(model)
    x, lengths = torch.randn(ROWS, 6, WIDTH, dtype=torch.float64), torch.full((ROWS,), 6)
    pipe = Pipe(
        model, 2, stages=2, devices=["cpu"] * 2, example=(x, lengths), balance="parameters",
        loss_fn=functional.mse_loss,
    )  # fmt: skip
    for batch in (lengths, torch.tensor([1, 2, 3, 3, 5, 4, 4, 6])):
        target = rows()
        pipe.step(x, batch, target=target)
        functional.mse_loss(unsplit(x, batch), target).backward()
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)
