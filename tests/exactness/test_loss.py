"""Tests of losses, their weights, metrics and scalers. That losses are exact is in features/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock import (
    PenstockTypeError,
    Pipe,
    RunError,
    Weighted,
    is_checkpointing,
    is_recomputing,
)
from penstock.stage.loss import LossReduction, resolve_reduction
from tests.features.rows import masked as as_tuple
from tests.support import (
    Do,
    Fails,
    batch,
    both,
    closely,
    differences,
    each_checkpoint,
    each_runtime,
    plain,
    run_in_threads,
    same_gradients,
    trained,
    whole,
)

Loss = Callable[..., Any]


def uneven(rows: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a batch whose first rows have more selected elements than its last rows."""
    x, value = batch(rows)
    mask = (torch.arange(3) < 3 - 3 * torch.arange(rows)[:, None] // rows).long()
    return x, (value, mask)


def agrees(model: nn.Module, pipe: Pipe, x: Tensor, target: Any, loss_fn: Loss) -> bool:
    """Train both for one step; return whether everything is equal."""
    return (
        differences(trained(pipe, x, target, "step"), whole(model, x, target, loss_fn), closely)
        == []
    )


# ---- weights that the loss returns -----------------------------------------------------------


def test_gradients_of_weighted_and_unweighted_steps_add_up() -> None:
    """The gradients are added into the existing tensors."""
    model, pipe = both(loss_fn=as_tuple)
    x, target = uneven(7)
    assert agrees(model, pipe, x, target, as_tuple)
    there = pipe[0].weight.grad
    pipe.step(x[:4], target=target[0][:4], loss_fn=F.mse_loss)
    F.mse_loss(model(x[:4]), target[0][:4]).backward()
    assert agrees(model, pipe, x[2:], (target[0][2:], target[1][2:]), as_tuple)
    assert pipe[0].weight.grad is there


@each_runtime
def test_gradients_of_inputs_with_a_weighted_loss(runtime: str) -> None:
    model, pipe = both(chunks=3, schedule="1f1b", runtime=runtime, loss_fn=as_tuple)
    x, target = uneven(7)
    encoder, other = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    other.load_state_dict(encoder.state_dict())
    pipe.step(encoder(x), target=target)
    as_tuple(model(other(x)), target)[0].backward()
    assert same_gradients(encoder, other)


def test_weighted_loss_with_parameters_outside_the_pipe() -> None:
    """A loss with parameters, and a tensor from outside that a layer uses, get their gradients."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 1.5, dtype=torch.float64))

        def forward(self, y: Tensor, target: tuple[Tensor, Tensor]) -> Any:
            return as_tuple(y * self.scale, target)

    x, target = uneven(7)
    found = []
    for split in (False, True):
        elsewhere = torch.full((8,), 0.5, dtype=torch.float64, requires_grad=True)
        layers = list(plain())
        model = nn.Sequential(*layers[:2], Do(lambda x, by=elsewhere: x * by), *layers[2:])
        loss_fn = Scaled()
        for _ in range(2):
            if split:
                Pipe(model, 3, stages=5, loss_fn=loss_fn).step(x, target=target)
            else:
                loss_fn(model(x), target)[0].backward()
        found.append([elsewhere.grad, loss_fn.scale.grad, layers[0].weight.grad])
    for a, b in zip(*found, strict=True):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        assert closely(a, b)


@each_runtime
def test_failed_step_with_a_weighted_loss_restores_gradients(runtime: str) -> None:
    """This includes the gradients of stages whose backwards were done."""
    fails = Fails()
    first, *others = plain()
    model = nn.Sequential(first, fails, *others)
    pipe = Pipe(model, 3, stages=5, loss_fn=as_tuple, runtime=runtime, schedule="1f1b")
    x, target = uneven(7)
    fails.broken = False
    pipe.step(x, target=target)
    there = [(p.grad, p.grad.clone()) for p in pipe.parameters() if p.grad is not None]
    fails.broken = True
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, target=target)
    for p, (grad, before) in zip(pipe.parameters(), there, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, before)


def test_hook_of_a_leaf_that_is_no_parameter_with_a_weighted_loss_is_refused() -> None:
    """The hook would run for each micro-batch, with a scale that is not final."""
    extra = torch.ones(8, dtype=torch.float64, requires_grad=True)
    hook = extra.register_hook(lambda gradient: None)
    first, *others = plain()
    model = nn.Sequential(first, Do(lambda x: x * extra), *others)
    pipe = Pipe(model, 3, stages=5, loss_fn=as_tuple, audit="off")
    x, target = uneven(7)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(8,\) has a hook"):
        pipe.step(x, target=target)
    assert pipe[0].weight.grad is None
    hook.remove()
    pipe.step(x, target=target)
    assert extra.grad is not None


def test_weighted_loss_with_a_leaf_used_only_by_a_later_micro_batch() -> None:
    """Earlier gradients were saved only for parameters and for what the first micro-batch used."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss_fn(output: Tensor, target: Tensor) -> Weighted:
        late = bool(target.sum())
        loss = (output * scale if late else output).square().mean()
        return Weighted(loss, 3.0 if late else 1.0)

    model, pipe = both(loss_fn=loss_fn, chunks=2, schedule="1f1b", audit="off")
    x, target = batch(4)[0], torch.tensor([0, 0, 1, 1])
    for _ in range(2):
        pipe.step(x, target=target)
    found, scale.grad = scale.grad, None
    for _ in range(2):
        (loss_fn(model(x[2:]), target[2:])[0] * 3 / 4).backward()
    assert found is not None
    assert scale.grad is not None
    assert closely(found, scale.grad)


@pytest.mark.parametrize(("runtime", "stages"), [("threads", 4), ("inline", 4), ("threads", 1)])
def test_weighted_steps_of_several_threads_are_serialized(runtime: str, stages: int) -> None:
    """One thread took the gradients of the other for earlier ones, and the other scaled them."""
    _, pipe = both(loss_fn=as_tuple, runtime=runtime, stages=stages)
    x, target = uneven(7)
    pipe.step(x, target=target)
    once = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()

    def train() -> None:
        for _ in range(10):
            pipe.step(x, target=target)

    run_in_threads(train, 2)
    for parameter, gradient in zip(pipe.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert closely(parameter.grad, 20 * gradient)


def test_weighted_loss_keeps_half_precision_gradients() -> None:
    _, pipe = both(plain(torch.bfloat16), loss_fn=as_tuple)
    x, target = uneven(7)
    result = pipe.step(x.bfloat16(), target=target)
    assert result.loss.dtype == torch.float64  # the dtype that the loss function returns
    assert pipe[0].weight.grad.dtype == torch.bfloat16


# ---- invalid results of a loss function ------------------------------------------------------


def sometimes(a: Any, b: Any) -> Loss:
    """Return a loss function that gives `a` for micro-batches of three rows, and else `b`."""
    return lambda y, t: (a if len(y) == 3 else b)(F.mse_loss(y, t))


@pytest.mark.parametrize(
    ("loss_fn", "reduction", "message"),
    [
        (lambda y, t: Weighted(F.mse_loss(y, t), 2), "sum", "a weight, but reduction='sum'"),
        (sometimes(lambda l: l, lambda l: Weighted(l, 1)), None, "and none for another"),
        (sometimes(lambda l: Weighted(l, 1), lambda l: {"loss": l}), None, "and none for"),
        (
            sometimes(lambda l: {"loss": l, "a": 1, "b": 2}, lambda l: {"loss": l, "a": 1}),
            None,
            "returned the metrics 'a', 'b' for one micro-batch and 'a' for another",
        ),
        (
            sometimes(lambda l: {"loss": l, "a": 1}, lambda l: l),
            None,
            r"returned the metrics 'a' for one micro-batch and \(none\) for another",
        ),
        (lambda y, t: {"a": y.mean()}, None, "a dict without a 'loss'. Its keys are: 'a'"),
        (lambda y, t: {}, None, r"loss_fn returned a dict .* keys are: \(none\)"),
        (lambda y, t: {"loss": y}, None, r"a loss must be .*, but loss_fn returned shape \(3, 3\)"),
        (lambda y, t: Weighted(y.mean(), y), None, r"weight must be .* returned shape \(3, 3"),
        (lambda y, t: {"loss": y.mean(), "weight": "1"}, None, "weight .* returned <class 'str"),
        (lambda y, t: Weighted(y.mean(), y.sum()), None, "returned a weight that requires grad"),
        (lambda y, t: (y.mean(), 1), None, "loss_fn returned a tuple of 2 values, and it is not"),
        (lambda y, t: [y.mean(), 1, 2], None, "loss_fn returned a list of 3 values, and it is"),
    ],
)  # fmt: skip
def test_invalid_results_of_a_loss_function_are_refused(
    loss_fn: Loss, reduction: str | None, message: str
) -> None:
    _, pipe = both(loss_fn=loss_fn, reduction=reduction, checkpoint="never")
    x, target = batch(7)
    with pytest.raises(RuntimeError, match=message):
        pipe.step(x, target=target)


# ---- losses of PyTorch that ignore targets ---------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # caused by torch.compile
def test_resolve_reduction_of_each_loss() -> None:
    def counted(loss_fn: Any, reduction: str | None = None) -> tuple[bool, bool]:
        rule = resolve_reduction(loss_fn, reduction)
        return rule.is_sum, rule.target_counter is not None

    class Mine(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target).square()

    assert resolve_reduction(None, None) == LossReduction(is_sum=False)
    assert counted(F.cross_entropy) == counted(nn.NLLLoss(), "mean") == (False, True)
    assert counted(torch.compile(nn.CrossEntropyLoss())) == (False, True)
    assert counted(nn.CrossEntropyLoss(reduction="sum")) == (True, False)
    assert counted(nn.CrossEntropyLoss(reduction="sum"), "mean") == (False, False)
    assert counted(F.cross_entropy, "sum") == (True, False)
    assert counted(Mine()) == (False, False)
    assert counted(nn.MSELoss()) == counted(lambda y, t: y) == (False, False)


def test_linear_cross_entropy_loss() -> None:
    if not hasattr(nn, "LinearCrossEntropyLoss"):
        pytest.skip("this PyTorch has none")
    loss_fn = nn.LinearCrossEntropyLoss(5, 4).double()
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 5)).double()
    model, pipe = both(layers, stages=3, loss_fn=loss_fn)
    x, target = batch(7)[0], torch.tensor([-100, -100, 1, 3, -100, 0, 2])
    result = pipe.step(x, target=target)
    loss = loss_fn(model(x), target)
    assert closely(result.loss, loss.detach())
    weight = loss_fn.linear.weight
    assert weight.grad is not None
    assert closely(weight.grad, torch.autograd.grad(loss, weight)[0])


