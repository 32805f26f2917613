"""The audit of the first step: what it finds, what it leaves alone, and which calls it audits."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import ArgumentError, AuditError, NoChunk, Pipe, RunError
from penstock.runtime.audit import digest, write_log
from penstock.runtime.audit.audited_call import Audit
from penstock.runtime.audit.digest import Digester
from penstock.stage.stage_runner import StageRunner

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64)


class Does(nn.Module):
    """A layer that computes a function of its input and of itself."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.function = linear(), function
        self.teacher = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("state", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


class Blocks(nn.Module):
    """A model that is traced: three layers, and a function between the last two."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks, self.function = nn.ModuleList(linear() for _ in range(3)), function

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](torch.tanh(self.blocks[0](x)))
        output: Tensor = self.blocks[2](self.function(self, x))
        return output


def piped(layer: nn.Module, **options: Any) -> Pipe:
    torch.manual_seed(0)
    given = {"chunks": 4, "stages": 2, "schedule": "1f1b", "loss_fn": mean_square, **options}
    if isinstance(layer, Blocks):
        given |= {"example": (rows(),), "balance": "parameters"}
        return Pipe(layer, devices=["cpu"] * 2, **given)
    return Pipe(nn.Sequential(linear(), layer, linear()), devices=["cpu"] * 2, **given)


def mean_square(output: Tensor, *target: Tensor) -> Tensor:
    return output.square().mean()


# ---- what it finds ---------------------------------------------------------------------------


def scale_of_thread(layer: nn.Module, x: Tensor) -> Tensor:
    return x * (3.0 if threading.current_thread() is threading.main_thread() else 1.0)


@pytest.mark.parametrize("kind", [Does, Blocks])
@pytest.mark.parametrize("door", ["step", "call"])
def test_value_of_the_callers_thread_is_found(door: str, kind: type[nn.Module]) -> None:
    pipe = piped(kind(scale_of_thread))
    with pytest.raises(AuditError, match="does not compute what the model computes"):
        (pipe.step if door == "step" else pipe)(rows())


def contrast(output: Tensor) -> Tensor:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def standardized(output: Tensor) -> Tensor:
    """Return a loss that is nan for one row: its deviation is none."""
    return ((output - output.mean(0)) / output.std(0)).clamp(min=-0.5).mean()


@pytest.mark.parametrize(
    "loss_fn",
    [contrast, lambda y: y.square().sum() / (8 * WIDTH), lambda y: y.sum(), standardized],
)
def test_loss_that_is_no_mean_over_rows_is_found(loss_fn: Callable[..., Tensor]) -> None:
    pipe = piped(linear(), loss_fn=loss_fn)
    for _ in range(2):  # the same step, tried again
        with pytest.raises(AuditError, match="depends on how it is split"):
            pipe.step(rows())


@pytest.mark.parametrize("chunks", [4, 8])
def test_loss_that_is_no_mean_over_rows_in_a_later_micro_batch_is_found(chunks: int) -> None:
    """Its first micro-batches have no zero in their mask, and each column has a mean of its own."""

    def loss_fn(output: Tensor, mask: Tensor) -> Tensor:
        return ((output.square() * mask).sum(0) / mask.sum(0).clamp(min=1)).mean()

    mask = torch.ones(8, WIDTH, dtype=torch.float64)
    mask[6, 1:] = 0
    pipe = piped(linear(), loss_fn=loss_fn, chunks=chunks)
    with pytest.raises(AuditError, match="depends on how it is split"):
        pipe.step(rows(), target=mask)
    pipe.step(rows(), target=torch.ones_like(mask))


def each(output: Tensor) -> Tensor:
    return output.square().mean(1)


def trimmed(output: Tensor, weight: Tensor) -> Tensor:
    losses = each(output).sort().values
    count = len(losses) // 4
    return losses[count : len(losses) - count].mean()


def flooded(output: Tensor, weight: Tensor) -> Tensor:
    loss = (each(output) * weight).mean()
    return (loss - 0.5).abs() + 0.5


def normalised(output: Tensor, weight: Tensor) -> Tensor:
    return (each(output) * (weight / weight.sum())).sum()


def of_numbers(output: Tensor, weight: Tensor) -> Tensor:
    return (each(output) * weight.where(weight > 0, torch.nan)).nanmean()


def chosen(output: Tensor, weight: Tensor) -> Tensor:
    """Choose by a number of the whole batch, after the loss has been computed."""
    loss = each(output).mean()
    return 2 * loss if weight.std() > 20 else loss


class NormalisedAndCounted(nn.Module):
    """Counts its calls in a buffer, which nothing reads."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, output: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        return normalised(output, weight)


@pytest.mark.parametrize(
    "loss_fn", [trimmed, flooded, normalised, of_numbers, chosen, NormalisedAndCounted()]
)
def test_loss_that_depends_on_the_split_later_is_found(loss_fn: Callable[..., Tensor]) -> None:
    """Of one or two rows they are means over rows, and of equal weights."""
    pipe = piped(linear(), loss_fn=loss_fn)
    equal = torch.full((8,), 40.0, dtype=torch.float64)
    x = rows()
    for _ in range(5):
        if loss_fn is not trimmed:
            pipe.step(x, target=equal)
    weight = 10 * torch.arange(8, dtype=torch.float64)
    # The side of the kink on which a micro-batch is shows before all losses are known.
    match = "is not a mean over" if loss_fn is flooded else "but the loss of the whole batch is"
    with pytest.raises((AuditError, RunError), match=match):
        pipe.step(x, target=weight)
    with pytest.raises((AuditError, RunError), match=r"not a mean over|depends on how it is split"):
        pipe.step(x, target=weight)  # not only once


def test_loss_that_is_not_proved_is_compared_without_a_trace() -> None:
    """It is called once more in each step, and what it keeps does not see that call."""
    seen = []

    def loss_fn(output: Tensor) -> Tensor:
        seen.append(len(output))
        return (each(output).sort().values + 0.1 * torch.rand(())).mean()

    def deterministic(output: Tensor) -> Tensor:
        seen.append(len(output))
        return each(output).sort().values.mean()

    for function in (loss_fn, deterministic):
        pipe = piped(linear(), loss_fn=function, checkpoint="never")
        seen.clear()
        for _ in range(3):
            pipe.step(rows())
        assert seen == [2] * 12


def goes_on(layer: nn.Module, x: Tensor) -> Tensor:
    """Go on from the hidden state of the last batch, row by row."""
    x = x + 0.5 * vars(layer).get("hidden", torch.zeros_like(x))
    layer.hidden = x.detach()
    return x


def warms_up(layer: nn.Module, x: Tensor) -> Tensor:
    layer.calls = vars(layer).get("calls", 0) + 1
    return x * min(1.0, layer.calls / 10)  # type: ignore[operator]


def follows(layer: nn.Module, x: Tensor) -> Tensor:
    """Move a teacher towards its student, as BYOL does."""
    with torch.no_grad():
        layer.get_parameter("linear.bias").mul_(0.9)
    return x


def centres(layer: nn.Module, x: Tensor) -> Tensor:
    """Subtract a running mean, as DINO does."""
    x = x - layer.get_buffer("state")
    layer.get_buffer("state").mul_(0.9).add_(0.1 * x.detach().mean())
    return x


def enqueues(layer: nn.Module, x: Tensor) -> Tensor:
    """Compare with earlier keys, as MoCo does. The list is changed in place."""
    keys: list[Tensor] = vars(layer).setdefault("_keys", [torch.zeros(WIDTH, dtype=x.dtype)])
    x = x + keys[-1]
    keys[-1] = x.detach().mean(0)
    return x


def starts_from_the_first_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """Set a parameter from the first rows that are seen, as Glow does."""
    teacher = layer.get_parameter("teacher")
    if not bool(teacher):
        with torch.no_grad():
            teacher.copy_(x.mean())
    return x - teacher


def reverses_more_and_more(layer: nn.Module, x: Tensor) -> Tensor:
    """Scale the gradient by a number that grows with each call. The output stays the same."""
    layer.calls = vars(layer).get("calls", 0) + 1
    scaled = x * layer.calls  # type: ignore[operator]
    return x.detach() + scaled - scaled.detach()


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Does(goes_on),
        lambda: Does(warms_up),
        lambda: Does(follows),
        lambda: Does(centres),
        lambda: Does(enqueues),
        lambda: Does(starts_from_the_first_rows),
        lambda: Does(reverses_more_and_more),
        lambda: nn.utils.spectral_norm(linear()),
    ],
    ids=[
        *("hidden", "calls", "parameter", "buffer", "queue", "first rows", "gradient"),
        "spectral norm",
    ],
)
def test_layer_that_computes_with_what_the_micro_batch_before_has_left_is_found(
    build: Callable[[], nn.Module], door: str
) -> None:
    """The unsplit model changes its state once for the batch. Each micro-batch changed it again."""
    pipe = piped(build(), checkpoint="never")
    with pytest.raises(AuditError, match="and that of the next one computes with it"):
        (pipe.step if door == "step" else pipe)(rows())
    piped(build(), checkpoint="never", chunks=1).step(rows())


