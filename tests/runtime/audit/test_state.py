"""State that goes by an id or a count, and numbers that the code around the units reads."""

from __future__ import annotations

import copy
import datetime
import enum
import io
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, PenstockError, Pipe, PipeSequential

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


# ---- state that is no number ----------------------------------------------------------------


class Phase(enum.Enum):
    FIRST, SECOND, THIRD, LAST = range(4)

    def following(self) -> Phase:
        return Phase(min(self.value + 1, 3))


def move_phase(layer: Any) -> float:
    layer.state = layer.state.following()
    return 0.5 if layer.state is Phase.LAST else 1.0


def pop_entry(layer: Any) -> float:
    if layer.state:
        layer.state.pop()
        return 1.0
    return 0.5


def append_letter(layer: Any) -> float:
    layer.state += "."
    return 1.0 if len(layer.state) < 7 else 0.5


def append_to_tuple(layer: Any) -> float:
    layer.state = (*layer.state, 1)
    return 1.0 if len(layer.state) < 7 else 0.5


def count_in_text(layer: Any) -> float:
    layer.state = str(int(layer.state) + 1)
    return 1.0 if int(layer.state) < 7 else 0.5


def move_date(layer: Any) -> float:
    layer.state += datetime.timedelta(days=1)
    return 1.0 if layer.state.day < 7 else 0.5


def rotate(layer: Any) -> float:
    layer.state.rotate(1)
    return float(layer.state[0])


def rotate_tuple(layer: Any) -> float:
    layer.state = (*layer.state[1:], layer.state[0])
    return float(layer.state[0])


def turn(layer: Any) -> float:
    layer.state *= 0.9j
    return 1.0 if abs(layer.state) > 0.5 else 0.5


def take_next(layer: Any) -> float:
    return float(next(layer.state))


def read_line(layer: Any) -> float:
    return float(layer.state.readline())


def name_phase(layer: Any) -> float:
    letters = "abcdefghi"
    following = letters.find(layer.state or "?") + 1
    layer.state = letters[min(following, 8)]
    return 0.5 if layer.state == "f" else 1.0


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "an enum": (lambda: Phase.FIRST, move_phase),
    "a name that begins empty": (str, name_phase),
    "a name that begins as None": (lambda: None, name_phase),
    "a list that becomes shorter": (lambda: [0] * 9, pop_entry),
    "a string that grows": (str, append_letter),
    "a tuple that grows": (tuple, append_to_tuple),
    "a number in a string": (lambda: "0", count_in_text),
    "a date": (lambda: datetime.date(2020, 1, 1), move_date),
    "a deque that is rotated": (lambda: deque([1.0, 1.0, 1.0, 1.0, 0.5]), rotate),
    "a tuple that is rotated": (lambda: (1.0, 1.0, 1.0, 1.0, 0.5), rotate_tuple),
    "a complex number": (lambda: 1 + 0j, turn),
    "an iterator of a list": (lambda: iter([1.0] * 6 + [0.5] * 99), take_next),
    "a stream of texts": (lambda: io.StringIO("1\n" * 6 + "0.5\n" * 99), read_line),
    "a stream of bytes": (lambda: io.BytesIO(b"1\n" * 6 + b"0.5\n" * 99), read_line),
    "a chain": (lambda: itertools.chain([1.0] * 6, itertools.repeat(0.5)), take_next),
    "a cycle": (lambda: itertools.cycle([1.0, 1.0, 1.0, 1.0, 1.0, 0.5]), take_next),
    "a generator": (lambda: (1.0 if n < 6 else 0.5 for n in itertools.count()), take_next),
}


class Keeps(nn.Module):
    """A layer that changes a state in each forward, and multiplies by what it says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.change = STATES[kind]
        self.state = make()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) * self.change(self)
        return output


class KeepsAround(Keeps):
    """A model that does so in the code around its units."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(super().forward(x))
        return output


@each_door
@pytest.mark.parametrize("kind", STATES)
def test_state_that_is_no_number_and_matters_later_is_found(kind: str, door: str) -> None:
    """It begins to matter in a later step, so nothing shows in the first one."""
    pipe = build(Keeps(kind))
    with pytest.raises(
        AuditError, match=r"each forward changes|changes 0\.state|advances an iterator"
    ):
        train(pipe, door, rows())


