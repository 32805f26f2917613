"""Data that the first stage's rank alone has: it carries to other ranks what their stages take.

It goes through the host, whatever the links between stages are, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.errors import RunError
from penstock.ir import Message
from penstock.partition.split import Split
from penstock.run.feed import Given
from penstock.run.passage import Cell, from_outside
from penstock.run.processes.opening import Announcement
from penstock.run.processes.wire import Wire
from penstock.stage.parcel import Parcel
from penstock.stage.stage import OUTSIDE


def carry_away(given: Given, cells: list[Cell], split: Split, wire: Wire) -> None:
    """On the rank that has the data: what cells of others are given."""
    parcels = from_outside(given)
    for stage, i in cells:
        parcel = parcels[stage, i]
        if any(parcel.needs):
            raise RunError(
                "with data='first', a side input or target wants a gradient, and it goes to "
                "another process, from where no gradient comes back: detach it, or give it to the "
                "first layer"
            )
        wire.send_to(split.placement[stage], Message(OUTSIDE, stage, i), parcel)
    wire.flush()


def carried_here(
    cells: list[Cell], split: Split, wire: Wire, device: torch.device
) -> dict[Cell, Parcel]:
    """On another rank: what its own cells are given."""
    mine = [cell for cell in cells if split.is_here(cell[0])]
    asked: list[Callable[[], Parcel]] = [
        wire.recv_from(split.placement[0], Message(OUTSIDE, *cell)) for cell in mine
    ]
    return {
        cell: wait().moved(lambda tensor: tensor.to(device))
        for cell, wait in zip(mine, asked, strict=True)
    }


def cells_away(announced: Announcement, split: Split) -> list[Cell]:
    """Those that are given something, on other ranks than the first stage's."""
    stages = [s for s in announced.stages if split.placement[s] != split.placement[0]]
    return [(stage, i) for stage in stages for i in range(announced.chunks)]
