"""The mirror of `torch.distributed.pipeline.sync`, which PyTorch removed in 2.4.

Its `Pipe` takes layers that are on their devices already, and returns an RRef.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from penstock.compat import add_submodules
from penstock.compat.legacy_pipe import (
    DeferredBatchNorm,
    DeviceLike,
    LegacyPipe,
    split_by_balance,
    verify_module,
)
from penstock.compat.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from penstock.microbatch import NoChunk
from penstock.model.sequential import PipeSequential, WithDevice, find_layer_device
from penstock.stage.recompute import is_checkpointing, is_recomputing
from penstock.torch_compat import pytree

__all__ = ["NoChunk", "Pipe", "WithDevice", "is_checkpointing", "is_recomputing"]


class TorchSyncPipe(LegacyPipe):
    """A pipe over a Sequential whose children are on their devices.

    Neighbours on one GPU make one partition.
    """

    __module__ = "penstock.compat.torch_sync.pipe"
    __qualname__ = "Pipe"

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        if not (rpc.is_available() and rpc._is_current_rpc_agent_set()):  # type: ignore[attr-defined]
            raise RuntimeError(
                "Please initialize RPC framework for Pipe: call torch.distributed.rpc.init_rpc"
                "('worker', rank=0, world_size=1) first, or use penstock.Pipe, which needs none."
            )
        verify_module(module)
        verify_skippables(module)
        parts, devices = partitions_of(module)
        super().__init__(PipeSequential(*parts), devices, chunks, checkpoint, deferred_batch_norm)

    def forward(self, *inputs: Any) -> rpc.RRef[Any]:
        """Return an RRef to the output: `pipe(x).local_value()`.

        Inputs that are tensors are split into micro-batches. A tensor inside a list or a dict goes
        to every micro-batch whole.

        Raises:
            TypeError: There is no tensor among the inputs, or in the output.
        """
        if not any(isinstance(value, Tensor) for value in inputs):
            kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
            raise TypeError(f"a pipe needs at least one tensor among its inputs, but got {kinds}.")
        output = self._run(*map(_keep_whole, inputs))
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)):
            raise TypeError("the last partition returned no tensor, but a pipe needs at least one.")
        return rpc.RRef(output)


TorchSyncPipe.__name__ = "Pipe"  # users see and pickle it under PyTorch's name
Pipe = TorchSyncPipe


def _keep_whole(value: Any) -> Any:
    return value if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, NoChunk, value)


def partitions_of(module: nn.Sequential) -> tuple[list[PipeSequential], list[torch.device]]:
    """Return the partitions and their devices.

    Neighbours on one GPU make a partition; on the CPU each child is one.
    """
    parts: list[list[nn.Module]] = []
    devices: list[torch.device] = []
    for child in module:
        device = find_layer_device(child) or torch.device("cpu")
        if device.type == "cpu" or devices[-1:] != [device]:
            parts.append([])
            devices.append(device)
        parts[-1] += _layers(child)
    return [PipeSequential(*part) for part in parts], devices


def _layers(child: nn.Module) -> list[nn.Module]:
    """Return the layers of a child: those of a Sequential, and the layer inside a WithDevice."""
    layer = child.module.to(child.device) if isinstance(child, WithDevice) else child
    return list(layer) if isinstance(layer, nn.Sequential) else [layer]


def partition_model(
    module: nn.Sequential, balance: Iterable[int], devices: Iterable[DeviceLike] | None = None
) -> nn.Sequential:
    """Return a Sequential of Sequentials with `balance` layers each, every one on its device.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> [len(part) for part in partition_model(layers, [2, 1], devices=["cpu", "cpu"])]
    [2, 1]
    """
    parts, places = split_by_balance(module, balance, devices)
    moved = (nn.Sequential(*p).to(place) for p, place in zip(parts, places, strict=True))
    return nn.Sequential(*moved)


add_submodules(
    __name__,
    batchnorm=[DeferredBatchNorm],
    checkpoint=[is_checkpointing, is_recomputing],
    microbatch=[NoChunk],
    pipe=[Pipe, PipeSequential, WithDevice, partitions_of, verify_module],
    skip=[Namespace, Skippable, pop, skippable, stash, verify_skippables],
    utils=[partition_model],
)
