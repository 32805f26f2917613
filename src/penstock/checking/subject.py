"""What is checked: a model and a batch, copied and in float64, and how a pipe is made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batch import Chunk, NoChunk, Rows, scatter
from penstock.errors import ArgumentError
from penstock.ir import Schedule
from penstock.partition.forward.cutting import Prospect
from penstock.partition.forward.units import Asked
from penstock.partition.forward.whole import Whole
from penstock.partition.hugging_face import defaults_of
from penstock.partition.model import Example, prospect_of
from penstock.partition.partition import Partition
from penstock.partition.sequential import check_model, is_layered
from penstock.partition.side import names_in_chain, picked
from penstock.pipe import Pipe
from penstock.run.memory import Memory
from penstock.run.training import StepResult
from penstock.schedules.choice import Asked as AskedSchedule
from penstock.schedules.choice import stages_per_rank
from penstock.stage.added import added_losses
from penstock.stage.loss import own_loss, read_loss
from penstock.stage.reduction import LossFn, Reduction, reduction_of


@dataclass(frozen=True)
class Values:
    """What a step is given: positional and side inputs, and the target."""

    batch: tuple[Any, ...]
    side: dict[str, Any] = field(default_factory=dict)
    target: Any = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Values:
        """With each tensor changed."""

        def changed(leaf: Any) -> Any:
            if isinstance(leaf, NoChunk):
                return NoChunk(change(leaf.tensor))
            if isinstance(leaf, Chunk):
                return Chunk(change(leaf.tensor), leaf.dim)
            return change(leaf) if isinstance(leaf, Tensor) else leaf

        batch, side, target = pytree.tree_map(changed, (self.batch, self.side, self.target))
        return Values(batch, side, target)

    def cut(self, chunks: int) -> tuple[list[Values], Rows]:
        """The micro-batches, as a pipe cuts them; that of `chunks=1` is what a model is given."""
        names = [f"input {at}" for at in range(len(self.batch))]
        given = (*self.batch, *self.side.values(), self.target)
        pieces, rows = scatter(given, chunks, [*names, *self.side, "target"])
        return [self._of(piece) for piece in pieces], rows

    def uncut(self) -> Values:
        """The whole batch, as a model is given it."""
        return self.cut(1)[0][0]

    def _of(self, given: Sequence[Any]) -> Values:
        """Other values in the places of these."""
        *inputs, target = given
        size = len(self.batch)
        return Values(
            tuple(inputs[:size]), dict(zip(self.side, inputs[size:], strict=True)), target
        )

    def first_of(self, parts: int) -> Values:
        """The first of so many parts of the rows; what is not cut stays as it was given."""
        mine, spec = pytree.tree_flatten((self.batch, self.side, self.target))
        piece = self.cut(parts)[0][0]
        cut = pytree.tree_leaves((piece.batch, piece.side, piece.target))

        def shortened(given: Any, found: Any) -> Any:
            if isinstance(given, Chunk):
                return Chunk(found, given.dim)
            return found if isinstance(given, Tensor) else given

        leaves = [shortened(given, found) for given, found in zip(mine, cut, strict=True)]
        return Values(*pytree.tree_unflatten(leaves, spec))

    def inputs(self) -> dict[str, Tensor]:
        """The tensors that a model is given, by a name for each: input 0, mask, ..."""
        given = {**{f"input {at}": value for at, value in enumerate(self.batch)}, **self.side}
        found = {}
        for name, value in given.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                tensor = leaf.tensor if isinstance(leaf, Chunk | NoChunk) else leaf
                if isinstance(tensor, Tensor):
                    found[f"{name}{pytree.keystr(path)}"] = tensor
        return found

    def learning(self) -> Values:
        """The same with gradients wanted for every input that can have one."""
        inputs = {id(tensor) for tensor in self.inputs().values()}

        def leaf(tensor: Tensor) -> Tensor:
            mine = tensor.detach()
            wanted = id(tensor) in inputs and mine.is_floating_point()
            return mine.requires_grad_(wanted or tensor.requires_grad)

        return self.mapped(leaf)


def in_float64(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the host, with its numbers in double precision."""
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    if tensor.is_complex():
        wide = torch.complex128
    mine = tensor.detach().to("cpu", wide, copy=True)
    return mine.requires_grad_(tensor.requires_grad)


