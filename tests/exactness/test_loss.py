"""The loss of a step is that of the whole batch, however it is weighted and cut."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock import PenstockTypeError, Pipe, RunError
from penstock.stage.loss import LossReduction, resolve_reduction
from tests.pairs import each_pair
from tests.support import (
    SCHEDULES,
    Do,
    Fails,
    batch,
    closely,
    each_checkpoint,
    each_runtime,
    each_schedule,
    plain,
)

Loss = Callable[..., Any]
IGNORED = -100


def both(model: nn.Sequential | None = None, **options: Any) -> tuple[nn.Sequential, Pipe]:
    model = model or plain()
    return model, Pipe(copy.deepcopy(model), **{"chunks": 3, "stages": 4, **options})


def same_gradients(pipe: nn.Module, model: nn.Module) -> bool:
    found, wanted = ([p.grad for p in module.parameters()] for module in (pipe, model))
    assert None not in wanted
    pairs = zip(found, wanted, strict=True)
    return all(
        f is not None and w is not None and closely(f.nan_to_num(7), w.nan_to_num(7))
        for f, w in pairs
    )


def agrees(model: nn.Module, pipe: Pipe, x: Tensor, target: Any, loss_fn: Loss) -> bool:
    """One step of each: the same loss, the same gradients."""
    result = pipe.step(x, target=target)
    loss = loss_fn(model(x), target)
    loss.backward()
    return closely(result.loss.nan_to_num(7), loss.detach().nan_to_num(7)) and same_gradients(
        pipe, model
    )


# ---- weights that the loss returns ------------------------------------------------------------


def masked(y: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the columns that count."""
    value, mask = target
    return ((y - value) ** 2 * mask).sum() / mask.sum()


def as_tuple(y: Tensor, target: tuple[Tensor, Tensor]) -> Any:
    return masked(y, target), target[1].sum()


def as_dict(y: Tensor, target: tuple[Tensor, Tensor]) -> Any:
    return {"loss": masked(y, target), "weight": target[1].sum(), "mean": y.mean()}


def in_numbers(y: Tensor, target: tuple[Tensor, Tensor]) -> Any:
    return masked(y, target), int(target[1].sum())


