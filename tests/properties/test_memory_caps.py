"""A sample of `make caps`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from penstock import ArgumentError, Pipe
from tests.properties.memory_caps import run_case


def test_random_models_keep_to_their_memory_caps_with_exact_forecasts() -> None:
    outcomes = Counter(run_case(seed).kind for seed in range(5000, 5008))
    assert set(outcomes) == {"kept", "refused"}


def test_hard_models_keep_to_their_memory_caps_with_exact_forecasts() -> None:
    outcomes = Counter(run_case(seed, hard=True).kind for seed in range(5))
    assert set(outcomes) <= {"kept", "refused"}


def test_cap_error_where_smaller_microbatches_are_impossible() -> None:
    # To say what would fit, twice as many micro-batches are tried. BatchNorm refuses one row, and
    # the measured loss had the target of a larger micro-batch: neither may hide the error.
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    x, target = torch.randn(8, 16), torch.randint(16, (8,))
    options: dict[str, Any] = {"chunks": 4, "stages": 2, "devices": ["cpu"] * 2}
    options |= {"example": x, "target": target, "loss_fn": nn.CrossEntropyLoss()}
    need = Pipe(model, **options, memory="1 TB")._memory_forecast
    assert need is not None
    with pytest.raises(ArgumentError, match="What would fit"):
        Pipe(model, **options, memory=0.97 * max(need.total))
