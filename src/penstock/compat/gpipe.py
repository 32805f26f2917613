"""What torchgpipe's `GPipe` and fairscale's `Pipe` are: a Sequential cut by a balance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat.partitions import LegacyPipe
from penstock.errors import ArgumentError
from penstock.model.sequential import check_children
from penstock.schedules.balance_problem import check_cut
from penstock.stage.skip import verify_skippables

DeviceLike = torch.device | int | str


class BalancedLegacyPipe(LegacyPipe):
    """A pipe over a Sequential whose neighbouring layers are moved to devices, so many to each."""

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[DeviceLike] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        check_children(module)
        verify_skippables(module)
        parts, places = split_by_balance(module, balance, devices)
        super().__init__(nn.Sequential(*parts), places, chunks, checkpoint, deferred_batch_norm)
        self.balance = [len(part) for part in parts]

    def forward(self, input: Any) -> Any:
        """What the layers compute of a tensor, or of a tuple of tensors as one value."""
        _check_tensors(input)
        return self._run(input)


def split_by_balance(
    module: nn.Sequential, balance: Iterable[int] | None, devices: Iterable[DeviceLike] | None
) -> tuple[list[nn.Sequential], list[torch.device]]:
    """So many layers each, under their own names, and a device for each part."""
    if balance is None:
        raise ArgumentError(
            "balance says how many layers each partition takes, such as balance=[2, 3]; "
            "balance_by_time and balance_by_size find one"
        )
    counts = [int(count) for count in balance]
    check_cut(counts, len(module))
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    places = gpus if devices is None else [torch.device(device) for device in devices]
    if len(places) < len(counts):
        what = "devices" if devices is not None else "GPUs, which are taken without devices="
        raise IndexError(
            f"balance={counts} makes {len(counts)} partitions, but there are {len(places)} {what}: "
            f"give a device for each, such as devices=['cpu'] * {len(counts)}"
        )
    layers = iter(module._modules.items())
    parts = [nn.Sequential(OrderedDict(islice(layers, count))) for count in counts]
    return parts, places[: len(counts)]


def _check_tensors(value: Any) -> None:
    if isinstance(value, tuple):
        for each in value:
            _check_tensors(each)
    elif not isinstance(value, Tensor):
        raise TypeError(
            f"the input is a tensor or a tuple of tensors, and has {type(value).__name__} in it"
        )
