"""Rows that depend on each other: which tests of the audit find them, and what is left alone."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, PenstockError, Pipe, RunError, Weighted
from penstock.runtime.audit.audited_call import Audit
from penstock.runtime.audit.reference import Reference
from penstock.stage.rng import CellRngMode
from penstock.stage.row_counts import RowCounts
from tests.oracle import closely

WIDTH, ROWS = 6, 16
Function = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("double")


def rows(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """A layer that computes a function of its rows."""

    def __init__(self, function: Function, trains_only: bool = False) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.trains_only = trains_only

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return self.function(x) if self.training or not self.trains_only else x


def layers(*middle: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def made(model: nn.Module, **options: Any) -> Pipe:
    torch.manual_seed(0)
    options = {"chunks": 4, "stages": 2, "schedule": "gpipe", "audit": "first", **options}
    if not isinstance(model, nn.Sequential):
        options |= {"balance": "parameters"}
        options.setdefault("example", (rows(),))
    return Pipe(model, devices=["cpu"] * 2, **options)


def run(model: Any, door: str, seed: int = 1) -> Tensor:
    """Make one step, without an optimizer."""
    return run_on(model, door, rows(seed))


def run_on(model: Any, door: str, x: Tensor) -> Tensor:
    if door == "step":
        loss: Tensor = model.step(x, target=rows(9), loss_fn=nn.MSELoss()).loss
        return loss
    loss = functional.mse_loss(model(x), rows(9))
    loss.backward()
    return loss.detach()


def expect_equal(model: nn.Module, door: str, steps: int = 2, **options: Any) -> None:
    """Compare some steps of a model as a pipe with the unsplit model."""
    unsplit = copy.deepcopy(model)
    pipe = made(model, **options)
    for seed in range(steps):
        expected = functional.mse_loss(unsplit(rows(seed)), rows(9))
        expected.backward()
        assert closely(run(pipe, door, seed), expected.detach())
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        if ours.grad is not None or theirs.grad is not None:
            assert_close(ours, theirs)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.grad is not None
    assert theirs.grad is not None
    assert closely(ours.grad, theirs.grad)


# ---- layers that mix rows ----------------------------------------------------------------------


class HandWrittenNorm(nn.Module):
    """Normalises over the batch in training, and with running statistics otherwise."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


def shuffle(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "middle",
    [
        lambda: [HandWrittenNorm()],
        lambda: [HandWrittenNorm(), nn.Dropout(0.3)],
        lambda: [HandWrittenNorm(), nn.BatchNorm1d(WIDTH)],
        lambda: [Layer(lambda x: x - x.mean(0), trains_only=True), nn.Dropout(0.3)],
        lambda: [Layer(shuffle, trains_only=True)],
    ],
    ids=["norm", "norm and dropout", "norm and BatchNorm", "in training only", "mixup"],
)
def test_layer_that_mixes_rows_in_training_is_found(
    middle: Callable[[], list[nn.Module]], door: str
) -> None:
    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        run(made(layers(*middle())), door)


def sort_rows(x: Tensor) -> Tensor:
    return x[x[:, 0].argsort()]


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("audit", ["first", 2])
def test_rows_that_are_sorted_are_found_in_groups(door: str, audit: Any) -> None:
    """Two rows may be in order by chance. Micro-batches of many rows have groups in any audit."""
    rows_per_microbatch = 32 if audit == "first" else 4
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 4 * rows_per_microbatch, WIDTH, generator=generator)
    pipe = made(layers(Layer(sort_rows)), audit=audit, loss_fn=nn.MSELoss())

    def run_twice() -> None:
        for _ in range(2):
            _ = pipe.step(x, target=target) if door == "step" else pipe(x)

    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        run_twice()