class CentredLoss(nn.Module):
    """A loss that subtracts a running mean of the outputs, as that of DINO does."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor) -> Tensor:
        loss = (output - self.centre).square().mean()
        self.centre.mul_(0.9).add_(0.1 * output.detach().mean())
        return loss


def test_loss_that_computes_with_what_the_micro_batch_before_has_left_is_found() -> None:
    with pytest.raises(AuditError, match=r"changes CentredLoss\.centre, and that of the next one"):
        piped(linear(), loss_fn=CentredLoss()).step(rows())
    piped(linear(), loss_fn=CentredLoss(), chunks=1).step(rows())


class DrawsAlone(nn.Module):
    """A layer with random generators of its own, which also counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = linear(), 0
        self.generator, self.python = torch.Generator(), random.Random(0)
        self.numpy = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return self.linear(x + noise) * (self.python.random() + self.numpy.random())  # type: ignore[no-any-return]


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("deferred", [False, True])
def test_state_that_no_later_micro_batch_computes_with_is_accepted(
    door: str, deferred: bool
) -> None:
    """Counters, caches and running statistics are changed by each micro-batch."""
    norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    layer = nn.Sequential(norm, DrawsAlone(), Does(caches))
    pipe = piped(layer, checkpoint="never", deferred_batch_norm=deferred)
    (pipe.step if door == "step" else pipe)(rows())


