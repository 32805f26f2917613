"""A stage, and the tape on which one call of the pipe keeps what its backwards need.

A cell (stage, micro-batch) is computed forward from the parcels of its neighbours, perhaps
recomputed, and computed backward from gradients. What a cell saved is dropped at its last use,
so that what lives is what the timeline says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from penstock.stage.buffers import Copied, changed, copied, rewound
from penstock.stage.checkpointing import checkpointing, recomputing
from penstock.stage.context import Context
from penstock.stage.parcel import Parcel, put_together, taken_apart
from penstock.stage.randomness import OwnRandom, seed_of_cell

OUTSIDE = -1  # the neighbour that feeds the batch in and takes the outputs

# From what each source sent to what each destination gets; OUTSIDE is a neighbour too.
Compute = Callable[[Mapping[int, tuple[Any, ...]]], dict[int, tuple[Any, ...]]]
Gradients = tuple[Tensor | None, ...]


class Keep(Enum):
    """What a forward leaves behind."""

    GRAPH = auto()  # for its backward
    INPUTS = auto()  # for its recomputation
    NOTHING = auto()


@dataclass(slots=True)
class Habits:
    """What a stage was seen to do; None: not seen yet."""

    draws: bool | None = None  # random numbers
    mutates: bool | None = None  # its inputs, in place


@dataclass(eq=False)
class Stage:
    """Layers that run as one piece."""

    index: int
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    compute: Compute
    _habits: dict[tuple[Any, ...], Habits] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        kinds = ", ".join(type(layer).__name__ for layer in self.layers[:4])
        more = ", ..." if len(self.layers) > 4 else ""
        ends = self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"
        return f"stage {self.index} (layer{'s' * (len(self.names) > 1)} {ends}: {kinds}{more})"

    def parameters(self) -> list[nn.Parameter]:
        """Those that want a gradient."""
        return [p for layer in self.layers for p in layer.parameters() if p.requires_grad]

    def habits(self) -> Habits:
        """Of its layers as they are set now: in training or not, and with which probability."""
        modules = (module for layer in self.layers for module in layer.modules())
        manner = tuple((m.training, getattr(m, "p", None)) for m in modules)
        return self._habits.setdefault((type(self.compute), manner), Habits())

    def forget(self) -> None:
        """Watch it anew."""
        self._habits.clear()


class _Entry(torch.autograd.Function):
    """Where a stage's graph begins: not a leaf, so that the first layer may work in place."""

    @staticmethod
    def forward(ctx: Any, inbox: list[Any], root: Tensor, *tensors: Tensor) -> Any:
        ctx.inbox = inbox
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.inbox[:] = gradients
        return None, None, *(None for _ in gradients)


_ROOT = torch.empty(0, requires_grad=True)


@dataclass(slots=True)
class _Kept:
    """What a cell needs to be computed again."""

    arrived: dict[int, Parcel]
    buffers: list[Copied]


@dataclass(slots=True)
class _Graph:
    """Both ends of a cell's graph: its outputs by destination, its inputs by source."""

    roots: dict[int, tuple[GradientEdge | None, ...]]
    entered: dict[int, tuple[bool, ...]]  # which of each source's tensors are inputs here
    inputs: tuple[Tensor | GradientEdge, ...]
    inbox: list[Tensor | None] | None  # what the entry's backward caught, if there is an entry
    kept: _Kept | None = None  # if it was recomputed

    def caught(self) -> list[Tensor | None]:
        """The gradients of the inputs that a backward has left; they are taken away."""
        if self.inbox is not None:
            found = self.inbox[:]
            self.inbox[:] = [None] * len(found)
            return found
        leaves = [leaf for leaf in self.inputs if isinstance(leaf, Tensor)]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found


