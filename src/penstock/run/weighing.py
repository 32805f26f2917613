"""What the micro-batches of a training step count for, and what their losses come to.

The step's loss is the sum of theirs; or their mean, by rows, or by weights. Weights that the
loss returns are all known only after the last forward, and by then backwards have begun. The
gradients of such a step are in a unit of their own, apart from earlier ones, until its end.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import KindError, RunError
from penstock.stage.loss import NOTHING, Beside
from penstock.stage.parcel import Parcel, put_together
from penstock.stage.reduction import IGNORED, Reduction
from penstock.stage.tape import Tape


def loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """The factor of a `torch.amp.GradScaler`; None without one.

    >>> loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0), torch.device("cpu"))
    tensor(8.)
    """
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise KindError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}")
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


class Score(NamedTuple):
    """What one micro-batch came to."""

    loss: Tensor
    beside: Beside = NOTHING
    added: Tensor | None = None  # by layers


@dataclass(frozen=True)
class Part:
    """What a pipe counts for, whose batch is a part of one: others have the rest, in copies of it.

    Gradients are those of the whole batch's loss, times the number of copies: their mean over the
    copies is then the gradient, also of steps that were added up before.
    """

    copies: int = 1
    rows: float = 1.0  # its share of all rows
    counted: float | None = None  # what the targets of all count for

    def of_rows(self) -> float:
        """The factor of gradients of a mean by rows."""
        return self.rows * self.copies


class Ledger:
    """The scores of one step, and what is made of them.

    `shares` are the micro-batches' parts of the rows. Gradients are multiplied by `scale`.
    """

    def __init__(
        self,
        reduction: Reduction,
        shares: Sequence[float],
        targets: Sequence[tuple[Any, ...]],
        scale: Tensor | None = None,
    ) -> None:
        self._sums, self._scale = reduction.sums, scale
        self._rows = shares
        self._shares: Sequence[float] = [1] * len(shares) if reduction.sums else shares
        self._scores: dict[int, Score] = {}
        self._first: Beside | None = None
        self._unit: Tensor | None = None  # what the gradients' weights are divided by
        self._aside: Aside | None = None
        self._part = Part()
        self._all_weights: Tensor | None = None
        self._targets = targets
        given = [target for values in targets for target in values if isinstance(target, Tensor)]
        if reduction.counting is not None and len(given) == len(shares):
            self._unit = torch.stack([reduction.counting(target) for target in given]).sum()

    @property
    def sums(self) -> bool:
        """Is the step's loss the sum of theirs?"""
        return self._sums

    @property
    def counted(self) -> Tensor | None:
        """Before the step: what all targets count for, if that is known."""
        return self._unit

    def take_part(self, part: Part) -> None:
        """Before the step: this is a part of a larger batch."""
        self._part = part
        if self._unit is not None and part.counted is not None:
            self._unit = torch.full_like(self._unit, part.counted / part.copies)

    @property
    def scores(self) -> list[Score]:
        """In the order of the micro-batches."""
        return [self._scores[i] for i in range(len(self._shares))]

    # ---- while the step runs --------------------------------------------------------------

    def answer(self, microbatch: int, made: Parcel) -> Parcel:
        """The gradients with which a micro-batch's backward begins: of its loss, and of no other.

        What layers have added stands last. It is a mean by rows, whatever the loss is.
        """
        score = Score(*put_together(made.tensors, made.layout))  # type: ignore[arg-type]
        self._check_alike(score.beside)
        self._scores[microbatch] = score
        seeds: list[Tensor | None] = [None for _ in made.tensors]
        seeds[0] = self._seed(microbatch, score)
        if score.added is not None:
            share = self._rows[microbatch] * self._part.of_rows()
            seeds[-1] = self._scaled(torch.full_like(score.added, share))
        return Parcel(tuple(seeds))

    def prepare(self, tape: Tape, microbatch: int) -> None:
        """Before a cell's backward: set earlier gradients aside, if these are of another unit."""
        if self._aside is not None:
            self._aside.take(tape, microbatch)

    def _seed(self, microbatch: int, score: Score) -> Tensor:
        loss, weight = score.loss, score.beside.weight
        if weight is None:
            factor = self._part.copies if self._sums else self._part.of_rows()
            return self._scaled(torch.full_like(loss, self._shares[microbatch] * factor))
        if self._unit is None:
            self._unit = weight.masked_fill(weight == 0, 1) * len(self._shares)
            self._aside = Aside()
        return self._scaled(weight / self._unit).to(loss.dtype)

    def _scaled(self, seed: Tensor) -> Tensor:
        return seed if self._scale is None else (seed * self._scale).to(seed.dtype)

    def _check_alike(self, new: Beside) -> None:
        first = self._first = self._first or new
        if new.weight is not None and self._sums:
            raise RunError(
                "loss_fn gave a weight, and reduction='sum' has no use for it: leave the weight "
                "out, or take reduction='mean'"
            )
        if (first.weight is None) != (new.weight is None):
            raise RunError(
                "loss_fn gave a weight for one micro-batch and none for another: give one for all "
                "of them, or for none"
            )
        if first.metrics.keys() != new.metrics.keys():
            raise RunError(
                f"loss_fn gave the metrics {_named(first)} for one micro-batch and {_named(new)} "
                "for another: give the same for all of them"
            )

    # ---- after it -------------------------------------------------------------------------

    @property
    def _weights(self) -> list[Tensor]:
        """None at all, if the loss has none."""
        found = [score.beside.weight for score in self.scores]
        return [weight for weight in found if weight is not None]

    @property
    def weight(self) -> Tensor | None:
        """What the step's loss counts for among those of several copies; None: by its rows."""
        weights = self._weights
        return _total(weights) if weights else None

    def combined(self, numbers: Sequence[Tensor]) -> Tensor:
        """One number of those of the micro-batches, as for their losses."""
        weights = self._weights
        if not weights:
            return _total([n * share for n, share in zip(numbers, self._shares, strict=True)])
        pairs = zip(numbers, weights, strict=True)
        terms = [(n.to(w.device) * w).masked_fill(w == 0, 0) for n, w in pairs]
        mean = _total(terms) / _total(weights)
        return mean.to(numbers[0].dtype) if numbers[0].is_floating_point() else mean

    def loss(self) -> Tensor:
        """The step's, without what layers have added."""
        total = self.combined([score.loss for score in self.scores])
        if not self._sums and not self._weights and _ignores(self._targets):
            warnings.warn(
                f"there is a {IGNORED} among the targets, which PyTorch's losses ignore, and this "
                "loss, which is not one of them alone, gives no weight, so that each micro-batch "
                "counts by its rows: return (loss, weight), with the number of targets that count",
                stacklevel=5,
            )
        return total.detach()

    def added(self) -> list[Tensor]:
        """What layers have added to it, of each micro-batch."""
        shares = zip(self.scores, self._rows, strict=True)
        return [score.added.detach() * share for score, share in shares if score.added is not None]

    def total(self) -> Tensor:
        """The step's loss, with what layers have added."""
        total = self.loss()
        for added in self.added():
            total = total + added.to(total.device)
        return total

    def give_all_weights(self, weights: Tensor) -> None:
        """After the step: those of all copies together."""
        self._all_weights = weights

    @property
    def in_own_unit(self) -> bool:
        """Are this step's gradients of another unit than earlier ones, until its end?"""
        return self._aside is not None

    @property
    def factor(self) -> Tensor | None:
        """What this step's gradients are to be multiplied by; None if they are right already."""
        if self._aside is None:
            return None
        assert self._unit is not None
        if self._all_weights is None:
            return self._unit / _total(self._weights)
        return self._unit / (self._all_weights.to(self._unit.device) / self._part.copies)

    def finish(self) -> None:
        """Add this step's gradients to the earlier ones."""
        if self._aside is not None:
            factor = self.factor
            assert factor is not None
            self._aside.give_back(factor)

    def give_up(self) -> None:
        """The step has failed: gradients are as they were before it."""
        if self._aside is not None:
            self._aside.put_back()


