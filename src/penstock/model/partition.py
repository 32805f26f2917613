"""`Partition`: a model cut into stages, with the graph of which stage feeds which.

There are two kinds. A Sequential is cut between its layers, and `Partition.layout` is a
`SequentialLayout`. Any other model is traced, and `Partition.layout` is a `TracedPartition`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from torch import nn

from penstock.draw.model_picture import chain
from penstock.model.report import format_summary
from penstock.model.traced.local_model import TensorCast
from penstock.model.traced.stage_forward import StageForward
from penstock.model.traced.traced_partition import TracedPartition
from penstock.model_summary import ModelSummary
from penstock.schedules.ir import StageGraph
from penstock.stage.skip import SkipKey
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class SequentialLayout:
    """The skips between the stages of a Sequential, and the side inputs of each layer."""

    skip_routes: tuple[tuple[SkipKey, int, int], ...]  # key, stage that stashes, stage that pops
    side_names: tuple[tuple[frozenset[str], ...], ...]  # by stage, by layer


@dataclass(frozen=True)
class Partition:
    """A model cut into stages, as `penstock.split` returns it and `Pipe` runs it.

    `print(partition)` shows a table of the stages, what they send to each other, and advice.

    Attributes:
        stages: The stages in topological order.
        graph: The edges between stages, skip connections included.
        layout: The details of the cut, which depend on the kind of model.
        outline: A summary in plain numbers, for reports and pictures.

    >>> import torch
    >>> from penstock import split
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> partition = split(model, stages=[2, 1])
    >>> partition.counts
    (2, 1)
    >>> partition.graph.edges
    ((0, 1),)
    """

    stages: tuple[Stage, ...]
    graph: StageGraph
    layout: SequentialLayout | TracedPartition
    outline: ModelSummary

    def __str__(self) -> str:
        return format_summary(self.outline)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of units of each stage. `stages=` takes such a list."""
        return self.outline.counts

    def draw(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """Draw the model as a chain of units with the cuts.

        Args:
            path: The file to write, which ends in .svg or .png.
            title: A title above the picture.

        Raises:
            ArgumentError: If the path has another suffix.
            MissingExtra: If matplotlib is not installed.
        """
        chain(self.outline, path, title=title)

    def compute_modules(self) -> list[nn.Module]:
        """Return the layers of all stages, and the modules that the user put around them."""
        return [module for stage in self.stages for module in (*stage.wrappers, *stage.layers)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all stages, each once."""
        layers = (layer for stage in self.stages for layer in stage.layers)
        return list(dict.fromkeys(p for layer in layers for p in layer.parameters()))

    def roots(self) -> list[nn.Module]:
        """Return the outermost modules, which contain all modules that compute."""
        return [
            *self.wrapper_modules,
            *(self.compute_modules() if self.model is None else [self.model]),
        ]

    def modules(self) -> list[nn.Module]:
        """Return all modules that compute, each once."""
        # `nn.Module.modules` is a chain of nested generators and takes twice as long as this loop.
        todo = self.roots()
        visited: dict[nn.Module, None] = {}
        while todo:
            module = todo.pop()
            if module not in visited:
                visited[module] = None
                todo += [child for child in module._modules.values() if child is not None]
        return list(visited)

    def names(self) -> dict[nn.Module, str]:
        """Return the modules that compute, with their names in the model."""
        roots = [(n, m) for s in self.stages for n, m in zip(s.names, s.layers, strict=True)]
        if self.model is not None:
            roots = [("", self.model)]
        names: dict[nn.Module, str] = {}
        for prefix, root in roots:
            for name, module in root.named_modules(prefix=prefix):
                names.setdefault(module, name)
        for module in self.wrapper_modules:
            names.setdefault(module, type(module).__name__)
        return names

    def children(self, stages: Sequence[Stage]) -> dict[str, nn.Module | None]:
        """Return the child modules of a pipe of these stages, under the model's names."""
        if isinstance(self.layout, TracedPartition):
            return self.layout.children
        return {
            name: layer
            for stage in stages
            for name, layer in zip(stage.names, stage.layers, strict=True)
        }

    def root(self, model: nn.Module) -> nn.Module:
        """Return the module whose direct parameters and buffers a pipe of the model has."""
        return self.layout.model if isinstance(self.layout, TracedPartition) else model

    @property
    def model(self) -> nn.Module | None:
        """The traced model, or None for a Sequential."""
        return self.layout.model if isinstance(self.layout, TracedPartition) else None

    def record_members(self) -> None:
        """Record the modules around the units, so that later changes to them can be reported."""
        if isinstance(self.layout, TracedPartition):
            self.layout.check_unchanged()

    def has_input(self, name: str) -> bool:
        """Return whether the forward of a traced model has a parameter of this name."""
        model = self.model
        return model is not None and name in inspect.signature(model.forward).parameters

    @property
    def wrapper_modules(self) -> list[nn.Module]:
        """The modules that compute and are not among the children of a pipe."""
        root = [] if self.model is None else [self.model]
        if isinstance(self.layout, TracedPartition) and self.layout.local_model is not None:
            root += [
                module for unit in self.layout.local_model.remote_units for module in unit.modules()
            ]
        return root + [module for stage in self.stages for module in stage.wrappers]

    def refresh(self, cast: TensorCast) -> None:
        """Apply a cast of the pipe, such as `pipe.half()`, to tensors outside of its children."""
        if isinstance(self.layout, TracedPartition):
            self.layout.apply_cast(cast)
        for stage in self.stages:
            if isinstance(stage.compute, StageForward) and isinstance(self.layout, TracedPartition):
                stage.compute.refresh_buffers(self.layout.devices[stage.index])