def caches(layer: nn.Module, x: Tensor) -> Tensor:
    mask: Tensor = vars(layer).setdefault("mask", torch.linspace(0, 1, WIDTH, dtype=x.dtype))
    return x * mask


class Positions(nn.Module):
    """A model whose second input is a table for the words of a row, not for the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), linear())

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        output: Tensor = self.layers((x * table).mean(1))
        return output


@pytest.mark.parametrize("door", ["step", "call"])
def test_table_with_as_many_rows_as_the_batch_is_found(door: str) -> None:
    """Micro-batches of one row got one row of the table, which the multiplication repeated."""
    x, table = torch.randn(4, 4, WIDTH, dtype=torch.float64), rows(4)
    options: Any = {"stages": 2, "devices": ["cpu"] * 2, "loss_fn": mean_square}
    pipe = Pipe(Positions(), chunks=4, example=(x, table), **options)
    with pytest.raises(AuditError, match=r"Wrap it in penstock\.NoChunk"):
        (pipe.step if door == "step" else pipe)(x, table)
    pipe = Pipe(Positions(), chunks=4, example=(x, NoChunk(table)), **options)
    (pipe.step if door == "step" else pipe)(x, NoChunk(table))


def double_containers(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Sequential) else None


def test_hook_for_all_modules_that_is_registered_later_is_found() -> None:
    """A pipe does not call the Sequential itself, so the hook did not see its output."""
    pipe = piped(linear())
    pipe.step(rows())
    hook = nn.modules.module.register_module_forward_hook(double_containers)
    try:
        with pytest.raises(AuditError, match="the loss differs"):
            pipe.step(rows())
    finally:
        hook.remove()
    pipe.step(rows())


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_random_numbers_of_a_loss_are_those_of_the_reference(checkpoint: str) -> None:
    """The loss runs in the recomputation, after a forward that had drawn nothing."""

    def loss_fn(output: Tensor) -> Tensor:
        return functional.dropout(output).square().mean()

    for _ in range(2):
        piped(linear(), checkpoint=checkpoint, loss_fn=loss_fn, audit=1).step(rows())


class Switch:
    """A loss with a term that is no mean over rows, and that counts more later."""

    def __init__(self, way: str) -> None:
        self.way, self.weight = way, [0.0]

    def __call__(self, output: Tensor) -> Tensor:
        loss, term, weight = output.square().mean(), output.sum().square(), self.weight[0]
        if self.way == "condition":
            return loss + term if weight > 0.5 else loss
        if self.way == "tensor":
            return loss + torch.tensor(weight, dtype=loss.dtype) * term
        if self.way == "divided":
            return loss + term / (1 / weight if weight else 1e30)
        return loss + weight * term


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        ("condition", [1.0]),
        ("number", [1.0]),
        ("tensor", [1.0]),
        ("divided", [1.0]),
        ("number", [1e-12, 1e-12, 1e-9, 1e-6]),  # a term that is warmed up
    ],
)
def test_term_that_joins_the_loss_later_is_audited(way: str, weights: list[float]) -> None:
    loss_fn = Switch(way)
    pipe = piped(linear(), loss_fn=loss_fn)
    for weight in [0.0, 0.0, *weights[:-1]]:
        loss_fn.weight[0] = weight
        pipe.step(rows())
    loss_fn.weight[0] = weights[-1]
    for _ in range(2):
        with pytest.raises(AuditError, match="depends on how it is split"):
            pipe.step(rows())


def test_root_of_a_mean_is_audited_again() -> None:
    """Of equal rows it is the mean of the roots."""
    pipe = piped(linear(), loss_fn=lambda output: output.square().mean().sqrt())
    alike = rows()[:1].expand_as(rows()).contiguous()
    pipe.step(alike)
    pipe.step(alike)
    for _ in range(2):
        with pytest.raises(AuditError, match="depends on how it is split"):
            pipe.step(rows())


class Remembers(nn.Module):
    """A loss with state: a moving average, or a count, a sum and a log."""

    mean: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count, self.total = kind, 0, 0.0
        self.log: list[float] = []
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, output: Tensor) -> Tensor:
        mean = output.detach().mean(0)
        if self.kind == "buffer":
            self.mean.mul_(0.9).add_(0.1 * mean)
        elif self.kind == "assigned":
            self.mean = 0.9 * self.mean + 0.1 * mean
        elif self.kind == "number":
            self.total = 0.9 * self.total + 0.1 * mean.sum().item()
        else:
            self.count, self.total = self.count + 1, self.total + mean.sum().item()
            self.log.append(mean.sum().item())
        return output.square().mean()


@pytest.mark.parametrize("kind", ["buffer", "assigned", "number", "sums"])
def test_loss_whose_state_depends_on_the_order_needs_a_schedule_that_keeps_it(kind: str) -> None:
    in_order = piped(linear(), loss_fn=Remembers(kind), checkpoint="except_last")
    in_order.step(rows())
    pipe = piped(linear(), loss_fn=Remembers(kind), schedule="gpipe", checkpoint="except_last")
    if kind == "sums":
        pipe.step(rows())
        return
    with pytest.raises(AuditError, match=r"loss_fn keeps state .* in the order 3, 2, 1, 0"):
        pipe.step(rows())


def test_sum_is_right_with_its_reduction() -> None:
    assert piped(linear(), loss_fn=lambda y: y.sum(), reduction="sum").step(rows()).loss


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(WIDTH, dtype=torch.float64)])
def test_loss_that_mixes_rows_is_found_behind_dropout_and_batch_norm(layer: nn.Module) -> None:
    pipe = piped(layer, loss_fn=contrast)
    with pytest.raises(AuditError, match="depends on how it is split"):
        pipe.step(rows(16))


@pytest.mark.parametrize("kind", [Does, Blocks])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("change", [lambda x: x - x.mean(0), lambda x: x / x.std(0)])
def test_forward_that_mixes_rows_is_found(
    change: Callable[[Tensor], Tensor], door: str, kind: type[nn.Module]
) -> None:
    pipe = piped(kind(lambda _, x: change(x)))
    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        (pipe.step if door == "step" else pipe)(rows(16))


@pytest.mark.parametrize(
    ("method", "schedule"),
    [("forward", "gpipe"), ("backward", "1f1b"), ("backward_weights", "zb-h1")],
)
@pytest.mark.parametrize("runtime", ["threads", "inline"])
def test_wrong_cell_is_found(
    runtime: str, method: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a cell gets wrong: its output, a gradient, or a deferred gradient of a weight."""
    original = getattr(StageRunner, method)

    def wrong(self: StageRunner, microbatch: int, *args: Any) -> Any:
        result = original(self, microbatch, *args)
        if method == "forward":
            for payload in result.values():
                payload.tensors[0].mul_(1.01)
        elif self.parameters[0].grad is not None:
            self.parameters[0].grad.mul_(1.01)
        return result

    monkeypatch.setattr(StageRunner, method, wrong)
    pipe = piped(linear(), schedule=schedule, checkpoint="never", runtime=runtime)
    with pytest.raises(AuditError, match="differs by"):
        pipe.step(rows())


