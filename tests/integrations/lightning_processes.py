"""Functions that train with Lightning on the ranks of a pipe over processes."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

from penstock.data_parallel.sync import Replicas
from tests.integrations.curve import Curve
from tests.integrations.lightning_curves import fit, make_strategy, run_fabric


def fit_on_ranks(dp: int, options: dict[str, Any]) -> Curve:
    """Train with the Trainer on all ranks. Each of `dp` replicas gets its part of the rows."""
    warnings.simplefilter("ignore")
    pipe_options = {"dp": dp, **options.pop("pipe_options", {})}
    return fit(pipe_options=pipe_options, batch=4 // dp, **options).curve


def run_fabric_on_ranks(dp: int, options: dict[str, Any]) -> Curve:
    """Train with Fabric on all ranks."""
    warnings.simplefilter("ignore")
    # The audit of a step with Fabric takes longer than the run, and runs in one process elsewhere.
    return run_fabric(pipe_options={"dp": dp, "audit": "off"}, batch=4 // dp, **options)


def count_averages(fabric: bool, dp: int, options: dict[str, Any]) -> tuple[Curve, int]:
    """Train on all ranks. Return the curve, and how often gradients of replicas were averaged."""
    function = run_fabric_on_ranks if fabric else fit_on_ranks
    name = "average_unwrapped_gradients"
    with patch.object(
        Replicas, name, autospec=True, side_effect=getattr(Replicas, name)
    ) as average:
        curve = function(dp, options)
    return curve, average.call_count


def reduce_on_ranks(dp: int) -> list[float]:
    """Return the mean, the sums and the largest of one and three, on each of `dp` replicas."""
    strategy = make_strategy("lightning", dp=dp)
    strategy._mesh = strategy._make_mesh()
    value = torch.tensor(1.0 + 2 * (distributed.get_rank() * dp // distributed.get_world_size()))
    found = [strategy.reduce(value, reduce_op=name) for name in ("mean", "sum", "max")]
    return [float(value) for value in (*found, strategy.reduce(value.long(), reduce_op="sum"))]
