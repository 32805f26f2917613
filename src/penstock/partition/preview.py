"""`penstock.split`: a model cut, to be looked at before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.options import check_chunks
from penstock.partition.forward.units import UnitSelector
from penstock.partition.partition import Partition
from penstock.partition.sequential import check_model
from penstock.partition.split import (
    SplitRequest,
    check_split_request,
    count_stages,
    partition_model,
)
from penstock.stage.places import resolve_device


def split(
    model: nn.Module,
    stages: int | Sequence[int],
    example: Any = None,
    *,
    chunks: int = 1,
    units: UnitSelector = None,
    balance: str | None = None,
    memory: float | Sequence[float] | None = None,
) -> Partition:
    """Cut a model as `Pipe` would with the same arguments. The model stays as and where it is.

    `example` is a batch: a tensor, a tuple of inputs, or a dict of inputs by name. What is said of
    values and activations is for one of its `chunks` micro-batches. `memory` are the bytes that a
    stage's device may have, or a list with those of each.

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> partition = split(layers, 2, torch.zeros(6, 4), balance="parameters")
    >>> partition.counts
    (2, 2)
    >>> print(partition)
    Sequential in 2 stages of 2 + 2 units, 130 parameters
    <BLANKLINE>
    stage  parameters  bytes  receives  sends  units
        0          40  160 B         -  192 B  0 to 1
        1          90  360 B     192 B      -  2 to 3
    <BLANKLINE>
    sends    stage 0 to 1: 1, 192 B
    largest  stage 1: 360 B of parameters, 1.38 times the mean
    advice   nothing was measured: parameters say little about time; cut by balance='time', with an
             example
    """
    check_model(model)
    check_chunks(chunks)
    wish = SplitRequest(stages, None, balance, example, chunks, units, memory)
    check_split_request(wish)
    tensor = next((t for t in (*model.parameters(), *model.buffers())), torch.empty(0))
    here = resolve_device("cpu" if tensor.is_meta else tensor.device)
    number = count_stages(stages)
    return partition_model(model, wish, stages, [here] * number, tuple(range(number)))