# ---- metrics ---------------------------------------------------------------------------------


def test_metrics_of_each_type() -> None:
    def loss_fn(y: Tensor, target: Tensor) -> Any:
        return {
            "loss": F.mse_loss(y, target),
            "error": (y - target).abs().mean(),
            "rows": len(y),
            "half": 0.5,
            "each": (y - target).abs().mean(1),
            "nested": {"mean": y.mean(), "names": ["a"]},
            "wide": y.new_zeros(1, len(y)),
            "done": True,
            "none": None,
        }

    model, pipe = both(loss_fn=loss_fn)
    x, target = batch(7)
    metrics = pipe.step(x, target=target).metrics
    wanted = loss_fn(model(x), target)
    assert list(metrics) == list(wanted)[1:]
    for name in ("error", "each"):
        assert closely(metrics[name], wanted[name].detach())
        assert not metrics[name].requires_grad
    assert metrics["rows"] == pytest.approx((3 * 3 + 3 * 3 + 1) / 7)
    assert metrics["half"] == 0.5
    assert metrics["half"].dtype == torch.float64
    assert closely(metrics["nested"]["mean"], wanted["nested"]["mean"].detach())
    assert metrics["nested"]["names"] == [["a"] * 3]
    assert [tuple(each.shape) for each in metrics["wide"]] == [(1, 3), (1, 3), (1, 1)]
    assert metrics["done"] == [True] * 3
    assert metrics["none"] == [None] * 3