@pytest.mark.parametrize("kind", STATES)
def test_state_that_is_no_number_around_units_is_found(kind: str) -> None:
    options: dict[str, Any] = {"stages": 2, "devices": ["cpu"] * 2, "balance": "parameters"}
    options |= {"checkpoint": "never", "loss_fn": functional.mse_loss}

    def make_a_step() -> None:
        train(Pipe(KeepsAround(kind), 4, example=rows(), **options), "step", rows())

    with pytest.raises(PenstockError):  # the trace may show it already
        make_a_step()


class Notes(nn.Module):
    """A layer that notes what it was called with, and computes without it."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()
        self.last: tuple[float, ...] = ()
        self.name, self.log, self.is_first = "", "", True
        self.stream, self.closed_stream = io.StringIO(), io.BytesIO()
        self.closed_stream.close()

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.name = tuple(x.shape), f"{x.dtype} {x.dim()}"
        self.last = tuple(x[0].tolist())
        self.log += f"{x.shape}\n"
        print(x.shape, file=self.stream)
        self.is_first = False
        return x * 1.0


@each_door
def test_notes_of_the_last_micro_batch_are_no_state(door: str) -> None:
    pipe = build(Notes())
    for _ in range(3):
        train(pipe, door, rows())


def test_stream_that_is_read_with_one_micro_batch_is_equal() -> None:
    """The audit read its lines, and the step computed with the next ones."""
    layer: Any = Keeps("a stream of texts")
    layer.state = io.StringIO("2\n3\n5\n7\n")
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    pipe = Pipe(nn.Sequential(layer, linear), 1, stages=2, devices=["cpu"] * 2)
    for factor in (2, 3, 5):
        inputs, target = rows(), rows()
        loss = pipe.step(inputs, target=target, loss_fn=functional.mse_loss).loss
        expected = functional.mse_loss(linear(layer.linear(inputs) * factor), target)
        torch.testing.assert_close(loss, expected.detach())


# ---- weights that are computed once ---------------------------------------------------------


class CachesWeight(nn.Module):
    """A layer that computes its weight once in each step, as a hypernetwork does."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight: Any = None
        self.left = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.right = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = self.function(self.left, self.right)
        output: Tensor = x + x @ self.weight
        return output


@each_door
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_weight_that_is_computed_once_in_a_step_is_found(checkpoint: str, door: str) -> None:
    """Most of its gradient was lost in a recomputation, or PyTorch raised an error."""
    pipe = build(CachesWeight(torch.matmul), checkpoint=checkpoint)
    with pytest.raises(AuditError, match="with a tensor and its graph from there"):
        train(pipe, door, rows())


def test_weight_that_is_computed_once_without_saved_tensors_is_equal() -> None:
    model = CachesWeight(torch.add)
    unsplit = copy.deepcopy(model)
    pipe = build(model)
    last = copy.deepcopy(list(pipe.parameters())[-2:])
    x, target = rows(), rows()
    pipe.step(x, target=target)
    functional.mse_loss(functional.linear(unsplit(x), *last), target).backward()
    gradient, expected = model.left.grad, unsplit.left.grad
    assert gradient is not None
    assert expected is not None
    assert torch.allclose(gradient, expected)


# ---- what a forward leaves for its backward -------------------------------------------------


