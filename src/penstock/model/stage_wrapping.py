"""What the user puts around the layers of a stage: `stage_fn`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from penstock.data_parallel.dtensor import find_mesh_groups, is_dtensor
from penstock.data_parallel.fsdp import is_fsdp_module
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.partition import Partition
from penstock.model.sequential import list_module_tensors
from penstock.model.sequential_stage import SequentialStage
from penstock.model.tied import TiedTensor
from penstock.model.traced.traced_partition import TracedPartition
from penstock.stage.stage import Stage

StageFn = Callable[[nn.Module, int], nn.Module]
ParameterLocation = tuple[nn.Module, str]  # where a parameter is registered


def wrap_stages(
    partition: Partition,
    stage_fn: StageFn | None,
    stage_indices: Collection[int],
    tied_tensors: Sequence[TiedTensor] = (),
) -> Partition:
    """The partition, with what `stage_fn` makes of those stages computing in their place.

    `between` are ties with ranks of other processes.
    """
    if stage_fn is None:
        modules = (module for stage in partition.stages for module in stage.modules())
        if not any(map(is_fsdp_module, modules)):
            return partition
        stage_fn = _identity_stage_fn
    if isinstance(partition.how, TracedPartition):
        return _mark_resharding_modules(partition, stage_fn)
    ties = [
        homes for homes in _find_parameter_locations(partition.stages).values() if len(homes) > 1
    ]
    stages = tuple(
        _wrap_stage(stage, stage_fn) if stage.index in stage_indices else stage
        for stage in partition.stages
    )
    for homes in ties:
        if len({id(module._parameters[name]) for module, name in homes}) > 1:
            raise ArgumentError(
                f"stage_fn has put another parameter in the place of '{homes[0][1]}' of one layer, "
                "but not of another that shares it, so that they are no longer tied: keep such "
                "layers out of it, or put them into one stage and wrap them together"
            )
    for tie in tied_tensors:
        if tie.local_tensor is not None and is_dtensor(tie.local_tensor):
            raise ArgumentError(
                f"'{tie.name}' is on ranks {', '.join(map(str, tie.ranks))} of the pipe, and "
                "stage_fn has cut it in parts (fully_shard, tensor parallelism), whose gradients "
                "are not summed between ranks: keep its layers out of that, or put them into "
                "stages of one rank"
            )
    return replace(partition, stages=stages)


def _mark_resharding_modules(partition: Partition, stage_fn: StageFn) -> Partition:
    """Parts of a forward have nothing that could be wrapped; units may have been, before."""
    if stage_fn is not _identity_stage_fn:
        raise ArgumentError(
            "stage_fn wraps the layers of a Sequential, and here the stages are parts of one "
            "forward: wrap the model's blocks (fully_shard(block), block.compile()) before you "
            "make the Pipe"
        )
    return replace(
        partition,
        stages=tuple(
            replace(
                stage,
                resharding_modules=frozenset(
                    m for layer in stage.layers for m in _find_resharding_modules(layer)
                ),
            )
            for stage in partition.stages
        ),
    )


def _identity_stage_fn(module: nn.Module, _: int) -> nn.Module:
    return module


def _find_parameter_locations(
    stages: Sequence[Stage],
) -> dict[nn.Parameter, list[ParameterLocation]]:
    found: dict[nn.Parameter, list[ParameterLocation]] = {}
    for module in dict.fromkeys(module for stage in stages for module in stage.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module, name))
    return found


def _wrap_stage(stage: Stage, stage_fn: StageFn) -> Stage:
    chain = stage.compute
    assert isinstance(chain, SequentialStage)
    names = list(_iter_tensor_names(stage))
    made = stage_fn(chain.module.with_own_code(), stage.index)
    if not isinstance(made, nn.Module):
        raise PenstockTypeError(
            f"stage_fn gave {type(made).__name__} for {stage}, and not a module: return what is to "
            "compute in the stage's place, also if it is the module that was given"
        )
    if list(_iter_tensor_names(stage)) != names:
        changed = sorted(set(names) ^ set(_iter_tensor_names(stage)))
        raise ArgumentError(
            f"stage_fn changed the names of parameters or buffers of {stage}, {', '.join(changed)}:"
            " a pipe keeps the unsplit model's; put something around the stage, or change the "
            "model before you make the Pipe"
        )
    _check_same_tensors(stage, made)
    inner = set(stage.modules())
    return replace(
        stage,
        compute=chain.with_module(made),
        wrappers=tuple(module for module in made.modules() if module not in inner),
        resharding_modules=frozenset(_find_resharding_modules(made)),
    )


def _iter_tensor_names(stage: Stage) -> Iterator[str]:
    for name, layer in zip(stage.names, stage.layers, strict=True):
        yield from (f"{name}.{inner}" for inner, _ in layer.named_parameters())
        yield from (f"{name}.{inner}" for inner, _ in layer.named_buffers())


def _check_same_tensors(stage: Stage, wrapped_module: nn.Module) -> None:
    """Everything that the layers learn by is in it, and nothing else: it would not be saved."""
    ours = {id(t): t for layer in stage.layers for t in list_module_tensors(layer)}
    theirs = {id(t): t for t in list_module_tensors(wrapped_module)}
    for what, first, second in (("has not", ours, theirs), ("has also", theirs, ours)):
        found = [tuple(tensor.shape) for key, tensor in first.items() if key not in second]
        if found:
            raise ArgumentError(
                f"what stage_fn gave for {stage} {what} parameters or buffers of the shapes "
                f"{', '.join(map(str, found))}: it computes with those of the stage's layers; "
                "change the model before you make the Pipe"
            )


def _find_resharding_modules(wrapped_module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose parameters are gathered to compute, and others at rest."""
    for part in wrapped_module.modules():
        if is_fsdp_module(part):
            yield from (m for m in part.modules() if any(map(is_dtensor, m.parameters(False))))


def check_separate_process_groups(partition: Partition, placement: Sequence[int]) -> None:
    """Threads of one process do not communicate within one group: their order is chance."""
    users: dict[Any, set[int]] = {}
    for stage in partition.stages:
        tensors: list[Tensor] = [t for layer in stage.layers for t in list_module_tensors(layer)]
        for group in dict.fromkeys(
            group for tensor in tensors for group in find_mesh_groups(tensor)
        ):
            users.setdefault(group, set()).add(placement[stage.index])
    for ranks in users.values():
        if len(ranks) > 1:
            raise ArgumentError(
                f"the stages of ranks {', '.join(map(str, sorted(ranks)))} communicate in one "
                "process group (fully_shard, tensor parallelism) while their threads run beside "
                "each other, in an order that other processes need not have: take "
                "runtime='inline', or a mesh of its own for each rank"
            )
