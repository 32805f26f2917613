"""Stages that have replicas in other processes: their gradients are reduced once a step.

`DistributedDataParallel`, `replicate` and `fully_shard` reduce in each backward, and a step has one
for each micro-batch, with more to come in W. Within a step they are kept from it; at its end, each
does so once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.data_parallel.all_reduce import ReplicaGroup, average_gradients, broadcast_from_first
from penstock.data_parallel.ddp import DDPModules
from penstock.data_parallel.dtensor import find_mesh_groups
from penstock.data_parallel.fsdp import FSDPModules
from penstock.errors import RunError


@dataclass
class DeferredSync:
    """A step in which nobody reduces. Set the factor that its gradients are to be multiplied by."""

    rescale_factor: Tensor | None = None


class Replicas:
    """The wrappers in what computes the stages of this process."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = list(modules)
        parts = list(dict.fromkeys(part for module in self._modules for part in module.modules()))
        self._ddp_modules, self._fsdp_modules = DDPModules(parts), FSDPModules(parts)
        self.sync_enabled = True  # at the end of a step; else the gradients wait for one that does

    def __bool__(self) -> bool:
        return bool(self._ddp_modules) or bool(self._fsdp_modules)

    def check_forward_allowed(self) -> None:
        """What is called like the model knows no end of a step."""
        if self and torch.is_grad_enabled():
            raise RunError(
                "a stage is in DistributedDataParallel, replicate or fully_shard, and its "
                "gradients are reduced at the end of a step: train with pipe.step(x, target=y), "
                "and call pipe(x) under torch.no_grad()"
            )

    @contextmanager
    def deferred_sync(self, replica_group: ReplicaGroup | None = None) -> Iterator[DeferredSync]:
        """Within, nobody reduces; at the end each does so once, if it was a step with gradients.

        What no wrapper reduces is averaged over the `line`, if there is one. Every replica runs
        the same steps.
        """
        held, trains = DeferredSync(), torch.is_grad_enabled()
        if replica_group is not None and trains:
            replica_group.on_wait("the buffers of the first copy")
            broadcast_from_first(
                self._unwrapped_buffers(replica_group), replica_group.process_group
            )
        with self._defer_wrapper_sync(held, trains) if self else nullcontext():
            yield held
        if replica_group is not None and trains and self.sync_enabled:
            waiting = partial(replica_group.on_wait, "the average of gradients")
            average_gradients(
                self._unwrapped_parameters(replica_group), replica_group.process_group, waiting
            )

    @contextmanager
    def _defer_wrapper_sync(self, deferred: DeferredSync, with_grad: bool) -> Iterator[None]:
        self._ddp_modules.disable_sync(with_grad)
        self._fsdp_modules.disable_sync()
        try:
            yield
        except BaseException:
            self._fsdp_modules.discard_gradients()
            raise
        finally:
            self._ddp_modules.restore_sync()
        if with_grad:
            self._fsdp_modules.finish_step(self.sync_enabled, deferred.rescale_factor)
            if self.sync_enabled:
                self._ddp_modules.reduce_gradients()
        self._fsdp_modules.reshard()

    def broadcast_initial_state(self, replica_group: ReplicaGroup) -> None:
        """Give every copy of the line what the first has: they may have begun differently."""
        tensors = [
            *self._unwrapped_parameters(replica_group),
            *self._unwrapped_buffers(replica_group),
        ]
        replica_group.on_wait("what the first copy begins with")
        broadcast_from_first(
            [t for t in tensors if t.device.type != "meta"], replica_group.process_group
        )

    def _unwrapped_parameters(self, replica_group: ReplicaGroup) -> list[nn.Parameter]:
        """Those that nobody else reduces over the line."""
        wrapped = {
            p
            for wrapper in self._ddp_modules.find_wrappers_over(replica_group.global_ranks)
            for p in wrapper.parameters()
        }
        found = dict.fromkeys(p for module in self._modules for p in module.parameters())
        return [p for p in found if p not in wrapped and not _is_sharded_over(replica_group, p)]

    def _unwrapped_buffers(self, replica_group: ReplicaGroup) -> list[Tensor]:
        wrapped = {
            b
            for wrapper in self._ddp_modules.find_wrappers_over(replica_group.global_ranks)
            for b in wrapper.buffers()
        }
        found = dict.fromkeys(b for module in self._modules for b in module.buffers())
        return [b for b in found if b not in wrapped]


def _is_sharded_over(replica_group: ReplicaGroup, parameter: nn.Parameter) -> bool:
    """Is it in parts over the line? Who parts it reduces it."""
    members = map(dist.get_process_group_ranks, find_mesh_groups(parameter))
    return any(set(ranks) == replica_group.global_ranks for ranks in members)
