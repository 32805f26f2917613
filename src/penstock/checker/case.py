"""The case to check: copies of a model, a batch and a loss, in float64 on the CPU.

`CheckedModel` has the two ways to run them: `run_model` for the unsplit model and `run_step` for a
pipe. Both get the same arguments, so that their results can be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.microbatch import Chunk, MicrobatchRows, map_batch_tensors, scatter, unwrap_chunk
from penstock.model.cut import ExampleMicrobatch, trace_with_enough_units
from penstock.model.huggingface import build_default_kwargs
from penstock.model.partition import Partition
from penstock.model.sequential import check_model, is_plain_sequential
from penstock.model.sequential_stage import find_side_names_per_layer, select_side_inputs
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.units import UnitSelector
from penstock.pipe import Pipe
from penstock.runtime.memory import Memory
from penstock.runtime.step import StepResult
from penstock.schedules.ir import Schedule
from penstock.schedules.registry import ScheduleLike, default_stages_per_rank
from penstock.stage.aux_loss import added_losses
from penstock.stage.loss import (
    LossExtras,
    LossFn,
    LossReduction,
    extract_model_loss,
    parse_loss,
    resolve_reduction,
)
from penstock.torch_compat import pytree


class StepArguments(NamedTuple):
    """The arguments of a step: positional inputs, inputs by name (`side`), and the target."""

    batch: tuple[Any, ...]
    side: dict[str, Any] = {}  # noqa: RUF012 (it is never changed)
    target: Any = None

    def map_tensors(self, transform: Callable[[Tensor], Tensor]) -> StepArguments:
        """Return the arguments with every tensor transformed."""
        arguments: StepArguments = map_batch_tensors(self, transform)
        return arguments

    def split_microbatches(self, chunks: int) -> tuple[list[StepArguments], MicrobatchRows]:
        """Return the micro-batches as a pipe splits them, and the rows of each."""
        size = len(self.batch)
        names = [*(f"input {index}" for index in range(size)), *self.side, "target"]
        pieces, rows = scatter((*self.batch, *self.side.values(), self.target), chunks, names)
        microbatches = [
            StepArguments(
                piece[:size], dict(zip(self.side, piece[size:-1], strict=True)), piece[-1]
            )
            for piece in pieces
        ]
        return microbatches, rows

    def take_whole_batch(self) -> StepArguments:
        """Return the whole batch as the model gets it, without `Chunk` and `NoChunk` wrappers."""
        return self.split_microbatches(1)[0][0]

    def take_first_part(self, parts: int) -> StepArguments:
        """Return the first of `parts` equal parts of the batch.

        Wrappers stay, so that the result can be split again. Arguments that are not split stay as
        they are.
        """
        # `Chunk` and `NoChunk` are leaves, so both lists of leaves line up although the parts have
        # lost these wrappers.
        whole_leaves, spec = pytree.tree_flatten(self)
        part_leaves = pytree.tree_leaves(self.split_microbatches(parts)[0][0])

        def shorten_leaf(whole: Any, part: Any) -> Any:
            if isinstance(whole, Chunk):
                return Chunk(part, whole.dim)
            return part if isinstance(whole, Tensor) else whole

        leaves = [
            shorten_leaf(whole, part) for whole, part in zip(whole_leaves, part_leaves, strict=True)
        ]
        arguments: StepArguments = pytree.tree_unflatten(leaves, spec)
        return arguments

    def get_named_tensors(self) -> dict[str, Tensor]:
        """Return the input tensors, each with a name for the report: input 0, mask, ..."""
        inputs = {
            **{f"input {index}": value for index, value in enumerate(self.batch)},
            **self.side,
        }
        tensors = {}
        for name, value in inputs.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                tensor = unwrap_chunk(leaf)
                if isinstance(tensor, Tensor):
                    tensors[f"{name}{pytree.keystr(path)}"] = tensor
        return tensors

    def require_input_grads(self) -> StepArguments:
        """Return the arguments with `requires_grad` set on every floating-point input."""
        inputs = {id(tensor) for tensor in self.get_named_tensors().values()}

        # Detached, because `requires_grad_` on the shared tensors would outlast this trial.
        def detach_leaf(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            needs_grad = id(tensor) in inputs and detached.is_floating_point()
            return detached.requires_grad_(needs_grad or tensor.requires_grad)

        return self.map_tensors(detach_leaf)


def to_float64(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU, in double precision if it is floating-point."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    if tensor.is_complex():
        dtype = torch.complex128
    double = tensor.detach().to("cpu", dtype, copy=True)
    return double.requires_grad_(tensor.requires_grad)


class ModelCallResult(NamedTuple):
    """The result of one call of the unsplit model.

    Across micro-batches, `loss` counts by `weight` if there is one, and by rows otherwise.
    `aux_loss`, the sum of all `add_loss` calls, always counts by rows.
    """

    output: Any
    loss: Tensor
    aux_loss: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class CheckedModel:
    """Copies of a model, a batch and a loss, and the options of the pipes to build.

    `model` itself is never run: every run uses a copy of it, so that all runs start alike.
    """

    model: nn.Module
    arguments: StepArguments
    loss_fn: LossFn | None
    reduction: str | None
    stages: int | Sequence[int]
    chunks: int
    units: UnitSelector = None

    def copy_to_float64(self) -> CheckedModel:
        """Return the case with copies of model, arguments and loss in float64 on the CPU."""
        check_model(self.model)
        model, arguments = self.copy_model().double().cpu(), self.arguments
        model.zero_grad(set_to_none=True)
        if not is_plain_sequential(model):
            default_inputs = build_default_kwargs(self.model, arguments.side)
            arguments = arguments._replace(side={**default_inputs, **arguments.side})
        return replace(
            self,
            model=model,
            arguments=arguments.map_tensors(to_float64),
            loss_fn=_loss_to_float64(self.loss_fn),
        )

    def copy_model(self) -> nn.Module:
        """Return a fresh copy of the model."""
        return copy.deepcopy(self.model)

    def build_pipe(
        self,
        schedule: ScheduleLike,
        ranks: int,
        checkpoint: str,
        runtime: str,
        devices: Sequence[Any] | None = None,
    ) -> Pipe:
        """Return a pipe over a fresh copy of the model."""
        # Balancing by measured time could cut each pipe differently. All runs need the same cut.
        needs_balance = isinstance(self.stages, int) and self.traced_model is not None
        balance = "parameters" if needs_balance else None
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
            audit="off",
        )

    def run_step(self, pipe: Pipe, arguments: StepArguments) -> StepResult:
        """Run one step of a pipe."""
        return pipe.step(*arguments.batch, target=arguments.target, outputs=True, **arguments.side)

    def measure_memory(self, pipe: Pipe) -> Memory:
        """Measure the memory of one step of a pipe."""
        arguments = self.arguments.map_tensors(Tensor.detach)
        return pipe.memory(*arguments.batch, target=arguments.target, **arguments.side)

    def run_model(self, model: nn.Module, arguments: StepArguments) -> ModelCallResult:
        """Run the unsplit model and its loss on a batch or a micro-batch."""
        return self.call_model(model, arguments, self.compute_loss_weight(arguments))

    def call_model(
        self, model: nn.Module, arguments: StepArguments, loss_weight: Tensor | None
    ) -> ModelCallResult:
        """Run the unsplit model and its loss. `loss_weight` counts unless the loss has its own."""
        targets = () if arguments.target is None else (arguments.target,)
        with added_losses() as aux_losses:
            output = call_like_pipe(model, arguments)
            loss, extras = _compute_loss(self.loss_fn, output, *targets)
        aux_loss = torch.stack([torch.zeros_like(loss), *aux_losses]).sum()
        # A loss that comes with a weight takes the added losses along, as in a pipe.
        if extras.weight is not None:
            return ModelCallResult(output, loss + aux_loss, torch.zeros_like(loss), extras.weight)
        return ModelCallResult(output, loss, aux_loss, loss_weight)

    def compute_loss_weight(self, arguments: StepArguments) -> Tensor | None:
        """Return how much the targets count in the loss; None if the loss counts by rows.

        The targets are those of `loss_fn`, or those of a loss that the model computes itself. The
        latter may trace the model, which must not happen while its random numbers are redirected.
        """
        target_counter = self.loss_reduction.target_counter
        if target_counter is not None and arguments.target is not None:
            return target_counter(arguments.target)
        if self.loss_fn is not None or self.loss_reduction.is_sum:
            return None
        return self.partition.count_loss_targets(arguments.batch, arguments.side)

    @cached_property
    def loss_reduction(self) -> LossReduction:
        """The rule that combines the losses of micro-batches."""
        return resolve_reduction(self.loss_fn, self.reduction)

    @cached_property
    def partition(self) -> Partition:
        """The cut of the model, which is the same in all runs."""
        number = self.stages if isinstance(self.stages, int) else len(self.stages)
        return self.build_pipe("naive", number, "never", "inline")._placed_partition.partition

    @cached_property
    def traced_model(self) -> TracedModel | None:
        """The trace of a model that is not an `nn.Sequential`; None for one that is.

        All pipes share it, so that the model is traced once.
        """
        if is_plain_sequential(self.model):
            return None
        number = self.stages if isinstance(self.stages, int) else len(self.stages)
        microbatch = self.arguments.split_microbatches(self.chunks)[0][0]
        example, cpu = ExampleMicrobatch(microbatch.batch, microbatch.side), torch.device("cpu")
        return trace_with_enough_units(self.copy_model(), example, self.units, number, cpu)

    def activations_only(self) -> CheckedModel:
        """Return the same case without tensors that a step legitimately keeps until its end.

        The forecast of memory counts activations only. Metrics, the gradients of a weighted loss
        and those of proxies for tied parameters live longer. So the loss here has no extras, and
        no two layers share a parameter.
        """
        model = self.copy_model()
        # Copying the layers one by one separates those that share modules or parameters.
        if is_plain_sequential(model):
            for name, layer in model._modules.items():
                model._modules[name] = copy.deepcopy(layer)
        else:
            _untie_parameters(model)
        # Only its memory counts. As a sum, a loss need not be a mean over rows.
        loss_fn = partial(_compute_loss_only, self.loss_fn)
        return replace(self, model=model, loss_fn=loss_fn, reduction="sum")


def _compute_loss_only(loss_fn: LossFn | None, output: Any, *target: Any) -> Any:
    """Return the loss without its weight and metrics."""
    return _compute_loss(loss_fn, output, *target)[0]


def _compute_loss(loss_fn: LossFn | None, output: Any, *target: Any) -> tuple[Tensor, LossExtras]:
    loss_result = extract_model_loss(output) if loss_fn is None else loss_fn(output, *target)
    return parse_loss(loss_result, "the loss gave")


def _untie_parameters(model: nn.Module) -> None:
    """Give every module its own copy of a parameter that several modules share."""
    seen_ids: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen_ids:
                untied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module._parameters[name] = untied
            elif parameter is not None:
                seen_ids.add(id(parameter))


def call_like_pipe(model: nn.Module, arguments: StepArguments) -> Any:
    """Return the output of the unsplit model, called as a pipe calls it.

    `nn.Sequential` takes one positional input. A pipe also accepts several for the first layer,
    and inputs by name for any layer, so the layers are called one by one here.
    """
    if type(model).forward is not nn.Sequential.forward:
        return model(*arguments.batch, **arguments.side)
    layers = list(model.children())
    inputs: tuple[Any, ...] = arguments.batch
    for layer, names in zip(layers, find_side_names_per_layer(layers, first=True), strict=True):
        inputs = (layer(*inputs, **select_side_inputs(arguments.side, names)),)
    return inputs[0]


def count_ranks(schedule: str | Schedule, stages: int) -> int:
    """Return the number of ranks for a schedule of so many stages.

    Raises:
        ArgumentError: The schedule has several stages per rank, and `stages` is not a multiple.
    """
    if isinstance(schedule, Schedule):
        return schedule.ranks
    per_rank = default_stages_per_rank(schedule)
    if stages % per_rank:
        raise ArgumentError(
            f"{schedule} has {per_rank} stages per rank, and {stages} is not a multiple of "
            f"{per_rank}. Use stages={stages + per_rank - stages % per_rank}."
        )
    return stages // per_rank


def default_loss(output: Any) -> Tensor:
    """Return a loss for a model that has none: the mean of a function of every output.

    It is a mean over rows, whichever dimension they are on, so it can be split by rows.
    """
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and leaf.numel():
            total = total + (leaf.sin() + leaf.square()).mean()
    return total


def _loss_to_float64(loss_fn: LossFn | None) -> LossFn | None:
    """Return a copy of the loss with its own tensors, such as class weights, in float64."""
    if isinstance(loss_fn, nn.Module):
        return copy.deepcopy(loss_fn).double().cpu()
    if isinstance(loss_fn, partial):
        keywords = pytree.tree_map_only(Tensor, to_float64, loss_fn.keywords)
        arguments = pytree.tree_map_only(Tensor, to_float64, loss_fn.args)
        return partial(loss_fn.func, *arguments, **keywords)
    return loss_fn
