"""Dropout in a cell: `F.dropout` calls operators with the generator of the cell by itself."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.stage.rng import CellRngKernels, CellRngMode, DrawRedirect, suspend_cell_rng

WIDTH = 6


def kernels_of(seed: int) -> CellRngKernels:
    assert CellRngKernels.are_available()
    return CellRngKernels(DrawRedirect(seed))


DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: functional.dropout(x, 0.4),
    "parameter": lambda x: functional.dropout(nn.Parameter(x.detach()), 0.4),
    "everything": lambda x: functional.dropout(x, 1.0),
    "nothing": lambda x: functional.dropout(x, 0.0),
    "eval mode": lambda x: functional.dropout(x, 0.4, training=False),
    "no rows": lambda x: functional.dropout(x[:0], 0.4),
    "in place": lambda x: functional.dropout(x * 1, 0.4, inplace=True),
    "vmap": lambda x: torch.vmap(lambda row: functional.dropout(row, 0.4), randomness="same")(x),
    "transposed": lambda x: functional.dropout(x.T, 0.4),
    "keywords": lambda x: torch._VF.dropout(input=x, p=0.4, train=True),
}


@pytest.mark.parametrize("kind", DROPS)
def test_dropout_without_the_dispatcher_equals_that_under_a_mode(kind: str) -> None:
    def run(context: CellRngMode | CellRngKernels) -> list[Tensor]:
        x = torch.linspace(1, 2, 5 * WIDTH).view(5, WIDTH).requires_grad_()
        with context:
            outputs = [DROPS[kind](x), DROPS[kind](x)]
        if kind != "parameter":
            sum(outputs, torch.zeros(())).square().sum().backward()
            assert x.grad is not None
            outputs.append(x.grad)
        return outputs

    found, expected = run(kernels_of(3)), run(CellRngMode(3))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_dropout_in_a_cell_does_not_go_through_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way from C++ to Python and back cost threads a third of a step."""
    runs: list[Any] = []
    monkeypatch.setattr(DrawRedirect, "run", lambda self, func, args, kwargs: runs.append(func))
    with kernels_of(1) as kernels:
        functional.dropout(torch.ones(3), 0.5)
        assert kernels.redirect.has_drawn
    assert not runs


def test_dropout_is_pytorchs_own_outside_of_cells_and_in_other_threads() -> None:
    own = torch._VF.dropout
    torch.manual_seed(0)
    expected, drawn = functional.dropout(torch.ones(64), 0.5), list[Tensor]()
    with kernels_of(1):
        with kernels_of(2):
            assert torch._VF.dropout is not own
        assert torch._VF.dropout is not own
        torch.manual_seed(0)
        other = Thread(target=lambda: drawn.append(functional.dropout(torch.ones(64), 0.5)))
        other.start()
        other.join()
        torch.manual_seed(0)
        with suspend_cell_rng():
            drawn.append(functional.dropout(torch.ones(64), 0.5))
    assert torch._VF.dropout is own
    assert all(torch.equal(numbers, expected) for numbers in drawn)
