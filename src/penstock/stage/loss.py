"""The last stage of a training step: it ends in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.stage.added import Adding, Tally, summed, taken_by, unpacked
from penstock.stage.reduction import Counting, LossFn
from penstock.stage.stage import OUTSIDE, Compute, Stage


class Beside(NamedTuple):
    """What a micro-batch gives beside its loss."""

    weight: Tensor | None = None  # what it counts for: one number, in float64
    metrics: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    output: tuple[Any, ...] = ()  # on request


NOTHING = Beside()


def ending_in_loss(
    stages: Sequence[Stage],
    loss_fn: LossFn | None,
    counting: Counting | None,
    has_target: bool,
    outputs: bool,
) -> list[Stage]:
    """The stages of a training step."""
    *others, last = stages
    scored = Scored(last.compute, loss_fn, counting, has_target, outputs)
    return [
        *(replace(stage, compute=Adding(stage.compute)) for stage in others),
        replace(last, compute=scored),
    ]


class Scored:
    """The last stage's computation, and the loss of its output.

    From outside comes the target, after the batch if this is also the first stage; outside go
    the loss, what is beside it, and what layers have added, if anything. If the loss has a weight
    of its own, what was added is a part of it: by rows it could be weighted only at the end.
    """

    def __init__(
        self,
        compute: Compute,
        loss_fn: LossFn | None,
        counting: Counting | None,
        has_target: bool,
        outputs: bool,
    ) -> None:
        self._compute, self._loss_fn, self._counting = compute, loss_fn, counting
        self._has_target, self._outputs = has_target, outputs
        self._tally = Tally()
        self._source = "loss_fn gave" if loss_fn else "the model, without a loss_fn, gave"

    def __call__(self, arrived: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """As the stage's, with the loss in the place of the output, or before it."""
        targets: tuple[Any, ...] = ()
        arrived, added = unpacked(arrived)
        if self._has_target:
            *batch, target = arrived[OUTSIDE]
            arrived = {**arrived, OUTSIDE: tuple(batch)}
            targets = (target,)
        with taken_by(added.append):
            departing = self._compute(arrived)
            (output,) = departing[OUTSIDE]
            found = self._loss_fn(output, *targets) if self._loss_fn else own_loss(output)
        self._tally.count(added)
        loss, beside = read_loss(found, self._source)
        extra = summed(added).to(loss.device, copy=True) if added else None
        if beside.weight is not None:
            _keep_out_of(output, beside.weight)
            loss, extra = loss if extra is None else loss + extra, None
        elif self._counting is not None and targets and isinstance(targets[0], Tensor):
            weight = self._counting(targets[0])
            beside = beside._replace(weight=weight)
            if self._counting.classes is not None:  # else what is ignored has no gradient anyway
                _keep_out_of(output, weight)
        if self._outputs:
            beside = beside._replace(output=(output,))
        if extra is not None:
            return {**departing, OUTSIDE: (loss, beside, extra)}
        return {**departing, OUTSIDE: (loss,) if beside is NOTHING else (loss, beside)}


def own_loss(output: Any) -> Any:
    """The loss that a model gives itself: its output, the `loss` in that, or the first of it."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    if type(output) is tuple and len(output) > 1 and _is_number(output[0]):
        with_weight = len(output) == 2 and (_is_number(output[1]) or not _holds(output[1]))
        return output if with_weight else output[0]
    return output


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _holds(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def read_loss(found: Any, source: str) -> tuple[Tensor, Beside]:
    """A loss; a tuple of it and its weight; or a dict of them and metrics."""
    if type(found) is tuple and len(found) == 2:
        found = {"loss": found[0], "weight": found[1]}
    if not isinstance(found, Mapping):
        return _one_number("loss", found, source), NOTHING
    if "loss" not in found:
        raise RunError(
            f"{source} a dict with {', '.join(map(repr, found)) or 'nothing'}: it needs "
            "a 'loss', may have a 'weight', and all else in it is a metric"
        )
    loss = _one_number("loss", found["loss"], source)
    weight = _weight(found["weight"], loss, source) if "weight" in found else None
    metrics = {name: v for name, v in found.items() if name not in ("loss", "weight")}
    return loss, Beside(weight, pytree.tree_map_only(Tensor, _detached, metrics))


def _one_number(what: str, found: Any, source: str) -> Tensor:
    if isinstance(found, Tensor) and found.numel() == 1:
        number = found.reshape(()) if found.dim() else found
        return number.clone()  # the memory of some is as large as the output's
    kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found)
    raise RunError(f"a {what} is one number, but {source} {kind}: reduce it to a scalar")


def _weight(found: Any, loss: Tensor, source: str) -> Tensor:
    if isinstance(found, int | float):
        return torch.full((), found, dtype=torch.float64, device=loss.device)
    weight = _one_number("weight", found, source)
    if weight.requires_grad:
        raise RunError(f"{source} a weight that wants a gradient, and a weight has none: detach it")
    return weight.to(loss.device, torch.float64, copy=True)


def _detached(metric: Tensor) -> Tensor:
    """A number that the layers may go on changing is copied."""
    return metric.detach() if metric.dim() else metric.detach().clone()


def _keep_out_of(output: Any, weight: Tensor) -> None:
    """A micro-batch that counts for nothing has no gradient, though its mean be nan."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
            leaf.register_hook(partial(_if_it_counts, weight))


def _if_it_counts(weight: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(weight == 0, 0)
