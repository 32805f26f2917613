"""What is checked: a model and a batch, copied and in float64, and how a pipe is made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.microbatch import Chunk, MicrobatchRows, NoChunk, scatter
from penstock.model.cut import ExampleMicrobatch, trace_with_enough_units
from penstock.model.huggingface import build_default_kwargs
from penstock.model.partition import Partition
from penstock.model.sequential import check_model, is_plain_sequential
from penstock.model.sequential_stage import find_side_names_per_layer, select_side_inputs
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.traced_partition import TracedPartition
from penstock.model.traced.units import UnitSelector
from penstock.pipe import Pipe
from penstock.runtime.memory import Memory
from penstock.runtime.train_step import StepResult
from penstock.schedules.ir import Schedule
from penstock.schedules.registry import ScheduleLike as AskedSchedule
from penstock.schedules.registry import default_stages_per_rank
from penstock.stage.aux_loss import added_losses
from penstock.stage.loss import (
    LossFn,
    LossReduction,
    extract_model_loss,
    parse_loss,
    resolve_reduction,
)
from penstock.torch_compat import pytree


@dataclass(frozen=True)
class StepArguments:
    """What a step is given: positional and side inputs, and the target."""

    batch: tuple[Any, ...]
    side: dict[str, Any] = field(default_factory=dict)
    target: Any = None

    def map_tensors(self, transform: Callable[[Tensor], Tensor]) -> StepArguments:
        """With each tensor changed."""

        def map_leaf(leaf: Any) -> Any:
            if isinstance(leaf, NoChunk):
                return NoChunk(transform(leaf.tensor))
            if isinstance(leaf, Chunk):
                return Chunk(transform(leaf.tensor), leaf.dim)
            return transform(leaf) if isinstance(leaf, Tensor) else leaf

        batch, side, target = pytree.tree_map(map_leaf, (self.batch, self.side, self.target))
        return StepArguments(batch, side, target)

    def split_microbatches(self, chunks: int) -> tuple[list[StepArguments], MicrobatchRows]:
        """The micro-batches, as a pipe cuts them; that of `chunks=1` is what a model is given."""
        names = [f"input {at}" for at in range(len(self.batch))]
        given = (*self.batch, *self.side.values(), self.target)
        pieces, rows = scatter(given, chunks, [*names, *self.side, "target"])
        return [self._rebuild(piece) for piece in pieces], rows

    def take_whole_batch(self) -> StepArguments:
        """The whole batch, as a model is given it."""
        return self.split_microbatches(1)[0][0]

    def _rebuild(self, leaves: Sequence[Any]) -> StepArguments:
        """Other values in the places of these."""
        *inputs, target = leaves
        size = len(self.batch)
        return StepArguments(
            tuple(inputs[:size]), dict(zip(self.side, inputs[size:], strict=True)), target
        )

    def take_first_part(self, parts: int) -> StepArguments:
        """The first of so many parts of the rows; what is not cut stays as it was given."""
        mine, spec = pytree.tree_flatten((self.batch, self.side, self.target))
        piece = self.split_microbatches(parts)[0][0]
        cut = pytree.tree_leaves((piece.batch, piece.side, piece.target))

        def shorten_leaf(given: Any, found: Any) -> Any:
            if isinstance(given, Chunk):
                return Chunk(found, given.dim)
            return found if isinstance(given, Tensor) else given

        leaves = [shorten_leaf(given, found) for given, found in zip(mine, cut, strict=True)]
        return StepArguments(*pytree.tree_unflatten(leaves, spec))

    def get_named_tensors(self) -> dict[str, Tensor]:
        """The tensors that a model is given, by a name for each: input 0, mask, ..."""
        given = {**{f"input {at}": value for at, value in enumerate(self.batch)}, **self.side}
        found = {}
        for name, value in given.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                tensor = leaf.tensor if isinstance(leaf, Chunk | NoChunk) else leaf
                if isinstance(tensor, Tensor):
                    found[f"{name}{pytree.keystr(path)}"] = tensor
        return found

    def require_input_grads(self) -> StepArguments:
        """The same with gradients wanted for every input that can have one."""
        inputs = {id(tensor) for tensor in self.get_named_tensors().values()}

        def detach_leaf(tensor: Tensor) -> Tensor:
            mine = tensor.detach()
            wanted = id(tensor) in inputs and mine.is_floating_point()
            return mine.requires_grad_(wanted or tensor.requires_grad)

        return self.map_tensors(detach_leaf)


def to_float64(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the host, with its numbers in double precision."""
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    if tensor.is_complex():
        wide = torch.complex128
    mine = tensor.detach().to("cpu", wide, copy=True)
    return mine.requires_grad_(tensor.requires_grad)