def test_layer_that_mixes_more_rows_than_a_micro_batch_has_is_found_every_n_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def center_many(x: Tensor) -> Tensor:
        return x - x.mean(0) if math.log2(x.shape[0]) > 2 else x

    # As if the number of rows were read in a way that is not known.
    monkeypatch.setattr(RowCounts, "note_plain", lambda counts: None)
    pipe = made(layers(Layer(center_many)), audit=3)
    for _ in range(2):
        run(pipe, "step")
    with pytest.raises(AuditError, match="depends on how it is split"):
        run(pipe, "step")


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "is_large",
    [
        lambda x: 0.5 * x.shape[0] > 4,
        lambda x: math.log(x.shape[0]) > 2,
        lambda x: x.shape.numel() > 8 * WIDTH,
        lambda x: sum(1 for _ in range(x.shape[0])) > 8,
        lambda x: str(x.size(0)) == "16",
        lambda x: x.nbytes > 8 * 8 * WIDTH,
        lambda x: x.untyped_storage().nbytes() > 8 * 8 * WIDTH,
        lambda x: torch.ones(x.shape[0]).sum() > 8,
        lambda x: numpy.sqrt(x.shape[0]) > 3,  # it does not take such a number
    ],
)
def test_branch_on_a_number_that_is_computed_from_the_rows(is_large: Any, door: str) -> None:
    """A micro-batch has 4 rows, and the few rows that are tried together have two."""
    pipe = made(layers(Layer(lambda x: x - x.mean(0) if is_large(x) else x)), loss_fn=None)
    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        run(pipe, door)


class ByPosition(nn.Module):
    """A layer with a table, which it takes by the positions of rows in a batch."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.table, self.scale = nn.Parameter(torch.ones(32, 1)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def change_row(layer: ByPosition, x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = x[0] * layer.scale
    return y


def mask_late_rows(layer: ByPosition, x: Tensor) -> Tensor:
    return x * (1 + (torch.arange(x.shape[0]) > 8)[:, None])


def mask_late_rows_with_its_own_dtype(layer: ByPosition, x: Tensor) -> Tensor:
    is_late = (torch.arange(x.shape[0]) > 8).to(torch.bool)
    return x * (1 + is_late.to(x.dtype).contiguous()[:, None])


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda layer, x: x * layer.table[: len(x)],
        lambda layer, x: x * layer.table[: x.shape[0]],
        lambda layer, x: x * layer.table.narrow(0, 0, x.shape[0]),
        lambda layer, x: x * layer.table[torch.arange(x.shape[0])],
        lambda layer, x: x * functional.embedding(torch.arange(x.shape[0]), layer.table),
        lambda layer, x: torch.cat([x[:1] * layer.scale, x[1:]]),
        change_row,
        mask_late_rows,
        mask_late_rows_with_its_own_dtype,
        lambda layer, x: x * (1 + (torch.ones_like(x).cumsum(0) > 8)),
    ],
)
def test_numbers_that_go_by_the_position_of_a_row(
    function: Any, is_traced: bool, door: str
) -> None:
    """The tables hold equal numbers so far, and no micro-batch has a row 9."""
    model = layers(ByPosition(function))
    if is_traced:
        model = Wrapped(model)
    pipe = made(model)
    with pytest.raises(AuditError):
        run(pipe, door)


class Wrapped(nn.Module):
    """A model that is no Sequential."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "function",
    [
        lambda layer, x: x[torch.arange(x.shape[0]), :],
        lambda layer, x: x.gather(1, x.argsort(1)) + x[torch.arange(len(x)), x.argmax(1)][:, None],
        lambda layer, x: x * layer.table[: x.shape[1], 0] + torch.arange(x.shape[1]),
        lambda layer, x: x + torch.zeros(x.shape[0], 1) * torch.ones_like(x),
        lambda layer, x: torch.stack([x, 2 * x]).unbind()[0] + torch.stack([x, x])[1],
    ],
)
def test_positions_that_are_not_those_of_rows_are_equal(function: Any, door: str) -> None:
    expect_equal(layers(ByPosition(function)), door)