class ClipFunction(torch.autograd.Function):
    """Lets through the gradients of small inputs, whose places `keep` and `find` hand over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Callable[[Any, Tensor], None], find: Any) -> Tensor:
        keep(ctx, (x.detach().abs() < 100).to(x))
        ctx.find = find
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.find(ctx), None, None


class MaskBox:
    mask: Any = None
    masks: ClassVar[dict[str, Any]] = {}


class Clips(nn.Module):
    """A layer whose backward needs a mask of its rows. No row is masked at first."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.mask: Any = None
        self.register_buffer("kept", torch.zeros(0, dtype=torch.float64))

    def keep(self, ctx: Any, mask: Tensor) -> None:
        self.mask = mask.sum(1) if self.place == "log" else self.linear.weight.detach().clone()
        if self.place in ("context", "log"):
            ctx.save_for_backward(mask)
        elif self.place == "attribute":
            self.mask = mask
        elif self.place == "buffer":
            self.kept = mask
        elif self.place == "class":
            MaskBox.mask = mask
        elif self.place == "dict":
            MaskBox.masks["last"] = mask

    def find(self, ctx: Any) -> Any:
        if self.place in ("context", "log"):
            return ctx.saved_tensors[0]
        if self.place == "class":
            return MaskBox.mask
        if self.place == "dict":
            return MaskBox.masks["last"]
        return {"buffer": self.kept, "weight": self.mask.mean()}.get(self.place, self.mask)

    def forward(self, x: Tensor) -> Any:
        return ClipFunction.apply(self.linear(x), self.keep, self.find)  # type: ignore[no-untyped-call]


@each_door
@pytest.mark.parametrize("place", ["attribute", "buffer", "class", "dict"])
def test_mask_that_a_forward_leaves_for_its_backward_is_found(place: str, door: str) -> None:
    """It was that of the last micro-batch, which shows when rows are masked in a later step."""
    with pytest.raises(AuditError, match="the backward of a layer reads it from there"):
        train(build(Clips(place)), door, rows())


@each_door
@pytest.mark.parametrize("place", ["context", "log", "weight"])
def test_what_is_the_same_for_all_rows_or_not_read_in_a_backward_may_be_left(
    place: str, door: str
) -> None:
    train(build(Clips(place)), door, rows())


def test_mask_for_the_backward_may_be_left_where_no_forward_comes_in_between() -> None:
    """In the last stage of 1F1B each backward follows its forward."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Clips("attribute"))
    options: dict[str, Any] = {"stages": [1, 1], "devices": ["cpu"] * 2, "checkpoint": "never"}
    pipe = Pipe(layers, 4, schedule="1f1b", **options)
    pipe.step(rows(), target=rows(), loss_fn=functional.mse_loss)


# ---- what calls in eval mode leave for training ---------------------------------------------


class Banks(nn.Module):
    """A layer that leaves something in eval mode or without gradients, and may train with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.bank: list[Tensor] = []
        self.calls = 0
        self.table: Any = None
        self.note: Any = None
        self.centre: Any = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        if self.training and torch.is_grad_enabled():
            return self.linear(x) * self.find_scale()
        if self.kind == "bank" or (self.kind == "first bank" and not self.bank):
            self.bank.append(x.detach().mean(0))
        elif self.kind == "buffer":
            self.centre += x.detach().mean(0)
        elif self.kind == "count":
            self.calls += 1
        elif self.kind == "table" and self.table is None:
            self.table = torch.full((WIDTH,), 0.5, dtype=torch.float64)
        self.note = x.detach().sum()
        return self.linear(x)

    def find_scale(self) -> Any:
        if self.kind == "table":
            return 0.5 if self.table is None else self.table
        return (self.bank[-1] if self.bank else 1.0) + self.centre + self.calls


def evaluate(pipe: Pipe, mode: str) -> None:
    if mode == "eval":
        pipe.eval()
    with torch.no_grad():
        pipe(rows())
    pipe.train()


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
@pytest.mark.parametrize("order", ["training first", "evaluation first"])
@pytest.mark.parametrize("kind", ["bank", "first bank", "buffer", "count"])
def test_state_of_evaluation_that_training_computes_with_is_found(
    kind: str, order: str, mode: str
) -> None:
    """A pipe left the mean of each micro-batch there, and the model that of the batch."""
    pipe = build(Banks(kind))
    is_training = order == "training first"
    run = {True: lambda: train(pipe, "step", rows()), False: lambda: evaluate(pipe, mode)}
    run[is_training]()
    with pytest.raises(AuditError, match="that in training computes with what it has left"):
        run[not is_training]()


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
@pytest.mark.parametrize("kind", ["note", "table"])
def test_state_of_evaluation_that_does_not_change_training_is_left_alone(
    kind: str, mode: str
) -> None:
    pipe = build(Banks(kind))
    evaluate(pipe, mode)
    for _ in range(2):
        train(pipe, "step", rows())
        evaluate(pipe, mode)


