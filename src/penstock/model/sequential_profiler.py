"""Measure the layers of a Sequential: seconds, and bytes kept for the backward.

The layers run one after the other on an example. Each layer is a copy, and its inputs are detached
from the layers before it, as at the start of a stage:

    example -> [copy of layer 0] -> detach -> [copy of layer 1] -> detach -> ...
                backward of 0 alone            backward of 1 alone

No parameter, gradient, buffer, mode, random state or stashed value of the caller changes.
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
    """Return the seconds of each layer's forward and backward: the median over many passes.

    A pass takes the example through all layers. The first pass warms up and is not counted, and no
    pass after the second starts later than `timeout`. With `unpack`, a tuple that a layer returns
    becomes the arguments of the next, as in `PipeSequential`. Without it, the tuple stays one
    value, as in `nn.Sequential`.

    >>> len(measure_layer_times([nn.Linear(4, 4), nn.ReLU()], (torch.ones(8, 4),), timeout=0.0))
    2
    """
    passes: list[list[float]] = []
    whole = scatter(example, 1)[0][0]
    end = perf_counter() + timeout
    with preserve_global_state(_iter_tensors(layers, whole), device) as synchronize:
        while len(passes) < 2 or perf_counter() < end:
            layer_runs = _iter_layer_runs(layers, whole, unpack, device)
            passes.append([_time_layer(layer_run, synchronize) for layer_run in layer_runs])
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
    """Return the bytes of each layer: its parameters, and what one micro-batch keeps.

    The example is split into `chunks` micro-batches, and the first one is measured. If two layers
    keep the same tensor (one as its output, the next as its input), it counts for the first.
    Parameters count `param_scale` times: 2 for parameters and gradients, more with the state of an
    optimizer.

    >>> measure_layer_bytes([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], (torch.ones(8, 4),))
    [288.0, 128.0, 160.0]
    """
    if chunks < 1:
        raise ArgumentError(f"chunks={chunks}: a batch is split into at least one micro-batch")
    microbatch = scatter(example, chunks)[0][0]
    # Weak references: a storage that nothing keeps is freed, and its memory may be used again by a
    # storage that has to be counted.
    counted: WeakSet[torch.UntypedStorage] = WeakSet()
    with preserve_global_state(_iter_tensors(layers, microbatch), device):
        return [
            _measure_saved_bytes(layer_run, counted)
            + param_scale * sum(p.nbytes for p in layer_run.layer.parameters())
            for layer_run in _iter_layer_runs(layers, microbatch, unpack, device)
        ]


def _time_layer(layer_run: _LayerRun, synchronize: Callable[[], None]) -> float:
    forward = time_call(layer_run.forward, synchronize)
    return forward + time_call(layer_run.build_backward(), synchronize)


def _measure_saved_bytes(
    layer_run: _LayerRun, counted_storages: WeakSet[torch.UntypedStorage]
) -> int:
    """Run the layer's forward, and return the bytes that it and no earlier layer keeps."""
    counted_storages.update(t.untyped_storage() for t in iter_module_tensors(layer_run.layer))
    saved_storages: set[torch.UntypedStorage] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved_storages.add(tensor.untyped_storage())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer_run.forward()
    saved_storages.difference_update(counted_storages)
    counted_storages.update(saved_storages)
    return sum(storage.nbytes() for storage in saved_storages)


# ---- running one layer after another -------------------------------------------------------------


class _DetachInput(torch.autograd.Function):
    """An identity whose output shares memory with its input and can be changed in place.

    A layer may change its input in place. PyTorch forbids that for a leaf that requires grad and
    for a view of one, and the output of a Function is neither. There is no `backward`, because the
    gradients are computed for the output of this node and go no further.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()


class _LayerRun(Skips):
    """One layer that is run by itself: inputs, outputs and skips are detached from other layers.

    It is the `Skips` object during the layer's forward, so that stashed and popped values are
    detached like inputs and outputs.
    """

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
            error.add_note(
                f"This happened while Penstock measured layer {self.name} on the example."
            )
            raise

    def build_backward(self) -> Callable[[], object]:
        """Return a function that computes the gradients of inputs and parameters, from ones."""
        wanted = [*self.input_edges, *(p for p in self.layer.parameters() if p.requires_grad)]
        if not wanted:
            return lambda: None
        ones = [torch.ones_like(tensor) for tensor in self.output_tensors]
        return partial(torch.autograd.grad, self.output_tensors, wanted, ones, allow_unused=True)

    def stash(self, key: SkipKey, value: Any, shared: bool) -> None:
        """Stash a value, detached, for a later layer."""
        self.skips.stash(key, self._detach_outputs(value), shared)

    def pop(self, key: SkipKey) -> Any:
        """Pop a value that an earlier layer stashed, as an input of this layer."""
        return self._detach_inputs(self.skips.pop(key))

    def _detach_inputs(self, values: Any) -> Any:
        def detach_input(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            detached: Tensor = _DetachInput.apply(tensor)  # type: ignore[no-untyped-call]
            self.input_edges.append(get_gradient_edge(detached))
            return detached

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
    """Yield a run for each layer. The caller must execute it before it takes the next one.

    A layer is copied only now, and its copy is dropped with the run, so that there is memory for
    one layer at a time.
    """

    skips = Skips()
    values = pytree.tree_map_only(Tensor, build_tensor_copier(device), example)
    for index, layer in enumerate(layers):
        layer_run = _LayerRun(
            f"{index} ({type(layer).__name__})", copy.deepcopy(layer).to(device), values, skips
        )
        yield layer_run
        output = layer_run.output
        values = output if unpack and isinstance(output, tuple) else (output,)


def _iter_tensors(layers: Sequence[nn.Module], example: tuple[Any, ...]) -> Iterator[Any]:
    return chain(*map(iter_module_tensors, layers), pytree.tree_iter(example))