@pytest.mark.parametrize(
    "loss_factor",
    [
        lambda x: 1 + (0.5 * x.shape[0] > 4),
        lambda x: 1 + (math.log(x.shape[0]) > 2),
        lambda x: 1 + (x.shape.numel() > 8 * WIDTH),
        lambda x: 1 + (x.nbytes > 8 * 8 * WIDTH),
    ],
)
def test_loss_that_goes_by_a_number_that_is_computed_from_the_rows(loss_factor: Any) -> None:
    def compute_loss(output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = functional.mse_loss(output, target) * loss_factor(output)
        return loss

    pipe = made(layers(nn.Linear(WIDTH, WIDTH)), loss_fn=compute_loss)
    for _ in range(2):
        with pytest.raises(AuditError, match="the loss of the whole batch is"):
            pipe.step(rows(), target=rows(2))


def test_model_that_converts_a_mask_to_its_own_dtype_is_audited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The conversion returns the mask itself."""
    layer = Layer(lambda x: x + torch.zeros(x.shape[0], 1).to(x.dtype).contiguous())
    pipe = made(layers(layer), loss_fn=nn.MSELoss())
    pipe.step(rows(), target=rows(2))
    assert "was not compared" not in caplog.text


def test_model_that_takes_plain_sizes_only_is_audited(caplog: pytest.LogCaptureFixture) -> None:
    """NumPy does not take a size that knows of other numbers of rows."""
    layer = Layer(lambda x: x + float(numpy.sqrt(x.shape[1])) + 0 * float(numpy.log(x.shape[0])))
    pipe = made(layers(layer), loss_fn=nn.MSELoss())
    pipe.step(rows(), target=rows(2))
    assert "was not compared" not in caplog.text


@pytest.mark.parametrize("door", ["step", "call"])
def test_steps_after_the_first_run_nothing_more(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, count, original = list[int](), 0, Reference.run_forward

    def run_forward(self: Reference, *args: Any, **kwargs: Any) -> Any:
        calls.append(count)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Reference, "run_forward", run_forward)
    pipe = made(layers(nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)))
    for number in range(1, 40):
        count = number
        run(pipe, door, number)
    assert set(calls) == {1}


def test_groups_are_compared_every_n_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, count = list[int](), 0
    monkeypatch.setattr(Audit, "check_groups", lambda self: calls.append(count))
    pipe = made(layers(), audit=3)
    for number in range(1, 8):
        count = number
        run(pipe, "step")
    assert calls == [3, 6]


def test_forwards_without_state_share_an_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that keeps something starts each of them as it was before the step."""
    calls, original = list[nn.Module](), Reference._put_state_aside

    def put_state_aside(self: Reference, *args: Any) -> Any:
        calls.append(self.modules[0])
        return original(self, *args)

    monkeypatch.setattr(Reference, "_put_state_aside", put_state_aside)
    counts = []
    for middle in (nn.Dropout(0.1), nn.BatchNorm1d(WIDTH), Counts(False, is_read=False)):
        calls.clear()
        run(made(layers(middle)), "step")
        counts.append(len(calls))
    assert counts[:2] == [1, 1]  # for the unsplit micro-batch and the rows together
    assert counts[2] > 4


# ---- backwards that mix rows -------------------------------------------------------------------


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / gradient.norm()


normalise: Any = Normalised.apply


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -0.3 * gradient


def with_node_hook(method: str) -> Function:
    def normalise(gradients: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
        return tuple([None if g is None else g / g.norm() for g in gradients])

    def function(x: Tensor) -> Tensor:
        y = 1.0 * x
        if y.grad_fn is not None:
            getattr(y.grad_fn, method)(normalise)
        return 1.0 * y

    return function


def with_hook(hook: Function) -> Function:
    def function(x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(hook)
        return x

    return function


def mean_of_gradients(x: Tensor) -> Tensor:
    return x + x.mean(0) - x.mean(0).detach()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "function",
    [
        Normalised.apply,
        with_hook(lambda g: g / g.norm()),
        with_hook(lambda g: g / g.numel() ** 0.5),
        with_node_hook("register_hook"),
        with_node_hook("register_prehook"),
        mean_of_gradients,
    ],
    ids=["autograd.Function", "hook", "number of rows", "node", "prehook of a node", "detach"],
)
def test_backward_that_mixes_rows_is_found(function: Function, door: str, checkpoint: str) -> None:
    with pytest.raises(AuditError, match=r"So the backward mixes rows, or depends on their number"):
        run(made(layers(Layer(function)), checkpoint=checkpoint), door)


def test_loss_whose_gradient_mixes_rows_is_found() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        products = output.T @ output
        return functional.mse_loss(output, target) + (products - products.detach()).sum()

    with pytest.raises(AuditError, match="So the backward mixes rows"):
        made(layers(), loss_fn=loss_fn).step(rows(), target=rows(2))


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "function",
    [
        Reversed.apply,
        with_hook(lambda g: g.clamp(-1e-3, 1e-3)),
        with_hook(lambda g: g * (30 / g.norm(dim=1, keepdim=True)).clamp(max=1)),
        lambda x: x + (x.round() - x).detach(),
    ],
    ids=["reversed", "clipped", "rows clipped by norm", "straight through"],
)
def test_backward_of_each_row_by_itself_is_equal(function: Function, door: str) -> None:
    torch.manual_seed(0)
    expect_equal(layers(Layer(function)), door)


class ClippedByNorm(torch.autograd.Function):
    """Clips gradients that are a hundred times as large as those of the tests, by their norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return clip_by_norm(gradient)


def clip_by_norm(gradient: Any) -> Any:
    return gradient * (100 / (gradient.norm() + 1e-12)).clamp(max=1)


class ClipsWeight(nn.Linear):
    """Clips the gradient of its weight by value, before it reaches the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        weight = with_hook(lambda gradient: gradient.clamp(-100, 100))(self.weight)
        return functional.linear(x, weight, self.bias)


def clip_in_module_hook() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.register_full_backward_hook(lambda _, inputs, __: tuple(map(clip_by_norm, inputs)))
    return linear


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Layer(ClippedByNorm.apply),
        lambda: Layer(with_hook(clip_by_norm)),
        lambda: ClipsWeight(WIDTH, WIDTH),
        clip_in_module_hook,
    ],
    ids=["autograd.Function", "tensor", "weight", "module"],
)
def test_backward_that_would_clip_larger_gradients_is_found_in_the_first_step(
    build: Callable[[], nn.Module], door: str, checkpoint: str
) -> None:
    """A later step may have such gradients, and would clip those of each micro-batch."""
    with pytest.raises(AuditError, match="is not the sum of those for two parts of them"):
        run(made(layers(build()), checkpoint=checkpoint), door)
    run(made(layers(build()), checkpoint=checkpoint, chunks=1), door)