class Tape:
    """What one call of the pipe has computed of a stage, and what that left for backwards."""

    def __init__(
        self, stage: Stage, context: Context, seed: int, keep: Callable[[int], Keep]
    ) -> None:
        self.stage = stage
        self.seed = seed
        self._context, self._keep = context, keep
        self._cells: dict[int, _Graph | _Kept] = {}
        self._habits = stage.habits()
        self.parameters = stage.parameters()
        self._buffered = [m for layer in stage.layers for m in layer.modules() if m._buffers]
        self.collected: list[Tensor | None] | None = None
        self._recomputes = False

    @property
    def alive(self) -> int:
        """How many cells hold something."""
        return len(self._cells)

    @property
    def drew(self) -> bool:
        """Does the stage draw random numbers, as far as seen?"""
        return bool(self._habits.draws)

    @property
    def recomputes(self) -> bool:
        """Has it recomputed a cell?"""
        return self._recomputes

    # ---- forward --------------------------------------------------------------------------

    def forward(self, microbatch: int, arrived: dict[int, Parcel]) -> dict[int, Parcel]:
        """Compute the cell from what its sources sent; gives what its destinations get."""
        keep = self._keep(microbatch)
        read_only = _read_only(arrived)
        needs: bool | None
        if keep is Keep.GRAPH:
            self._cells[microbatch], outputs = self._build(microbatch, arrived)
            needs = None
        elif keep is Keep.INPUTS:
            with torch.no_grad():
                self._cells[microbatch], outputs = self._watched(microbatch, arrived)
            needs = bool(self.parameters) or any(any(p.needs) for p in arrived.values())
        else:
            outputs = self._run(microbatch, _plain_values(arrived))
            needs = False
        _check_unchanged(read_only)
        return _parcels(outputs, needs)

    def recompute(self, microbatch: int) -> None:
        """Build the graph that the forward did not."""
        kept = self._cells[microbatch]
        assert isinstance(kept, _Kept)
        self._recomputes = True
        arrived = _cloned(kept.arrived) if self._habits.mutates else kept.arrived
        with recomputing(), rewound(self._buffered, kept.buffers):
            graph, _ = self._build(microbatch, arrived)
        graph.kept = kept
        self._cells[microbatch] = graph

    def _watched(
        self, microbatch: int, arrived: dict[int, Parcel]
    ) -> tuple[_Kept, dict[int, tuple[Any, ...]]]:
        kept = arrived if self._habits.mutates is False else _cloned(arrived)
        buffers = copied(self._buffered)
        versions = _versions(arrived)
        with checkpointing():
            outputs = self._run(microbatch, _plain_values(arrived))
        mutated = versions != _versions(arrived)
        if mutated and self._habits.mutates is False:
            raise RuntimeError(
                "the layers changed their input in place, which they had not done before, so it "
                "is lost for the recomputation: work in place always or never, or set "
                "checkpoint='never'"
            )
        if self._habits.mutates is None:
            self._habits.mutates = mutated
        if not mutated:
            kept = arrived
        return _Kept(kept, changed(buffers)), outputs

    def _build(
        self, microbatch: int, arrived: dict[int, Parcel]
    ) -> tuple[_Graph, dict[int, tuple[Any, ...]]]:
        outer = [t for p in arrived.values() for t, need in _flagged(p) if need]
        inside, inputs, inbox = self._entered(outer)
        before = [tensor._version for tensor in outer]
        each = iter(inside)
        values = {
            source: put_together(
                [next(each) if need else tensor for tensor, need in _flagged(parcel)],
                parcel.layout,
            )
            for source, parcel in arrived.items()
        }
        del inside, each
        outputs = self._run(microbatch, values)
        if self._habits.mutates is not True and outer:
            self._habits.mutates = before != [tensor._version for tensor in outer]
        roots = {dst: tuple(map(_edge, taken_apart(v)[0])) for dst, v in outputs.items()}
        flags = {source: parcel.needs for source, parcel in arrived.items()}
        return _Graph(roots, flags, inputs, inbox), outputs

    def _entered(
        self, outer: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], tuple[Tensor | GradientEdge, ...], list[Tensor | None] | None]:
        """Where the graph begins: the tensors inside, how to ask for their gradients, an inbox.

        Leaves are cheaper, but nobody may change a leaf in place.
        """
        if not outer or self._habits.mutates is False:
            leaves = tuple(tensor.detach().requires_grad_() for tensor in outer)
            return leaves, leaves, None
        inbox: list[Tensor | None] = [None] * len(outer)
        inside = _Entry.apply(inbox, _ROOT, *outer)  # type: ignore[no-untyped-call]
        return inside, tuple(edge for edge in map(_edge, inside) if edge), inbox

    def _run(
        self, microbatch: int, values: dict[int, tuple[Any, ...]]
    ) -> dict[int, tuple[Any, ...]]:
        random: AbstractContextManager[Any] = nullcontext()
        if self._habits.draws is not False:
            random = OwnRandom(seed_of_cell(self.seed, self.stage.index, microbatch))
        with self._context.forwards(), random:
            outputs = self.stage.compute(values)
        if isinstance(random, OwnRandom):
            self._habits.draws = random.drew or bool(self._habits.draws)
        return outputs

    # ---- backward -------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Mapping[int, Gradients], retain: bool
    ) -> dict[int, Gradients]:
        """Gradients for each source, from those of each destination.

        Those of parameters go to `.grad`, or are summed in `collected` if that is a list.
        """
        graph = self._cells.pop(microbatch)
        assert isinstance(graph, _Graph)
        if retain:
            self._cells[microbatch] = graph.kept or graph
        pairs = [
            (edge, gradient)
            for dst in sorted(graph.roots, key=lambda dst: dst % _MANY, reverse=True)
            for edge, gradient in zip(graph.roots[dst], gradients[dst], strict=True)
            if edge is not None and gradient is not None
        ]
        caught: Sequence[Tensor | None] = [None] * len(graph.inputs)
        if pairs:
            roots, given = zip(*pairs, strict=True)
            if self.collected is None:
                _engine_run_backward(
                    roots, given, retain, False, (), allow_unreachable=True, accumulate_grad=True
                )
                caught = graph.caught()
            else:
                caught = self._collect(graph.inputs, roots, given, retain)
        each = iter(caught)
        return {
            source: tuple(next(each) if need else None for need in needs)
            for source, needs in graph.entered.items()
        }

    def _collect(
        self, inputs: tuple[Tensor | GradientEdge, ...], roots: Any, given: Any, retain: bool
    ) -> Sequence[Tensor | None]:
        wanted = (*inputs, *self.parameters)
        if not wanted:
            return ()
        found = _engine_run_backward(
            roots, given, retain, False, wanted, allow_unreachable=True, accumulate_grad=False
        )
        assert self.collected is not None
        for at, gradient in enumerate(found[len(inputs) :]):
            before = self.collected[at]
            if gradient is not None:
                self.collected[at] = gradient if before is None else before + gradient
        return found[: len(inputs)]

    def collect(self) -> None:
        """Let the next backwards sum gradients of parameters here, not in `.grad`."""
        self.collected = [None] * len(self.parameters)

    def clear(self) -> None:
        """Drop everything."""
        self._cells.clear()
        self.collected = None


