"""Operations that compute each row by itself, and those that may mix rows."""

from __future__ import annotations

import ctypes
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe, add_loss
from penstock.runtime.audit.row_operations import RowOperations
from penstock.runtime.audit.rows import RowsCheck
from tests.oracle import closely

WIDTH, ROWS = 6, 24
Function = Callable[[Tensor], Tensor]

POSITIONS = torch.ones(64, 1)  # as long as it is not trained
TABLE = torch.arange(5 * WIDTH).view(5, WIDTH) / 7
KERNEL = torch.ones(1, 1, 3) / 3
WEIGHT = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)


def follow(function: Function, counts: tuple[int, int] = (2, 3), dims: int = 2) -> str | None:
    """Return why a function of rows is not known to compute each row by itself, or None."""
    recorded = None
    for count in counts:
        recorded = RowOperations(count, recorded)
        shape = (count, WIDTH) if dims == 2 else (count, 4, WIDTH)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(count))
        with recorded.watch():
            function(x)
        recorded.finish()
    assert recorded is not None
    return recorded.problem


def attend(x: Tensor) -> Tensor:
    heads = (x @ WEIGHT).view(len(x), 4, 2, 3).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def write_masked(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = 1.0
    return y


def write_halves(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    y[:, :2] = x[:, 4:]
    y[:, 2:] = x[:, :4]
    return y


def rotate_halves(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


@torch.library.custom_op("penstock_tests::graph_conv", mutates_args=())
def convolve_graph(x: Tensor) -> Tensor:
    return x + x.flip(0)


@convolve_graph.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _flip_gradient(context: Any, gradient: Tensor) -> Tensor:
    return gradient + gradient.flip(0)


torch.library.register_autograd("penstock_tests::graph_conv", _flip_gradient)


def move_large_rows(x: Tensor) -> Tensor:
    return x[(torch.arange(len(x)) + (x[:, 0].abs() > 50).long()) % len(x)]


def overwrite_positions(x: Tensor) -> Tensor:
    positions = torch.arange(len(x))
    positions[x[:, 0].abs() > 50] = 0
    return x[positions]


def write_to_table(x: Tensor) -> Tensor:
    table = torch.zeros(64, WIDTH)
    table[: len(x)] = x
    return x + table.sum(0)


def add_to_table(x: Tensor) -> Tensor:
    table = torch.zeros(64 * WIDTH)
    table[: x.numel()].view(len(x), WIDTH).add_(x)
    return x + table.view(64, WIDTH).amax(0)


class Kernel(torch.autograd.Function):
    """A kernel that PyTorch does not see, such as one of Triton: large rows are the row before."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        values = x.contiguous()
        numbers = (ctypes.c_float * x.numel()).from_address(values.data_ptr())
        size = 4 * WIDTH
        for row in range(len(x)):
            source = (row - 1) % len(x) if abs(numbers[row * WIDTH]) > 50 else row
            ctypes.memmove(result.data_ptr() + row * size, values.data_ptr() + source * size, size)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def mask_two_dims(x: Tensor) -> Tensor:
    is_large = x[:, 0].abs() > 50
    return torch.stack([x, 2 * x])[torch.stack([~is_large, is_large])]


LSTM = nn.LSTM(3, 3, batch_first=True)
LSTM_OF_ROWS = nn.LSTM(WIDTH, WIDTH, batch_first=True)
for parameter in LSTM_OF_ROWS.parameters():
    nn.init.constant_(parameter, 0.3)

# They mix rows, by operations that compute each row by itself if they are used in another way.
OVERLOOKED: dict[str, Function] = {
    "repeated rows beside each other": lambda x: x.repeat(2, 1).view(len(x), 2, WIDTH).sum(1),
    "steps that are taken for rows": lambda x: (
        torch.stack([x, 2 * x], 1).transpose(0, 1).reshape(-1, WIDTH).view(len(x), 2, WIDTH).sum(1)
    ),
    "rows that are taken for columns": lambda x: x.reshape(-1).view(WIDTH, -1).t(),
    "rows that are joined, and columns": lambda x: x.T.reshape(-1).view(len(x), WIDTH),
    "index that moves large rows": move_large_rows,
    "index in reverse": lambda x: x[torch.arange(len(x) - 1, -1, -1)],
    "index that is written to": overwrite_positions,
    "index that wraps": lambda x: x[torch.arange(len(x)) % 3],
    "mask of two dims": mask_two_dims,
    "table that rows are written to": write_to_table,
    "table that rows are added to": add_to_table,
    "kernel that PyTorch does not see": Kernel.apply,
    "batch norm in training": lambda x: functional.batch_norm(
        x[..., None].expand(-1, -1, 2), None, None, training=True
    )[..., 0],
    "pad that moves rows": lambda x: functional.pad(x, (0, 0, 1, -1)),
    "another library's operation": convolve_graph,
    "recurrence over rows": lambda x: LSTM_OF_ROWS(0.01 * x[None])[0][0],
    "convolution over rows": lambda x: torch.conv_tbc(
        x[:, None], torch.ones(3, WIDTH, WIDTH) / 9, torch.zeros(WIDTH), 1
    )[:, 0],
    "norm of each column": lambda x: torch._weight_norm(x, torch.ones(1, WIDTH), 1),
}
ROW_BY_ROW: dict[str, Function] = {
    "linear": lambda x: functional.linear(x, WEIGHT, WEIGHT[0]),
    "transposed product": lambda x: (WEIGHT @ x.T).T,
    "activation in place": lambda x: functional.gelu(x + 1).relu_(),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "maximum of each row": lambda x: x - x.amax(1, keepdim=True),
    "cumsum of each row": lambda x: x.cumsum(1),
    "sort of each row": lambda x: x.sort(-1).values,
    "halves": rotate_halves,
    "mask": write_masked,
    "lookup": lambda x: TABLE[(x[:, 0] > 0).long()],
    "embedding": lambda x: functional.embedding((x > 0).long(), TABLE),
    "an entry of each row": lambda x: x[torch.arange(len(x)), x.argmax(1)],
    "convolution": lambda x: functional.conv1d(x[:, None], KERNEL, padding=1)[:, 0],
    "pool": lambda x: functional.max_pool1d(x[:, None], 2)[:, 0],
    "a mean at the end": lambda x: 0.5 * (x * x).mean() + 0.1 * x.abs().sum(),
    "a share of the rows": lambda x: 0.5 * (x > 0).sum() / 7 + (x > 0).float().mean(),
    "a number of rows": lambda x: (x > 0).sum(0).sum().float(),
    "cross entropy": lambda x: functional.cross_entropy(x, (x[:, 0] > 0).long()),
    "rows inside of steps": lambda x: (
        (x[:, None].expand(-1, 4, -1).transpose(0, 1).reshape(-1, WIDTH) @ WEIGHT)
        .view(4, len(x), WIDTH)
        .sum(0)
    ),
    "memory that is filled": lambda x: torch.empty_like(x).fill_(1) * x,
    "rows that are written to empty memory": write_halves,
    "constants that are filled": lambda x: x + x.new_zeros(WIDTH).fill_(0.5),
    "positions that are expanded": lambda x: x + TABLE[:1].expand(len(x), -1),
    "repeated rows": lambda x: x.repeat(2, 1).view(2, len(x), WIDTH).sum(0),
    "rows beside each other": lambda x: x.repeat_interleave(2, 0).view(len(x), 2, WIDTH).sum(1),
    "dropout of rows inside of steps": lambda x: functional.dropout(
        torch.stack([x, 2 * x]).view(-1, WIDTH), 0.5, training=True
    ),
    "recurrence": lambda x: LSTM(x.view(len(x), 2, 3))[0],
    "instance norm": lambda x: functional.instance_norm(x.view(len(x), 2, 3), weight=TABLE[0, :2]),
    "batch norm in eval mode": lambda x: functional.batch_norm(x, TABLE[0], TABLE[1] + 1),
    "columns in reverse": lambda x: x[:, torch.arange(WIDTH - 1, -1, -1)],
    "an entry of each row, of two": lambda x: x[torch.arange(len(x))[:, None], x.topk(2).indices],
    "padded columns": lambda x: functional.pad(x[:, 1:-1], (1, 1)),
    "time loss": lambda x: functional.ctc_loss(
        x.log_softmax(-1).expand(5, -1, -1),
        torch.ones(len(x), 2, dtype=torch.long),
        torch.full((len(x),), 5),
        torch.full((len(x),), 2),
    ),
    "solution of each row": lambda x: torch.linalg.solve(
        WEIGHT + 9 * torch.eye(WIDTH), x[..., None]
    ),
}
MIXED: dict[str, Function] = {
    "pairs": lambda x: torch.cdist(x, x),
    "near pairs": lambda x: x * ((x[:, None] - x[None]).norm(dim=-1) < 0.1).sum(1, keepdim=True),
    "similar pairs": lambda x: (x @ x.T > 9.0).to(x) @ x,
    "running maximum": lambda x: x.cummax(0).values,
    "running sum": lambda x: x * (x.cumsum(0) < 3),
    "norm of columns": lambda x: torch.renorm(x, 2, 1, 3.0),
    "covariance": lambda x: x @ (x.T @ x > 5.0).to(x),
    "mean of rows": lambda x: torch.where(x > x.mean(0) + 2, 0.1 * x, x),
    "sorted rows": lambda x: x.sort(0).values,
    "rows in reverse": lambda x: x.flip(0),
    "rows that move on": lambda x: x.roll(1, 0),
    "a row for all": lambda x: x + x[:1],
    "window over rows": lambda x: functional.max_pool1d(x.T[None], 3, 1, 1)[0].T,
    "filter over rows": lambda x: functional.conv1d(x.T[:, None], KERNEL, padding=1)[:, 0].T,
    "padded rows": lambda x: functional.pad(x, (0, 0, 1, 0))[:-1],
    "order of a score": lambda x: x[x[:, 0].argsort()],
    "counts": lambda x: x * torch.bincount((x[:, 0] > 0).long(), minlength=2)[0],
    "kink of a mean": lambda x: torch.maximum(x.mean(), x.abs().mean() - 0.5),
    "square root of a mean": lambda x: x.square().mean().sqrt(),
    "one loss over another": lambda x: x.abs().sum() / x.square().sum(),
    "softmax over rows": lambda x: x.softmax(0),
    "rows turned into columns": lambda x: x.reshape(WIDTH, len(x)).cumsum(0).reshape(x.shape),
    "norm over rows": lambda x: functional.normalize(x, dim=0, eps=100.0),
    **OVERLOOKED,
    "first rows of a table": lambda x: x * (2 * POSITIONS)[: len(x)],
    "first rows of a padded table": lambda x: x * functional.pad(POSITIONS, (0, 0, 2, 0))[: len(x)],
    "first rows of a narrowed table": lambda x: x * POSITIONS.cumsum(0).narrow(0, 0, len(x)),
    "largest rows": lambda x: (x - 50).relu().amax(0).mean(),
    "largest number": lambda x: (x[:, 0] - 50).relu().amax(),
    "deviation of rows": lambda x: (x - 50).relu().std(),
    "product of rows": lambda x: (x[:, 0] - 50).relu().prod(),
    "size of columns": lambda x: (x - 50).relu().norm(),
    "numbers of the first row": lambda x: (x - 50).relu().gather(1, torch.zeros(1, 1).long()).sum(),
    "rows as time of a loss": lambda x: functional.ctc_loss(
        x[:, None].log_softmax(-1),
        torch.ones(1, 1, dtype=torch.long),
        torch.tensor([len(x)]),
        torch.tensor([1]),
    ),
    "flag of a mean": lambda x: (x.mean() > 200).float(),
    "flag of any row": lambda x: (x > 350).any().float(),
    "mean that is rounded": lambda x: x.mean().long().float(),
    "mean that is divided and rounded": lambda x: torch.div(x.mean(), 5, rounding_mode="floor"),
    "position of the largest row": lambda x: x[:, 0].argmax().float(),
    "rows that are cut off": lambda x: (x - 50).relu().view(-1).clone().resize_(1, WIDTH).sum(),
    "margins between rows": lambda x: functional.multi_margin_loss(x.T, torch.zeros(WIDTH).long()),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_rows_that_are_computed_by_themselves_are_recognised(name: str) -> None:
    assert follow(ROW_BY_ROW[name]) is None


def test_attention_of_each_row_is_recognised() -> None:
    assert follow(attend, dims=3) is None


@pytest.mark.parametrize("counts", [(2, 3), (1, 2)])
@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_mixed_are_not(name: str, counts: tuple[int, int]) -> None:
    assert follow(MIXED[name], counts) is not None


def test_other_operations_for_other_rows_are_not_compared() -> None:
    assert "other operations" in str(follow(lambda x: x.sin() if len(x) > 2 else x.cos()))
    assert "fewer operations" in str(follow(lambda x: x if len(x) > 2 else x.cos()))


def test_an_operation_that_no_rule_expects_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RowOperations, *_: object) -> None:
        raise IndexError("no such argument")

    monkeypatch.setattr(RowOperations, "_follow", fail)
    assert "cannot be followed" in str(follow(torch.sin))


# ---- random programs -----------------------------------------------------------------------------

STEPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "linear": lambda x, _: x @ WEIGHT,
    "shift": lambda x, limit: x + limit,
    "relu": lambda x, limit: functional.relu(x - limit),
    "norm": lambda x, _: functional.layer_norm(x, (WIDTH,)),
    "softmax": lambda x, _: x.softmax(1),
    "near": lambda x, limit: x * (torch.cdist(x, x) < limit).sum(1, keepdim=True),
    "columns": lambda x, limit: torch.renorm(x, 2, 1, 2 * limit),
    "centre": lambda x, limit: torch.where(x.mean(0) > limit, x - limit, x),
    "largest": lambda x, limit: torch.where(x > x.amax(0) - 0.01 * limit, 0.5 * x, x),
    "maximum": lambda x, limit: x.cummax(0).values.clamp(max=limit) + x,
    "order": lambda x, limit: x * (x.argsort(0) < 20 * limit),
    "rows": lambda x, limit: x * (x[:, None] > x[None] + limit).any(1),
    "transpose": lambda x, _: (WEIGHT @ x.T).T,
    "reshape": lambda x, _: x.reshape(-1, 2).tanh().reshape(len(x), -1),
    "turn": lambda x, limit: x + limit * x.reshape(WIDTH, len(x)).cumsum(0).reshape(len(x), WIDTH),
}


@pytest.mark.parametrize("seed", range(150))
def test_a_random_program_that_is_known_gives_each_row_its_own_numbers(seed: int) -> None:
    choices = random.Random(seed)
    program = [(choices.choice(list(STEPS)), choices.uniform(0.1, 2)) for _ in range(4)]

    def compute(x: Tensor) -> Tensor:
        for name, limit in program:
            x = STEPS[name](x, limit)
        return x

    if follow(compute) is None:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "WEIGHT", WEIGHT.double())
            apart = torch.cat([compute(part) for part in x.split(8)])
            closely(apart, compute(x))


# ---- in a pipe -----------------------------------------------------------------------------------


def set_to_identity(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight.copy_(torch.eye(WIDTH))
        layer.bias.zero_()
    return layer


class FunctionLayer(nn.Module):
    """A function of rows as a layer."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Layer(nn.Module):
    """A layer that computes a function of its rows."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def damp_many(x: Tensor) -> Tensor:
    sizes = x.square().sum(1, keepdim=True)
    if sizes.shape[0] > 8:
        return torch.where(sizes > sizes.mean() + sizes.std(), 0.1 * x, x)
    return x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and used all the same
    damp_scripted = torch.jit.script(damp_many)


@torch.library.custom_op("penstock_tests::damp_rows", mutates_args=())
def damp_by_operation(x: Tensor) -> Tensor:
    if len(x) < 4:
        return x.clone()
    sizes = x.square().sum(1, keepdim=True)
    return torch.where(sizes > sizes.mean() + sizes.std(), 0.1 * x, x)


@damp_by_operation.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(context: Any, gradient: Tensor) -> Tensor:
    return gradient


torch.library.register_autograd("penstock_tests::damp_rows", _backward)

HIDDEN: dict[str, Function] = {
    "near rows": lambda x: (d := (torch.cdist(x, x) < 0.8).to(x)) @ x / d.sum(1, keepdim=True),
    "similar rows": lambda x: (
        x * (functional.normalize(x) @ functional.normalize(x).T > 0.9).sum(1, keepdim=True)
    ),
    "norm of columns": lambda x: torch.renorm(x, 2, 1, 2.0),
    "capacity": lambda x: x * ((x[:, :1] > 0).long().cumsum(0) <= 5),
    "window": lambda x: x + functional.relu(functional.max_pool1d(x.T[None], 3, 1, 1)[0].T - 0.5),
    "scripted": damp_scripted,
    "operation": damp_by_operation,
}


def make(function: Function, **options: Any) -> Pipe:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Layer(function), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    ).double()
    return Pipe(model, 2, stages=2, devices=["cpu"] * 2, audit="first", **options)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return numbers[0], numbers[1]


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("name", HIDDEN)
def test_rows_that_are_mixed_beyond_a_threshold_are_refused(name: str, door: str) -> None:
    pipe = make(HIDDEN[name])
    x, y = batch(1)
    run = partial(pipe.step, target=y, loss_fn=nn.MSELoss()) if door == "step" else pipe
    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        run(x)


@pytest.mark.parametrize("name", OVERLOOKED)
def test_large_rows_that_are_mixed_do_not_train_in_silence(name: str) -> None:
    model = nn.Sequential(
        set_to_identity(nn.Linear(WIDTH, WIDTH)),
        FunctionLayer(lambda x: torch.where(x[:, :1].abs() > 50, OVERLOOKED[name](x), x)),
        nn.Linear(WIDTH, 1),
    )
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, audit="first")
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    y = 100 * torch.arange(6.0)[:, None]
    large = x.clone()
    large[:, 0] = torch.tensor([100.0, 200.0, 300.0, 400.0, 0.0, 500.0])
    pipe.step(x, target=y, loss_fn=nn.MSELoss())
    with pytest.raises(AuditError, match=r"a layer mixes rows|how it is split"):
        pipe.step(large, target=y, loss_fn=nn.MSELoss())


@pytest.mark.parametrize(
    "name",
    ["largest rows", "largest number", "product of rows", "flag of any row", "flag of a mean"],
)
def test_losses_that_are_no_sums_over_rows_do_not_train_in_silence(name: str) -> None:
    def add_penalty(x: Tensor) -> Tensor:
        add_loss(1e5 * MIXED[name](x))
        return x

    first = set_to_identity(nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(first, FunctionLayer(add_penalty), nn.Linear(WIDTH, 1))
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, audit="first")
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    y = 100 * torch.arange(6.0)[:, None]
    large = x + y
    pipe.step(x, target=y, loss_fn=nn.MSELoss())
    with pytest.raises(AuditError, match="a layer mixes rows of the batch"):
        pipe.step(large, target=y, loss_fn=nn.MSELoss())


def test_rows_that_are_mixed_later_are_refused_when_the_steps_have_doubled() -> None:
    pipe = make(lambda x: x + functional.relu(x.cummax(0).values - 2))
    for seed in range(3):
        x, y = batch(seed)
        pipe.step(0.01 * x, target=y, loss_fn=nn.MSELoss())
    for seed in range(3, 5):  # after an error the next step is compared, too
        x, y = batch(seed)
        with pytest.raises(AuditError, match="a layer mixes rows of the batch"):
            pipe.step(10 * x, target=y, loss_fn=nn.MSELoss())


USUAL = {
    "dropout": functional.dropout,
    **{name: f for name, f in ROW_BY_ROW.items() if f(TABLE).shape == TABLE.shape},
}


@pytest.mark.parametrize("name", USUAL)
def test_the_whole_batch_is_not_compared_for_layers_that_are_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    original = RowsCheck.computes_each_row

    def note(self: RowsCheck) -> bool:
        answers.append(original(self))
        return answers[-1]

    monkeypatch.setattr(RowsCheck, "computes_each_row", note)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(USUAL[name]), nn.Linear(WIDTH, WIDTH))
    x, y = batch(1)
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, audit="first")
    pipe.step(x.float(), target=y.float(), loss_fn=nn.MSELoss())
    assert answers == [True]


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_the_layers_of_transformers_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    bert_sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    t5_sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2},
        "llama": bert_sizes,
        "t5": {**t5_sizes, "decoder_start_token_id": 0},
        "bert": bert_sizes,
    }
    heads = {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "t5": "T5ForConditionalGeneration",
        "bert": "BertForMaskedLM",
    }
    torch.manual_seed(0)
    model = getattr(transformers, heads[name])(
        transformers.AutoConfig.for_model(name, **sizes[name])
    )
    model.config.use_cache = False
    ids = torch.randint(20, (8, 5))
    answers = []
    original = RowsCheck.computes_each_row

    def note(self: RowsCheck) -> bool:
        answers.append(original(self))
        return answers[-1]

    monkeypatch.setattr(RowsCheck, "computes_each_row", note)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=inputs, audit="first")
    pipe.step(**inputs)
    assert answers == [True]


def test_numpy_is_not_an_operation() -> None:
    # What a forward does outside of PyTorch is a number that it reads: see branches.py.
    assert follow(lambda x: x * float(numpy.median(x.detach().numpy()) > 9)) is None


class Interpolation(nn.Module):
    """Mixes rows by a weight that lets them be as they are at first."""

    def __init__(self, mix: Function) -> None:
        super().__init__()
        self.weight, self.mix = nn.Parameter(torch.ones(())), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + (1 - self.weight) * self.mix(x)


class Centred(nn.Module):
    """Subtracts a mean over rows that cancels in the results."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        with torch.no_grad():
            same_mean = x.mean(0)
        return x - (mean - same_mean)


@pytest.mark.parametrize(
    "layer", [Interpolation(lambda x: x.roll(1, 0)), Interpolation(lambda x: x.flip(0)), Centred()]
)
def test_rows_that_are_mixed_in_gradients_alone_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = Pipe(model.double(), 2, stages=2, devices=["cpu"] * 2, audit="first")
    x, y = batch(1)
    with pytest.raises(AuditError, match="the gradient of"):
        pipe.step(x, target=y, loss_fn=nn.MSELoss())


@pytest.mark.parametrize("distance", [2, 4, 8])
def test_rows_that_move_by_the_rows_that_are_tried_are_refused(distance: int) -> None:
    pipe = make(lambda x: x + 0.5 * x.roll(distance, 0))
    x, y = batch(1)
    with pytest.raises(AuditError, match="depends on how it is split"):
        pipe.step(x, target=y, loss_fn=nn.MSELoss())


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_mixed_rows_beside_random_numbers_of_python_are_refused(draw: Callable[[], float]) -> None:
    pipe = make(lambda x: (x + x.roll(1, 0)) * (1 + draw()))
    x, y = batch(1)
    with pytest.raises(AuditError, match=r"an operation may mix rows .*roll"):
        pipe.step(x, target=y, loss_fn=nn.MSELoss())


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_random_numbers_of_python_are_accepted_where_rows_are_not_mixed(
    draw: Callable[[], float],
) -> None:
    pipe = make(lambda x: x * (1 + draw()))
    x, y = batch(1)
    pipe.step(x, target=y, loss_fn=nn.MSELoss())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_layers_that_python_skips_at_random_are_accepted(
    draw: Callable[[], float], seed: int
) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    pipe = make(lambda x: x + x.relu() @ WEIGHT.double() if draw() < 0.6 else x)
    x, y = batch(1)
    pipe.step(x, target=y, loss_fn=nn.MSELoss())


def test_solutions_beside_random_numbers_of_python_are_accepted() -> None:
    matrix = 9 * torch.eye(WIDTH).double()
    pipe = make(lambda x: torch.linalg.solve(matrix, x[..., None])[..., 0] * (1 + random.random()))
    x, y = batch(1)
    pipe.step(x, target=y, loss_fn=nn.MSELoss())