def test_larger_gradients_that_are_infinite_prove_nothing() -> None:
    """The gradients of half precision overflow, and a layer need not go on with such numbers."""

    def hook(gradient: Tensor) -> Tensor:
        return gradient.half().to(gradient.dtype)

    expect_equal(layers(Layer(with_hook(lambda g: 1e3 * hook(1e-3 * g)))), "step")
    model = layers(Layer(with_hook(lambda g: hook(1e4 * g) * 1e-4)))
    run(made(model), "step")


class LocalLoss(nn.Module):
    """A layer that learns from a loss of its own, in its forward."""

    def __init__(self, reduce: Function) -> None:
        super().__init__()
        self.linear, self.critic, self.reduce = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), reduce

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if torch.is_grad_enabled():
            self.reduce(self.critic(x.detach()).square()).backward()
        return x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("door", ["step", "call"])
def test_layer_that_calls_backward_on_a_mean_in_its_forward_is_found(
    door: str, checkpoint: str
) -> None:
    pipe = made(layers(LocalLoss(torch.mean)), checkpoint=checkpoint)
    with pytest.raises(AuditError, match="a forward calls backward by itself, on a mean"):
        run(pipe, door)
    model = layers(LocalLoss(torch.sum))
    expected = copy.deepcopy(model)
    functional.mse_loss(expected(rows()), rows(9)).backward()
    run(made(model, checkpoint=checkpoint), "step")
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)


def note_gradient(layer: Any, _: Any, gradients: Any) -> None:
    layer.note(gradients[0])