_MANY = 1 << 30  # more than there are stages: OUTSIDE comes after them all


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Where its gradient enters the graph; None if it has no part in one."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


def _flagged(parcel: Parcel) -> zip[tuple[Any, bool]]:
    return zip(parcel.tensors, parcel.needs, strict=True)


def _plain_values(arrived: Mapping[int, Parcel]) -> dict[int, tuple[Any, ...]]:
    return {s: put_together(p.tensors, p.layout) for s, p in arrived.items()}  # type: ignore[arg-type]


def _cloned(arrived: Mapping[int, Parcel]) -> dict[int, Parcel]:
    return {source: parcel.moved(Tensor.clone) for source, parcel in arrived.items()}


def _versions(arrived: Mapping[int, Parcel]) -> list[int]:
    return [t._version for p in arrived.values() for t in p.tensors if t is not None]


def _read_only(arrived: Mapping[int, Parcel]) -> list[tuple[Tensor, int]]:
    """The tensors that others read too, with their versions."""
    if torch.is_inference_mode_enabled():  # keeps no versions
        return []
    tensors = [p.tensors[at] for p in arrived.values() if p.shared for at in p.shared]
    return [(tensor, tensor._version) for tensor in tensors if tensor is not None]


def _check_unchanged(read_only: Sequence[tuple[Tensor, int]]) -> None:
    for tensor, version in read_only:
        if tensor._version != version:
            raise RuntimeError(
                f"a layer changed a tensor of shape {tuple(tensor.shape)} in place that others "
                "read too (it was stashed as a skip, given to every micro-batch, or belongs to "
                "the caller and needs a gradient): clone it first, or set inplace=False"
            )


def _parcels(outputs: Mapping[int, tuple[Any, ...]], needs: bool | None) -> dict[int, Parcel]:
    """What each destination gets; `needs` None: a gradient for what is part of a graph."""
    parcels = {}
    for dst, values in outputs.items():
        tensors, layout = taken_apart(values)
        if needs is None:
            wanted = tuple(t.requires_grad for t in tensors)
        else:
            wanted = tuple(needs and (t.is_floating_point() or t.is_complex()) for t in tensors)
        parcels[dst] = Parcel(tuple(t.detach() for t in tensors), layout, wanted)
    if len(parcels) > 1:
        _mark_shared(parcels.values())
    return parcels


def _mark_shared(parcels: Any) -> None:
    homes: dict[int, list[tuple[Parcel, int]]] = {}
    for parcel in parcels:
        for at, tensor in enumerate(parcel.tensors):
            homes.setdefault(tensor.untyped_storage().data_ptr(), []).append((parcel, at))
    for places in homes.values():
        if len(places) > 1:
            for parcel, at in places:
                parcel.shared |= {at}
