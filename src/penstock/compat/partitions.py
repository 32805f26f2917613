"""What the old pipes have in common: layers held as `partitions.J.I`, a device for each J."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.compat.batchnorm import DeferredBatchNorm
from penstock.microbatch import Chunk
from penstock.pipe import Pipe
from penstock.schedules.families.gpipe import clocked
from penstock.torch_compat import pytree


class LegacyPipe(nn.Module):
    """A pipe whose stages are partitions of layers, and whose ranks are the different devices.

    Parameters, buffers and the state dict are those of `partitions`; what runs them is a
    `penstock.Pipe` over the same layers, not registered as a module. `chained` says how values
    go from one partition to the next.
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
        """How many micro-batches a batch is cut into."""
        return self._pipe.chunks

    @property
    def checkpoint(self) -> str:
        """Which micro-batches are recomputed: `always`, `except_last` or `never`."""
        return self._pipe.checkpoint

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
        """Casting only, as with `penstock.Pipe`."""
        self._pipe.to(*args, **kwargs)
        return self

    def cuda(self, device: Any = None) -> Self:
        """Denied."""
        return self.to(device="cuda")

    def cpu(self) -> Self:
        """Denied."""
        return self.to(device="cpu")

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Denied."""
        return self.to(device=device)


def chunk_on_dim_zero(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each tensor cut on dim 0, whatever the others have there: the old pipes knew no other way."""

    def chunk(tensor: Tensor) -> Chunk | Tensor:
        return Chunk(tensor, dim=0) if tensor.dim() else tensor

    found: tuple[Any, ...] = pytree.tree_map_only(Tensor, chunk, values)
    return found
