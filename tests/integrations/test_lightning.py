"""Lightning's Trainer and Fabric with a pipe, against the same on the unsplit module.

`make frameworks` compares more options and longer runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

import torchmetrics

from penstock import ArgumentError, PenstockError, RunError
from tests.distributed.ranks import ranks
from tests.integrations.lightning_curves import (
    PACKAGES,
    define_modules,
    fit,
    load_package,
    make_rows,
    make_strategy,
    run_fabric,
)
from tests.integrations.lightning_processes import (
    count_averages,
    fit_on_ranks,
    reduce_on_ranks,
    run_fabric_on_ranks,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Lightning

TOLERANCE = 1e-6
# Full batches only, as each other size of a batch is traced by itself. The tests of curves have
# smaller ones, too.
FULL: dict[str, Any] = {"rows": 16}
# Step 5 ends an epoch, as Lightning does not resume in the middle of one.
RESUMED: dict[str, Any] = {"rows": 20}
# The audit of a step with Fabric takes longer than the run. A test of curves has it.
UNAUDITED: dict[str, Any] = {"audit": "off"}
Automatic: Any = define_modules("lightning").Automatic


@pytest.mark.parametrize("package", PACKAGES)
def test_trainer_has_the_curve_of_the_unsplit_module(package: str) -> None:
    options: dict[str, Any] = {
        "steps": 6,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.3,
    }
    expected, run = fit(package, **options), fit(package, pipe_options={}, **options)
    assert run.curve.compute_difference(expected.curve) < TOLERANCE
    assert (len(expected.curve.steps), len(expected.curve.evaluations)) == (10, 2)
    for name, value in expected.logged.items():  # also means over epochs, and the accuracy
        assert run.logged[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "64-true"},
        {"kind": "Manual", "module_options": {"accumulation": 2}},
        {"kind": "TwoOptimizers"},
    ],
    ids=["clip by value", "float64", "manual", "two optimizers"],
)
def test_options_of_the_trainer(options: dict[str, Any]) -> None:
    options = {"steps": 6, **FULL, **options}
    expected = fit(**options).curve
    assert fit(pipe_options={}, **options).curve.compute_difference(expected) < TOLERANCE


def test_manual_optimization_under_a_schedule() -> None:
    expected = fit(steps=4, kind="Manual", **FULL).curve
    pipe_options = {"schedule": "zb-h1", "loss_methods": ("compute_loss",)}
    run = fit(steps=4, kind="Manual", pipe_options=pipe_options, **FULL)
    assert run.curve.compute_difference(expected) < TOLERANCE


def test_mixed_precision_trains_in_bfloat16() -> None:
    options: dict[str, Any] = {"steps": 4, **FULL}
    expected = fit(precision="bf16-mixed", **options).curve
    curve = fit(precision="bf16-mixed", pipe_options={}, **options).curve
    exact = fit(pipe_options={}, **options).curve
    assert curve.compute_difference(expected) < 0.02  # bfloat16 has 8 bits
    assert curve.compute_difference(exact) > 1e-5


@pytest.mark.parametrize(
    ("kind", "pipe_options"), [("Automatic", {}), ("Network", UNAUDITED)], ids=str
)
def test_fabric_has_the_curve_of_the_unsplit_module(
    kind: str, pipe_options: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "kind": kind,
        "steps": 5,
        "accumulation": 2,
        "clip": {"max_norm": 0.3},
    }
    expected = run_fabric(**options)
    curve = run_fabric(pipe_options=pipe_options, **options)
    assert curve.compute_difference(expected) < TOLERANCE
    assert len(expected.evaluations) == 1


def test_run_that_is_killed_resumes_with_another_number_of_stages(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 10, **RESUMED}
    expected = fit(**options)
    curve = fit(pipe_options={}, **options, folder=str(tmp_path), kill_at=5).curve
    assert max(curve.steps) == 5
    checkpoint = next(tmp_path.glob("*.ckpt"))
    fit(pipe_options={"stages": 3}, curve=curve, resume=str(checkpoint), **options)
    assert curve.compute_difference(expected.curve) < TOLERANCE
    # The file is that of the unsplit module.
    module = Automatic.load_from_checkpoint(checkpoint, weights_only=False)
    assert module.state_dict().keys() == expected.module.state_dict().keys()


def test_fabric_resumes_with_another_number_of_stages(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 10, **FULL}
    expected, folder = run_fabric(**options), str(tmp_path)
    curve = run_fabric(pipe_options=UNAUDITED, folder=folder, kill_at=5, **options)
    resume = f"{folder}/step-5.ckpt"
    run_fabric(pipe_options={"stages": 3, **UNAUDITED}, curve=curve, resume=resume, **options)
    assert curve.compute_difference(expected) < TOLERANCE


# ---- what a step logs ------------------------------------------------------------------------


class WithMetrics(Automatic):
    """Logs metrics of torchmetrics, sums, and a number of rows; collects outputs in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        names = torchmetrics.Accuracy, torchmetrics.F1Score
        self.scores = torchmetrics.MetricCollection([m("multiclass", num_classes=3) for m in names])
        self.collected: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.log("accuracy", self.accuracy(logits, batch[1]))
        self.log("hits", (logits.argmax(1) == batch[1]).sum(), reduce_fx=torch.sum, on_epoch=True)
        self.log_dict({"rows": len(batch[0]), "train_loss": loss}, batch_size=len(batch[0]))
        return {"loss": loss, "logits": logits, "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (len(batch[0]), 3)
        self.log("twice", outputs["twice"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.collected.append(logits)
        self.scores.update(logits, batch[1])
        self.log_dict(self.scores)
        self.log("val_loss", functional.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("calls", float(len(self.collected)))
        self.log("logits", torch.cat(self.collected).mean())
        self.collected.clear()


def test_logged_values_are_those_of_the_whole_batch() -> None:
    logged = []
    choices: list[dict[str, Any] | None] = [None, {}]
    for pipe_options in choices:
        torch.manual_seed(0)
        logged.append(fit(steps=7, module=WithMetrics(), pipe_options=pipe_options).logged)
    assert logged[0].keys() == logged[1].keys()
    for name, value in logged[0].items():
        assert logged[1][name] == pytest.approx(value, rel=1e-5), name


class Norm(Automatic):
    """Logs a number that is neither a mean nor a sum over rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("norm", logits.norm())
        return functional.cross_entropy(logits, batch[1])


class Contrastive(Automatic):
    """Has a loss that mixes rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Counting(Automatic):
    """Counts its steps in an attribute."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx)


class CountingAnew(Automatic):
    """Counts its steps in an attribute that the first step creates."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.number = getattr(self, "number", 0) + 1
        loss: Any = super().training_step(batch, batch_idx)
        return loss * self.number


class Remembering(Automatic):
    """Compares each batch with the first one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "first"):
            self.first = batch[0].float().mean()
        return super().training_step(batch, batch_idx) * (1 + self.first)


class Averaging(Automatic):
    """Keeps an average of its inputs in place of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Any = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.average = 0.9 * self.average + 0.1 * batch[0].float().mean()
        return super().training_step(batch, batch_idx) * self.average


class Filling(Automatic):
    """Keeps norms in an attribute that was a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: Any = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.norms = numpy.ones(3)
        return super().training_step(batch, batch_idx)


class Skipping(Automatic):
    """Skips batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Norm, r"self\.log\('norm'\) in training_step is .* for the whole batch, but"),
        (Contrastive, "the loss of a batch depends on how it is split"),
        (Counting, r"training_step changed self\.count from 0 to 1"),
        (CountingAnew, r"creates self\.number, and asks whether it is there already"),
        (Remembering, r"creates self\.first, and asks whether it is there already"),
        (Averaging, r"training_step changed self\.average from 1\.0 to a tensor"),
        (Filling, r"training_step changed self\.norms from 0 to a value of type ndarray"),
        (Skipping, "A pipe needs a loss in every step"),
    ],
)
def test_steps_that_a_pipe_would_compute_otherwise_are_refused(module: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        fit(steps=2, module=module(), pipe_options={})


class Best(Automatic):
    """Has an attribute that is not a number yet."""

    best = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.best = float("nan")


def test_attribute_that_is_nan_has_not_changed() -> None:
    """It was refused, as changed from nan to nan."""
    fit(steps=2, module=Best(), pipe_options={})


class Showing(Automatic):
    """Keeps what it logs in an attribute, for a debugger. Nothing reads it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = super().training_step(batch, batch_idx)
        self.shown_loss = loss.detach()
        self.log("shown_loss", loss)
        return loss


def test_attribute_with_the_name_of_a_logged_value_is_no_state() -> None:
    """It was refused: the name is a text in the code of the step."""
    curves = []
    choices: list[dict[str, Any] | None] = [None, {}]
    for pipe_options in choices:
        torch.manual_seed(0)
        curves.append(fit(steps=2, module=Showing(), pipe_options=pipe_options).curve)
    assert curves[1].compute_difference(curves[0]) < TOLERANCE


class Scheduled(Automatic):
    """Depends on the number of the batch, the step and an attribute that a hook sets."""

    beta = 1.0

    def on_train_epoch_start(self) -> None:
        self.beta = 1.0 + self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = functional.cross_entropy(logits, batch[1]) * self.beta * (1 + batch_idx % 2)
        if self.global_step > 3:
            loss = loss + self.trainer.global_step * logits.square().mean()
        self.log("train_loss", loss)
        return loss


def test_step_that_depends_on_the_state_of_the_trainer() -> None:
    curves = []
    choices: list[dict[str, Any] | None] = [None, {}]
    for pipe_options in choices:
        torch.manual_seed(0)
        run = fit(steps=7, module=Scheduled(), pipe_options=pipe_options, **FULL)
        curves.append(run.curve)
    assert curves[1].compute_difference(curves[0]) < TOLERANCE


# ---- the rest of the Trainer -----------------------------------------------------------------


def test_validate_test_and_predict_before_and_after_fit() -> None:
    pl = load_package("lightning").pl
    loader = DataLoader(make_rows(9, 2), 4)
    results = []
    for strategy in ("auto", make_strategy("lightning")):
        torch.manual_seed(0)
        module = Automatic()
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        before = trainer.validate(module, loader, verbose=False)
        trainer.fit(module, DataLoader(make_rows(8), 4))
        after = trainer.test(module, loader, verbose=False)
        predictions = torch.cat(trainer.predict(module, loader))
        results.append([before[0]["val_loss"], after[0]["test_loss"], *predictions.flatten()])
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]))


def test_trainer_can_be_used_again_after_an_error() -> None:
    class Failing(Automatic):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.global_step == 2:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError, match="mine"):
        fit(steps=4, module=module, pipe_options={}, **FULL)
    assert not {"log", "forward", "log_dict"} & vars(module).keys()
    module.fails = False
    assert len(fit(steps=4, module=module, pipe_options={}, **FULL).curve.steps) == 4


def test_devices_of_the_trainer_are_the_ranks() -> None:
    run = fit(steps=1, pipe_options={"devices": None, "chunks": None}, devices=2)
    assert run.trainer.world_size == 1
    pl = load_package("lightning").pl
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="penstock", logger=False)
    assert type(trainer.strategy).__name__ == "PenstockStrategy"


class WithBatchNorm(Automatic):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.network.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))


def test_dropout_and_batch_norm_train_alike_in_two_runs() -> None:
    curves = []
    for schedule in ("1f1b", "gpipe"):
        torch.manual_seed(0)
        options = {"schedule": schedule, "deferred_batch_norm": True}
        curves.append(fit(steps=4, rows=16, module=WithBatchNorm(), pipe_options=options).curve)
    assert curves[0].compute_difference(curves[1]) < TOLERANCE


# ---- processes -------------------------------------------------------------------------------


def test_trainer_over_processes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "gradient_clip_val": 0.3, **RESUMED}
    expected = fit(**options).curve
    saved = {**options, "folder": str(tmp_path)}
    curves = ranks(2).run(fit_on_ranks, 1, saved)
    assert max(curve.compute_difference(expected) for curve in curves) < TOLERANCE
    # The checkpoint goes on in one process, with another number of stages.
    checkpoint = next(tmp_path.glob("*.ckpt"))
    curve = curves[0]
    curve.steps = {n: v for n, v in curve.steps.items() if n <= 5}
    fit(pipe_options={"stages": 3}, curve=curve, resume=str(checkpoint), **options)
    assert curve.compute_difference(expected) < TOLERANCE


def test_fabric_and_manual_optimization_over_processes() -> None:
    options: dict[str, Any] = {"steps": 4, **FULL}
    curves = ranks(2).run(run_fabric_on_ranks, 1, options)
    expected = run_fabric(**options)
    assert max(curve.compute_difference(expected) for curve in curves) < TOLERANCE
    pipe_options = {"loss_methods": ("compute_loss",)}
    options = {"kind": "Manual", "steps": 3, **FULL}
    curves = ranks(2).run(fit_on_ranks, 1, {**options, "pipe_options": pipe_options})
    expected = fit(**options).curve
    assert max(curve.compute_difference(expected) for curve in curves) < TOLERANCE


@pytest.mark.parametrize("fabric", [False, True])
def test_replicas_average_twice_however_many_batches_are_accumulated(fabric: bool) -> None:
    options: dict[str, Any] = {"rows": 32, "steps": 4}
    if fabric:
        options |= {"accumulation": 4, "clip": {"max_norm": 0.3}}
        expected = run_fabric(**options)
    else:
        options |= {"accumulate_grad_batches": 4, "gradient_clip_val": 0.3}
        expected = fit(**options).curve
    for curve, averages in ranks(2).run(count_averages, fabric, 2, options):
        assert curve.compute_difference(expected) < TOLERANCE
        assert averages == 2 * 4  # instead of one for each of 16 batches


def test_values_are_reduced_over_replicas_and_not_over_the_ranks_of_one_pipe() -> None:
    assert ranks(4).run(reduce_on_ranks, 2) == [[2.0, 4.0, 3.0, 4.0]] * 4


@pytest.mark.parametrize("fabric", [False, True])
def test_samplers_count_replicas(fabric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_strategy("lightning", fabric).distributed_sampler_kwargs is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    strategy = make_strategy("lightning", fabric, dp=2)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    assert strategy.is_distributed
    # The ranks of one pipe get the same rows, so the sampler of the script stays.
    assert make_strategy("lightning", fabric).distributed_sampler_kwargs is None


# ---- refusals --------------------------------------------------------------------------------


class FromIterator(Automatic):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm=True is not supported"),
        ({"module": FromIterator}, r"training_step\(dataloader_iter\) is not supported"),
        ({"pipe_options": {"loss_fn": nn.MSELoss()}}, "has no option 'loss_fn'"),
        ({"pipe_options": {"dp": 2}}, "dp=2 needs several processes"),
        ({"pipe_options": {"devices": None, "stages": None}}, "there is one device"),
        (
            {"kind": "Manual", "pipe_options": {"loss_methods": ("loss",)}},
            "loss_methods has 'loss', but Manual has no such method",
        ),
    ],
)
def test_options_that_cannot_be_followed_are_refused(options: dict[str, Any], message: str) -> None:
    options = {"pipe_options": {}, **options}
    if "module" in options:
        options["module"] = options["module"]()
    with pytest.raises(ArgumentError, match=message):
        fit(steps=1, **options)


def test_loss_has_gradients_for_one_backward() -> None:
    from penstock.integrations.piped_module import attach_gradients

    parameter = nn.Parameter(torch.zeros(2))
    loss = attach_gradients(torch.tensor(1.0), [parameter], [torch.ones(2)], 2.0)
    (loss * 3).backward(retain_graph=True)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.5, 1.5]
    (loss * 3).backward()
    assert parameter.grad.tolist() == [3.0, 3.0]
    with pytest.raises(RunError, match="were already added"):
        (loss * 3).backward()
