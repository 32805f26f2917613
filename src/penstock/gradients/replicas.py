"""Stages that have replicas in other processes: their gradients are reduced once a step.

`DistributedDataParallel`, `replicate` and `fully_shard` reduce in each backward, and a step has one
for each micro-batch, with more to come in W. Within a step they are kept from it; at its end, each
does so once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.gradients.averaged import Averaged
from penstock.gradients.sharded import Sharded


@dataclass
class Held:
    """A step in which nobody reduces. Set the factor that its gradients are to be multiplied by."""

    factor: Tensor | None = None


class Replicas:
    """The wrappers in what computes the stages of this process."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._averaged, self._sharded = Averaged(parts), Sharded(parts)
        self.reduces = True  # at the end of a step; else the gradients wait for one that does

    def __bool__(self) -> bool:
        return bool(self._averaged) or bool(self._sharded)

    def check_call(self) -> None:
        """What is called like the model knows no end of a step."""
        if self and torch.is_grad_enabled():
            raise RunError(
                "a stage is in DistributedDataParallel, replicate or fully_shard, and its "
                "gradients are reduced at the end of a step: train with pipe.step(x, target=y), "
                "and call pipe(x) under torch.no_grad()"
            )

    @contextmanager
    def held(self) -> Iterator[Held]:
        """Within, nobody reduces; at the end each does so once, if it was a step with gradients.

        Every replica runs the same steps.
        """
        held, trains = Held(), torch.is_grad_enabled()
        if not self:
            yield held
            return
        self._averaged.begin(trains)
        self._sharded.begin()
        try:
            yield held
        except BaseException:
            self._sharded.give_up()
            raise
        finally:
            self._averaged.end()
        if trains:
            self._sharded.finish(self.reduces, held.factor)
            if self.reduces:
                self._averaged.reduce()
        self._sharded.rest()