def test_state_of_evaluation_is_no_problem_without_training() -> None:
    pipe = build(Banks("bank"))
    for _ in range(3):
        evaluate(pipe, "eval")


# ---- state of a backward ---------------------------------------------------------------------


class CountedGradient(torch.autograd.Function):
    """Returns its input, and notes each backward on a layer, which may scale the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.layer.note(gradients[0])
        return gradients[0] * ctx.layer.find_scale(), None


class CountsBackwards(nn.Module):
    def __init__(self, warmup: int | None, as_text: bool) -> None:
        super().__init__()
        self.warmup = warmup
        self.calls: Any = "" if as_text else 0
        self.gradients: list[Tensor] = []

    def note(self, gradient: Tensor) -> None:
        self.calls += "." if isinstance(self.calls, str) else 1
        self.gradients.append(gradient)

    def find_scale(self) -> float:
        calls = len(self.calls) if isinstance(self.calls, str) else self.calls
        return 0.5 if self.warmup is not None and calls > self.warmup else 1.0

    def forward(self, x: Tensor) -> Any:
        apply: Any = CountedGradient.apply
        return apply(x, self)


@pytest.mark.parametrize("as_text", [False, True])
def test_counter_of_a_backward_that_scales_later_gradients_is_found(as_text: bool) -> None:
    pipe = build(nn.Linear(WIDTH, WIDTH).double(), CountsBackwards(20, as_text))
    with pytest.raises(AuditError, match="the backward of a micro-batch changes"):
        train(pipe, "step", rows())


@pytest.mark.parametrize("as_text", [False, True])
def test_counter_of_a_backward_that_nothing_reads_is_accepted(as_text: bool) -> None:
    layer = CountsBackwards(None, as_text)
    pipe = build(nn.Linear(WIDTH, WIDTH).double(), layer)
    for _ in range(2):
        train(pipe, "step", rows())
    assert len(layer.gradients) == 8
    assert layer.calls == ("........" if as_text else 8)


def test_gradient_that_a_backward_hook_keeps_is_accepted() -> None:
    kept: dict[str, Tensor] = {}
    linear = nn.Linear(WIDTH, WIDTH).double()
    linear.register_full_backward_hook(lambda *args: kept.update(last=args[2][0]))
    pipe = build(nn.Linear(WIDTH, WIDTH).double(), linear)
    for _ in range(2):
        train(pipe, "step", rows())
    assert kept["last"].shape == (2, WIDTH)


# ---- events that the first batches do not have -----------------------------------------------


class CountsOverflows(nn.Module):
    """A layer that counts large inputs in a buffer, and becomes smaller after some of them."""

    def __init__(self, tolerated: float, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.tolerated, self.in_place = tolerated, in_place

    def forward(self, x: Tensor) -> Tensor:
        count: Any = self.get_buffer("count")
        overflows = x.detach().abs().amax() > 10
        if self.in_place:
            count.add_(overflows)
        else:
            count = self.count = count + overflows
        return x * torch.where(count > self.tolerated, 0.5, 1.0)


@each_door
@pytest.mark.parametrize("in_place", [False, True])
def test_count_of_later_events_by_which_a_layer_goes_is_found(door: str, in_place: bool) -> None:
    pipe = build(nn.Linear(WIDTH, WIDTH).double(), CountsOverflows(8, in_place))
    for _ in range(2):
        train(pipe, door, rows())
    with pytest.raises(AuditError, match=r"changes 1\.count"):
        train(pipe, door, 100 * rows())


@each_door
def test_count_of_later_events_that_nothing_reads_is_accepted(door: str) -> None:
    layer = CountsOverflows(float("inf"), in_place=False)
    pipe = build(nn.Linear(WIDTH, WIDTH).double(), layer)
    for scale in (1, 1, 100, 100):
        train(pipe, door, scale * rows())
    assert layer.count == 8