class ModelCallResult(NamedTuple):
    """What a model gives for some rows; `added` counts by rows, the loss by its weight if any."""

    output: Any
    loss: Tensor
    aux_loss: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class CheckedModel:
    """A model, a batch and a loss; nothing here is the user's own, and the model is never run."""

    model: nn.Module
    arguments: StepArguments
    loss_fn: LossFn | None
    reduction: str | None
    stages: int | Sequence[int]
    chunks: int
    units: UnitSelector = None

    @staticmethod
    def from_user_model(
        model: nn.Module,
        arguments: StepArguments,
        loss_fn: LossFn | None,
        reduction: str | None,
        stages: int | Sequence[int],
        chunks: int,
        units: UnitSelector = None,
    ) -> CheckedModel:
        """Copies, in float64, on the host."""
        check_model(model)
        mine = copy.deepcopy(model).double().cpu()
        mine.zero_grad(set_to_none=True)
        if not is_plain_sequential(model):
            side = {**build_default_kwargs(model, arguments.side), **arguments.side}
            arguments = StepArguments(arguments.batch, side, arguments.target)
        loss_fn = _loss_to_float64(loss_fn)
        return CheckedModel(
            mine, arguments.map_tensors(to_float64), loss_fn, reduction, stages, chunks, units
        )

    def copy_model(self) -> nn.Module:
        """The model as it was given."""
        return copy.deepcopy(self.model)

    def build_pipe(
        self,
        schedule: AskedSchedule,
        ranks: int,
        checkpoint: str,
        runtime: str,
        devices: Sequence[Any] | None = None,
    ) -> Pipe:
        """A pipe over a fresh copy."""
        cut = isinstance(self.stages, int) and self.traced_model is not None
        balance = "parameters" if cut else None  # the same cut each time
        return Pipe(
            self.copy_model(),
            self.chunks,
            checkpoint,
            stages=self.stages,
            example=self.traced_model,
            balance=balance,
            devices=devices or ["cpu"] * ranks,
            schedule=schedule,
            loss_fn=self.loss_fn,
            reduction=self.reduction,
            runtime=runtime,
        )

    def run_step(self, pipe: Pipe, arguments: StepArguments, outputs: bool = True) -> StepResult:
        """The one place where a pipe is given a batch."""
        return pipe.step(
            *arguments.batch, target=arguments.target, outputs=outputs, **arguments.side
        )

    def measure_memory(self, pipe: Pipe) -> Memory:
        """What is alive in a step of the pipe."""
        values = self.arguments.map_tensors(Tensor.detach)
        return pipe.memory(*values.batch, target=values.target, **values.side)

    def run_model(self, model: nn.Module, arguments: StepArguments) -> ModelCallResult:
        """The one place where a model is."""
        given = () if arguments.target is None else (arguments.target,)
        with added_losses() as extra:
            output = call_like_pipe(model, arguments)
            found = (
                extract_model_loss(output) if self.loss_fn is None else self.loss_fn(output, *given)
            )
        loss, beside = parse_loss(found, "the loss gave")
        added = torch.stack([torch.zeros_like(loss), *extra]).sum()
        if beside.weight is not None:
            return ModelCallResult(output, loss + added, torch.zeros_like(loss), beside.weight)
        return ModelCallResult(output, loss, added, self._compute_loss_weight(arguments))

    def _compute_loss_weight(self, arguments: StepArguments) -> Tensor | None:
        """What targets count for: the loss's own, or those that the model takes itself."""
        counting, how = self.loss_reduction.target_counter, self.partition.how
        if counting is not None and arguments.target is not None:
            return counting(arguments.target)
        if (
            self.loss_fn is not None
            or self.loss_reduction.is_sum
            or not isinstance(how, TracedPartition)
        ):
            return None
        found = how.trace_microbatch(
            arguments.batch, arguments.side, how.read_settings()
        ).compute_loss_targets()
        return None if found is None else found[1](found[0])

    @cached_property
    def loss_reduction(self) -> LossReduction:
        """How the losses of micro-batches make one."""
        return resolve_reduction(self.loss_fn, self.reduction)

    @cached_property
    def partition(self) -> Partition:
        """How the model is cut."""
        number = self.stages if isinstance(self.stages, int) else len(self.stages)
        return self.build_pipe("naive", number, "never", "inline")._placed_partition.partition

    @cached_property
    def traced_model(self) -> TracedModel | None:
        """What was traced of a model that is no Sequential: every pipe of it is made with that."""
        if is_plain_sequential(self.model):
            return None
        number = self.stages if isinstance(self.stages, int) else len(self.stages)
        first = self.arguments.split_microbatches(self.chunks)[0][0]
        example, cpu = ExampleMicrobatch(first.batch, first.side), torch.device("cpu")
        return trace_with_enough_units(self.copy_model(), example, self.units, number, cpu)

    def activations_only(self) -> CheckedModel:
        """The same without what a step keeps until its end, by rights.

        Those are metrics, and gradients that it makes anew: of weighted losses, and of stand-ins
        for tied parameters. So the loss comes alone, and no layers share anything.
        """
        model = self.copy_model()
        if is_plain_sequential(model):
            for name, layer in model._modules.items():
                model._modules[name] = copy.deepcopy(layer)
        else:
            _untie_parameters(model)
        return replace(self, model=model, loss_fn=partial(_compute_loss_only, self.loss_fn))

    def with_arguments(self, arguments: StepArguments, chunks: int) -> CheckedModel:
        """The same model with another batch."""
        return replace(self, arguments=arguments, chunks=chunks)


