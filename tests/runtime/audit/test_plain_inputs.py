"""Inputs that are no tensors, with an entry for each row that differs later."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import AuditError, Pipe, PipeSequential
from penstock.runtime.audit.audited_call import Audit

ROWS, WIDTH = 8, 4
EQUAL, UNEQUAL = [1] * ROWS, list(range(1, ROWS + 1))

pytestmark = pytest.mark.usefixtures("double")


class RowScale(nn.Module):
    def forward(self, x: Tensor, meta: Any) -> Tensor:
        values = meta.values() if isinstance(meta, dict) else getattr(meta, "entries", meta)
        return torch.stack([row * float(value) for row, value in zip(x, values, strict=False)])


class Scale(nn.Module):
    def forward(self, x: Tensor, meta: Any) -> Tensor:
        scaled: Tensor = x * meta.scale
        return scaled


def build(layer: nn.Module) -> Pipe:
    model = PipeSequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    return Pipe(model, 4, stages=2, devices=["cpu"] * 2, loss_fn=nn.MSELoss())


def train(pipe: Pipe, meta: Any) -> None:
    pipe.step(torch.randn(ROWS, WIDTH), meta=meta, target=torch.randn(ROWS, WIDTH))


METAS: dict[str, Callable[[Sequence[int]], Any]] = {
    "object": lambda values: SimpleNamespace(entries=values),
    "string": lambda values: "".join(map(str, values)),
    "bytes": bytes,
    "bytearray": bytearray,
    "array": lambda values: array("d", values),
    "deque": deque,
    "dict": lambda values: dict(enumerate(values)),
}


@pytest.mark.parametrize("name", METAS)
def test_entries_by_row_that_differ_later_are_found(name: str) -> None:
    pipe, build_meta = build(RowScale()), METAS[name]
    for _ in range(2):
        train(pipe, build_meta(EQUAL))
    with pytest.raises(AuditError, match="an input that is no tensor may have an entry for each"):
        train(pipe, build_meta(UNEQUAL))


def test_object_with_another_number_in_each_step_is_accepted_and_seldom_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    monkeypatch.setattr(Audit, "check_plain_inputs", lambda self: compared.append(self))
    pipe = build(Scale())
    for step in range(20):
        train(pipe, SimpleNamespace(scale=1 + step))
    assert len(compared) == 6  # steps 1, 2, 3, 4, 8 and 16


def test_object_with_equal_contents_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(Audit, "check_plain_inputs", lambda self: compared.append(self))
    pipe = build(Scale())
    for _ in range(8):
        train(pipe, SimpleNamespace(scale=2.0, names=deque("abc"), table=torch.randn(3)))
    assert len(compared) == 1


def test_object_whose_number_changes_is_compared_and_accepted() -> None:
    pipe = build(Scale())
    for step in range(6):
        train(pipe, SimpleNamespace(scale=1 + step))