def uneven(rows: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The first rows count for more than the last."""
    x, value = batch(rows)
    mask = torch.zeros(rows, 3, dtype=torch.int64)
    for row in range(rows):
        mask[row, : 3 - 3 * row // rows] = 1
    return x, (value, mask)


@each_runtime
@pytest.mark.parametrize("rows", [1, 2, 5, 7])
@pytest.mark.parametrize("loss_fn", [as_tuple, as_dict, in_numbers])
def test_weights_of_the_loss_count(loss_fn: Loss, rows: int, runtime: str) -> None:
    model, pipe = both(loss_fn=loss_fn, runtime=runtime, schedule="1f1b")
    x, target = uneven(rows)
    assert agrees(model, pipe, x, target, masked)


@each_checkpoint
@each_schedule
def test_under_every_schedule(schedule: str, checkpoint: str) -> None:
    model, pipe = both(
        schedule=schedule,
        checkpoint=checkpoint,
        loss_fn=as_tuple,
        devices=["cpu"] * (4 // SCHEDULES[schedule]),
    )
    assert agrees(model, pipe, *uneven(7), masked)


@pytest.mark.parametrize("rows", [5, 9])
@each_schedule
def test_with_ties_under_every_schedule(schedule: str, rows: int) -> None:
    """A stand-in may get its first gradient in a W, and another in a whole backward."""
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(6)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    devices = ["cpu"] * (6 // SCHEDULES[schedule])
    options = {"stages": 6, "chunks": 6, "schedule": schedule, "loss_fn": as_tuple}
    model, pipe = both(nn.Sequential(*layers), devices=devices, **options)
    x, (_, mask) = uneven(rows)
    for _ in range(2):
        assert agrees(model, pipe, x, (x, mask.repeat(1, 2)), masked)


def test_a_micro_batch_that_counts_for_nothing() -> None:
    """Also the first, whose weight is the unit; its mean is nan, and its gradients are none."""
    for nothing in ([0, 1, 2], [3, 4, 5], [6], [0, 1, 2, 6]):
        model, pipe = both(loss_fn=as_tuple)
        x, (value, mask) = uneven(7)
        mask[nothing] = 0
        assert agrees(model, pipe, x, (value, mask), masked)
        assert not any(p.grad.isnan().any() for p in pipe.parameters() if p.grad is not None)


def test_where_nothing_counts_the_loss_is_nan() -> None:
    model, pipe = both(loss_fn=as_tuple)
    x, (value, mask) = uneven(7)
    assert agrees(model, pipe, x, (value, mask * 0), masked)
    assert pipe.step(x, target=(value, mask * 0)).loss.isnan()


def test_steps_add_up() -> None:
    """With weights, by rows, and with weights again; into the tensor that is there."""
    model, pipe = both(loss_fn=as_tuple)
    x, target = uneven(7)
    assert agrees(model, pipe, x, target, masked)
    there = pipe[0].weight.grad
    pipe.step(x[:4], target=target[0][:4], loss_fn=F.mse_loss)
    F.mse_loss(model(x[:4]), target[0][:4]).backward()
    assert agrees(model, pipe, x[2:], (target[0][2:], target[1][2:]), masked)
    assert pipe[0].weight.grad is there


def test_inputs_and_frozen_layers() -> None:
    model, pipe = both(loss_fn=as_tuple)
    x, target = uneven(7)
    for module in (model, pipe):
        module[0].requires_grad_(False)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    pipe.step(mine, target=target)
    masked(model(theirs), target).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert closely(mine.grad, theirs.grad)
    assert closely(pipe[3].weight.grad, model[3].weight.grad)  # type: ignore[arg-type]
    assert pipe[0].weight.grad is None


def test_what_is_no_parameter_of_the_pipe() -> None:
    """A loss with parameters, and a tensor that a layer found elsewhere, learn as they should."""

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


def test_sparse_gradients() -> None:
    def made(sparse: bool) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Linear(3, 3)).double()

    x = torch.arange(7)
    target = uneven(7)[1]
    model, pipe = made(sparse=True), Pipe(made(sparse=True), 3, stages=2, loss_fn=as_tuple)
    for kind in (True, True, False):
        for module in (model, pipe):
            module[0].sparse = kind
        pipe.step(x, target=target)
        masked(model(x), target).backward()
        found, wanted = pipe[0].weight.grad, model[0].weight.grad
        assert isinstance(wanted, Tensor)
        assert found.is_sparse == wanted.is_sparse == kind
        assert closely(found.to_dense(), wanted.to_dense())


@pytest.mark.parametrize("rows", [7, 1])
def test_without_gradients(rows: int) -> None:
    model, pipe = both(loss_fn=as_dict)
    x, target = uneven(rows)
    with torch.no_grad():
        assert closely(pipe.step(x, target=target).loss, masked(model(x), target))


@each_runtime
def test_a_step_that_fails_leaves_gradients_as_they_were(runtime: str) -> None:
    """Also those of stages whose backwards have been done."""
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


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_would_see_gradients_too_early(kind: str) -> None:
    _, pipe = both(loss_fn=as_tuple)
    x, target = uneven(7)
    pipe.step(x, target=target)
    before = pipe[0].weight.grad.clone()
    hook = getattr(pipe[2].weight, kind)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(8, 8\) has a hook"):
        pipe.step(x, target=target)
    assert torch.equal(pipe[0].weight.grad, before)
    hook.remove()
    pipe.step(x, target=target)
    assert closely(pipe[0].weight.grad, 2 * before)


def test_a_leaf_that_only_a_later_micro_batch_uses() -> None:
    """Earlier gradients were set aside for what the first one used, and for parameters."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        late = bool(target.sum())
        return (output * scale if late else output).square().mean(), 3.0 if late else 1.0

    model, pipe = both(loss_fn=loss_fn, chunks=2, schedule="1f1b")
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
def test_steps_of_several_threads_take_turns(runtime: str, stages: int) -> None:
    """One took the other's gradients for earlier ones, and the other multiplied them."""
    _, pipe = both(loss_fn=as_tuple, runtime=runtime, stages=stages)
    x, target = uneven(7)
    pipe.step(x, target=target)
    once = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()

    def train() -> None:
        for _ in range(30):
            pipe.step(x, target=target)

    threads = [threading.Thread(target=train, daemon=True) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for parameter, gradient in zip(pipe.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert closely(parameter.grad, 60 * gradient)


def test_half_precision_keeps_its_dtype() -> None:
    _, pipe = both(plain(torch.bfloat16), loss_fn=as_tuple)
    x, target = uneven(7)
    result = pipe.step(x.bfloat16(), target=target)
    assert result.loss.dtype == torch.float64  # as the loss's own
    assert pipe[0].weight.grad.dtype == torch.bfloat16


# ---- what a loss may not give --------------------------------------------------------------


def sometimes(a: Any, b: Any) -> Loss:
    """The one for micro-batches of three rows, the other for that of one."""
    return lambda y, t: (a if len(y) == 3 else b)(F.mse_loss(y, t))


@pytest.mark.parametrize(
    ("loss_fn", "reduction", "message"),
    [
        (lambda y, t: (F.mse_loss(y, t), 2), "sum", "a weight, but reduction='sum' does not"),
        (sometimes(lambda l: l, lambda l: (l, 1)), None, "one micro-batch and none for another"),
        (sometimes(lambda l: (l, 1), lambda l: {"loss": l}), None, "one micro-batch and none for"),
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
        (lambda y, t: (y.mean(), y), None, r"weight must be .*, but loss_fn returned shape \(3, 3"),
        (lambda y, t: (y.mean(), "1"), None, "weight must be .*, but loss_fn returned <class 'str"),
        (lambda y, t: (y.mean(), y.sum()), None, "loss_fn returned a weight that requires grad"),
        (lambda y, t: (y.mean(), 1, 2), None, "a loss must be .* loss_fn returned <class 'tup"),
    ],
)  # fmt: skip
def test_what_it_may_not_give(loss_fn: Loss, reduction: str | None, message: str) -> None:
    _, pipe = both(loss_fn=loss_fn, reduction=reduction)
    x, target = batch(7)
    with pytest.raises(RuntimeError, match=message):
        pipe.step(x, target=target)


# ---- PyTorch's own losses that count targets ------------------------------------------------

SIZES = [(5,), (2, 4), (2, 2, 3)]


def classes(rows: int, size: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits for five classes, of rows of that size, and targets of which most are ignored."""
    torch.manual_seed(seed)
    x = torch.randn(rows, 5, *size[1:], dtype=torch.float64)
    target = torch.randint(0, 5, (rows, *size[1:]))
    target[torch.rand(target.shape) < 0.4] = IGNORED
    target[: rows // 3] = IGNORED
    target[-1] = 1
    return x, target


def pointwise() -> nn.Sequential:
    """Layers along dim 1, whatever comes after it."""

    def along(layer: nn.Linear) -> nn.Module:
        return nn.Sequential(
            Do(lambda x: x.movedim(1, -1)), layer, Do(lambda x: x.movedim(-1, 1).contiguous())
        )

    torch.manual_seed(0)
    return nn.Sequential(*(along(nn.Linear(5, 5)) for _ in range(3))).double()


WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
STOCK: dict[str, Loss] = {
    "function": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(WEIGHT),
    "smooth": nn.CrossEntropyLoss(label_smoothing=0.2),
    "weighted and smooth": nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2),
    "another ignored": nn.CrossEntropyLoss(ignore_index=1),
    "a partial": partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1, ignore_index=3),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "a partial sum": partial(F.cross_entropy, reduction="sum"),
    "an old sum": partial(F.cross_entropy, size_average=False),
    "nll": F.nll_loss,
    "nll module": nn.NLLLoss(WEIGHT),
    "a partial nll": partial(F.nll_loss, ignore_index=2),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@each_pair(rows=[1, 4, 7], size=SIZES, name=STOCK)
def test_only_targets_that_count(name: str, size: tuple[int, ...], rows: int) -> None:
    loss_fn = STOCK[name]
    model, pipe = both(pointwise(), stages=3, schedule="1f1b", loss_fn=loss_fn)
    x, target = classes(rows, size)
    ignored = {"another ignored": 1, "a partial": 3, "a partial nll": 2}.get(name, IGNORED)
    target[target == IGNORED] = ignored
    assert agrees(model, pipe, x, target, loss_fn)
    assert agrees(model, pipe, x, target, loss_fn)


@pytest.mark.parametrize("name", ["function", "weighted", "smooth", "weighted and smooth"])
def test_probabilities_of_classes_count_by_rows(name: str) -> None:
    model, pipe = both(pointwise(), stages=3, loss_fn=STOCK[name])
    x, _ = classes(7, (2, 4))
    target = torch.rand(7, 5, 4, dtype=torch.float64).softmax(1)
    assert agrees(model, pipe, x, target, STOCK[name])


@pytest.mark.parametrize("name", ["function", "weighted", "smooth", "weighted and smooth"])
def test_all_ignored(name: str) -> None:
    """The loss is nan, as for the unsplit model, and so are the gradients that are there."""
    model, pipe = both(pointwise(), stages=3, loss_fn=STOCK[name])
    x, target = classes(7, (2, 4))
    assert agrees(model, pipe, x, torch.full_like(target, IGNORED), STOCK[name])


def test_a_class_without_weight() -> None:
    """A micro-batch of it alone counts for nothing, and its mean is nan."""
    model, pipe = both(pointwise(), stages=3, loss_fn=STOCK["weighted"])
    x, target = classes(7, (2, 4))
    target[:3] = 2
    target[3:] = target[3:].clamp(min=1)
    assert agrees(model, pipe, x, target, STOCK["weighted"])
    assert not pipe[0][1].weight.grad.isnan().any()


def test_hooks_run_as_ever_where_weights_are_known_ahead() -> None:
    model, pipe = both(pointwise(), stages=3, loss_fn=F.cross_entropy)
    seen: list[Tensor] = []
    pipe[0][1].weight.register_hook(seen.append)
    x, target = classes(7, (2, 4))
    assert agrees(model, pipe, x, target, F.cross_entropy)
    assert len(seen) == 3


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch.compile's own
def test_which_losses_count_what() -> None:
    def counted(loss_fn: Any, asked: str | None = None) -> tuple[bool, bool]:
        rule = resolve_reduction(loss_fn, asked)
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


def test_a_linear_layer_in_the_loss() -> None:
    if not hasattr(nn, "LinearCrossEntropyLoss"):
        pytest.skip("this PyTorch has none")
    loss_fn = nn.LinearCrossEntropyLoss(5, 4).double()
    model, pipe = both(pointwise(), stages=3, loss_fn=loss_fn)
    x, target = classes(7, (5,))
    target[target > 3] = 0
    result = pipe.step(x, target=target)
    loss = loss_fn(model(x), target)
    assert closely(result.loss, loss.detach())
    weight = loss_fn.linear.weight
    assert weight.grad is not None
    assert closely(weight.grad, torch.autograd.grad(loss, weight)[0])


# ---- metrics ---------------------------------------------------------------------------------


def test_metrics() -> None:
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


def test_metrics_of_other_shapes_are_listed() -> None:
    _, pipe = both(loss_fn=lambda y: {"loss": y.mean(), "rows": [0] * len(y)})
    assert pipe.step(batch(7)[0]).metrics == {"rows": [[0] * 3, [0] * 3, [0]]}


def test_metrics_sum_up_with_the_loss() -> None:
    _, pipe = both(loss_fn=lambda y: {"loss": y.sum(), "rows": len(y)}, reduction="sum")
    result = pipe.step(batch(7)[0])
    assert result.metrics["rows"] == 7
    assert not result.metrics["rows"].is_floating_point()


def test_metrics_are_weighted_with_the_loss() -> None:
    """One that is nan where nothing counts is left out."""

    def loss_fn(y: Tensor, target: tuple[Tensor, Tensor]) -> Any:
        mask = target[1]
        return {**as_dict(y, target), "mean": (y * mask).sum() / mask.sum(), "count": mask.sum()}

    model, pipe = both(loss_fn=loss_fn)
    x, (value, mask) = uneven(7)
    mask[:3] = 0
    found = pipe.step(x, target=(value, mask)).metrics
    assert closely(found["mean"], loss_fn(model(x), (value, mask))["mean"].detach())
    counts = [int(part.sum()) for part in mask.split([3, 3, 1])]
    assert float(found["count"]) == pytest.approx(sum(c * c for c in counts) / sum(counts))


def test_a_number_that_goes_on_changing() -> None:
    seen = torch.zeros(())

    def loss_fn(y: Tensor) -> Any:
        seen.add_(1)
        return {"loss": y.sum(), "seen": seen}

    _, pipe = both(loss_fn=loss_fn, reduction="sum", checkpoint="never")
    assert pipe.step(batch(7)[0]).metrics["seen"] == 1 + 2 + 3


def test_a_model_that_ends_in_a_dict() -> None:
    model = nn.Sequential(*plain(), Do(lambda y: {"loss": y.square().mean(), "logits": y}))
    pipe = Pipe(copy.deepcopy(model), 3, stages=5)
    x, _ = batch(7)
    result = pipe.step(x, outputs=True)
    wanted = model(x)
    wanted["loss"].backward()
    assert closely(result.loss, wanted["loss"].detach())
    assert closely(result.metrics["logits"], wanted["logits"].detach())
    assert closely(result.outputs["logits"], wanted["logits"].detach())
    assert same_gradients(pipe, model)


def test_without_a_dict_there_are_no_metrics() -> None:
    _, pipe = both(loss_fn=F.mse_loss)
    x, target = batch(7)
    assert pipe.step(x, target=target).metrics == {}


def test_outputs_and_targets_are_any_trees() -> None:
    def loss_fn(out: dict[str, Any], target: list[Any]) -> Any:
        (y, twice), (value, others) = out["both"], target
        rows = others["rows"]
        return ((y - value).square().sum() + twice.mean(1).sum()) / len(rows), len(rows)

    ends = Do(lambda y: {"both": (y, 2 * y)})
    model, pipe = both(nn.Sequential(*plain(), ends), stages=5, loss_fn=loss_fn)
    x, value = batch(7)
    target = [value, {"rows": torch.arange(7)}]
    assert agrees(model, pipe, x, target, lambda *given: loss_fn(*given)[0])


# ---- a scaler --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [masked, as_tuple], ids=["by rows", "by weights"])
def test_a_scaler_scales_gradients_alone(loss_fn: Loss) -> None:
    """Training with it goes as for the unsplit model, also where it skips a step."""
    model, pipe = both(loss_fn=loss_fn)
    x, (value, mask) = uneven(7)
    if loss_fn is masked:
        mask = torch.ones_like(mask)
    modules: list[nn.Module] = [model, pipe]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in modules]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in modules]
    for turn in range(6):
        target = (value * (torch.inf if turn == 2 else 1), mask)
        before = pipe[0].weight.detach().clone()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = masked(model(x), target)
        scalers[0].scale(loss).backward()
        result = pipe.step(x, target=target, scaler=scalers[1])
        assert closely(result.loss.nan_to_num(7), loss.detach().nan_to_num(7))
        assert turn == 2 or same_gradients(pipe, model)
        for module, scaler, optimizer in zip(modules, scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert torch.equal(before, pipe[0].weight) == (turn == 2)
        assert all(
            closely(p, q) for p, q in zip(pipe.parameters(), model.parameters(), strict=True)
        )


def test_a_scaler_under_autocast() -> None:
    model, pipe = both(plain(torch.float32), chunks=1, stages=2, loss_fn=F.mse_loss)
    x, target = batch(8, torch.float32)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        result = pipe.step(x, target=target, scaler=scalers[0])
        loss = F.mse_loss(model(x), target)
    scalers[1].scale(loss).backward()
    assert torch.equal(result.loss, loss.detach())
    for p, q in zip(pipe.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_a_scaler_that_is_none() -> None:
    _, pipe = both(loss_fn=F.mse_loss)
    x, target = batch(7)
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, not float"):
        pipe.step(x, target=target, scaler=1024.0)  # type: ignore[arg-type]
    model, _ = both()
    off = torch.amp.GradScaler("cpu", enabled=False)
    pipe.step(x, target=target, scaler=off)
    F.mse_loss(model(x), target).backward()
    assert same_gradients(pipe, model)


# ---- losses that would go wrong in silence ------------------------------------------------


@each_checkpoint
def test_a_loss_that_was_detached_is_refused(checkpoint: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(6, 3)).double(), 3, checkpoint)
    x, target = batch(7)
    with pytest.raises(RunError, match="the loss does not require grad"):
        pipe.step(x, target=target, loss_fn=lambda y, t: F.mse_loss(y.detach(), t))


def test_targets_that_a_function_of_ones_own_may_ignore() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(6, 3)).double(), 3)
    x, _ = batch(7)
    labels = torch.tensor([-100, 1, -100, 0, 1, 2, -100])

    def around(y: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(y, labels)

    with pytest.warns(UserWarning, match="there is a -100 among the targets"):
        pipe.step(x, target=labels, loss_fn=around)
    pipe.step(x, target=labels.clamp(0), loss_fn=around)
    pipe.step(x, target=labels, loss_fn=F.cross_entropy)
    pipe.step(x, target=labels, loss_fn=lambda y, t: (around(y, t), (t != -100).sum()))


@pytest.mark.parametrize("given", [3, nn.CrossEntropyLoss])
def test_what_is_no_loss(given: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 3)).double()
    with pytest.raises(PenstockTypeError, match="loss_fn must be a function"):
        Pipe(model, loss_fn=given)
    x, target = batch(7)
    with pytest.raises(PenstockTypeError, match="loss_fn must be a function"):
        Pipe(model).step(x, target=target, loss_fn=given)
