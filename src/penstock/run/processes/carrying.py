"""Data that the first stage's rank alone has: it carries to other ranks what their stages take.

It goes through the host, whatever the links between stages are, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.errors import RunError
from penstock.ir import Message
from penstock.partition.split import PlacedPartition
from penstock.run.feed import InputsByStage
from penstock.run.passage import Cell, build_input_payloads
from penstock.run.processes.opening import BatchAnnouncement
from penstock.run.processes.wire import ProcessTransport
from penstock.stage.parcel import Payload
from penstock.stage.stage import OUTSIDE


def send_inputs(
    inputs: InputsByStage,
    cells: list[Cell],
    placed_partition: PlacedPartition,
    transport: ProcessTransport,
) -> None:
    """On the rank that has the data: what cells of others are given."""
    parcels = build_input_payloads(inputs)
    for stage, i in cells:
        parcel = parcels[stage, i]
        if any(parcel.needs_grad):
            raise RunError(
                "with data='first', a side input or target wants a gradient, and it goes to "
                "another process, from where no gradient comes back: detach it, or give it to the "
                "first layer"
            )
        transport.send_to(placed_partition.placement[stage], Message(OUTSIDE, stage, i), parcel)
    transport.flush()


def receive_inputs(
    cells: list[Cell],
    placed_partition: PlacedPartition,
    transport: ProcessTransport,
    device: torch.device,
) -> dict[Cell, Payload]:
    """On another rank: what its own cells are given."""
    mine = [cell for cell in cells if placed_partition.is_local(cell[0])]
    asked: list[Callable[[], Payload]] = [
        transport.recv_from(placed_partition.placement[0], Message(OUTSIDE, *cell)) for cell in mine
    ]
    return {
        cell: wait().map_tensors(lambda tensor: tensor.to(device))
        for cell, wait in zip(mine, asked, strict=True)
    }


def find_remote_input_cells(
    announcement: BatchAnnouncement, placed_partition: PlacedPartition
) -> list[Cell]:
    """Those that are given something, on other ranks than the first stage's."""
    stages = [
        s
        for s in announcement.input_stages
        if placed_partition.placement[s] != placed_partition.placement[0]
    ]
    return [(stage, i) for stage in stages for i in range(announcement.chunks)]
