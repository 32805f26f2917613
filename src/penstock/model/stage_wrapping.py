"""Apply `stage_fn`, with which the user wraps the layers of a stage.

`stage_fn(module, index)` gets the layers of a stage as one module and returns the module that
computes in their place: the same one after `fully_shard`, or a wrapper such as DDP or
`torch.compile`. The pipe keeps the names, parameters and buffers of the unsplit model, so
`wrap_stages` raises if `stage_fn` has changed them.
"""

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
from penstock.model.tied import TiedTensor, collect_tensor_uses
from penstock.stage.stage import Stage

StageFn = Callable[[nn.Module, int], nn.Module]


def wrap_stages(
    partition: Partition,
    stage_fn: StageFn | None,
    stage_indices: Collection[int],
    tied_tensors: Sequence[TiedTensor] = (),
) -> Partition:
    """Return the partition with `stage_fn` applied to these stages.

    `tied_tensors` are shared with ranks in other processes.
    """
    if stage_fn is None:
        # Layers may be in `fully_shard` without a `stage_fn`. The pipe has to know which modules
        # exchange their parameters during a forward.
        modules = (module for stage in partition.stages for module in stage.modules())
        if not any(map(is_fsdp_module, modules)):
            return partition
        stages = tuple(map(_mark_resharding_modules, partition.stages))
    else:
        partition.check_stage_fn_allowed()
        stages = _apply_stage_fn(partition.stages, stage_fn, stage_indices)
    for tie in tied_tensors:
        if tie.local_tensor is not None and is_dtensor(tie.local_tensor):
            raise ArgumentError(
                f"'{tie.name}' is shared by ranks {', '.join(map(str, tie.ranks))} of the pipe, "
                "and stage_fn sharded it (fully_shard, tensor parallelism). Gradients of shards "
                "are not summed between ranks. Do not shard its layers, or put them into stages "
                "of one rank."
            )
    return replace(partition, stages=stages)


def _mark_resharding_modules(stage: Stage) -> Stage:
    marked = (m for layer in stage.layers for m in _find_resharding_modules(layer))
    return replace(stage, resharding_modules=frozenset(marked))


def _apply_stage_fn(
    stages: Sequence[Stage], stage_fn: StageFn, stage_indices: Collection[int]
) -> tuple[Stage, ...]:
    """Wrap these stages. Raise if that ends a tie between two layers."""
    shared = [uses for uses in collect_tensor_uses(stages).values() if len(uses) > 1]
    wrapped = tuple(
        _wrap_stage(stage, stage_fn) if stage.index in stage_indices else stage for stage in stages
    )
    # `fully_shard` replaces parameters. If it replaces a tied parameter in one layer only, the two
    # layers would train apart from each other without an error.
    for uses in shared:
        locations = [use.location for use in uses]
        if len({id(module._parameters.get(name)) for module, name in locations}) > 1:
            raise ArgumentError(
                f"stage_fn replaced the parameter '{locations[0][1]}' in one layer but not in "
                "another layer that shares it, so they are no longer tied. Leave these layers out "
                "of stage_fn, or put them into one stage and wrap them together."
            )
    return wrapped


def _wrap_stage(stage: Stage, stage_fn: StageFn) -> Stage:
    """Apply `stage_fn` to one stage, and check that the result has the stage's tensors."""
    compute = stage.compute
    assert isinstance(compute, SequentialStage)
    # Before the call, because `stage_fn` may change the layers in place.
    names = list(_iter_tensor_names(stage))
    wrapped = stage_fn(compute.module.with_own_code(), stage.index)
    if not isinstance(wrapped, nn.Module):
        raise PenstockTypeError(
            f"stage_fn returned {type(wrapped).__name__} for {stage}, not a module. Return the "
            "module that computes in the stage's place, even if it is the one that was passed in."
        )
    if list(_iter_tensor_names(stage)) != names:
        changed = sorted(set(names) ^ set(_iter_tensor_names(stage)))
        raise ArgumentError(
            f"stage_fn changed the names of parameters or buffers of {stage}: "
            f"{', '.join(changed)}. A pipe keeps the names of the unsplit model. Return a wrapper "
            "around the stage, or change the model before you make the Pipe."
        )
    _check_same_tensors(stage, wrapped)
    inner = set(stage.modules())
    return replace(
        stage,
        compute=compute.with_module(wrapped),
        wrappers=tuple(module for module in wrapped.modules() if module not in inner),
        resharding_modules=frozenset(_find_resharding_modules(wrapped)),
    )


def _iter_tensor_names(stage: Stage) -> Iterator[str]:
    for name, layer in zip(stage.names, stage.layers, strict=True):
        yield from (f"{name}.{inner}" for inner, _ in layer.named_parameters())
        yield from (f"{name}.{inner}" for inner, _ in layer.named_buffers())


def _check_same_tensors(stage: Stage, wrapped_module: nn.Module) -> None:
    """Raise unless the wrapped module has exactly the parameters and buffers of the stage's layers.

    The pipe would not train a missing tensor, and would not save an additional one.
    """
    stage_tensors = {id(t): t for layer in stage.layers for t in list_module_tensors(layer)}
    wrapped_tensors = {id(t): t for t in list_module_tensors(wrapped_module)}
    for problem, tensors, others in (
        ("lacks", stage_tensors, wrapped_tensors),
        ("adds", wrapped_tensors, stage_tensors),
    ):
        shapes = [tuple(tensor.shape) for key, tensor in tensors.items() if key not in others]
        if shapes:
            raise ArgumentError(
                f"the module that stage_fn returned for {stage} {problem} parameters or buffers "
                f"of the shapes {', '.join(map(str, shapes))}. It must have exactly those of the "
                "stage's layers. Change the model before you make the Pipe."
            )


def _find_resharding_modules(wrapped_module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose parameters `fully_shard` gathers for a forward and frees again."""
    for part in wrapped_module.modules():
        if is_fsdp_module(part):
            yield from (m for m in part.modules() if any(map(is_dtensor, m.parameters(False))))


def check_separate_process_groups(partition: Partition, placement: Sequence[int]) -> None:
    """Raise if stages of several ranks in this process use one process group.

    Collectives of a group must be called in the same order in all processes. The ranks of one
    process are threads, and their order differs from run to run, so the collectives could
    deadlock or mix up their data.
    """
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
                "process group (fully_shard, tensor parallelism). Their threads run at once, so "
                "the order of their collectives may differ between processes. Use "
                "runtime='inline', or a separate mesh for each rank."
            )
