"""Operations that compute each row by itself, and those that may mix rows."""

from __future__ import annotations

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

from penstock import AuditError, Pipe
from penstock.runtime.audit.row_operations import RowOperations
from penstock.runtime.audit.rows import RowsCheck
from tests.oracle import closely

WIDTH, ROWS = 6, 24
Function = Callable[[Tensor], Tensor]

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


def rotate_halves(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


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
    "cross entropy": lambda x: functional.cross_entropy(x, (x[:, 0] > 0).long()),
    "rows inside of steps": lambda x: (
        (x[:, None].expand(-1, 4, -1).transpose(0, 1).reshape(-1, WIDTH) @ WEIGHT)
        .view(4, len(x), WIDTH)
        .sum(0)
    ),
    "constants that are filled": lambda x: x + x.new_zeros(WIDTH).fill_(0.5),
    "positions that are expanded": lambda x: x + TABLE[:1].expand(len(x), -1),
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


def test_rows_that_are_mixed_later_are_refused_when_the_steps_have_doubled() -> None:
    pipe = make(lambda x: x + functional.relu(x.cummax(0).values - 2))
    for seed in range(3):
        x, y = batch(seed)
        pipe.step(0.01 * x, target=y, loss_fn=nn.MSELoss())
    for seed in range(3, 5):  # after an error the next step is compared, too
        x, y = batch(seed)
        with pytest.raises(AuditError, match="a layer mixes rows of the batch"):
            pipe.step(10 * x, target=y, loss_fn=nn.MSELoss())


def test_the_whole_batch_is_not_compared_for_layers_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: RowsCheck) -> None:
        raise AssertionError("the whole batch is compared")

    monkeypatch.setattr(RowsCheck, "compare_all_microbatches", fail)
    for function in ROW_BY_ROW["softmax"], ROW_BY_ROW["halves"], functional.dropout:
        pipe = make(function)
        x, y = batch(1)
        pipe.step(x, target=y, loss_fn=nn.MSELoss())


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