def test_metrics_that_cannot_be_combined_are_listed() -> None:
    _, pipe = both(loss_fn=lambda y: {"loss": y.mean(), "rows": [0] * len(y)})
    assert pipe.step(batch(7)[0]).metrics == {"rows": [[0] * 3, [0] * 3, [0]]}


def test_metrics_are_summed_with_reduction_sum() -> None:
    _, pipe = both(loss_fn=lambda y: {"loss": y.sum(), "rows": len(y)}, reduction="sum")
    result = pipe.step(batch(7)[0])
    assert result.metrics["rows"] == 7
    assert not result.metrics["rows"].is_floating_point()


def test_metric_tensor_that_changes_in_place() -> None:
    seen = torch.zeros(())

    def loss_fn(y: Tensor) -> Any:
        seen.add_(1)
        return {"loss": y.sum(), "seen": seen}

    _, pipe = both(loss_fn=loss_fn, reduction="sum", checkpoint="never")
    assert pipe.step(batch(7)[0]).metrics["seen"] == 1 + 2 + 3


# ---- GradScaler ------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_grad_scaler_skips_the_steps_that_overflow(weighted: bool) -> None:
    """Training goes as for the unsplit model, also where the scaler skips a step."""

    def loss_fn(y: Tensor, target: tuple[Tensor, Tensor]) -> Any:
        found = as_tuple(y, target)
        return found if weighted else found[0]

    model, pipe = both(loss_fn=loss_fn)
    x, (value, mask) = uneven(7)
    if not weighted:
        mask = torch.ones_like(mask)
    modules: list[nn.Module] = [model, pipe]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in modules]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in modules]
    for turn in range(6):
        target = (value * (torch.inf if turn == 2 else 1), mask)
        before = pipe[0].weight.detach().clone()
        loss = as_tuple(model(x), target)[0]
        scalers[0].scale(loss).backward()
        assert closely(pipe.step(x, target=target, scaler=scalers[1]).loss, loss.detach())
        for module, scaler, optimizer in zip(modules, scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert torch.equal(before, pipe[0].weight) == (turn == 2)
        assert all(map(closely, pipe.parameters(), model.parameters()))


def test_grad_scaler_of_wrong_type_or_disabled() -> None:
    _, pipe = both(loss_fn=F.mse_loss)
    x, target = batch(7)
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, not float"):
        pipe.step(x, target=target, scaler=1024.0)  # type: ignore[arg-type]
    off = torch.amp.GradScaler("cpu", enabled=False)
    pipe.step(x, target=target, scaler=off)
    gradient = pipe[0].weight.grad.clone()
    pipe.zero_grad()
    pipe.step(x, target=target)
    assert torch.equal(pipe[0].weight.grad, gradient)


# ---- losses that would be wrong without an error ---------------------------------------------


@each_checkpoint
def test_detached_loss_is_refused(checkpoint: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(6, 3)).double(), 3, checkpoint)
    x, target = batch(7)
    with pytest.raises(RunError, match="the loss does not require grad"):
        pipe.step(x, target=target, loss_fn=lambda y, t: F.mse_loss(y.detach(), t))


