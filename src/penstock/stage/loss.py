"""The last stage of a training step: it ends in the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import _reduction, functional

from penstock.errors import RunError
from penstock.stage.aux_loss import (
    AuxLossCounter,
    AuxLossStageFunction,
    collect_aux_losses,
    split_aux_losses,
    sum_losses,
)
from penstock.stage.stage import OUTSIDE, Stage, StageFunction
from penstock.torch_compat import pytree

# -------------------------------------------------------------------------------------------------
# How the losses of micro-batches make one: a sum, or a mean; and what counts in a mean.
#
# PyTorch's own classification losses average over the targets that are not ignored, weighted by
# their classes: there, not every row counts the same, and the targets tell what does.
# -------------------------------------------------------------------------------------------------

LossFn = Callable[..., Any]

_COUNTED_LOSS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_COUNTED_LOSS_MODULES = tuple(
    getattr(nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")  # the last since 2.13
    if hasattr(nn, name)
)
DEFAULT_IGNORE_INDEX = -100  # unless the loss says otherwise


@dataclass(frozen=True)
class TargetCounter:
    """What the targets of a micro-batch count for, on their device; the host does not wait."""

    ignore_index: int = DEFAULT_IGNORE_INDEX
    class_weights: Tensor | None = None  # the weight of each

    def __call__(self, target: Tensor) -> Tensor:
        """One number.

        >>> TargetCounter()(torch.tensor([3, 1, -100]))
        tensor(2., dtype=torch.float64)
        """
        if target.is_floating_point():  # probabilities of the classes, along dim 1
            rows = target[:, 0].numel() if target.dim() > 1 else 1
            return torch.full((), rows, dtype=torch.float64, device=target.device)
        counts = target != self.ignore_index
        if self.class_weights is None:
            return counts.sum(dtype=torch.float64)
        known = target.long().clamp(
            0, len(self.class_weights) - 1
        )  # the loss itself finds wrong ones
        weights = self.class_weights.detach().to(target.device)[known]
        return weights.where(counts, 0).sum(dtype=torch.float64)


@dataclass(frozen=True)
class LossReduction:
    """The rule of one step. Where nothing is counted, a mean is by rows, or as the loss says."""

    is_sum: bool
    target_counter: TargetCounter | None = None


def resolve_reduction(loss_fn: LossFn | None, requested: str | None) -> LossReduction:
    """What was asked for, or what the loss itself does."""
    loss_fn = getattr(loss_fn, "_orig_mod", loss_fn)  # of a module that was compiled
    keywords = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    own = getattr(loss_fn, "reduction", keywords.get("reduction", "mean"))
    if keywords.get("size_average") is not None or keywords.get("reduce") is not None:
        own = _reduction.legacy_get_string(
            keywords.get("size_average"), keywords.get("reduce"), emit_warning=False
        )
    if (requested or own) == "sum":
        return LossReduction(is_sum=True)
    return LossReduction(
        is_sum=False,
        target_counter=_find_target_counter(loss_fn, keywords) if own == "mean" else None,
    )


def _find_target_counter(loss_fn: Any, keywords: dict[str, Any]) -> TargetCounter | None:
    function = loss_fn.func if isinstance(loss_fn, partial) and not loss_fn.args else loss_fn
    if function in _COUNTED_LOSS_FUNCTIONS:
        return TargetCounter(
            keywords.get("ignore_index", DEFAULT_IGNORE_INDEX), keywords.get("weight")
        )
    for known in _COUNTED_LOSS_MODULES:
        if isinstance(loss_fn, known) and type(loss_fn).forward is known.forward:
            ignored = loss_fn.ignore_index
            return TargetCounter(
                DEFAULT_IGNORE_INDEX if ignored is None else ignored, loss_fn.weight
            )
    return None


# -------------------------------------------------------------------------------------------------


class LossExtras(NamedTuple):
    """What a micro-batch gives beside its loss."""

    weight: Tensor | None = None  # what it counts for: one number, in float64
    metrics: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    output: tuple[Any, ...] = ()  # on request


NO_EXTRAS = LossExtras()


def append_loss(
    stages: Sequence[Stage],
    loss_fn: LossFn | None,
    target_counter: TargetCounter | None,
    has_target: bool,
    return_outputs: bool,
) -> list[Stage]:
    """The stages of a training step."""
    *others, last = stages
    scored = LossStageFunction(last.compute, loss_fn, target_counter, has_target, return_outputs)
    return [
        *(replace(stage, compute=AuxLossStageFunction(stage.compute)) for stage in others),
        replace(last, compute=scored),
    ]


class LossStageFunction:
    """The last stage's computation, and the loss of its output.

    From outside comes the target, after the batch if this is also the first stage; outside go
    the loss, what is beside it, and what layers have added, if anything. If the loss has a weight
    of its own, what was added is a part of it: by rows it could be weighted only at the end.
    """

    def __init__(
        self,
        compute: StageFunction,
        loss_fn: LossFn | None,
        target_counter: TargetCounter | None,
        has_target: bool,
        return_outputs: bool,
    ) -> None:
        self._compute, self._loss_fn, self._target_counter = compute, loss_fn, target_counter
        self._has_target, self._return_outputs = has_target, return_outputs
        self._aux_loss_counter = AuxLossCounter()
        self._origin = "loss_fn gave" if loss_fn else "the model, without a loss_fn, gave"

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """As the stage's, with the loss in the place of the output, or before it."""
        targets: tuple[Any, ...] = ()
        inputs, added = split_aux_losses(inputs)
        if self._has_target:
            *batch, target = inputs[OUTSIDE]
            inputs = {**inputs, OUTSIDE: tuple(batch)}
            targets = (target,)
        with collect_aux_losses(added.append):
            departing = self._compute(inputs)
            (output,) = departing[OUTSIDE]
            found = self._loss_fn(output, *targets) if self._loss_fn else extract_model_loss(output)
        self._aux_loss_counter.count(added)
        loss, beside = parse_loss(found, self._origin)
        extra = sum_losses(added).to(loss.device, copy=True) if added else None
        if beside.weight is not None:
            _zero_grad_if_weightless(output, beside.weight)
            loss, extra = loss if extra is None else loss + extra, None
        elif self._target_counter is not None and targets and isinstance(targets[0], Tensor):
            weight = self._target_counter(targets[0])
            beside = beside._replace(weight=weight)
            if (
                self._target_counter.class_weights is not None
            ):  # else what is ignored has no gradient anyway
                _zero_grad_if_weightless(output, weight)
        if self._return_outputs:
            beside = beside._replace(output=(output,))
        if extra is not None:
            return {**departing, OUTSIDE: (loss, beside, extra)}
        return {**departing, OUTSIDE: (loss,) if beside is NO_EXTRAS else (loss, beside)}


