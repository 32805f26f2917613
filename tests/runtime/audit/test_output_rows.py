"""Outputs of `pipe(x)` that have rows in some calls, and none in others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock import AuditError, Pipe
from penstock.runtime.audit.audited_call import Audit

WIDTH = 4


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.table * 1.0


class Squeeze(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(*self.dims)


def build(last: nn.Module, width: int = WIDTH) -> Pipe:
    torch.manual_seed(0)
    return Pipe(nn.Sequential(nn.Linear(WIDTH, width), last), 4, stages=2, devices=["cpu"] * 2)


def test_table_that_is_as_long_as_later_micro_batches_is_found() -> None:
    pipe = build(WithTable())
    for rows in (8, 8):
        _, tables = pipe(torch.randn(rows, WIDTH))
        assert isinstance(tables, list)
    with pytest.raises(AuditError, match=r"the output\[1\] of shape \(3, 4\) has no rows"):
        pipe(torch.randn(9, WIDTH))  # three micro-batches of three rows


def test_squeezed_dim_of_a_single_row_is_found() -> None:
    pipe = build(Squeeze(), 1)
    assert pipe(torch.randn(8, WIDTH)).shape == (8,)
    with pytest.raises(AuditError, match="had in earlier calls"):
        pipe(torch.randn(10, WIDTH))  # 3 + 3 + 3 + 1


def test_outputs_with_rows_in_all_calls_are_accepted_and_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Audit, "check_structure", lambda *_: pytest.fail("compared"))
    pipe = build(Squeeze(-1), 1)
    for rows in (8, 10, 9, 3, 1):
        assert pipe(torch.randn(rows, WIDTH)).shape == (rows,)


def test_list_of_tables_of_another_number_of_micro_batches_is_accepted() -> None:
    pipe = build(WithTable())
    for rows, chunks in ((8, 4), (6, 3), (8, 4)):
        _, tables = pipe(torch.randn(rows, WIDTH))
        assert len(tables) == chunks
