"""Train a LightningModule as a pipeline, in one process or under torchrun.

    python examples/train_lightning.py                              two CPU ranks, in one process
    python examples/train_lightning.py --check                      and the same unsplit
    torchrun --nproc-per-node 2 examples/train_lightning.py         one process for each rank
    torchrun --nproc-per-node 4 examples/train_lightning.py --dp 2  two replicas of two ranks

The module is an ordinary one. Only the strategy of the Trainer is another.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from penstock.integrations.lightning import PenstockStrategy


class Classifier(LightningModule):
    """A module with layers, a loss and an optimizer."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        x, labels = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", (logits.argmax(1) == labels).float().mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of a batch."""
        x, labels = batch
        self.log("val_loss", functional.cross_entropy(self(x), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader(rows: int, batch: int, seed: int) -> DataLoader[Any]:
    """Return a loader of random rows, whose class depends on their sums."""
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    labels = (x[:, :8].sum(1) > 0).long() + 2 * (x[:, 8:].sum(1) > 0).long()
    return DataLoader(TensorDataset(x, labels), batch)


def train(strategy: Any, batch: int, folder: str) -> dict[str, float]:
    """Train for two epochs, and return what was logged last."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="auto",
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), make_loader(128, batch, 0), make_loader(32, batch, 1))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def main() -> None:
    """Parse the command line, train, and compare if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the unsplit module")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipe, under torchrun")
    parser.add_argument("--out", default="out/lightning", help="the folder of the checkpoints")
    options = parser.parse_args()
    has_processes = "RANK" in os.environ
    if options.check and has_processes:
        parser.error("--check trains the unsplit module in one process: start it without torchrun")
    devices = None if has_processes or torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    strategy = PenstockStrategy(
        devices=devices, chunks=4, schedule="1f1b", balance="parameters", dp=options.dp
    )
    logged = train(strategy, 16 // options.dp, options.out)
    if os.environ.get("RANK", "0") == "0":
        print(", ".join(f"{name} {value:.4f}" for name, value in sorted(logged.items())))
    if options.check:
        expected = train("auto", 16, f"{options.out}/unsplit")
        difference = max(abs(logged[name] - expected[name]) for name in expected)
        print(f"largest difference from the unsplit module: {difference:.1e}")


if __name__ == "__main__":
    main()