def extract_model_loss(output: Any) -> Any:
    """The loss that a model gives itself: its output, the `loss` in that, or the first of it."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    if type(output) is tuple and len(output) > 1 and _is_scalar_tensor(output[0]):
        with_weight = len(output) == 2 and (
            _is_scalar_tensor(output[1]) or not _contains_tensor(output[1])
        )
        return output if with_weight else output[0]
    return output


def _is_scalar_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _contains_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def parse_loss(result: Any, origin: str) -> tuple[Tensor, LossExtras]:
    """A loss; a tuple of it and its weight; or a dict of them and metrics."""
    if type(result) is tuple and len(result) == 2:
        result = {"loss": result[0], "weight": result[1]}
    if not isinstance(result, Mapping):
        return _parse_scalar("loss", result, origin), NO_EXTRAS
    if "loss" not in result:
        raise RunError(
            f"{origin} a dict with {', '.join(map(repr, result)) or 'nothing'}: it needs "
            "a 'loss', may have a 'weight', and all else in it is a metric"
        )
    loss = _parse_scalar("loss", result["loss"], origin)
    weight = _parse_weight(result["weight"], loss, origin) if "weight" in result else None
    metrics = {name: v for name, v in result.items() if name not in ("loss", "weight")}
    return loss, LossExtras(weight, pytree.tree_map_only(Tensor, _detach_metric, metrics))


def _parse_scalar(name: str, value: Any, origin: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        number = value.reshape(()) if value.dim() else value
        return number.clone()  # the memory of some is as large as the output's
    kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
    raise RunError(f"a {name} is one number, but {origin} {kind}: reduce it to a scalar")


def _parse_weight(value: Any, loss: Tensor, origin: str) -> Tensor:
    if isinstance(value, int | float):
        return torch.full((), value, dtype=torch.float64, device=loss.device)
    weight = _parse_scalar("weight", value, origin)
    if weight.requires_grad:
        raise RunError(f"{origin} a weight that wants a gradient, and a weight has none: detach it")
    return weight.to(loss.device, torch.float64, copy=True)


def _detach_metric(metric: Tensor) -> Tensor:
    """A number that the layers may go on changing is copied."""
    return metric.detach() if metric.dim() else metric.detach().clone()


def _zero_grad_if_weightless(output: Any, weight: Tensor) -> None:
    """A micro-batch that counts for nothing has no gradient, though its mean be nan."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
            leaf.register_hook(partial(_mask_gradient, weight))


def _mask_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(weight == 0, 0)