def _compute_loss_only(loss_fn: LossFn | None, output: Any, *target: Any) -> Any:
    found = extract_model_loss(output) if loss_fn is None else loss_fn(output, *target)
    return parse_loss(found, "the loss gave")[0]


def _untie_parameters(model: nn.Module) -> None:
    """Each parameter is one module's."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                alone = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module._parameters[name] = alone
            elif parameter is not None:
                seen.add(id(parameter))


def call_like_pipe(model: nn.Module, arguments: StepArguments) -> Any:
    """The model's output; a Sequential takes several inputs, and some by name, as in a pipe."""
    if type(model).forward is not nn.Sequential.forward:
        return model(*arguments.batch, **arguments.side)
    layers = list(model.children())
    given: tuple[Any, ...] = arguments.batch
    for layer, names in zip(layers, find_side_names_per_layer(layers, first=True), strict=True):
        given = (layer(*given, **select_side_inputs(arguments.side, names)),)
    return given[0]


def count_ranks(schedule: str | Schedule, stages: int) -> int:
    """How many ranks suit a schedule of so many stages."""
    if isinstance(schedule, Schedule):
        return schedule.ranks
    per_rank = default_stages_per_rank(schedule)
    if stages % per_rank:
        raise ArgumentError(
            f"{schedule} has {per_rank} stages a rank, and {stages} stages do not divide so: "
            f"use stages={stages + per_rank - stages % per_rank}"
        )
    return stages // per_rank


def default_loss(output: Any) -> Tensor:
    """A loss for models that come without one: a mean by rows, whichever dim these are on."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and leaf.numel():
            total = total + (leaf.sin() + leaf.square()).mean()
    return total


def _loss_to_float64(loss_fn: LossFn | None) -> LossFn | None:
    """With its own tensors (the weights of classes, say) in float64."""
    if isinstance(loss_fn, nn.Module):
        return copy.deepcopy(loss_fn).double().cpu()
    if isinstance(loss_fn, partial):
        keywords = pytree.tree_map_only(Tensor, to_float64, loss_fn.keywords)
        arguments = pytree.tree_map_only(Tensor, to_float64, loss_fn.args)
        return partial(loss_fn.func, *arguments, **keywords)
    return loss_fn