class Called(NamedTuple):
    """What a model gives for some rows; `added` counts by rows, the loss by its weight if any."""

    output: Any
    loss: Tensor
    added: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class Subject:
    """A model, a batch and a loss; nothing here is the user's own, and the model is never run."""

    model: nn.Module
    values: Values
    loss_fn: LossFn | None
    reduction: str | None
    stages: int | Sequence[int]
    chunks: int
    units: Asked = None

    @staticmethod
    def of(
        model: nn.Module,
        values: Values,
        loss_fn: LossFn | None,
        reduction: str | None,
        stages: int | Sequence[int],
        chunks: int,
        units: Asked = None,
    ) -> Subject:
        """Copies, in float64, on the host."""
        check_model(model)
        mine = copy.deepcopy(model).double().cpu()
        mine.zero_grad(set_to_none=True)
        if not is_layered(model):
            side = {**defaults_of(model, values.side), **values.side}
            values = Values(values.batch, side, values.target)
        loss_fn = _loss_in_float64(loss_fn)
        return Subject(mine, values.mapped(in_float64), loss_fn, reduction, stages, chunks, units)

    def fresh(self) -> nn.Module:
        """The model as it was given."""
        return copy.deepcopy(self.model)

    def pipe(
        self,
        schedule: AskedSchedule,
        ranks: int,
        checkpoint: str,
        runtime: str,
        devices: Sequence[Any] | None = None,
    ) -> Pipe:
        """A pipe over a fresh copy."""
        cut = isinstance(self.stages, int) and self.prospect is not None
        balance = "parameters" if cut else None  # the same cut each time
        return Pipe(
            self.fresh(),
            self.chunks,
            checkpoint,
            stages=self.stages,
            example=self.prospect,
            balance=balance,
            devices=devices or ["cpu"] * ranks,
            schedule=schedule,
            loss_fn=self.loss_fn,
            reduction=self.reduction,
            runtime=runtime,
        )

    def step(self, pipe: Pipe, values: Values, outputs: bool = True) -> StepResult:
        """The one place where a pipe is given a batch."""
        return pipe.step(*values.batch, target=values.target, outputs=outputs, **values.side)

    def weighed(self, pipe: Pipe) -> Memory:
        """What is alive in a step of the pipe."""
        values = self.values.mapped(Tensor.detach)
        return pipe.memory(*values.batch, target=values.target, **values.side)

    def call(self, model: nn.Module, values: Values) -> Called:
        """The one place where a model is."""
        given = () if values.target is None else (values.target,)
        with added_losses() as extra:
            output = called(model, values)
            found = own_loss(output) if self.loss_fn is None else self.loss_fn(output, *given)
        loss, beside = read_loss(found, "the loss gave")
        added = torch.stack([torch.zeros_like(loss), *extra]).sum()
        if beside.weight is not None:
            return Called(output, loss + added, torch.zeros_like(loss), beside.weight)
        return Called(output, loss, added, self._weight(values))

    def _weight(self, values: Values) -> Tensor | None:
        """What targets count for: the loss's own, or those that the model takes itself."""
        counting, how = self.rule.counting, self.partition.how
        if counting is not None and values.target is not None:
            return counting(values.target)
        if self.loss_fn is not None or self.rule.sums or not isinstance(how, Whole):
            return None
        found = how.divided(values.batch, values.side, how.state()).counted()
        return None if found is None else found[1](found[0])

    @cached_property
    def rule(self) -> Reduction:
        """How the losses of micro-batches make one."""
        return reduction_of(self.loss_fn, self.reduction)

    @cached_property
    def partition(self) -> Partition:
        """How the model is cut."""
        number = self.stages if isinstance(self.stages, int) else len(self.stages)
        return self.pipe("naive", number, "never", "inline")._split.partition

    @cached_property
    def prospect(self) -> Prospect | None:
        """What was traced of a model that is no Sequential: every pipe of it is made with that."""
        if is_layered(self.model):
            return None
        number = self.stages if isinstance(self.stages, int) else len(self.stages)
        first = self.values.cut(self.chunks)[0][0]
        example, cpu = Example(first.batch, first.side), torch.device("cpu")
        return prospect_of(self.fresh(), example, self.units, number, cpu)

    def activations_only(self) -> Subject:
        """The same without what a step keeps until its end, by rights.

        Those are metrics, and gradients that it makes anew: of weighted losses, and of stand-ins
        for tied parameters. So the loss comes alone, and no layers share anything.
        """
        model = self.fresh()
        if is_layered(model):
            for name, layer in model._modules.items():
                model._modules[name] = copy.deepcopy(layer)
        else:
            _untie(model)
        return replace(self, model=model, loss_fn=partial(_alone, self.loss_fn))

    def with_values(self, values: Values, chunks: int) -> Subject:
        """The same model with another batch."""
        return replace(self, values=values, chunks=chunks)


def _alone(loss_fn: LossFn | None, output: Any, *target: Any) -> Any:
    found = own_loss(output) if loss_fn is None else loss_fn(output, *target)
    return read_loss(found, "the loss gave")[0]


def _untie(model: nn.Module) -> None:
    """Each parameter is one module's."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                alone = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module._parameters[name] = alone
            elif parameter is not None:
                seen.add(id(parameter))


def called(model: nn.Module, values: Values) -> Any:
    """The model's output; a Sequential takes several inputs, and some by name, as in a pipe."""
    if type(model).forward is not nn.Sequential.forward:
        return model(*values.batch, **values.side)
    layers = list(model.children())
    given: tuple[Any, ...] = values.batch
    for layer, names in zip(layers, names_in_chain(layers, first=True), strict=True):
        given = (layer(*given, **picked(values.side, names)),)
    return given[0]


def ranks_for(schedule: str | Schedule, stages: int) -> int:
    """How many ranks suit a schedule of so many stages."""
    if isinstance(schedule, Schedule):
        return schedule.ranks
    per_rank = stages_per_rank(schedule)
    if stages % per_rank:
        raise ArgumentError(
            f"{schedule} has {per_rank} stages a rank, and {stages} stages do not divide so: "
            f"use stages={stages + per_rank - stages % per_rank}"
        )
    return stages // per_rank


def of_its_own(output: Any) -> Tensor:
    """A loss for models that come without one: a mean by rows, whichever dim these are on."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and leaf.numel():
            total = total + (leaf.sin() + leaf.square()).mean()
    return total


def _loss_in_float64(loss_fn: LossFn | None) -> LossFn | None:
    """With its own tensors (the weights of classes, say) in float64."""
    if isinstance(loss_fn, nn.Module):
        return copy.deepcopy(loss_fn).double().cpu()
    if isinstance(loss_fn, partial):
        keywords = pytree.tree_map_only(Tensor, in_float64, loss_fn.keywords)
        arguments = pytree.tree_map_only(Tensor, in_float64, loss_fn.args)
        return partial(loss_fn.func, *arguments, **keywords)
    return loss_fn
