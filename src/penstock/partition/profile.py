"""What each layer costs, measured: its seconds, and the bytes it keeps for its backward.

The layers run one after another. Each is a copy of its own, and cut off from the layers before
it, as at the start of a stage, so that its backward is its own too. Nothing that was given
changes: no parameter, gradient, buffer, mode, random state or stashed value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from penstock.batch import scatter
from penstock.errors import ArgumentError
from penstock.partition.aside import Device, copier, leaving_no_trace, own_tensors
from penstock.partition.measure import timed
from penstock.stage.added import added_losses
from penstock.stage.skip import SkipKey, Skips, use_skips


def layer_times(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    *,
    unpack: bool = False,
    timeout: float = 1.0,
    device: Device = None,
) -> list[float]:
    """Seconds of each layer's forward and backward together: the median of many passes.

    A pass takes the example through all layers; a first one, to warm up, is not counted. The
    last one starts before `timeout`. With `unpack` a tuple that a layer returns becomes the next
    one's arguments, as in `PipeSequential`; without, it stays one value, as in `nn.Sequential`.

    >>> len(layer_times([nn.Linear(4, 4), nn.ReLU()], (torch.ones(8, 4),), timeout=0.0))
    2
    """
    passes: list[list[float]] = []
    whole = scatter(example, 1)[0][0]
    end = perf_counter() + timeout
    with leaving_no_trace(_tensors(layers, whole), device) as synchronize:
        while len(passes) < 2 or perf_counter() < end:
            turns = _turns(layers, whole, unpack, device)
            passes.append([_seconds(turn, synchronize) for turn in turns])
    return [median(seconds) for seconds in zip(*passes[1:], strict=True)]


def layer_bytes(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    *,
    unpack: bool = False,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[float]:
    """Bytes of each layer: what one micro-batch keeps for its backward, and its parameters.

    The micro-batch is the first of `chunks` that the example is cut into, as a batch is. What two
    layers keep (one its output, the next the same as its input) is counted once, for the first.
    Parameters count `param_scale` times: 2 for their gradients, more for an optimizer's state.

    >>> layer_bytes([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], (torch.ones(8, 4),))
    [288.0, 128.0, 160.0]
    """
    if chunks < 1:
        raise ArgumentError(f"chunks={chunks}: a batch is cut into at least one micro-batch")
    first = scatter(example, chunks)[0][0]
    counted: WeakSet[torch.UntypedStorage] = WeakSet()
    with leaving_no_trace(_tensors(layers, first), device):
        return [
            _kept(turn, counted) + param_scale * sum(p.nbytes for p in turn.layer.parameters())
            for turn in _turns(layers, first, unpack, device)
        ]


def _seconds(turn: _Turn, synchronize: Callable[[], None]) -> float:
    forward = timed(turn.forward, synchronize)
    return forward + timed(turn.prepared_backward(), synchronize)


def _kept(turn: _Turn, counted: WeakSet[torch.UntypedStorage]) -> int:
    """Bytes kept for the backward by the layer's forward, and by none before."""
    counted.update(t.untyped_storage() for t in own_tensors(turn.layer))
    kept: set[torch.UntypedStorage] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        turn.forward()
    kept.difference_update(counted)
    counted.update(kept)
    return sum(storage.nbytes() for storage in kept)


# ---- one layer after another --------------------------------------------------------------


class _Entrance(torch.autograd.Function):
    """The same memory, but no leaf and no view, so that a layer may change it in place.

    It has no backward: gradients are asked for at its output.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()


class _Turn(Skips):
    """One layer's turn to run, between cuts: values enter it and leave it without their graph."""

    def __init__(self, name: str, layer: nn.Module, inputs: tuple[Any, ...], skips: Skips) -> None:
        self.name = name
        self.layer = layer
        self.skips = skips
        self.entrances: list[GradientEdge] = []
        self.exits: list[Tensor] = []
        self.inputs = self._entered(inputs)
        self.output: Any = None

    def forward(self) -> None:
        """Run the layer."""
        try:
            with use_skips(self), added_losses():
                self.output = self._left(self.layer(*self.inputs))
        except Exception as error:
            error.add_note(f"This was layer {self.name}, run on an example to measure it.")
            raise

    def prepared_backward(self) -> Callable[[], object]:
        """What will compute the gradients of inputs and parameters, from ones."""
        wanted = [*self.entrances, *(p for p in self.layer.parameters() if p.requires_grad)]
        if not wanted:
            return lambda: None
        ones = [torch.ones_like(tensor) for tensor in self.exits]
        return partial(torch.autograd.grad, self.exits, wanted, ones, allow_unused=True)

    def stash(self, key: SkipKey, value: Any, shared: bool) -> None:
        """A way out."""
        self.skips.stash(key, self._left(value), shared)

    def pop(self, key: SkipKey) -> Any:
        """A way in."""
        return self._entered(self.skips.pop(key))

    def _entered(self, values: Any) -> Any:
        def enter(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            inside: Tensor = _Entrance.apply(tensor)  # type: ignore[no-untyped-call]
            self.entrances.append(get_gradient_edge(inside))
            return inside

        return pytree.tree_map_only(Tensor, enter, values)

    def _left(self, values: Any) -> Any:
        def leave(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                self.exits.append(tensor)
            return tensor.detach().requires_grad_(tensor.requires_grad)

        return pytree.tree_map_only(Tensor, leave, values)


def _turns(
    layers: Sequence[nn.Module], example: tuple[Any, ...], unpack: bool, device: Device
) -> Iterator[_Turn]:
    """Each layer's turn, to be run before the next is asked for."""

    skips = Skips()
    values = pytree.tree_map_only(Tensor, copier(device), example)
    for at, layer in enumerate(layers):
        turn = _Turn(
            f"{at} ({type(layer).__name__})", copy.deepcopy(layer).to(device), values, skips
        )
        yield turn
        values = turn.output if unpack and isinstance(turn.output, tuple) else (turn.output,)


def _tensors(layers: Sequence[nn.Module], example: tuple[Any, ...]) -> Iterator[Any]:
    return chain(*map(own_tensors, layers), pytree.tree_iter(example))
