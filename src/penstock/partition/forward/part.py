"""A stage of a divided forward: computes its part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.absent import RUN
from penstock.partition.forward.performer import Ended, Performer
from penstock.partition.forward.skeleton import Skeleton, follow
from penstock.partition.forward.state import State
from penstock.partition.forward.trees import unflatten
from penstock.partition.forward.whole import Handed
from penstock.stage.checkpointing import is_recomputing
from penstock.stage.stage import OUTSIDE


class Part:
    """A stage's computation: the model's own forward, of which it runs its steps.

    From outside come a `Handed` and the inputs that it takes; from other stages, values.
    """

    def __init__(
        self,
        index: int,
        skeleton: Skeleton,
        targets: Mapping[str, nn.Module],
        twins: Sequence[tuple[nn.Module, nn.Module]] = (),
    ) -> None:
        self._index, self._skeleton, self._targets = index, skeleton, targets
        self._twins = twins  # of units that another stage calls as well: original and copy
        self._state: State | None = None

    def refresh(self, device: torch.device) -> None:
        """The model was cast."""
        self._skeleton.refresh(device)

    def __call__(self, arrived: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """As a stage computes."""
        RUN.number += 1
        handed: Handed
        handed, *tensors = arrived[OUTSIDE]
        score = handed.scores[self._index]
        if self._state is not handed.state:
            self._skeleton.follow()
            for original, copy in self._twins:
                follow(original, copy)
            self._state = handed.state
        leaves = list(handed.leaves)
        for place, stand_in in zip(handed.places, score.inputs, strict=True):
            leaves[place] = stand_in
        given: dict[int, Tensor] = {}
        for at, tensor in zip(score.given, tensors, strict=True):
            leaves[handed.places[at]] = given[score.inputs[at].value] = tensor
        args, kwargs = unflatten(leaves, handed.spec)
        received = {
            value: tensor
            for source, values in score.arriving.items()
            for value, tensor in zip(values, arrived[source], strict=True)
        }
        performer = Performer(score, self._targets, received, given)
        performer.hooks = self._skeleton.hooks
        anew = () if is_recomputing() else score.anew
        output: Any = None
        try:
            grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
            with grad_mode, self._skeleton.running(anew), performer:
                output = self._skeleton.model(*args, **kwargs)
        except Ended:
            pass
        else:
            output = performer.finished(output)
        departing = {
            dst: tuple(performer.kept[value] for value in score.departing.get(dst, ()))
            for dst in handed.neighbours[self._index]
        }
        if score.last:
            departing[OUTSIDE] = (output,)
        return departing