def test_wrong_gradient_of_a_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner._collect_grads

    def wrong(self: StageRunner, gradients: Any, totals: Any) -> None:
        original(self, tuple(None if g is None else 1.01 * g for g in gradients), totals)

    monkeypatch.setattr(StageRunner, "_collect_grads", wrong)
    loss = mean_square(piped(linear(), checkpoint="never")(rows()))
    with pytest.raises(AuditError, match=r"the gradient of .* differs by"):
        loss.backward()


class Remembered(nn.Module):
    """Keeps something of its last input in a buffer that no output depends on."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(scale_of_thread(self, x.detach().mean(0)))
        return x


@pytest.mark.parametrize("door", ["step", "call"])
def test_wrong_buffer_is_found(door: str) -> None:
    pipe = piped(Remembered(), checkpoint="never", chunks=1)
    with pytest.raises(AuditError, match=r"the buffer '1\.last' differs by"):
        (pipe.step if door == "step" else pipe)(rows())


def test_error_comes_before_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = piped(linear(), audit=2)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    pipe.step(rows(), optimizer=optimizer)
    before = copy.deepcopy(pipe.state_dict())
    factors, digest = itertools.count(1), Digester.digest
    monkeypatch.setattr(Digester, "digest", lambda self, t: digest(self, t * next(factors)))
    with pytest.raises(AuditError, match="The optimizer has not stepped"):
        pipe.step(rows(), optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


# ---- what it leaves alone --------------------------------------------------------------------


def draws(layer: nn.Module, x: Tensor) -> Tensor:
    return functional.dropout(x, 0.3) + torch.rand_like(x)


def counts(layer: nn.Module, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1  # type: ignore[assignment]
    return x


def writes(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.get_parameter("teacher").add_(1)
    return x


def remembers(layer: nn.Module, x: Tensor) -> Tensor:
    layer.get_buffer("state").add_(x.detach().mean())
    return x


def make_closure() -> Callable[..., Tensor]:
    calls = 0

    def count(layer: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return count


def make_function_attribute() -> Callable[..., Tensor]:
    def count(layer: nn.Module, x: Tensor) -> Tensor:
        vars(count)["calls"] = vars(count).get("calls", 0) + 1
        return x * float(vars(count)["calls"])

    return count


def make_iterator() -> Callable[..., Tensor]:
    source = itertools.count(1)
    return lambda layer, x: x * next(source)


def make_array() -> Callable[..., Tensor]:
    total = numpy.zeros(())

    def count(layer: nn.Module, x: Tensor) -> Tensor:
        total[...] += 1
        return x * float(total)

    return count


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def make_slots() -> Callable[..., Tensor]:
    state = Slots()

    def count(layer: nn.Module, x: Tensor) -> Tensor:
        state.calls += 1
        return x * state.calls

    return count


class CountsCalls:
    """An object that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