class Fisher(nn.Linear):
    """A layer whose backward hook keeps squares of gradients in a buffer, as EWC does."""

    fisher: Tensor

    def __init__(self, reduce: Function, hook: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("fisher", torch.zeros(WIDTH))
        self.reduce, self.hook = reduce, hook
        if hook == "module":
            self.register_full_backward_hook(note_gradient)

    def note(self, gradient: Tensor) -> None:
        self.fisher += self.reduce(gradient.square())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.hook == "tensor" and x.requires_grad:
            x.register_hook(self.note)
        return x


@pytest.mark.parametrize("hook", ["module", "tensor"])
@pytest.mark.parametrize("door", ["step", "call"])
def test_buffer_to_which_a_backward_adds_a_mean_over_rows_is_found(door: str, hook: str) -> None:
    pipe = made(layers(Fisher(lambda x: x.mean(0), hook)), checkpoint="never")
    with pytest.raises(AuditError, match=r"what a backward adds to '1\.fisher'"):
        run(pipe, door)
    model = layers(Fisher(lambda x: x.sum(0), hook))
    expected = copy.deepcopy(model)
    functional.mse_loss(expected(rows()), rows(9)).backward()
    run(made(model, checkpoint="never"), "step")
    torch.testing.assert_close(model[1].fisher, expected[1].fisher, rtol=1e-10, atol=0)


class Fused(torch.autograd.Function):
    """A product whose backward adds to `weight.main_grad`, and returns no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.weight.main_grad.add_(gradients[0].T @ ctx.saved_tensors[0])
        return gradients[0] @ ctx.weight, None


class FusedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.randn(WIDTH, WIDTH))
        setattr(self.weight, "main_grad", torch.zeros(WIDTH, WIDTH))  # noqa: B010

    def forward(self, x: Tensor) -> Any:
        return Fused.apply(x, self.weight)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradient_that_a_backward_accumulates_by_itself(schedule: str, is_traced: bool) -> None:
    """As in Megatron's fused accumulation. The audit must not leave its own gradients there."""
    layer = FusedLinear()
    model = layers(layer)
    functional.mse_loss(model(rows()), rows(9)).backward()
    expected = layer.weight.main_grad.clone()
    options: dict[str, Any] = {"schedule": schedule}
    if is_traced:
        options["example"] = (rows(),)
    pipe = made(model, **options)
    layer.weight.main_grad.zero_()
    for count in (1, 2):
        run(pipe, "step")
        torch.testing.assert_close(layer.weight.main_grad, count * expected, rtol=1e-10, atol=0)

    def loss_fn(output: Tensor, target: Tensor) -> Weighted:
        weight = 2 + target[:, 0].sign()
        losses = weight * (output - target).square().mean(1)
        return Weighted(losses.sum() / weight.sum(), weight.sum())

    with pytest.raises(
        AuditError, match=r"a backward adds to '1\.weight\.main_grad', and the loss"
    ):
        pipe.step(rows(), target=rows(9), loss_fn=loss_fn)


def test_gradient_of_the_inputs_that_mixes_rows_is_found() -> None:
    model: Any = nn.Sequential(Layer(lambda x: x), nn.Linear(WIDTH, WIDTH))
    model[0].linear.requires_grad_(False)
    model[0].register_forward_pre_hook(lambda _, args: (normalise(args[0]),))
    with pytest.raises(AuditError, match="the gradient of the inputs for some rows together"):
        made(model, loss_fn=nn.MSELoss()).step(rows().requires_grad_(), target=rows(2))


@pytest.mark.parametrize(
    "hook", [lambda g: g.clamp(-0.01, 0.01), lambda g: g / g.norm()], ids=["clip", "normalise"]
)
def test_hook_of_a_parameter_that_is_not_linear_sees_the_gradient_of_the_batch(
    hook: Function,
) -> None:
    gradients: list[Any] = []
    for door in ("unsplit", "call", "step"):
        torch.manual_seed(0)
        model, seen = layers(), list[Tensor]()
        model[0].weight.register_hook(lambda g, seen=seen: seen.append(g) or hook(g))
        run(model if door == "unsplit" else made(model), "step" if door == "step" else "call")
        gradients.append(model[0].weight.grad)
        assert len(seen) == 1  # that of the batch, and nothing of the audit
    assert closely(*gradients[:2])
    assert closely(*gradients[1:])


def test_hook_of_a_parameter_that_clips_later_is_equal() -> None:
    """In the first step it changes nothing. It also reads a variable that is changed later."""
    torch.manual_seed(0)
    model, unsplit, limits = layers(), layers(), [1e3]
    unsplit.load_state_dict(model.state_dict())
    for layer in (model[0], unsplit[0]):
        layer.weight.register_hook(lambda g: g.clamp(-limits[0], limits[0]) + 0.1 * limits[0])
    pipe = made(model)
    for limits[0] in (1e3, 1e-3):
        model.zero_grad()
        unsplit.zero_grad()
        run(pipe, "step")
        run(unsplit, "call")
        assert_close(model[0].weight, unsplit[0].weight)


def test_hook_of_a_tensor_that_the_loss_uses_is_refused() -> None:
    """It would see the gradient of each micro-batch."""
    scale = torch.zeros(WIDTH, requires_grad=True)
    scale.register_hook(lambda g: g.clamp(-0.01, 0.01))
    options: dict[str, Any] = {"loss_fn": lambda y, t: functional.mse_loss(y * scale.exp(), t)}
    with pytest.raises(AuditError, match="of its own that has a hook"):
        made(layers(), **options).step(rows(), target=rows(2))
    made(layers(), chunks=1, **options).step(rows(), target=rows(2))


def test_hook_of_a_parameter_that_is_linear_is_equal() -> None:
    gradients: list[Any] = []
    for door in ("call", "step"):
        torch.manual_seed(0)
        model = layers()
        model[0].weight.register_hook(lambda g: 0.5 * g)
        run(model if door == "call" else made(model), door)
        gradients.append(model[0].weight.grad)
    assert closely(*gradients)


# ---- gradients of inputs and of outputs --------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        hidden = []
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) + (y if index % 2 else 0)
            hidden.append(x)
        return {"y": x, "hidden": tuple(hidden)}


