"""What is checked: a model and a batch, copied and in float64, and how a pipe is made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batch import NoChunk, scatter, shares
from penstock.errors import ArgumentError
from penstock.ir import Schedule
from penstock.pipe import Pipe
from penstock.run.training import StepResult
from penstock.schedules.choice import Asked, stages_per_rank
from penstock.stage.loss import LossFn


@dataclass(frozen=True)
class Values:
    """What a step is given: positional and keyword inputs, and the target."""

    batch: tuple[Any, ...]
    side: dict[str, Any] = field(default_factory=dict)
    target: Any = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Values:
        """With each tensor changed."""

        def changed(leaf: Any) -> Any:
            if isinstance(leaf, NoChunk):
                return NoChunk(change(leaf.tensor))
            return change(leaf) if isinstance(leaf, Tensor) else leaf

        batch, side, target = pytree.tree_map(changed, (self.batch, self.side, self.target))
        return Values(batch, side, target)

    def cut(self, chunks: int) -> list[Values]:
        """The micro-batches, as a pipe cuts them; that of `chunks=1` is what a model is given."""
        pieces = scatter((self.batch, self.side, self.target), chunks)
        return [Values(*piece) for piece in pieces]

    def shares(self, chunks: int) -> list[float]:
        """The part of the rows that each micro-batch has."""
        return shares((self.batch, self.side, self.target), chunks)

    def half(self) -> Values:
        """The first half of the rows; what is not cut stays as it was given."""
        mine, spec = pytree.tree_flatten((self.batch, self.side, self.target))
        piece = self.cut(2)[0]
        cut = pytree.tree_leaves((piece.batch, piece.side, piece.target))
        leaves = [c if isinstance(m, Tensor) else m for m, c in zip(mine, cut, strict=True)]
        return Values(*pytree.tree_unflatten(leaves, spec))

    def inputs(self) -> dict[str, Tensor]:
        """The tensors that a model is given, by a name for each: input 0, mask, ..."""
        given = {**{f"input {at}": value for at, value in enumerate(self.batch)}, **self.side}
        found = {}
        for name, value in given.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                tensor = leaf.tensor if isinstance(leaf, NoChunk) else leaf
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


@dataclass(frozen=True)
class Subject:
    """A model, a batch and a loss; nothing here is the user's own, and the model is never run."""

    model: nn.Module
    values: Values
    loss_fn: LossFn | None
    reduction: str | None
    stages: int | Sequence[int]
    chunks: int

    @staticmethod
    def of(
        model: nn.Module,
        values: Values,
        loss_fn: LossFn | None,
        reduction: str | None,
        stages: int | Sequence[int],
        chunks: int,
    ) -> Subject:
        """Copies, in float64, on the host."""
        mine = copy.deepcopy(model).double().cpu()
        mine.zero_grad(set_to_none=True)
        return Subject(
            mine, values.mapped(in_float64), _loss_in_float64(loss_fn), reduction, stages, chunks
        )

    def fresh(self) -> nn.Module:
        """The model as it was given."""
        return copy.deepcopy(self.model)

    def pipe(
        self,
        schedule: Asked,
        ranks: int,
        checkpoint: str,
        runtime: str,
        devices: Sequence[Any] | None = None,
        chunks: int | None = None,
    ) -> Pipe:
        """A pipe over a fresh copy."""
        return Pipe(
            self.fresh(),  # type: ignore[arg-type]
            chunks or self.chunks,
            checkpoint,
            stages=self.stages,
            devices=devices or ["cpu"] * ranks,
            schedule=schedule,
            loss_fn=self.loss_fn,
            reduction=self.reduction,
            runtime=runtime,
        )

    def step(self, pipe: Pipe, values: Values, outputs: bool = True) -> StepResult:
        """The one place where a pipe is given a batch."""
        return pipe.step(*values.batch, target=values.target, outputs=outputs, **values.side)

    def call(self, model: nn.Module, values: Values) -> tuple[Any, Tensor]:
        """The one place where a model is: its output, and the loss of it."""
        output = _called(model, values)
        if self.loss_fn is None:
            return output, output
        given = () if values.target is None else (values.target,)
        loss: Tensor = self.loss_fn(output, *given)
        return output, loss

    def weights(self, values: Values) -> list[float]:
        """How much the loss of each micro-batch counts."""
        named = getattr(self.loss_fn, "keywords", {}).get("reduction", "mean")
        reduction = self.reduction or getattr(self.loss_fn, "reduction", named)
        parts = values.shares(self.chunks)
        return [1.0 if reduction == "sum" else part for part in parts]

    @cached_property
    def layers(self) -> list[tuple[str, ...]]:
        """The names of the layers of each stage."""
        number = self.stages if isinstance(self.stages, int) else len(self.stages)
        pipe = self.pipe("naive", number, "never", "inline")
        return [stage.names for stage in pipe._split.partition.stages]

    def with_values(self, values: Values) -> Subject:
        """The same model with another batch."""
        return replace(self, values=values)


def _called(model: nn.Module, values: Values) -> Any:
    """The model's output; a Sequential gives all inputs to its first layer, as in a pipe."""
    if type(model).forward is not nn.Sequential.forward:
        return model(*values.batch, **values.side)
    first, *others = model.children()
    value = first(*values.batch, **values.side)
    for layer in others:
        value = layer(value)
    return value


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
    """A loss for models that come without one: a mean by rows, in which every number counts."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and len(leaf):
            rows = leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]
            signs = torch.arange(rows.size(1), dtype=leaf.dtype).cos()
            total = total + (rows * signs + rows.square()).mean()
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
