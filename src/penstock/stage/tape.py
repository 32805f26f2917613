"""The tape on which one call of the pipe keeps what the backwards of a stage need.

A cell (stage, micro-batch) is computed forward from the parcels of its neighbours, perhaps
recomputed, and computed backward from gradients. What a cell saved is dropped at its last use,
so that what lives is what the timeline says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.stage.checkpointing import checkpointing, recomputing
from penstock.stage.context import Context
from penstock.stage.deferred import Deferral
from penstock.stage.exchange import (
    Apart,
    Values,
    apart,
    cloned,
    differentiable,
    in_graph,
    parcels_of,
    plain_values,
    values_inside,
    versions_in,
)
from penstock.stage.graph import Beginning, Gradients, Graph, edge
from penstock.stage.later import Pair, weight_gradients
from penstock.stage.parcel import Parcel
from penstock.stage.randomness import OwnRandom, Source
from penstock.stage.rewind import (
    Copied,
    changed,
    copied,
    rewound,
    training_as,
    untouched,
    written,
)
from penstock.stage.sharing import check_unchanged, memory, protect
from penstock.stage.stage import OUTSIDE, Stage
from penstock.stage.stand_ins import StandIns, real


class Keep(Enum):
    """What a forward leaves behind."""

    GRAPH = auto()  # for its backward
    INPUTS = auto()  # for its recomputation
    NOTHING = auto()


@dataclass(slots=True)
class _Kept:
    """What a cell needs to be computed again."""

    arrived: dict[int, Parcel]
    versions: list[int]  # of what arrived, after the forward
    buffers: list[Copied]  # that the forward changed, as they were before
    others: list[Copied]  # that it did not: nobody may


class Tape:
    """What one call of the pipe has computed of a stage, and what that left for backwards.

    Gradients of parameters go to `.grad`. If the caller's graph `tracks` the call, they are
    summed in `collected`, from one `collect` to the next.
    """

    def __init__(
        self,
        stage: Stage,
        context: Context,
        keep: Callable[[int], Keep],
        divided: Callable[[int], bool] = lambda microbatch: False,
        tracked: bool = False,
        stand_ins: StandIns | None = None,
    ) -> None:
        self.stage = stage
        self._stand_ins = StandIns(stage.modules()) if stand_ins is None else stand_ins
        modules = self._stand_ins.modules
        self.parameters = learning(modules)
        self.collected: list[Tensor | None] | None = None
        self.recomputes = False  # has it recomputed a cell?
        self.source: Callable[[int], Source | int] = lambda microbatch: 0  # if the stage draws
        self._context, self._keep, self._divided = context, keep, divided
        self._habits = stage.habits(modules)
        self._buffered = [module for module in modules if module._buffers]
        self._steady = [module for module in modules if module not in stage.shifting]
        self._modules, self._training = modules, [module.training for module in modules]
        self._of_parameters: list[tuple[int, int]] = []  # while something is kept
        self._tracked = tracked
        self._graphs: dict[int, Graph] = {}
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, list[Pair]] = {}  # weight gradients for a W
        self._sums: set[int] = set()  # which of the collected are sums of our own

    @property
    def drew(self) -> bool:
        """Does the stage draw random numbers, as far as seen?"""
        return bool(self._habits.draws)

    @property
    def may_draw(self) -> bool:
        """Has it not been seen to draw none?"""
        return self._habits.draws is not False or self.stage.watched

    # ---- forward --------------------------------------------------------------------------

    def forward(self, microbatch: int, arrived: dict[int, Parcel]) -> dict[int, Parcel]:
        """Compute the cell from what its sources sent; gives what its destinations get."""
        keep = self._keep(microbatch)
        if keep is Keep.INPUTS and not self._learns(p.needs for p in arrived.values()):
            keep = Keep.GRAPH  # of nothing, and so its outputs need no gradient
        read_only = [parcel for parcel in arrived.values() if parcel.shared]
        before = versions_in(read_only) if read_only else []
        if keep is Keep.GRAPH:
            self._graphs[microbatch], outputs = self._build(microbatch, arrived)
            parcels = parcels_of(outputs, in_graph)
        elif keep is Keep.INPUTS:
            with torch.no_grad():
                self._kept[microbatch], outputs = self._watched(microbatch, arrived)
            parcels = parcels_of(outputs, differentiable)
        else:
            outputs = apart(self._run(microbatch, plain_values(arrived)))
            parcels = parcels_of(outputs, lambda tensor: False)
        if read_only:
            check_unchanged(read_only, before)
        self._protect(parcels, outputs, read_only)
        self._note_parameters()
        return parcels

    def _learns(self, needs: Iterable[Sequence[bool]]) -> bool:
        """Does anything want a gradient of a cell, of whose inputs these need one?"""
        return bool(self.parameters) or any(map(any, needs))

    def _protect(
        self, parcels: Mapping[int, Parcel], outputs: Apart, read_only: Sequence[Parcel]
    ) -> None:
        """Whoever comes next may not change what is the stage's own, or what others read too."""
        others = memory(t for parcel in read_only for t in parcel.tensors)
        for dst, (tensors, _) in outputs.items():
            # those that could be something that was there before
            places = [at for at, t in enumerate(tensors) if others or t.is_leaf or t._is_view()]
            if places:
                protect(parcels[dst], places, self._memory, others)

    @cached_property
    def _memory(self) -> set[int]:
        """Where the stage's own parameters and buffers are, and what stands in for them."""
        found = [t for m in self._modules for t in (*m._parameters.values(), *m._buffers.values())]
        return memory([*found, *self._stand_ins.tensors])

    def recompute(self, microbatch: int) -> None:
        """Build the graph that the forward did not, if it did not."""
        kept = self._kept.get(microbatch)
        if kept is None:
            return
        self.recomputes = True
        same_inputs = versions_in(kept.arrived.values()) == kept.versions
        same_buffers = not changed(kept.others)
        if not (
            same_inputs and same_buffers and self._state_of_parameters() == self._of_parameters
        ):
            what = "a parameter or buffer" if same_inputs else "an input"
            raise RunError(
                f"{what} of these layers has been changed in place after their forward, and the "
                "recomputation needs it as it was: clone what you change, and change parameters "
                "after the backward"
            )
        arrived = cloned(kept.arrived) if self._habits.mutates else kept.arrived
        as_before = training_as(self._modules, self._training)
        with recomputing(), as_before, rewound(self._buffered, kept.buffers):
            self._graphs[microbatch], _ = self._build(microbatch, arrived)
        self._note_parameters()

    def _note_parameters(self) -> None:
        """What the layers themselves do to their parameters (a norm kept small, say) is right."""
        if self._kept:
            self._of_parameters = self._state_of_parameters()

    def _state_of_parameters(self) -> list[tuple[int, int]]:
        found = [p for module in self._steady for p in module._parameters.values()]
        return [(p.data_ptr(), p._version) for p in found if p is not None]

    def _watched(self, microbatch: int, arrived: dict[int, Parcel]) -> tuple[_Kept, Apart]:
        """Compute the cell, and keep what it needs to be computed again as it was before."""
        habits = self._habits
        kept = arrived if habits.mutates is False else cloned(arrived)
        buffers = copied(self._buffered)
        before = versions_in(arrived.values())
        with checkpointing():
            outputs = self._run(microbatch, plain_values(arrived))
        mutated = before != versions_in(arrived.values())
        if mutated and habits.mutates is False:
            raise RunError(
                "the layers changed their input in place, which they had not done before, so it "
                "is lost for the recomputation: work in place always or never, or set "
                "checkpoint='never'"
            )
        habits.mutates = mutated or bool(habits.mutates)
        kept = kept if mutated else arrived
        wrote = written(buffers, habits.quietly)
        others = untouched(buffers, wrote)
        return _Kept(kept, versions_in(kept.values()), wrote, others), apart(outputs)

    def _build(self, microbatch: int, arrived: dict[int, Parcel]) -> tuple[Graph, Apart]:
        habits = self._habits
        outer = [t for p in arrived.values() for t, need in zip(p.tensors, p.needs) if need]  # noqa: B905
        if habits.mutates is False or not outer:
            beginning = Beginning.leaves(outer)  # type: ignore[arg-type]
        else:
            beginning = Beginning.entry(outer)  # type: ignore[arg-type]
        before = versions_in(arrived.values()) if habits.mutates is None else []
        values = values_inside(arrived, beginning.inside)
        outputs = apart(self._run(microbatch, values, self._divided(microbatch)))
        beginning.inside = ()
        if habits.mutates is None:
            habits.mutates = before != versions_in(arrived.values())
        roots = {dst: tuple(map(edge, tensors)) for dst, (tensors, _) in outputs.items()}
        entered = {source: parcel.needs for source, parcel in arrived.items()}
        graph = Graph(roots, entered, beginning)
        if self._tracked and not habits.closed:
            known = {*map(self._stand_ins.of, self.parameters)}
            graph.check_closed(known)
            habits.closed = True
        return graph, outputs

    def _run(self, microbatch: int, values: Values, weights_wait: bool = False) -> Values:
        habits, context = self._habits, self._context
        if not self.may_draw and context.plain and not self._stand_ins and not weights_wait:
            return self.stage.compute(values)
        random: OwnRandom | None = None
        with ExitStack() as stack:
            stack.enter_context(self._stand_ins.used())
            stack.enter_context(context.forwards())
            if weights_wait:
                self._later[microbatch] = stack.enter_context(self._deferral.used())
            if self.may_draw:
                random = OwnRandom(self.source(microbatch))
                stack.enter_context(random)
            outputs = self.stage.compute(values)
        if random is not None:
            habits.draws = random.drew or bool(habits.draws)
        return outputs

    @cached_property
    def _deferral(self) -> Deferral:
        return Deferral(self._steady, self.stage.around)

    # ---- backward -------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Mapping[int, Gradients], retain: bool
    ) -> dict[int, Gradients]:
        """Gradients for each source, from those of each destination.

        If the cell has a W, the gradients of most weights are left for that. With `retain` the
        cell can be computed backward again: from its graph, or, if it was recomputed, after
        another recomputation.
        """
        graph = self._graphs.pop(microbatch)
        if not retain:
            self._kept.pop(microbatch, None)
        elif microbatch not in self._kept:
            self._graphs[microbatch] = graph
        if self.collected is None:
            self._check_loss(graph, gradients)
            return graph.accumulate(gradients, retain)
        leaves = [self._stand_ins.of(parameter) for parameter in self.parameters]
        found, of_parameters = graph.collect(gradients, leaves, retain)
        for at, gradient in enumerate(of_parameters):
            if gradient is not None:
                self._add(at, gradient)
        return found

    def _check_loss(self, graph: Graph, gradients: Mapping[int, Gradients]) -> None:
        """If anything here learns, then by the loss, too."""
        learns = self._learns(graph.entered.values())
        if learns and OUTSIDE in gradients and not any(graph.roots[OUTSIDE]):
            raise RunError(
                "the loss has no gradient, though there is something to learn: it was detached, or "
                "does not depend on the output"
            )

    def backward_weights(self, microbatch: int) -> None:
        """The gradients that the backward of the inputs has left."""
        weight_gradients(self._later.pop(microbatch))

    def leaves(self, microbatch: int) -> list[Tensor]:
        """What the backwards of the cell may add to: parameters, registered or not.

        A stand-in whose gradient is left for W is not in the graph.
        """
        used = map(self._stand_ins.of, self.parameters)
        return [*self.parameters, *used, *self._graphs[microbatch].leaves()]

    def collect(self) -> None:
        """Let the next backwards sum gradients of parameters here, not in `.grad`."""
        self.collected = [None] * len(self.parameters)
        self._sums.clear()

    def _add(self, at: int, gradient: Tensor) -> None:
        assert self.collected is not None
        before = self.collected[at]
        if before is None:
            self.collected[at] = gradient
        elif at in self._sums:
            before.add_(gradient)
        else:
            self.collected[at] = before + gradient
            self._sums.add(at)

    def clear(self) -> None:
        """Drop everything."""
        self._graphs.clear()
        self._kept.clear()
        self._later.clear()
        self.collected = None


def learning(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that want a gradient, each once."""
    found = [real(p) for module in modules for p in module._parameters.values() if p is not None]
    return [p for p in dict.fromkeys(found) if p.requires_grad]