@pytest.mark.parametrize("is_one", [False, True], ids=["two inputs", "one input twice"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("door", ["step", "call"])
def test_gradients_of_inputs_are_equal(door: str, checkpoint: str, is_one: bool) -> None:
    def loss_fn(output: Any, target: Tensor) -> Any:
        penalty = output["hidden"][0].abs().mean()
        return functional.mse_loss(output["y"], target) + penalty

    torch.manual_seed(0)
    model = TwoInputs()
    unsplit = copy.deepcopy(model)
    gradients: list[Any] = []
    for network in (unsplit, made(model, checkpoint=checkpoint, example=(rows(), rows(2)))):
        x, y = rows().requires_grad_(), rows(2).requires_grad_()
        inputs = (x, x) if is_one else (x, y)
        if door == "step" and isinstance(network, Pipe):
            network.step(*inputs, target=rows(3), loss_fn=loss_fn)
        else:
            loss_fn(network(*inputs), rows(3)).backward()
        gradients.append((x.grad, y.grad))
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert (ours is None and theirs is None) or closely(ours, theirs)


@pytest.mark.parametrize("door", ["step", "call"])
def test_wrong_gradient_of_an_input_is_found(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an input is the last thing that the backward of the first stage returns."""
    pipe = made(layers(), loss_fn=nn.MSELoss())
    original = Audit._check_input_gradients

    def check(self: Audit, expected: Any, scale: float) -> None:
        for payload in self._cell_io.input_gradients.values():
            for tensor in filter(torch.is_tensor, payload.tensors):
                tensor.mul_(1.5)
        original(self, expected, scale)

    monkeypatch.setattr(Audit, "_check_input_gradients", check)
    x = rows().requires_grad_()
    with pytest.raises(AuditError, match=r"the gradient of an input of shape \(4, 6\) differs"):
        run_on(pipe, door, x)


def test_weighted_loss_with_gradients_of_its_own_is_equal() -> None:
    """The gradients of parts have a provisional scale."""

    def weighted(output: Tensor, target: Tensor) -> Weighted:
        mask = target > 0
        errors = (output - target.detach()).square() * mask
        return Weighted(errors.sum() / mask.sum(), mask.sum())

    torch.manual_seed(0)
    model = layers(Layer(Reversed.apply))
    unsplit = copy.deepcopy(model)
    weighted(unsplit(rows()), rows(2)).loss.backward()
    made(model).step(rows(), target=rows(2), loss_fn=weighted)
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert_close(ours, theirs)


# ---- the model's own loss ----------------------------------------------------------------------


class OwnLoss(nn.Module):
    """A model that returns its own loss."""

    weight = 0.0

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.loss = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = self.loss(x, y)
        if self.weight:
            loss = loss + self.weight * contrast(x, y)
        return {"loss": loss, "output": x}


def contrast(x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(x @ y.T, torch.arange(len(x)))


def flood(level: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: (functional.mse_loss(x, y) - level).abs() + level


def free_bits(level: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: functional.mse_loss(x, y) + x.square().mean(0).clamp(min=level).sum()


def own_step(pipe: Any, door: str, seed: int = 1) -> Tensor:
    if door == "step":
        loss: Tensor = pipe.step(x=rows(seed) + 1, y=rows(2)).loss
        return loss
    loss = pipe(x=rows(seed) + 1, y=rows(2))["loss"]
    loss.backward()
    return loss.detach()


def own_pipe(model: nn.Module, **options: Any) -> Pipe:
    return made(model, example={"x": rows(), "y": rows(2)}, **options)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("loss", [flood(4.5), free_bits(2.5)], ids=["flooding", "free bits"])
def test_loss_with_a_kink_between_micro_batches_is_refused(
    loss: Any, door: str, checkpoint: str
) -> None:
    torch.manual_seed(0)
    pipe = own_pipe(OwnLoss(loss), checkpoint=checkpoint)
    with pytest.raises((RunError, AuditError), match=r"not a mean over|depends on how"):
        own_step(pipe, door, 0)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("loss", [flood(0.1), free_bits(0.01)], ids=["flooding", "free bits"])
def test_loss_on_one_side_of_its_kink_is_equal(loss: Any, door: str) -> None:
    torch.manual_seed(0)
    model = OwnLoss(loss)
    unsplit = copy.deepcopy(model)
    pipe = own_pipe(model)
    for seed in range(3):
        expected = unsplit(rows(seed) + 1, rows(2))["loss"]
        assert closely(own_step(pipe, door, seed), expected.detach())


@pytest.mark.parametrize("door", ["step", "call"])
def test_contrastive_loss_of_the_model_itself_is_found(door: str) -> None:
    class Contrasts(OwnLoss):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": super().forward(x, y)["loss"]}

    torch.manual_seed(0)
    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        own_step(own_pipe(Contrasts(contrast)), door)


def test_term_that_joins_the_loss_of_a_call_later_is_found() -> None:
    torch.manual_seed(0)
    model = OwnLoss(functional.mse_loss)
    pipe = own_pipe(model)
    for seed in range(2):
        own_step(pipe, "call", seed)
    model.weight = 0.1
    with pytest.raises(AuditError, match="depends on how the batch is split"):
        own_step(pipe, "call", 2)


# ---- counters ----------------------------------------------------------------------------------


class Counts(nn.Module):
    """Counts its calls, and perhaps goes by the count when there were many."""

    def __init__(self, is_buffer: bool, is_read: bool) -> None:
        super().__init__()
        self.linear, self.is_read = nn.Linear(WIDTH, WIDTH), is_read
        if is_buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls: Any = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        is_warm = self.is_read and bool(self.calls > 1000)
        return x + self.linear(x) if is_warm else self.linear(x)


@pytest.mark.parametrize("is_buffer", [False, True], ids=["attribute", "buffer"])
@pytest.mark.parametrize("door", ["step", "call"])
def test_counter_that_is_read_when_it_has_grown_is_found(door: str, is_buffer: bool) -> None:
    match = r"changes 1\.calls, and computes something else once it has grown"
    with pytest.raises(AuditError, match=match):
        run(made(layers(Counts(is_buffer, is_read=True))), door)


@pytest.mark.parametrize("is_buffer", [False, True], ids=["attribute", "buffer"])
@pytest.mark.parametrize("door", ["step", "call"])
def test_counter_that_nothing_reads_is_left_alone(door: str, is_buffer: bool) -> None:
    torch.manual_seed(0)
    expect_equal(layers(Counts(is_buffer, is_read=False)), door)


def test_loss_that_reads_its_state_after_some_calls_is_found() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.centre = 0, torch.zeros(WIDTH)

        def forward(self, output: Tensor, target: Tensor) -> Any:
            self.calls += 1
            centre = self.centre if self.calls > 100 else 0.0
            self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
            return functional.mse_loss(output - centre, target)

    with pytest.raises(AuditError, match="once it has grown"):
        made(layers(), schedule="1f1b", loss_fn=Centred()).step(rows(), target=rows(2))


# ---- tensors that a forward leaves behind ------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self, is_detached: bool = False) -> None:
        super().__init__()
        self.linear, self.is_detached = nn.Linear(WIDTH, WIDTH), is_detached
        self.features: Any = None
        self.store: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        self.features = self.store["x"] = x.detach() if self.is_detached else x
        return x


def take_features(layer: Keeps, kept: list[Tensor]) -> Any:
    return layer.features


def take_entry(layer: Keeps, kept: list[Tensor]) -> Any:
    return layer.store["x"]


def take_from_hook(layer: Keeps, kept: list[Tensor]) -> Any:
    return kept[-1]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("take", [take_features, take_entry, take_from_hook])
def test_backward_from_a_kept_tensor_is_refused(take: Any, checkpoint: str) -> None:
    layer, kept = Keeps(), list[Tensor]()
    layer.register_forward_hook(lambda module, args, output: kept.append(output))
    pipe = made(layers(layer), checkpoint=checkpoint)
    for _ in range(2):
        output = pipe(rows())
        features = take(layer, kept)
        assert features.shape == (4, WIDTH)  # its numbers may be looked at
        with pytest.raises(RunError, match="a tensor that a layer or a hook has kept in"):
            (output.square().mean() + features.square().mean()).backward()


def test_kept_tensor_without_a_graph_is_left_alone() -> None:
    torch.manual_seed(0)
    layer = Keeps(is_detached=True)
    expect_equal(layers(layer), "call")
    assert not layer.features.requires_grad


# ---- random numbers ----------------------------------------------------------------------------


def test_loss_that_draws_with_python_is_not_audited(caplog: pytest.LogCaptureFixture) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) * (1 + random.random())

    made(layers(), chunks=1, loss_fn=loss_fn).step(rows(), target=rows(2))
    assert "because loss_fn draws from random or numpy.random" in caplog.text


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.draw(x)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.rand(len(x), 1) < 0.5,
        lambda x: x.new_empty(len(x), 1).bernoulli_(0.7),
        lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
        lambda x: torch.normal(x.detach(), 1.0),
        lambda x: torch.randint(1, 5, (len(x), 1)),
        lambda x: torch.empty_like(x).exponential_().log(),
        lambda x: torch.multinomial(x.detach().softmax(1), 2).sum(1, keepdim=True),
        lambda x: torch.poisson(x.detach().abs()),
        lambda x: torch.empty_like(x).geometric_(0.5),  # one that has no fixed result
        lambda x: functional.dropout(x, 0.5),
    ],
)
def test_layers_that_draw_for_each_row_raise_no_alarm(
    draw: Callable[[Tensor], Any], door: str
) -> None:
    pipe = made(layers(Draws(draw)))
    for seed in range(2):
        try:
            run(pipe, door, seed)
        except AuditError:
            raise
        except PenstockError:
            pytest.fail("it should train")
    assert not isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), CellRngMode)


# ---- backwards that clip ------------------------------------------------------------------------


class Clipped(torch.autograd.Function):
    """The identity, whose backward clips the gradient: by its norm, or each number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float, by_norm: bool) -> Tensor:
        ctx.limit, ctx.by_norm = limit, by_norm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if ctx.by_norm:
            return gradient * (ctx.limit / gradient.norm()).clamp(max=1), None, None
        return gradient.clamp(-ctx.limit, ctx.limit), None, None


def clip(x: Tensor, limit: float, by_norm: bool) -> Tensor:
    apply: Any = Clipped.apply
    clipped: Tensor = apply(x, limit, by_norm)
    return clipped


def clip_by_hook(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g * (1.0 / g.norm()).clamp(max=1))
    return x * 1


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", [clip_by_hook, lambda x: clip(x, 1.0, True)])
def test_backward_that_would_clip_larger_gradients_by_their_norm(function: Any, door: str) -> None:
    """The gradients of the first step are smaller, and nothing is clipped yet."""
    pipe = made(layers(Layer(function)))
    with pytest.raises(AuditError, match="is not the sum of those for two parts"):
        run(pipe, door)


def test_backward_that_clips_each_number_is_equal() -> None:
    expect_equal(layers(Layer(lambda x: clip(x, 1e-3, False))), "step")


@pytest.mark.parametrize("limit", [1e-3, 10.0])
def test_backward_that_clips_each_number_needs_the_final_scale(limit: float) -> None:
    """With weights, gradients get it after the backwards. The larger limit clips nothing yet."""

    def compute_loss(output: Tensor, target: Tensor) -> Weighted:
        weight = target.abs().sum()
        return Weighted((target.abs() * (output - target).square()).sum() / weight, weight)

    pipe = made(layers(Layer(lambda x: clip(x, limit, False))), loss_fn=compute_loss)
    with pytest.raises(AuditError, match=r"the gradient of '0\.weight'"):
        pipe.step(rows(), target=rows(2))


def test_backward_that_would_clip_each_number_needs_the_final_scale() -> None:
    """Rows of equal weight combine, whatever the scale. Only larger gradients show it."""

    def compute_loss(output: Tensor, target: Tensor) -> Weighted:
        return Weighted(functional.mse_loss(output, target), torch.tensor(float(len(target))))

    pipe = made(layers(Layer(lambda x: clip(x, 10.0, False))), loss_fn=compute_loss)
    with pytest.raises(AuditError, match="does not grow with that of the loss"):
        pipe.step(rows(), target=rows(2))


def test_backward_that_clips_each_number_with_targets_that_are_counted_is_equal() -> None:
    model = layers(Layer(lambda x: clip(x, 1e-3, False)))
    unsplit, loss_fn = copy.deepcopy(model), nn.CrossEntropyLoss(ignore_index=0)
    target = torch.tensor([0] * 5 + [1, 2, 3, 4, 5] * 3)[:ROWS]
    made(model, loss_fn=loss_fn).step(rows(), target=target)
    loss_fn(unsplit(rows()), target).backward()
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert_close(ours, theirs)
