"""How the losses of micro-batches make one: a sum, or a mean; and what counts in a mean.

PyTorch's own classification losses average over the targets that are not ignored, weighted by
their classes: there, not every row counts the same, and the targets tell what does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import _reduction, functional

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

        >>> Counting()(torch.tensor([3, 1, -100]))
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