TOTAL = {"calls": 0}


def count_globally(layer: nn.Module, x: Tensor) -> Tensor:
    TOTAL["calls"] += 1
    return x * TOTAL["calls"]


def make_global() -> Callable[..., Tensor]:
    TOTAL["calls"] = 0
    return count_globally


class CountsInClass(nn.Module):
    """A layer that counts its calls in its class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsInClass.calls += 1
        return x * CountsInClass.calls


def make_class() -> nn.Module:
    CountsInClass.calls = 0
    return CountsInClass()


COUNTERS = [
    make_closure,
    make_function_attribute,
    make_iterator,
    make_array,
    make_slots,
    CountsCalls,
    make_global,
    make_class,
]


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("make", COUNTERS)
def test_audit_does_not_advance_state_outside_of_modules(
    make: Callable[[], Any], door: str
) -> None:
    """The forward of the audit counted, too, and the next step computed with another number."""
    losses = []
    for audit in ("off", "first"):
        torch.manual_seed(0)
        counter = make()
        layer = counter if isinstance(counter, nn.Module) else Does(counter)
        pipe = piped(layer, chunks=1, checkpoint="never", runtime="inline", audit=audit)
        for _ in range(2):
            loss = pipe.step(rows()).loss if door == "step" else pipe(rows()).sum().detach()
            losses.append(float(loss))
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize("make", COUNTERS)
def test_state_outside_of_modules_that_a_later_micro_batch_computes_with_is_found(
    make: Callable[[], Any],
) -> None:
    counter = make()
    layer = counter if isinstance(counter, nn.Module) else Does(counter)
    with pytest.raises(AuditError, match="and that of the next one computes with it"):
        piped(layer, checkpoint="never", runtime="inline").step(rows())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: (n for n in range(1, 99)).__next__, "generator"),
        (lambda: itertools.count(1).__next__, "count"),
        (lambda: partial(next, itertools.count(1)), "count"),
        (lambda: map(int, range(1, 99)).__next__, "map"),
    ],
)
def test_model_with_an_iterator_that_cannot_be_copied_is_not_audited(
    make: Callable[[], Callable[[], int]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was only logged, and each micro-batch computed with another number."""
    advance = make()
    is_on = True
    layer = Does(lambda _, x: x * advance() if is_on else x)
    pipe = piped(layer, checkpoint="never", runtime="inline")
    with caplog.at_level(logging.WARNING, "penstock"):
        for count in (4, 9):  # of four micro-batches each, and the next line
            with pytest.raises(AuditError, match=rf"advances an iterator \({name}\)"):
                pipe.step(rows())
            assert advance() == count + 1
        is_on = False
        pipe.step(rows())
    (record,) = caplog.records
    assert f"a layer or the loss uses a {name}" in record.getMessage()


GENERATOR = torch.Generator()


def draws_alone(layer: nn.Module, x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=GENERATOR, dtype=x.dtype)


