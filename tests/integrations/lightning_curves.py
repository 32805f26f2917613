"""Training curves of Lightning's Trainer and Fabric, unsplit and as pipes, to compare.

`fit` runs a Trainer, and `run_fabric` a loop with Fabric. Both return the curve: loss and gradient
norm of each step, and the losses of the validations. Modules are made for either package name,
`lightning` or `pytorch_lightning`.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.integrations.curve import Curve, Killed

PACKAGES = ("lightning", "pytorch_lightning")
VOCABULARY, LENGTH, CLASSES = 16, 6, 3


@cache
def load_package(name: str) -> Any:
    """Return the classes of a package: those of the Trainer, of Fabric, and our strategies."""
    trainer, fabric = (
        ("lightning.pytorch", "lightning.fabric")
        if name == "lightning"
        else ("pytorch_lightning", "lightning_fabric")
    )
    strategies = import_module(f"penstock.integrations.{name}")
    for logger in (trainer, fabric):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torchmetrics")
    return SimpleNamespace(
        pl=import_module(trainer),
        callbacks=import_module(f"{trainer}.callbacks"),
        fabric=import_module(fabric),
        PenstockStrategy=strategies.PenstockStrategy,
        PenstockFabricStrategy=strategies.PenstockFabricStrategy,
    )


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(torch.tanh(self.linear(self.norm(x))))
        return y


class Network(nn.Module):
    """A classifier of short texts."""

    def __init__(self, width: int = 16, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def measure_norm(module: nn.Module) -> float:
    """Return the norm of all gradients, also of those in other processes."""
    gradients = [p.grad.double() for p in module.parameters() if p.grad is not None]
    squared = torch.stack([g.square().sum() for g in gradients]).sum()
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.all_reduce(squared)
        squared /= getattr(module, "replicas", 1)
    return float(squared.sqrt())


@cache
def define_modules(package: str) -> Any:
    """Return the LightningModules of a package."""
    base: Any = load_package(package).pl.LightningModule

    class Automatic(base):
        """A module with its own loss. The Trainer calls the optimizer."""

        def __init__(self, dropout: float = 0.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.network = Network(dropout=dropout)
            self.norm = 0.0

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.network(ids)
            return logits

        def compute_loss(self, batch: Any) -> Tensor:
            ids, labels = batch
            logits = self(ids)
            penalty = 0.01 * logits.square().mean()
            self.log("accuracy", (logits.argmax(1) == labels).float().mean())
            loss: Tensor = penalty + functional.cross_entropy(logits, labels, label_smoothing=0.1)
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.compute_loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            ids, labels = batch
            self.log("val_loss", functional.cross_entropy(self(ids), labels))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            ids, labels = batch
            self.log("test_loss", functional.cross_entropy(self(ids), labels))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0]).softmax(1)  # type: ignore[no-any-return]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norm = measure_norm(self)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Manual(Automatic):
        """The same with manual optimization. `accumulation` batches make a step."""

        def __init__(self, dropout: float = 0.0, accumulation: int = 1) -> None:
            super().__init__(dropout)
            self.automatic_optimization = False
            self.accumulation = accumulation

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            loss = self.compute_loss(batch)
            self.log("train_loss", loss)
            self.manual_backward(loss / self.accumulation)
            if (batch_idx + 1) % self.accumulation == 0:
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    class TwoOptimizers(Automatic):
        """Two optimizers that take turns, as in a GAN."""

        def __init__(self, dropout: float = 0.0) -> None:
            super().__init__(dropout)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                loss = self.compute_loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.norm = measure_norm(self)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            self.log("train_loss", loss)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

        def configure_optimizers(self) -> Any:
            first = [*self.network.embedding.parameters(), *self.network.blocks[:2].parameters()]
            second = [*self.network.blocks[2:].parameters(), *self.network.head.parameters()]
            return torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=1e-2)

    # Lightning finds the class by this name when it loads a checkpoint.
    return SimpleNamespace(Automatic=Automatic, Manual=Manual, TwoOptimizers=TwoOptimizers)


def make_rows(count: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return TensorDataset(ids, torch.randint(CLASSES, (count,), generator=generator))


def make_loader(
    rows: TensorDataset, batch: int, sampling: dict[str, int] | None
) -> DataLoader[Any]:
    """Return a loader. Lightning would shuffle the rows of replicas."""
    options: dict[str, Any] = {"shuffle": False, **(sampling or {})}
    sampler: Any = None if sampling is None else DistributedSampler(rows, **options)
    return DataLoader(rows, batch, sampler=sampler)


def make_strategy(package: str, fabric: bool = False, **options: Any) -> Any:
    """Return a strategy with small defaults: in one process, two CPU ranks."""
    defaults: dict[str, Any] = {"chunks": 2, "balance": "parameters"}
    is_distributed = distributed.is_initialized() and distributed.get_world_size() > 1
    if not is_distributed and options.get("devices", "") is not None:
        stages = options.setdefault("stages", 2)
        defaults["devices"] = ["cpu"] * stages
    classes = load_package(package)
    strategy = classes.PenstockFabricStrategy if fabric else classes.PenstockStrategy
    return strategy(**{**defaults, **options})


@dataclass
class Run:
    """A run of a Trainer: its curve, and what is left of it."""

    curve: Curve
    trainer: Any
    module: Any
    logged: dict[str, float] = field(default_factory=dict)


def fit(
    package: str = "lightning",
    *,
    pipe_options: dict[str, Any] | None = None,
    kind: str = "Automatic",
    module_options: dict[str, Any] | None = None,
    rows: int = 18,
    batch: int = 4,
    steps: int = 20,
    curve: Curve | None = None,
    folder: str | None = None,
    kill_at: int | None = None,
    resume: str | None = None,
    module: Any = None,
    **options: Any,
) -> Run:
    """Train a module. Without `pipe_options` it is unsplit. A `curve` is continued."""
    classes = load_package(package)
    pl = classes.pl
    pl.seed_everything(0, verbose=False)
    if module is None:
        module = getattr(define_modules(package), kind)(**(module_options or {}))
    recorded = curve = Curve() if curve is None else curve
    callback: Any = pl.Callback

    class Recorder(callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if kill_at is not None and trainer.global_step >= kill_at:
                raise Killed

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            metrics = trainer.callback_metrics
            loss = metrics.get("train_loss_step", metrics.get("train_loss"))
            # A manual run with two optimizers counts two steps for each batch.
            number = trainer.fit_loop.epoch_loop.total_batch_idx + 1
            recorded.steps[number] = float(loss), module.norm

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                recorded.evaluations[trainer.global_step] = float(
                    trainer.callback_metrics["val_loss"]
                )

    callbacks = [Recorder(), *options.pop("callbacks", [])]
    if folder is not None:
        callbacks.append(
            classes.callbacks.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
        )
    strategy = "auto"
    if pipe_options is not None:
        strategy = make_strategy(package, **pipe_options)
        module.replicas = strategy.replicas
    defaults = {
        "logger": False,
        "enable_checkpointing": folder is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "max_steps": steps,
        "max_epochs": -1,
    }
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, callbacks=callbacks, **{**defaults, **options}
    )
    sampling = trainer.distributed_sampler_kwargs
    loaders = [
        make_loader(make_rows(n, seed), batch, sampling) for n, seed in ((rows, 1), (rows // 2, 2))
    ]
    with suppress(Killed):
        trainer.fit(module, *loaders, ckpt_path=resume, weights_only=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Run(curve, trainer, module, logged)


def run_fabric(
    package: str = "lightning",
    *,
    pipe_options: dict[str, Any] | None = None,
    kind: str = "Automatic",
    accumulation: int = 1,
    clip: dict[str, float] | None = None,
    precision: str = "32-true",
    rows: int = 18,
    batch: int = 4,
    steps: int = 20,
    curve: Curve | None = None,
    folder: str | None = None,
    kill_at: int | None = None,
    resume: str | None = None,
) -> Curve:
    """Train with Fabric: a LightningModule by its steps, or "Network", whose loss is outside."""
    classes = load_package(package)
    strategy = "auto"
    if pipe_options is not None:
        strategy = make_strategy(package, fabric=True, **pipe_options)
    devices = 1 if pipe_options is None else "auto"
    fabric = classes.fabric.Fabric(
        accelerator="cpu", devices=devices, strategy=strategy, precision=precision
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    module = Network() if kind == "Network" else getattr(define_modules(package), kind)()
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    module.replicas = getattr(strategy, "replicas", 1)
    model, optimizer = fabric.setup(module, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(make_rows(rows), batch))
    valid = fabric.setup_dataloaders(DataLoader(make_rows(rows // 2, 2), batch))
    curve = Curve() if curve is None else curve
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        fabric.load(resume, state)
    step, epoch_size = state["step"], len(loader)
    number = step * accumulation
    while step < steps:
        for index, (ids, labels) in enumerate(loader):
            if index < number % epoch_size:
                continue
            number += 1
            accumulates = bool(number % accumulation)
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = (
                    functional.cross_entropy(model(ids), labels)
                    if kind == "Network"
                    else model.training_step((ids, labels), index)
                )
                fabric.backward(loss / accumulation)
            if accumulates:
                continue
            norm = measure_norm(module)
            if clip is not None:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            curve.steps[step] = float(loss.detach()), norm
            if step % 5 == 0:
                model.eval()
                with torch.no_grad():
                    losses = [functional.cross_entropy(model(x), y) for x, y in valid]
                model.train()
                mean = fabric.all_reduce(torch.stack(losses).mean())
                curve.evaluations[step] = float(mean)
                if folder is not None:
                    fabric.save(f"{folder}/step-{step}.ckpt", {**state, "step": step})
            if step in (kill_at, steps):
                return curve
    return curve
