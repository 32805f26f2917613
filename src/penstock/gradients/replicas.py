"""Stages that have replicas in other processes: their gradients are reduced once a step.

`DistributedDataParallel`, `replicate` and `fully_shard` reduce in each backward, and a step has one
for each micro-batch, with more to come in W. Within a step they are kept from it; at its end, each
does so once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.gradients.average import Line, average, give_firsts
from penstock.gradients.averaged import Averaged
from penstock.gradients.sharded import Sharded
from penstock.gradients.shards import groups_of


@dataclass
class Held:
    """A step in which nobody reduces. Set the factor that its gradients are to be multiplied by."""

    factor: Tensor | None = None


class Replicas:
    """The wrappers in what computes the stages of this process."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = list(modules)
        parts = list(dict.fromkeys(part for module in self._modules for part in module.modules()))
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
    def held(self, line: Line | None = None) -> Iterator[Held]:
        """Within, nobody reduces; at the end each does so once, if it was a step with gradients.

        What no wrapper reduces is averaged over the `line`, if there is one. Every replica runs
        the same steps.
        """
        held, trains = Held(), torch.is_grad_enabled()
        if line is not None and trains:
            line.waiting("the buffers of the first copy")
            give_firsts(self._buffers(line), line.group)
        with self._wrappers_held(held, trains) if self else nullcontext():
            yield held
        if line is not None and trains and self.reduces:
            waiting = partial(line.waiting, "the average of gradients")
            average(self._parameters(line), line.group, waiting)

    @contextmanager
    def _wrappers_held(self, held: Held, trains: bool) -> Iterator[None]:
        self._averaged.begin(trains)
        self._sharded.begin()
        try:
            yield
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

    def begin_alike(self, line: Line) -> None:
        """Give every copy of the line what the first has: they may have begun differently."""
        tensors = [*self._parameters(line), *self._buffers(line)]
        line.waiting("what the first copy begins with")
        give_firsts([t for t in tensors if t.device.type != "meta"], line.group)

    def _parameters(self, line: Line) -> list[nn.Parameter]:
        """Those that nobody else reduces over the line."""
        wrapped = {p for wrapper in self._averaged.over(line.members) for p in wrapper.parameters()}
        found = dict.fromkeys(p for module in self._modules for p in module.parameters())
        return [p for p in found if p not in wrapped and not _is_over(line, p)]

    def _buffers(self, line: Line) -> list[Tensor]:
        wrapped = {b for wrapper in self._averaged.over(line.members) for b in wrapper.buffers()}
        found = dict.fromkeys(b for module in self._modules for b in module.buffers())
        return [b for b in found if b not in wrapped]


def _is_over(line: Line, parameter: nn.Parameter) -> bool:
    """Is it in parts over the line? Who parts it reduces it."""
    members = map(dist.get_process_group_ranks, groups_of(parameter))
    return any(set(ranks) == line.members for ranks in members)