def draws_on_host(layer: nn.Module, x: Tensor) -> Tensor:
    return x * random.random()


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "layer",
    [
        Does(draws),
        Does(counts),
        Does(writes),
        Does(remembers),
        Does(draws_alone),
        Does(draws_on_host),
        nn.BatchNorm1d(WIDTH, dtype=torch.float64),
        Blocks(draws),
    ],
    ids=lambda layer: getattr(getattr(layer, "function", layer), "__name__", "norm"),
)
def test_audit_leaves_no_trace(
    layer: nn.Module, door: str, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small parameters are copied before the audit, and others when something writes to them."""
    monkeypatch.setattr(write_log, "_SMALL_BYTES", small_bytes)
    found = []
    for audit in ("off", "first"):
        random.seed(3)
        pipe = piped(copy.deepcopy(layer), checkpoint="never", runtime="inline", audit=audit)
        x, parameters = rows().requires_grad_(), list(pipe.parameters())
        parameters[0].grad = torch.ones_like(parameters[0])
        GENERATOR.manual_seed(5)
        if door == "step":
            loss = pipe.step(x).loss
        else:
            loss = pipe(x).square().mean()
            loss.backward()
        assert x.grad is not None
        state = [loss.detach(), x.grad, torch.get_rng_state(), GENERATOR.get_state()]
        state.append(torch.tensor(random.random()))
        gradients = [p.grad for p in parameters if p.grad is not None]
        attributes = [vars(module).get("calls") for module in pipe.modules()]
        found.append(([*state, *gradients, *pipe.state_dict().values()], attributes))
    (plain, plain_attributes), (audited, audited_attributes) = found
    assert all(map(torch.equal, plain, audited))
    assert plain_attributes == audited_attributes


class Cubes(torch.autograd.Function):
    """A function of which the audit sees no operation inside, perhaps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if float(torch.ones_like(x).sum()) < 2 * WIDTH:
            parameter.data.add_(1)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 3 * x**2, None


def writes_for_one_row(layer: Any, x: Tensor) -> Tensor:
    if len(x) == 1:
        layer.teacher.data.add_(1)
    return x


def writes_after_a_number(layer: Any, x: Tensor) -> Tensor:
    if float(torch.ones_like(x).sum()) < 2 * WIDTH:
        layer.teacher.data.add_(1)
    return x


def adds_nothing_for_two_rows(layer: Any, x: Tensor) -> Tensor:
    layer.teacher.data.add_(2 * WIDTH - torch.ones_like(x).sum())
    return x


def writes_in_a_function(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = Cubes.apply(x, layer.teacher)  # type: ignore[no-untyped-call]
    return output


class WritesInBackward(torch.autograd.Function):
    """A function whose backward counts its calls in a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.parameter.data.add_(1)
        return gradients[0], None


def writes_in_a_backward(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = WritesInBackward.apply(x, layer.teacher)  # type: ignore[no-untyped-call]
    return output


def writes_in_eval_mode(layer: Any, x: Tensor) -> Tensor:
    if layer.training:  # this draw has no fixed result, so that rows are compared in eval mode
        return x * x.new_ones(()).geometric_(0.5)
    layer.teacher.data.add_(1)
    return x


def writes_for_a_host_draw(layer: Any, x: Tensor) -> Tensor:
    if random.random() < 0.3:
        layer.teacher.data.add_(1)
    return x


def writes_for_the_batch(layer: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        if bool(torch.ones_like(x).sum() > 2 * WIDTH):
            layer.teacher.data.add_(1)
    return x


def counts_and_writes_for_later_rows(layer: Any, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    if bool((x.abs() > 100).any()):
        layer.teacher.data.add_(1)
    return x


@pytest.mark.parametrize(
    "function",
    [
        writes_for_one_row,
        writes_after_a_number,
        adds_nothing_for_two_rows,
        writes_in_a_function,
        writes_in_a_backward,
        writes_in_eval_mode,
        writes_for_a_host_draw,
        writes_for_the_batch,
        counts_and_writes_for_later_rows,
    ],
)
def test_what_other_rows_write_to_parameters_is_put_back(
    function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward of a micro-batch writes nothing, and that of a row or of the batch does."""
    monkeypatch.setattr(write_log, "_SMALL_BYTES", 0)
    for seed in range(4):
        found = []
        for audit in ("off", "first"):
            layer = Does(function)
            pipe = piped(layer, checkpoint="never", runtime="inline", audit=audit)
            random.seed(seed)
            x = rows()
            x[2:4] *= 1e4
            pipe.step(x)
            found.append(layer.teacher.item())
        assert found[0] == found[1]


@pytest.mark.parametrize("row_count", [1, 8])
def test_what_a_loss_writes_to_parameters_is_put_back(
    row_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss function for micro-batches of two rows, which writes for other numbers of rows."""
    monkeypatch.setattr(write_log, "_SMALL_BYTES", 0)
    layer = Does(lambda _, x: x)

    def loss_fn(output: Tensor) -> Tensor:
        if len(output) == row_count:
            layer.teacher.data.add_(1)
        # No proof of a mean over rows, so it is compared with that of the whole batch.
        return output.square().flatten().sort().values.mean()

    piped(layer, loss_fn=loss_fn, checkpoint="never", runtime="inline").step(rows())
    assert layer.teacher == 0


def test_parameters_that_are_nan_are_not_written() -> None:
    """A write would raise the version of the parameter, and graphs of the caller would be void."""
    pipe = piped(linear(), checkpoint="never")
    parameter = next(pipe.parameters())
    with torch.no_grad():
        parameter.fill_(math.nan)
    version = parameter._version
    pipe.step(rows())
    assert parameter._version == version


def test_digest_does_not_depend_on_the_tensors_beside() -> None:
    """Small tensors of one size are digested together."""
    tensors = {n: torch.randn(5, n % 2 + 2, dtype=torch.float64) for n in range(7)}
    tensors[7], tensors[8] = torch.randn(0), torch.randn(99, 99)
    together = Digester().digest_all(tensors)
    for key, tensor in tensors.items():
        assert Digester().digest_all({key: tensor}) == {key: together[key]}
        product, norm = Digester().compute_sums(tensor).tolist()
        assert together[key] == pytest.approx((product, norm**0.5), rel=1e-5)


def test_state_and_hooks_outside_of_the_model_see_the_step_once() -> None:
    """What a loss function counts, hooks on parameters, and the generators of Python."""
    pipe = piped(linear(), checkpoint="never")
    seen: list[int] = []
    hooks: list[Tensor] = []

    def loss_fn(output: Tensor) -> Tensor:
        seen.append(len(output))
        return mean_square(output)

    next(pipe.parameters()).register_hook(hooks.append)
    state = random.getstate()
    pipe.step(rows(), loss_fn=loss_fn)
    assert (seen, len(hooks)) == ([2, 2, 2, 2], 1)
    assert random.getstate() == state


def test_audit_of_a_call_warns_of_nothing() -> None:
    """PyTorch warns when a number of a graph is read, and that ended the comparison of parts."""
    pipe = piped(linear(), checkpoint="never")
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe(rows()).sum().backward()
    finally:
        torch.set_warn_always(False)
    assert not caught


def test_buffer_that_is_assigned_between_units_is_no_difference() -> None:
    class Counts(Blocks):
        total: Tensor

        def __init__(self) -> None:
            super().__init__(lambda _, x: x)
            self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x.detach().mean(0)
            return super().forward(x)

    assert piped(Counts()).step(rows()).loss


def test_unsplit_model_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def only_in_a_worker(layer: nn.Module, x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            raise ValueError("not here")
        return x

    pipe = piped(Does(only_in_a_worker))
    with caplog.at_level(logging.WARNING, "penstock"):
        pipe.step(rows())
        pipe.step(rows(), loss_fn=lambda y: y.mean())
    assert [record.getMessage().count("not here") for record in caplog.records] == [1]


# ---- which calls it audits -------------------------------------------------------------------


def test_first_step_of_each_kind_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    audited: list[int] = []
    original = Audit.run_reference

    def run_reference(self: Audit, loss: Any) -> None:
        audited.append(1)
        original(self, loss)

    monkeypatch.setattr(Audit, "run_reference", run_reference)

    def count(call: Callable[[], object]) -> int:
        audited.clear()
        call()
        return len(audited)

    pipe = piped(linear())
    assert count(lambda: pipe.step(rows())) == 1
    assert count(lambda: pipe.step(rows(12))) == 0  # another size is no other kind
    losses = [count(lambda: pipe.step(rows(), loss_fn=lambda y: y.mean())) for _ in range(3)]
    assert losses == [1, 0, 0]  # a new lambda of the same code is none either
    assert count(lambda: pipe.step(rows(), target=rows())) == 1
    assert count(lambda: pipe(rows())) == 1
    assert count(pipe.eval) == 0
    assert count(lambda: pipe.step(rows())) == 1
    with torch.no_grad():
        assert count(lambda: pipe.step(rows())) == 0
    copied = copy.deepcopy(pipe).train()
    assert count(lambda: copied.step(rows())) == 1
    every_third = piped(linear(), audit=3)
    assert [count(lambda: every_third.step(rows())) for _ in range(6)] == [1, 0, 1, 0, 0, 1]
    off = piped(linear(), audit="off")
    assert count(lambda: off.step(rows())) == 0


def test_loss_that_uses_float32_in_a_float64_model() -> None:
    """The label smoother of transformers adds up in float32, and evaluations were refused."""

    def smooth(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean(1).sum(dtype=torch.float32).double() / len(output)

    pipe = piped(linear())
    x, y = rows(999), rows(999)
    with torch.no_grad():
        result = pipe.eval().step(x, target=y, loss_fn=smooth)
    assert result.loss.item() == pytest.approx(smooth(pipe(x), y).item(), rel=1e-6)


class Caches(Blocks):
    """Returns a cache in an object, unless it is turned off, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: x)
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Any:
        has_cache = self.config.use_cache if use_cache is None else use_cache
        y = super().forward(x)
        return {"y": y, "cache": SimpleNamespace(values=y)} if has_cache else {"y": y}


def test_cache_that_only_the_unsplit_model_returns() -> None:
    """The audit found `pipe(x)` of any decoder of transformers wrong, unless its config said so."""
    model, x = Caches(), rows()
    pipe = Pipe(model, 2, stages=2, devices=["cpu", "cpu"], example=x, balance="parameters")
    output = pipe(x)
    assert output.keys() == {"y"}
    output["y"].square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x)["y"].square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("audit", ["always", 0, True, None])
def test_unknown_audit_is_refused(audit: Any) -> None:
    with pytest.raises(ArgumentError, match="audit must be 'first', 'off' or a positive number"):
        piped(linear(), audit=audit)


def test_integers_have_the_rounding_of_float64() -> None:
    assert digest.find_rounding([]) == digest.find_rounding([torch.float64])
    assert digest.find_rounding([torch.int64]) == digest.find_rounding([torch.float64])


def test_float32_has_the_rounding_of_float16_where_gpus_compute_in_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Convolutions of a U-Net on two shares of a GPU differed by 8e-4 in their gradients."""
    monkeypatch.setattr(digest, "may_use_tf32", lambda device_type: device_type == "cuda")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert digest.find_rounding([torch.float32], [cpu]) == digest.find_rounding([torch.float32])
    assert digest.find_rounding([torch.float32], [cpu, gpu]) == digest.find_rounding(
        [torch.float16]
    )
    assert digest.find_rounding([torch.float64], [gpu]) == digest.find_rounding([torch.float64])


class LongMean(nn.Module):
    """A layer that mixes rows if they are long. What it returns has the same shape for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        output: Tensor = x - x.mean(0 if x.shape[1] > 6 else 1, keepdim=True)
        return output[:, 0]


class LongModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = LongMean(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x))
        return output


