"""Functions that train with Lightning on the ranks of a pipe over processes."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader

from tests.integrations.curve import Curve
from tests.integrations.lightning_curves import (
    define_modules,
    fit,
    load_package,
    make_rows,
    make_strategy,
    run_fabric,
)


def fit_on_ranks(dp: int, options: dict[str, Any]) -> Curve:
    """Train with the Trainer on all ranks. Each of `dp` replicas gets its part of the rows."""
    warnings.simplefilter("ignore")
    pipe_options = {"dp": dp, **options.pop("pipe_options", {})}
    return fit(pipe_options=pipe_options, batch=4 // dp, **options).curve


def run_fabric_on_ranks(dp: int, options: dict[str, Any]) -> Curve:
    """Train with Fabric on all ranks."""
    warnings.simplefilter("ignore")
    return run_fabric(pipe_options={"dp": dp}, batch=4 // dp, **options)


def count_replicas_on_ranks(dp: int) -> Any:
    """Return the replicas and the index of this one in the sampler that a Trainer has made."""
    warnings.simplefilter("ignore")
    package = load_package("lightning")
    trainer = package.pl.Trainer(
        accelerator="cpu",
        strategy=make_strategy("lightning", dp=dp),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    package.pl.seed_everything(0, verbose=False)
    trainer.fit(define_modules("lightning").Automatic(), DataLoader(make_rows(16), 4, shuffle=True))
    sampler = trainer.train_dataloader.sampler
    return (sampler.num_replicas, sampler.rank) if hasattr(sampler, "num_replicas") else None
