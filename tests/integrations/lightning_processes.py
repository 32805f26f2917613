"""Functions that train with Lightning on the ranks of a pipe over processes."""

from __future__ import annotations

import warnings
from typing import Any

from tests.integrations.curve import Curve
from tests.integrations.lightning_curves import fit, run_fabric


def fit_on_ranks(dp: int, options: dict[str, Any]) -> Curve:
    """Train with the Trainer on all ranks. Each of `dp` replicas gets its part of the rows."""
    warnings.simplefilter("ignore")
    pipe_options = {"dp": dp, **options.pop("pipe_options", {})}
    return fit(pipe_options=pipe_options, batch=4 // dp, **options).curve


def run_fabric_on_ranks(dp: int, options: dict[str, Any]) -> Curve:
    """Train with Fabric on all ranks."""
    warnings.simplefilter("ignore")
    return run_fabric(pipe_options={"dp": dp}, batch=4 // dp, **options)
