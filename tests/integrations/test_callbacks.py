"""Callbacks of frameworks: numbers and timelines of a pipe in their logs, and the same curve."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
pytest.importorskip("matplotlib", reason="the callbacks draw timelines")

from transformers import Trainer, TrainerCallback

from penstock import ArgumentError, Pipe, RunError
from penstock.integrations.step_monitor import StepMonitor
from penstock.integrations.transformers import PipelineCallback, PipeTrainer
from tests.integrations.curves import MODELS, make_arguments, make_pipe, make_text_rows

pytestmark = pytest.mark.filterwarnings("default")  # those of the frameworks

NUMBERS = {
    "pipe/loss",
    "pipe/step_seconds",
    "pipe/bubble",
    "pipe/rows",
    "pipe/rows_per_second",
    "pipe/tokens",
    "pipe/tokens_per_second",
    "pipe/peak_bytes",
}


class Writer:
    """What a writer of TensorBoard does with a figure."""

    def __init__(self) -> None:
        self.figures: list[tuple[str, int]] = []

    def add_figure(self, name: str, figure: Any, step: int) -> None:
        assert figure.get_axes()
        self.figures.append((name, step))


class Reporter(TrainerCallback):  # type: ignore[misc]
    """A callback that reports logs, as that of TensorBoard does."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.tb_writer = Writer()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append({"step": state.global_step, **logs})


def train(folder: Path, callbacks: list[Any], **options: Any) -> list[dict[str, float]]:
    """Train a tiny model for four steps, and return the log of the Trainer."""
    case = MODELS["Llama"]
    torch.manual_seed(0)
    arguments = make_arguments(str(folder), max_steps=4, eval_steps=3, **options)
    rows = make_text_rows(16)
    pipe = make_pipe(case.make(0.0), rows)
    trainer = PipeTrainer(
        model=pipe, args=arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks
    )
    trainer.train()
    assert not pipe._step_hooks
    return list(trainer.state.log_history)


def test_pipeline_callback_logs_and_draws_every_second_step(tmp_path: Path) -> None:
    reporter, figures = Reporter(), list[tuple[str, int]]()
    callback = PipelineCallback(2, log_figure=lambda name, _, step: figures.append((name, step)))
    options = {"gradient_accumulation_steps": 2}
    with_callback = train(tmp_path, [reporter, callback], **options)
    logged = [line for line in with_callback if "pipe/bubble" in line]
    assert [line["step"] for line in logged] == [2, 4]
    for line in logged:
        assert line.keys() >= NUMBERS
        assert 0 <= line["pipe/bubble"] < 1
        assert line["pipe/tokens"] > line["pipe/rows"] > 0
    assert [line["step"] for line in reporter.logs if "pipe/bubble" in line] == [2, 4]
    expected = [("pipe/timeline", step) for step in (2, 4)]
    assert figures == reporter.tb_writer.figures == expected
    files = sorted(path.name for path in (tmp_path / "timelines").iterdir())
    assert files == ["step-000002.svg", "step-000004.svg"]
    # The lines of the Trainer itself are all there, with the same numbers.
    without_callback = train(tmp_path, [], **options)
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    for key in keys:
        curves = [[line[key] for line in log if key in line and "pipe/loss" not in line]
                  for log in (with_callback, without_callback)]  # fmt: skip
        assert curves[0] == pytest.approx(curves[1]), key


def test_pipeline_callback_needs_a_pipe_trainer(tmp_path: Path) -> None:
    case = MODELS["Llama"]
    arguments = make_arguments(str(tmp_path), max_steps=1, eval_strategy="no")
    trainer = Trainer(
        model=case.make(0.0),
        args=arguments,
        train_dataset=make_text_rows(4),
        callbacks=[PipelineCallback()],
    )
    with pytest.raises(RunError, match="only a PipeTrainer runs"):
        trainer.train()


@pytest.mark.parametrize("every", [0, -1, 2.0, True, None])
def test_monitor_refuses_other_intervals(every: Any) -> None:
    with pytest.raises(ArgumentError, match="every must be a number of steps from 1 up"):
        StepMonitor(every)


def test_monitor_does_not_take_an_evaluation_for_a_training_step() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
    monitor = StepMonitor(1, draw_timeline=False)
    monitor.attach([pipe, pipe])
    with torch.no_grad():
        pipe.step(torch.zeros(4, 4), target=torch.zeros(4, 2))
    assert not monitor.is_due(1)
    result = pipe.step(torch.zeros(4, 4), target=torch.zeros(4, 2))
    assert monitor.is_due(1)
    assert monitor.read_metrics()["pipe/loss"] == result.loss.item()
    monitor.detach()
    assert not pipe._step_hooks