def test_custom_loss_with_ignored_targets_is_refused_unless_every_row_counts_the_same() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(6, 3)).double(), 3)
    x, _ = batch(7)
    labels = torch.tensor([-100, 1, -100, 0, 1, 2, -100])

    def around(y: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(y, labels)

    with pytest.raises(RunError, match="averages over targets that count 0 in micro-batch 2 and"):
        pipe.step(x, target=labels, loss_fn=around)
    pipe.step(x, target=labels.clamp(0), loss_fn=around)
    pipe.step(x[:6], target=torch.tensor([-100, 1, -100, 0, 1, -100]), loss_fn=around)
    pipe.step(x, target=labels, loss_fn=F.cross_entropy)
    pipe.step(x, target=labels, loss_fn=lambda y, t: Weighted(around(y, t), (t != -100).sum()))


@pytest.mark.parametrize("given", [3, nn.CrossEntropyLoss])
def test_loss_fn_must_be_a_function(given: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 3)).double()
    with pytest.raises(PenstockTypeError, match="loss_fn must be a function"):
        Pipe(model, loss_fn=given)
    x, target = batch(7)
    with pytest.raises(PenstockTypeError, match="loss_fn must be a function"):
        Pipe(model).step(x, target=target, loss_fn=given)


@each_checkpoint
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_loss_function_runs_once_for_each_micro_batch(schedule: str, checkpoint: str) -> None:
    """It may keep a metric, or a buffer that it advances."""
    seen: list[tuple[int, bool, bool]] = []

    def counting(y: Tensor, target: Tensor) -> Tensor:
        seen.append((len(y), is_checkpointing(), is_recomputing()))
        return F.mse_loss(y, target)

    model, pipe = both(checkpoint=checkpoint, schedule=schedule, loss_fn=counting)
    x, target = batch(7)
    loss = F.mse_loss(model(x), target)
    assert closely(pipe.step(x, target=target).loss, loss.detach())
    assert sorted(rows for rows, *_ in seen) == [1, 3, 3]
    assert not any(flag for _, *flags in seen for flag in flags)


@pytest.mark.parametrize("weighted", [False, True])
def test_scale_accumulates_the_mean_of_batches(weighted: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batches = [(torch.randn(4, 6).double(), torch.tensor([0, 1, -100, 2])) for _ in range(3)]

    def compute(output: Tensor, target: Tensor) -> Any:
        loss = nn.functional.cross_entropy(output, target)
        return Weighted(loss, (target != -100).sum()) if weighted else loss

    for x, y in batches:
        (nn.functional.cross_entropy(model(x), y) / 3).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    pipe = Pipe(model, 2, stages=2, devices=["cpu", "cpu"])
    loss_fn = compute if weighted else nn.CrossEntropyLoss()
    for x, y in batches:
        result = pipe.step(x, target=y, loss_fn=loss_fn, scale=1 / 3)
        torch.testing.assert_close(result.loss, nn.functional.cross_entropy(model(x), y))
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("scale", ["1", True, float("nan"), []])
def test_scale_that_is_not_a_number_is_refused(scale: Any) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), devices=["cpu"], loss_fn=nn.MSELoss())
    with pytest.raises(ValueError, match="scale must be a finite number"):
        pipe.step(torch.ones(2, 2), target=torch.ones(2, 2), scale=scale)
