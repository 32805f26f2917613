"""`Replicas`: reduce the gradients of replicated stages once, at the end of a step.

`DistributedDataParallel`, `replicate` and `fully_shard` reduce in every backward. A step has a
backward for each micro-batch, and under a split backward weight gradients come later, in W. So the
wrappers' own reduction is off during the step, and each wrapper is reduced once at its end.

Stages may have replicas in two ways:

    wrapped     `stage_fn` puts the stage into DDP, `replicate` or `fully_shard`
    unwrapped   the pipe runs on a mesh with a `dp` dim; a `ReplicaGroup` names the processes

A parameter is reduced by its wrapper if that covers the replica group, and directly otherwise.
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
    """The handle of a step whose reduction is deferred.

    The step sets `rescale_factor` if its gradients have a provisional scale (loss_accumulator.py).
    """

    rescale_factor: Tensor | None = None


class Replicas:
    """The data-parallel wrappers among the modules that compute the stages of this process."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = list(modules)
        submodules = list(
            dict.fromkeys(submodule for module in self._modules for submodule in module.modules())
        )
        self._ddp_modules, self._fsdp_modules = DDPModules(submodules), FSDPModules(submodules)
        self.is_empty = not self._ddp_modules and not self._fsdp_modules
        # False inside `pipe.no_sync()`: steps then accumulate gradients for a later reduction.
        self.sync_enabled = True

    def __bool__(self) -> bool:
        return not self.is_empty

    def check_forward_allowed(self) -> None:
        """Raise if `pipe(x)` is called with gradients while a stage is in DDP or FSDP.

        `pipe(x)` has no end of step at which to reduce.
        """
        if self and torch.is_grad_enabled():
            raise RunError(
                "a stage is in DistributedDataParallel, replicate or fully_shard, so its "
                "gradients are reduced at the end of a step, which pipe(x) does not have. Train "
                "with pipe.step(x, target=y), or call pipe(x) under torch.no_grad()."
            )

    @contextmanager
    def deferred_sync(self, replica_group: ReplicaGroup | None = None) -> Iterator[DeferredSync]:
        """Defer all reductions to the end of the context, where each happens once.

        Parameters that no wrapper reduces are averaged over the replica group, if there is one.
        Without gradients nothing is reduced. Every replica runs the same steps.
        """
        deferred, with_grad = DeferredSync(), torch.is_grad_enabled()
        if replica_group is not None and with_grad:
            # As in DistributedDataParallel, a step starts with the buffers of the first replica.
            replica_group.on_wait("the buffers of the first replica")
            broadcast_from_first(
                self._unwrapped_buffers(replica_group), replica_group.process_group
            )
        with self._defer_wrapper_sync(deferred, with_grad) if self else nullcontext():
            yield deferred
        if replica_group is not None and with_grad and self.sync_enabled:
            self.average_unwrapped_gradients(replica_group)

    def average_unwrapped_gradients(self, replica_group: ReplicaGroup) -> None:
        """Replace gradients that no wrapper reduces by their mean over the replica group."""
        on_wait = partial(replica_group.on_wait, "the average of the gradients")
        average_gradients(
            self._unwrapped_parameters(replica_group), replica_group.process_group, on_wait
        )

    @contextmanager
    def _defer_wrapper_sync(self, deferred: DeferredSync, with_grad: bool) -> Iterator[None]:
        # On an error nothing is reduced: other replicas may not get to the end of the step, and a
        # collective would wait for them. DDP's flags are restored in any case.
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
        """Overwrite parameters and buffers of every replica with those of the first.

        The replicas may have been initialised with different random numbers.
        """
        tensors = [
            *self._unwrapped_parameters(replica_group),
            *self._unwrapped_buffers(replica_group),
        ]
        # Tensors on `meta` have no values; a checkpoint fills them later on every replica.
        replica_group.on_wait("the initial state of the first replica")
        broadcast_from_first(
            [t for t in tensors if t.device.type != "meta"], replica_group.process_group
        )

    def _unwrapped_parameters(self, replica_group: ReplicaGroup) -> list[nn.Parameter]:
        """Return the parameters that no wrapper reduces over the replica group."""
        wrapped = {
            p
            for wrapper in self._ddp_modules.find_wrappers_over(replica_group.global_ranks)
            for p in wrapper.parameters()
        }
        parameters = dict.fromkeys(p for module in self._modules for p in module.parameters())
        return [
            p for p in parameters if p not in wrapped and not _is_sharded_over(replica_group, p)
        ]

    def _unwrapped_buffers(self, replica_group: ReplicaGroup) -> list[Tensor]:
        wrapped = {
            b
            for wrapper in self._ddp_modules.find_wrappers_over(replica_group.global_ranks)
            for b in wrapper.buffers()
        }
        buffers = dict.fromkeys(b for module in self._modules for b in module.buffers())
        return [b for b in buffers if b not in wrapped]


def _is_sharded_over(replica_group: ReplicaGroup, parameter: nn.Parameter) -> bool:
    """Return whether a dim of a parameter's mesh is the replica group.

    Such a parameter is reduced by `fully_shard`.
    """
    members = map(dist.get_process_group_ranks, find_mesh_groups(parameter))
    return any(set(ranks) == replica_group.global_ranks for ranks in members)
