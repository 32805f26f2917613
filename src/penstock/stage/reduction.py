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

_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_MODULES = tuple(
    getattr(nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")  # the last since 2.13
    if hasattr(nn, name)
)
IGNORED = -100  # unless the loss says otherwise


@dataclass(frozen=True)
class Counting:
    """What the targets of a micro-batch count for, on their device; the host does not wait."""

    ignored: int = IGNORED
    classes: Tensor | None = None  # the weight of each

    def __call__(self, target: Tensor) -> Tensor:
        """One number.

        >>> Counting()(torch.tensor([3, 1, -100]))
        tensor(2., dtype=torch.float64)
        """
        if target.is_floating_point():  # probabilities of the classes, along dim 1
            rows = target[:, 0].numel() if target.dim() > 1 else 1
            return torch.full((), rows, dtype=torch.float64, device=target.device)
        counts = target != self.ignored
        if self.classes is None:
            return counts.sum(dtype=torch.float64)
        known = target.long().clamp(0, len(self.classes) - 1)  # the loss itself finds wrong ones
        weights = self.classes.detach().to(target.device)[known]
        return weights.where(counts, 0).sum(dtype=torch.float64)


@dataclass(frozen=True)
class Reduction:
    """The rule of one step. Where nothing is counted, a mean is by rows, or as the loss says."""

    sums: bool
    counting: Counting | None = None


def reduction_of(loss_fn: LossFn | None, asked: str | None) -> Reduction:
    """What was asked for, or what the loss itself does."""
    loss_fn = getattr(loss_fn, "_orig_mod", loss_fn)  # of a module that was compiled
    keywords = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    own = getattr(loss_fn, "reduction", keywords.get("reduction", "mean"))
    if keywords.get("size_average") is not None or keywords.get("reduce") is not None:
        own = _reduction.legacy_get_string(
            keywords.get("size_average"), keywords.get("reduce"), emit_warning=False
        )
    if (asked or own) == "sum":
        return Reduction(sums=True)
    return Reduction(sums=False, counting=_counting(loss_fn, keywords) if own == "mean" else None)


def _counting(loss_fn: Any, keywords: dict[str, Any]) -> Counting | None:
    function = loss_fn.func if isinstance(loss_fn, partial) and not loss_fn.args else loss_fn
    if function in _FUNCTIONS:
        return Counting(keywords.get("ignore_index", IGNORED), keywords.get("weight"))
    for known in _MODULES:
        if isinstance(loss_fn, known) and type(loss_fn).forward is known.forward:
            ignored = loss_fn.ignore_index
            return Counting(IGNORED if ignored is None else ignored, loss_fn.weight)
    return None