# ---- Lightning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_pipeline_monitor_logs_and_draws_in_lightning(package: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl = pytest.importorskip(package)
        pytest.importorskip("lightning.pytorch")
        loggers = pytest.importorskip(f"{package}.loggers")
    from penstock.integrations.lightning_callback import PipelineMonitor

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            cpus = ["cpu", "cpu"]
            self.pipe = Pipe(layers, chunks=2, stages=2, devices=cpus, loss_fn=nn.MSELoss())

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.log("train_loss", self.pipe.step(batch, target=batch[:, :2]).loss)
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    csv = loggers.CSVLogger(str(tmp_path), name="csv")
    module, figures = Module(), list[int]()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=6,
        default_root_dir=tmp_path,
        logger=csv,
        callbacks=[PipelineMonitor(3, log_figure=lambda name, figure, step: figures.append(step))],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    rows: Any = torch.randn(24, 4)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    assert figures == [3, 6]
    assert not module.pipe._step_hooks
    rows = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()
    assert NUMBERS - {"pipe/tokens", "pipe/tokens_per_second"} <= set(rows[0].split(","))
    assert sorted(path.name for path in (tmp_path / "timelines").iterdir()) == [
        "step-000003.svg",
        "step-000006.svg",
    ]


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_pipeline_monitor_logs_and_draws_with_the_strategy(package: str, tmp_path: Path) -> None:
    """The numbers of the pipe are logged, and those that `self.log` records only once.

    `pipe/inverse_weight`, with which logged values are added up, was among them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip(package)
        pytest.importorskip("lightning.pytorch")
        from penstock.integrations.lightning_callback import PipelineMonitor
        from tests.integrations.lightning_curves import fit, load_package

        loggers = pytest.importorskip(f"{load_package(package).pl.__name__}.loggers")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        norm = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(48, 3))

        def training_step(self, batch: Any, index: int) -> Any:
            logits = self.layers(batch[0])
            loss = nn.functional.cross_entropy(logits, batch[1])
            self.log("train_loss", loss)
            return {"loss": loss, "size": logits.detach().square().mean()}

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    csv, figures = loggers.CSVLogger(str(tmp_path), name="csv"), list[int]()
    monitor = PipelineMonitor(3, log_figure=lambda name, figure, step: figures.append(step))
    run = fit(
        package,
        pipe_options={},
        module=Module(),
        steps=6,
        accumulate_grad_batches=2,
        default_root_dir=tmp_path,
        logger=csv,
        log_every_n_steps=1,
        callbacks=[monitor],
    )
    names, *rows = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()
    columns = {name for name in names.split(",") if name.startswith("pipe/")}
    assert columns == NUMBERS - {"pipe/tokens", "pipe/tokens_per_second"} | {"pipe/size"}
    logged = [dict(zip(names.split(","), row.split(","), strict=True)) for row in rows]
    monitored = [row for row in logged if row["pipe/loss"]]
    assert [row["step"] for row in monitored] == ["3", "6"]
    assert figures == [3, 6]
    assert run.trainer.strategy.pipe is None  # released
    assert sorted(path.name for path in (tmp_path / "timelines").iterdir()) == [
        "step-000003.svg",
        "step-000006.svg",
    ]


def test_pipeline_monitor_takes_the_pipe_and_the_result_of_a_strategy(tmp_path: Path) -> None:
    """A strategy may make its pipe from the first batch, after the callback has looked for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning.pytorch")
    from penstock.integrations.lightning_callback import PipelineMonitor

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
    logged: list[dict[str, float]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append(metrics))
    strategy = SimpleNamespace(pipe=None, result=None)
    trainer = SimpleNamespace(
        strategy=strategy,
        global_step=0,
        loggers=[logger],
        is_global_zero=True,
        default_root_dir=tmp_path,
    )
    monitor, module = PipelineMonitor(1), nn.Linear(1, 1)
    for step in (1, 2):
        monitor.on_train_batch_start(trainer, module, None, step)
        strategy.pipe, trainer.global_step = pipe, step
        strategy.result = pipe.step(torch.zeros(4, 4), target=torch.zeros(4, 2))
        monitor.on_train_batch_end(trainer, module, None, None, step)
        monitor.on_train_batch_end(trainer, module, None, None, step)  # a batch that accumulates
    assert len(logged) == 2
    assert json.dumps(logged)
