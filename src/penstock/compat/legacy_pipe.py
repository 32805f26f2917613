"""The pipes of torchgpipe, fairscale and PyTorch 2.3, over `penstock.Pipe`.

They hold their layers as `partitions.J.I`, with one device for each J, so the keys of old state
dicts fit. `LegacyPipe` is what all of them have in common; `BalancedPipe` is torchgpipe's and
fairscale's, which takes a list of layer counts. PyTorch's own is in `torch_sync.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.device.accelerator import list_accelerators
from penstock.errors import ArgumentError
from penstock.microbatch import Chunk
from penstock.model.placement import build_move_error
from penstock.model.sequential import check_children
from penstock.pipe import Pipe
from penstock.schedules.balance import check_cut
from penstock.schedules.families.gpipe import clocked
from penstock.stage import deferred_batchnorm
from penstock.stage.skip import verify_skippables
from penstock.torch_compat import pytree

DeviceLike = torch.device | int | str


class DeferredBatchNorm(deferred_batchnorm.DeferredStatsBatchNorm):
    """A deferred BatchNorm with two buffers that every old checkpoint has.

    They are zero between batches.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, chunks)
        for name in ("sum", "sum_squares"):
            self.register_buffer(name, torch.zeros(num_features))


class LegacyPipe(nn.Module):
    """A pipe whose stages are partitions of layers, with one rank for each different device.

    Parameters, buffers and the state dict are those of `partitions`. A `penstock.Pipe` over the
    same layers runs them. It is not registered as a module: every parameter would have two names.
    `chained` is the Sequential of partitions; its class decides how values go from one to the next.
    """

    partitions: nn.ModuleList
    devices: list[torch.device]
    _pipe: Pipe

    def __init__(
        self,
        chained: nn.Sequential,
        devices: Sequence[torch.device],
        chunks: int,
        checkpoint: str,
        deferred_batch_norm: bool,
    ) -> None:
        super().__init__()
        chunks, checkpoint = int(chunks), str(checkpoint)
        if deferred_batch_norm:
            converted = DeferredBatchNorm.convert_deferred_batch_norm(chained, chunks)
            assert isinstance(converted, nn.Sequential)
            chained = converted
        ranks = list(dict.fromkeys(devices))
        pipe = Pipe(
            chained,
            chunks,
            checkpoint,
            stages=[1] * len(chained),
            devices=ranks,
            schedule=clocked([ranks.index(device) for device in devices], chunks),
        )
        object.__setattr__(self, "_pipe", pipe)
        self.partitions = nn.ModuleList(chained)
        self.devices = list(devices)

    @property
    def chunks(self) -> int:
        """The number of micro-batches that a batch is split into."""
        return self._pipe.chunks

    @property
    def checkpoint(self) -> str:
        """The micro-batches that are recomputed: `always`, `except_last` or `never`."""
        return str(self._pipe.checkpoint)

    def _run(self, *inputs: Any) -> Any:
        self._pipe.training = self.training
        if len(inputs) > 1 or not isinstance(inputs[0], Tensor):
            inputs = chunk_on_dim_zero(inputs)
        return self._pipe(*inputs)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast the parameters. Any device raises, even that of all partitions, as it always did."""
        if {"device", "tensor"} & kwargs.keys() or (args and not isinstance(args[0], torch.dtype)):
            raise build_move_error()
        self._pipe.to(*args, **kwargs)
        return self

    def cuda(self, device: Any = None) -> Self:
        """Raise: the partitions stay on their devices."""
        return self.to(device="cuda")

    def cpu(self) -> Self:
        """Raise: the partitions stay on their devices."""
        return self.to(device="cpu")

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Raise: the partitions stay on their devices."""
        return self.to(device=device)


def chunk_on_dim_zero(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Mark every tensor to be split on dim 0, whatever its size there.

    The old pipes know no other way. `penstock.Pipe` would refuse inputs whose sizes differ.
    """

    def chunk(tensor: Tensor) -> Chunk | Tensor:
        return Chunk(tensor, dim=0) if tensor.dim() else tensor

    chunked: tuple[Any, ...] = pytree.tree_map_only(Tensor, chunk, values)
    return chunked


class BalancedLegacyPipe(LegacyPipe):
    """A pipe over a Sequential. Device i gets the next `balance[i]` layers."""

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
        verify_module(module)
        verify_skippables(module)
        parts, part_devices = split_by_balance(module, balance, devices)
        super().__init__(
            nn.Sequential(*parts), part_devices, chunks, checkpoint, deferred_batch_norm
        )
        self.balance = [len(part) for part in parts]

    def forward(self, input: Any) -> Any:
        """Return the output for a tensor, or for a tuple of tensors that counts as one value.

        Raises:
            TypeError: The input or the output has something else than tensors in it.
        """
        _check_tensors(input)
        output = self._run(input)
        for leaf in pytree.tree_leaves(output):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    "the output must be made of tensors, but the last partition returned a "
                    f"{type(leaf).__name__}."
                )
        return output


def verify_module(module: nn.Module) -> None:
    """Raise if a module cannot be partitioned.

    Raises:
        TypeError: It is not an `nn.Sequential`.
        ValueError: It is empty, or a child is in it twice.
    """
    check_children(module)


def split_by_balance(
    module: nn.Sequential, balance: Iterable[int] | None, devices: Iterable[DeviceLike] | None
) -> tuple[list[nn.Sequential], list[torch.device]]:
    """Return the partitions, whose layers keep their names, and the device of each."""
    if balance is None:
        raise ArgumentError(
            "balance is missing. It says how many layers each partition takes, such as "
            "balance=[2, 3]; balance_by_time and balance_by_size find one."
        )
    counts = [int(count) for count in balance]
    check_cut(counts, len(module))
    available = list_accelerators() if devices is None else list(map(torch.device, devices))
    if len(available) < len(counts):
        what = "devices" if devices is not None else "GPUs, the default for devices"
        raise IndexError(
            f"balance={counts} makes {len(counts)} partitions, but there are {len(available)} "
            f"{what}. Pass a device for each, such as devices=['cpu'] * {len(counts)}."
        )
    layers = iter(module._modules.items())
    parts = [nn.Sequential(OrderedDict(islice(layers, count))) for count in counts]
    return parts, available[: len(counts)]


def _check_tensors(value: Any) -> None:
    if isinstance(value, tuple):
        for element in value:
            _check_tensors(element)
    elif not isinstance(value, Tensor):
        raise TypeError(
            "the input must be a tensor or a tuple of tensors, but has a "
            f"{type(value).__name__} in it."
        )
