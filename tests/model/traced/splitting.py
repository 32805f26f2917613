"""Helpers that train a small model and the same model as a pipe, and compare the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipe
from tests.models.architecture import squares

torch.set_num_threads(1)


class Four(nn.Module):
    """A model of four units, which subclasses use in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def batches(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(4, length, 4, dtype=torch.float64, generator=generator) for length in lengths
    ]


def piped(model: nn.Module, example: Any, stages: int, runtime: str = "inline") -> Pipe:
    return Pipe(
        model,
        chunks=2,
        stages=stages,
        devices=["cpu"] * stages,
        example=example,
        schedule="1f1b",
        runtime=runtime,
        balance="parameters",
        loss_fn=squares,
    )


ALL_CUTS: tuple[tuple[int, str], ...] = ((2, "inline"), (4, "threads"))
if "PENSTOCK_SOAK" in os.environ:  # `make zoo`
    ALL_CUTS = (*ALL_CUTS, (3, "threads"), (4, "inline"))
ONE_CUT = ((4, "inline"),)


def assert_same(
    kind: Callable[[], nn.Module],
    lengths: Sequence[int] = (5, 7, 5),
    buffers: bool = True,
    cuts: Sequence[tuple[int, str]] = ALL_CUTS,
) -> None:
    """Assert equal gradients and buffers with 2 and 4 stages, over several batches."""
    given = batches(*lengths)
    for stages, runtime in cuts:
        model, unsplit = made(kind), made(kind)
        pipe = piped(model, given[0], stages, runtime)
        for batch in given:
            for piece in batch.chunk(2):
                (squares(unsplit(piece)) / 2).backward()
            pipe.step(batch)
        for (name, found), (_, wanted) in zip(
            _all(model, buffers), _all(unsplit, buffers), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=f"{stages}: {name}")


def _all(model: nn.Module, buffers: bool) -> list[tuple[str, Tensor | None]]:
    gradients = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [*gradients, *(model.named_buffers() if buffers else ())]
