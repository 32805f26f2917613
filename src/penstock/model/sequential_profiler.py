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

from penstock.errors import ArgumentError
from penstock.microbatch import scatter
from penstock.model.isolation import (
    DeviceLike,
    build_tensor_copier,
    iter_module_tensors,
    preserve_global_state,
)
from penstock.model.profiler import time_call
from penstock.stage.aux_loss import added_losses
from penstock.stage.skip import SkipKey, Skips, use_skips
from penstock.torch_compat import pytree


def measure_layer_times(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    *,
    unpack: bool = False,
    timeout: float = 1.0,
    device: DeviceLike = None,
) -> list[float]:
    """Seconds of each layer's forward and backward together: the median of many passes.

    A pass takes the example through all layers; a first one, to warm up, is not counted. The
    last one starts before `timeout`. With `unpack` a tuple that a layer returns becomes the next
    one's arguments, as in `PipeSequential`; without, it stays one value, as in `nn.Sequential`.

    >>> len(measure_layer_times([nn.Linear(4, 4), nn.ReLU()], (torch.ones(8, 4),), timeout=0.0))
    2
    """
    passes: list[list[float]] = []
    whole = scatter(example, 1)[0][0]
    end = perf_counter() + timeout
    with preserve_global_state(_iter_tensors(layers, whole), device) as synchronize:
        while len(passes) < 2 or perf_counter() < end:
            turns = _iter_layer_runs(layers, whole, unpack, device)
            passes.append([_time_layer(turn, synchronize) for turn in turns])
    return [median(seconds) for seconds in zip(*passes[1:], strict=True)]


def measure_layer_bytes(
    layers: Sequence[nn.Module],
    example: tuple[Any, ...],
    *,
    unpack: bool = False,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: DeviceLike = None,
) -> list[float]:
    """Bytes of each layer: what one micro-batch keeps for its backward, and its parameters.

    The micro-batch is the first of `chunks` that the example is cut into, as a batch is. What two
    layers keep (one its output, the next the same as its input) is counted once, for the first.
    Parameters count `param_scale` times: 2 for their gradients, more for an optimizer's state.

    >>> measure_layer_bytes([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], (torch.ones(8, 4),))
    [288.0, 128.0, 160.0]
    """
    if chunks < 1:
        raise ArgumentError(f"chunks={chunks}: a batch is cut into at least one micro-batch")
    first = scatter(example, chunks)[0][0]
    counted: WeakSet[torch.UntypedStorage] = WeakSet()
    with preserve_global_state(_iter_tensors(layers, first), device):
        return [
            _measure_saved_bytes(turn, counted)
            + param_scale * sum(p.nbytes for p in turn.layer.parameters())
            for turn in _iter_layer_runs(layers, first, unpack, device)
        ]


def _time_layer(layer_run: _LayerRun, synchronize: Callable[[], None]) -> float:
    forward = time_call(layer_run.forward, synchronize)
    return forward + time_call(layer_run.build_backward(), synchronize)


def _measure_saved_bytes(
    layer_run: _LayerRun, counted_storages: WeakSet[torch.UntypedStorage]
) -> int:
    """Bytes kept for the backward by the layer's forward, and by none before."""
    counted_storages.update(t.untyped_storage() for t in iter_module_tensors(layer_run.layer))
    kept: set[torch.UntypedStorage] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer_run.forward()
    kept.difference_update(counted_storages)
    counted_storages.update(kept)
    return sum(storage.nbytes() for storage in kept)


# ---- one layer after another --------------------------------------------------------------


class _DetachInput(torch.autograd.Function):
    """The same memory, but no leaf and no view, so that a layer may change it in place.

    It has no backward: gradients are asked for at its output.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()


class _LayerRun(Skips):
    """One layer's turn to run, between cuts: values enter it and leave it without their graph."""

    def __init__(self, name: str, layer: nn.Module, inputs: tuple[Any, ...], skips: Skips) -> None:
        self.name = name
        self.layer = layer
        self.skips = skips
        self.input_edges: list[GradientEdge] = []
        self.output_tensors: list[Tensor] = []
        self.inputs = self._detach_inputs(inputs)
        self.output: Any = None

    def forward(self) -> None:
        """Run the layer."""
        try:
            with use_skips(self), added_losses():
                self.output = self._detach_outputs(self.layer(*self.inputs))
        except Exception as error:
            error.add_note(f"This was layer {self.name}, run on an example to measure it.")
            raise

    def build_backward(self) -> Callable[[], object]:
        """What will compute the gradients of inputs and parameters, from ones."""
        wanted = [*self.input_edges, *(p for p in self.layer.parameters() if p.requires_grad)]
        if not wanted:
            return lambda: None
        ones = [torch.ones_like(tensor) for tensor in self.output_tensors]
        return partial(torch.autograd.grad, self.output_tensors, wanted, ones, allow_unused=True)

    def stash(self, key: SkipKey, value: Any, shared: bool) -> None:
        """A way out."""
        self.skips.stash(key, self._detach_outputs(value), shared)

    def pop(self, key: SkipKey) -> Any:
        """A way in."""
        return self._detach_inputs(self.skips.pop(key))

    def _detach_inputs(self, values: Any) -> Any:
        def detach_input(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            inside: Tensor = _DetachInput.apply(tensor)  # type: ignore[no-untyped-call]
            self.input_edges.append(get_gradient_edge(inside))
            return inside

        return pytree.tree_map_only(Tensor, detach_input, values)

    def _detach_outputs(self, values: Any) -> Any:
        def detach_output(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                self.output_tensors.append(tensor)
            return tensor.detach().requires_grad_(tensor.requires_grad)

        return pytree.tree_map_only(Tensor, detach_output, values)


def _iter_layer_runs(
    layers: Sequence[nn.Module], example: tuple[Any, ...], unpack: bool, device: DeviceLike
) -> Iterator[_LayerRun]:
    """Each layer's turn, to be run before the next is asked for."""

    skips = Skips()
    values = pytree.tree_map_only(Tensor, build_tensor_copier(device), example)
    for at, layer in enumerate(layers):
        turn = _LayerRun(
            f"{at} ({type(layer).__name__})", copy.deepcopy(layer).to(device), values, skips
        )
        yield turn
        values = turn.output if unpack and isinstance(turn.output, tuple) else (turn.output,)


def _iter_tensors(layers: Sequence[nn.Module], example: tuple[Any, ...]) -> Iterator[Any]:
    return chain(*map(iter_module_tensors, layers), pytree.tree_iter(example))
