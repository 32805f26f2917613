"""Hugging Face accelerate: an `Accelerator` that knows which processes share a batch.

accelerate takes every process for a data-parallel replica: it wraps models in
DistributedDataParallel, gives every process other rows, and gathers from all of them. The ranks of
one pipe are not replicas. They get the same rows, and their results count once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn

from penstock.errors import PenstockTypeError
from penstock.pipe import Pipe
from penstock.torch_compat import pytree

T = TypeVar("T")


def adapt(accelerator: Accelerator, pipe: Pipe) -> Accelerator:
    """Make an accelerator count the replicas of a pipe where it would count processes.

    Call it before `accelerator.prepare`. In one process it only changes `clip_grad_norm_`.

    Args:
        accelerator: The accelerator. It is changed in place.
        pipe: The pipe that will be trained.

    Returns:
        The accelerator.

    Raises:
        PenstockTypeError: If `pipe` is not a pipe, or the accelerator uses another library, such as
            DeepSpeed, to run the model.
    """
    if not isinstance(pipe, Pipe):
        raise PenstockTypeError(
            f"adapt(accelerator, pipe) needs a penstock.Pipe, not {type(pipe).__name__}. Make the "
            "pipe first."
        )
    kind = str(accelerator.distributed_type.value)
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise PenstockTypeError(
            f"the accelerator was set up for {kind}, which runs the model by itself. Switch it off "
            "in accelerate's configuration; a pipe runs its own stages."
        )
    accelerator.__class__ = _PipeAccelerator
    assert isinstance(accelerator, _PipeAccelerator)
    accelerator.pipe = pipe
    return accelerator


def count_replicas(pipe: Pipe) -> int:
    """Return the number of replicas of a pipe."""
    topology = pipe._topology
    return 1 if topology is None else len(topology.replicas)


class _PipeAccelerator(Accelerator):  # type: ignore[misc]
    """An accelerator that `adapt` has changed. It is never constructed."""

    pipe: Pipe

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare autocast for a pipe, and leave its devices and its replicas to itself."""
        if model is not self.pipe:
            return super().prepare_model(model, device_placement, evaluation_mode)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, **options: Any
    ) -> Any:
        """Prepare a loader that gives each replica its own rows, and all its ranks the same."""
        topology = self.pipe._topology
        if topology is None:
            return super().prepare_data_loader(data_loader, device_placement, **options)
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        if self.dispatch_batches:
            raise PenstockTypeError(
                "dispatch_batches=True lets one process read the data for all others, and it takes "
                "each of them for a replica. Set dispatch_batches=False."
            )
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=len(topology.replicas),
            process_index=topology.replica_index,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: T) -> T:
        """Gather tensors of all replicas, each from one of its ranks."""
        gathered: T = super().gather(tensor)
        topology = self.pipe._topology
        if topology is None:
            return gathered
        first_ranks = [ranks[0] for ranks in topology.replicas]

        def select(values: Tensor) -> Tensor:
            parts = values.chunk(self.num_processes)
            return torch.cat([parts[rank] for rank in first_ranks])

        selected: T = pytree.tree_map_only(Tensor, select, gathered)
        return selected

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip by the norm over all stages, where `parameters` are those of the pipe."""
        parameters = list(parameters)
        if parameters != list(self.pipe.parameters()):
            norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        self.unscale_gradients()
        return self.pipe.clip_grad_norm_(max_norm, norm_type)
