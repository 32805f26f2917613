"""`Pipe` as PyTorch had it: over layers that are placed already, with an RRef for an answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from penstock.compat.partitions import LegacyPipe
from penstock.microbatch import NoChunk
from penstock.model.sequential import PipeSequential, WithDevice, check_children, find_layer_device
from penstock.stage.skip import verify_skippables
from penstock.torch_compat import pytree

__all__ = ["Pipe", "PipeSequential", "WithDevice"]


class Pipe(LegacyPipe):
    """A pipe over a Sequential whose children stand on devices; neighbours on a GPU go together."""

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
                "('worker', rank=0, world_size=1) first, or use penstock.Pipe, which needs none"
            )
        check_children(module)
        verify_skippables(module)
        parts, devices = partitions_of(module)
        super().__init__(PipeSequential(*parts), devices, chunks, checkpoint, deferred_batch_norm)

    def forward(self, *inputs: Any) -> rpc.RRef[Any]:
        """What the layers compute of a batch, behind an RRef: `pipe(x).local_value()`.

        Only the inputs that are tensors themselves are cut, not those within a list, say.
        """
        if not any(isinstance(value, Tensor) for value in inputs):
            kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
            raise TypeError(f"a pipe needs a tensor among its inputs, and got {kinds}")
        return rpc.RRef(self._run(*map(_whole, inputs)))


def _whole(value: Any) -> Any:
    return value if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, NoChunk, value)


def partitions_of(module: nn.Sequential) -> tuple[list[PipeSequential], list[torch.device]]:
    """Neighbours on one GPU make a partition; on the CPU each child is one."""
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
    """A Sequential stands for its layers, a WithDevice for the layer in it."""
    layer = child.module.to(child.device) if isinstance(child, WithDevice) else child
    return list(layer) if isinstance(layer, nn.Sequential) else [layer]
