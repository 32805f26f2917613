"""Captured steps in a notebook, whose kernel changes context variables with every cell."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest
from torch import nn

from penstock import Pipe
from tests.runtime.cuda_graph.support import batch, recordings, stack

HEADER: ContextVar[dict[str, str]] = ContextVar("parent_header")
LOOP: ContextVar[asyncio.AbstractEventLoop] = ContextVar("_loop")
SETTING: ContextVar[int] = ContextVar("setting", default=0)


@pytest.mark.parametrize(("variable", "replays"), [("notebook", [3]), ("own", [])])
def test_step_is_replayed_in_later_cells(variable: str, replays: list[int]) -> None:
    """The header of each cell, and an event loop, were part of the key: nothing was replayed."""
    pipe = Pipe(stack(), 2, stages=2, devices=["cpu", "cpu"], runtime="graph", audit="off")
    x, y = batch(0)
    loop = asyncio.new_event_loop()
    tokens: list[tuple[ContextVar[Any], Any]] = [(LOOP, LOOP.set(loop))]
    try:
        for cell in range(4):
            if variable == "notebook":
                tokens.append((HEADER, HEADER.set({"msg_id": str(cell)})))
            else:
                tokens.append((SETTING, SETTING.set(cell)))
            loop.call_soon(print, cell)  # the loop has other state in each cell
            pipe.step(x, target=y, loss_fn=nn.functional.mse_loss)
    finally:
        for context_variable, token in reversed(tokens):
            context_variable.reset(token)
        loop.close()
    assert recordings(pipe) == replays