class Aside:
    """Gradients of earlier steps, while one runs whose own are of another unit."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor | None] = {}
        self._one_at_a_time = threading.Lock()

    def take(self, tape: Tape, microbatch: int) -> None:
        """Those that the cell's backward would add to, once; another cell may add to others."""
        leaves = dict.fromkeys(tape.leaves(microbatch))
        with self._one_at_a_time:
            for leaf in leaves:
                if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                    raise RunError(
                        f"a parameter of shape {tuple(leaf.shape)} has a hook, and the weights "
                        "that loss_fn gives are not all known when it runs: remove the hook, or "
                        "take reduction='sum' and divide by the whole batch's weight in loss_fn"
                    )
                if leaf not in self._kept:
                    self._kept[leaf], leaf.grad = leaf.grad, None

    @torch.no_grad()
    def give_back(self, factor: Tensor) -> None:
        """All together, this step's multiplied by the factor."""
        for leaf, earlier in self._kept.items():
            new, leaf.grad = leaf.grad, earlier
            if new is None:
                continue
            new.mul_(factor.to(new.device))
            if earlier is None:
                leaf.grad = new
            elif earlier.is_sparse and not new.is_sparse:
                leaf.grad = new + earlier
            else:
                earlier.add_(new)

    def put_back(self) -> None:
        """The earlier ones alone."""
        for leaf, earlier in self._kept.items():
            leaf.grad = earlier


def _ignores(targets: Sequence[tuple[Any, ...]]) -> bool:
    """Those on the host alone are looked at: others would have to be waited for."""
    values = [value for target in targets for value in target]
    if not all(isinstance(value, Tensor) for value in values):
        values = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    found = [t for t in values if t.dtype == torch.int64 and not t.is_cuda]
    return any(bool((t == IGNORED).any()) for t in found)


def _total(numbers: Sequence[Tensor]) -> Tensor:
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total


def _named(beside: Beside) -> str:
    return ", ".join(map(repr, beside.metrics)) or "(none)"
