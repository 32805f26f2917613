"""What the user puts around the layers of a stage: `stage_fn`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from penstock.errors import ArgumentError, KindError
from penstock.gradients.sharded import is_sharded
from penstock.gradients.shards import groups_of, is_in_parts
from penstock.partition.chain import Chain
from penstock.partition.forward.whole import Whole
from penstock.partition.partition import Partition
from penstock.partition.sequential import tensors_of
from penstock.partition.tied import Tie
from penstock.stage.stage import Stage

StageFn = Callable[[nn.Module, int], nn.Module]
Home = tuple[nn.Module, str]  # where a parameter is registered


def wrapped(
    partition: Partition,
    stage_fn: StageFn | None,
    those: Collection[int],
    between: Sequence[Tie] = (),
) -> Partition:
    """The partition, with what `stage_fn` makes of those stages computing in their place.

    `between` are ties with ranks of other processes.
    """
    if stage_fn is None:
        modules = (module for stage in partition.stages for module in stage.modules())
        if not any(map(is_sharded, modules)):
            return partition
        stage_fn = _as_it_is
    if isinstance(partition.how, Whole):
        return _as_they_are(partition, stage_fn)
    ties = [homes for homes in _homes(partition.stages).values() if len(homes) > 1]
    stages = tuple(
        _around(stage, stage_fn) if stage.index in those else stage for stage in partition.stages
    )
    for homes in ties:
        if len({id(module._parameters[name]) for module, name in homes}) > 1:
            raise ArgumentError(
                f"stage_fn has put another parameter in the place of '{homes[0][1]}' of one layer, "
                "but not of another that shares it, so that they are no longer tied: keep such "
                "layers out of it, or put them into one stage and wrap them together"
            )
    for tie in between:
        if tie.tensor is not None and is_in_parts(tie.tensor):
            raise ArgumentError(
                f"'{tie.name}' is on ranks {', '.join(map(str, tie.holders))} of the pipe, and "
                "stage_fn has cut it in parts (fully_shard, tensor parallelism), whose gradients "
                "are not summed between ranks: keep its layers out of that, or put them into "
                "stages of one rank"
            )
    return replace(partition, stages=stages)


def _as_they_are(partition: Partition, stage_fn: StageFn) -> Partition:
    """Parts of a forward have nothing that could be wrapped; units may have been, before."""
    if stage_fn is not _as_it_is:
        raise ArgumentError(
            "stage_fn wraps the layers of a Sequential, and here the stages are parts of one "
            "forward: wrap the model's blocks (fully_shard(block), block.compile()) before you "
            "make the Pipe"
        )
    return replace(
        partition,
        stages=tuple(
            replace(
                stage, shifting=frozenset(m for layer in stage.layers for m in _shifting(layer))
            )
            for stage in partition.stages
        ),
    )


def _as_it_is(module: nn.Module, _: int) -> nn.Module:
    return module


def _homes(stages: Sequence[Stage]) -> dict[nn.Parameter, list[Home]]:
    found: dict[nn.Parameter, list[Home]] = {}
    for module in dict.fromkeys(module for stage in stages for module in stage.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module, name))
    return found


def _around(stage: Stage, stage_fn: StageFn) -> Stage:
    chain = stage.compute
    assert isinstance(chain, Chain)
    names = list(_names(stage))
    made = stage_fn(chain.module.apart(), stage.index)
    if not isinstance(made, nn.Module):
        raise KindError(
            f"stage_fn gave {type(made).__name__} for {stage}, and not a module: return what is to "
            "compute in the stage's place, also if it is the module that was given"
        )
    if list(_names(stage)) != names:
        changed = sorted(set(names) ^ set(_names(stage)))
        raise ArgumentError(
            f"stage_fn changed the names of parameters or buffers of {stage}, {', '.join(changed)}:"
            " a pipe keeps the unsplit model's; put something around the stage, or change the "
            "model before you make the Pipe"
        )
    _check_same(stage, made)
    inner = set(stage.modules())
    return replace(
        stage,
        compute=chain.running(made),
        around=tuple(module for module in made.modules() if module not in inner),
        shifting=frozenset(_shifting(made)),
    )


def _names(stage: Stage) -> Iterator[str]:
    for name, layer in zip(stage.names, stage.layers, strict=True):
        yield from (f"{name}.{inner}" for inner, _ in layer.named_parameters())
        yield from (f"{name}.{inner}" for inner, _ in layer.named_buffers())


def _check_same(stage: Stage, made: nn.Module) -> None:
    """Everything that the layers learn by is in it, and nothing else: it would not be saved."""
    ours = {id(t): t for layer in stage.layers for t in tensors_of(layer)}
    theirs = {id(t): t for t in tensors_of(made)}
    for what, first, second in (("has not", ours, theirs), ("has also", theirs, ours)):
        found = [tuple(tensor.shape) for key, tensor in first.items() if key not in second]
        if found:
            raise ArgumentError(
                f"what stage_fn gave for {stage} {what} parameters or buffers of the shapes "
                f"{', '.join(map(str, found))}: it computes with those of the stage's layers; "
                "change the model before you make the Pipe"
            )


def _shifting(made: nn.Module) -> Iterator[nn.Module]:
    """The modules whose parameters are gathered to compute, and others at rest."""
    for part in made.modules():
        if is_sharded(part):
            yield from (m for m in part.modules() if any(map(is_in_parts, m.parameters(False))))


def check_apart(partition: Partition, placement: Sequence[int]) -> None:
    """Threads of one process do not communicate within one group: their order is chance."""
    users: dict[Any, set[int]] = {}
    for stage in partition.stages:
        tensors: list[Tensor] = [t for layer in stage.layers for t in tensors_of(layer)]
        for group in dict.fromkeys(group for tensor in tensors for group in groups_of(tensor)):
            users.setdefault(group, set()).add(placement[stage.index])
    for ranks in users.values():
        if len(ranks) > 1:
            raise ArgumentError(
                f"the stages of ranks {', '.join(map(str, sorted(ranks)))} communicate in one "
                "process group (fully_shard, tensor parallelism) while their threads run beside "
                "each other, in an order that other processes need not have: take "
                "runtime='inline', or a mesh of its own for each rank"
            )
