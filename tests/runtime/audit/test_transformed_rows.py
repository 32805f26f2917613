"""Layers that use `torch.func`, whose tensors must not be kept after a transform has ended."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn import functional

from penstock import AuditError
from tests.oracle import closely
from tests.runtime.audit.test_rows import Layer, assert_close, layers, made, rows, run

Function = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("double")


def zero_far_rows(row: Tensor, limit: Tensor) -> Tensor:
    return torch.where(row.norm() > limit, row * 0.1, row)


ROW_BY_ROW: dict[str, Function] = {
    "sum": vmap(lambda row: row * row.sum()),
    "mean": vmap(lambda row: row - row.mean()),
    "norm": vmap(lambda row: row / row.norm()),
    "std": vmap(lambda row: row / row.std()),
    "max": vmap(lambda row: row / row.abs().max()),
    "dot": vmap(lambda row: row * row.dot(row)),
    "topk": vmap(lambda row: row * row.topk(2).values.sum()),
    "where": lambda x: vmap(zero_far_rows, in_dims=(0, None))(x, torch.tensor(2.0)),
    "grad": vmap(grad(lambda row: row.square().sum())),
    "jacrev": vmap(lambda row: jacrev(lambda r: r.square().sum())(row)),
    "grad of all rows": grad(lambda x: x.pow(3).sum()),
    "vmap of vmap": vmap(vmap(lambda number: number * number.sin().sum())),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", ROW_BY_ROW.values(), ids=list(ROW_BY_ROW))
def test_transform_of_each_row_is_equal_in_all_steps(
    function: Function, door: str, checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = layers(Layer(function))
    unsplit = copy.deepcopy(model)
    pipe = made(model, checkpoint=checkpoint)
    with caplog.at_level(logging.WARNING, "penstock"):
        for seed in range(3):
            expected = functional.mse_loss(unsplit(rows(seed)), rows(9))
            expected.backward()
            assert closely(run(pipe, door, seed), expected.detach())
    assert not caplog.records  # it was audited
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert_close(ours, theirs)


OVER_COLUMNS: dict[str, Function] = {
    "mean": vmap(lambda column: column - column.mean(), in_dims=1, out_dims=1),
    "threshold": vmap(
        lambda column: torch.where(column.square().sum() > 5, column * 0.1, column),
        in_dims=1,
        out_dims=1,
    ),
    "gradient": grad(lambda x: x.square().sum().sqrt()),
    "threshold of a gradient": grad(
        lambda x: torch.where(x.square().sum() > 8, x.square().sum(), x.sum())
    ),
}


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", OVER_COLUMNS.values(), ids=list(OVER_COLUMNS))
def test_transform_that_mixes_rows_is_refused(function: Function, door: str) -> None:
    torch.manual_seed(0)
    pipe = made(layers(Layer(function)))
    with pytest.raises(AuditError, match="of the batch"):
        run(pipe, door)