@pytest.mark.parametrize("earlier", [(5,), (5, 6, 4)])
def test_length_by_which_a_unit_goes_is_a_new_kind(earlier: tuple[int, ...]) -> None:
    """Nothing that goes between the stages shows the length."""

    def build_batch(length: int) -> Tensor:
        return torch.randn(8, length, WIDTH, dtype=torch.float64)

    pipe = Pipe(
        LongModel(),
        4,
        stages=2,
        devices=["cpu"] * 2,
        balance="parameters",
        loss_fn=lambda output: output.square().mean(),
        example=build_batch(earlier[0]),
    )
    for length in earlier:
        pipe.step(build_batch(length))
    with pytest.raises(AuditError, match="depends on how it is split"):
        pipe.step(build_batch(9))


class FlatWeights(nn.Module):
    """A layer whose parameters are views of one memory. Its forward halves one of them."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(1.0, WIDTH * WIDTH + WIDTH + 1, dtype=torch.float64)
        self.weight = nn.Parameter(memory[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        self.bias = nn.Parameter(memory[WIDTH * WIDTH :])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("small_bytes", [0, 2 << 20])
def test_parameters_that_are_views_of_one_memory_are_put_back(
    small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_log, "_SMALL_BYTES", small_bytes)
    weights = []
    for audit in ("off", "first"):
        layer = FlatWeights()
        pipe = piped(layer, checkpoint="never", runtime="inline", audit=audit)
        with torch.no_grad(), suppress(AuditError):  # the next micro-batch computes with them
            pipe(rows())
        weights.append(layer.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_step_holds_no_tensors_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    original = Audit.run_reference

    def note(self: Audit, *args: Any) -> None:
        original(self, *args)
        assert self._forward is not None
        kept.append((self._forward.operations, self._forward.row_watch._constants))

    monkeypatch.setattr(Audit, "run_reference", note)
    layer = Does(lambda layer, x: x + torch.arange(WIDTH))
    piped(layer, audit="first").step(rows())
    assert kept == [(None, {})]
