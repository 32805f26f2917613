"""A model cut into stages, with the graph of who feeds whom."""

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
    """How a Sequential is cut: what crosses stages, and the side inputs of each stage's layers."""

    skip_routes: tuple[tuple[SkipKey, int, int], ...]  # skips
    side_names: tuple[tuple[frozenset[str], ...], ...]


@dataclass(frozen=True)
class Partition:
    """The stages of a model: of the layers of a Sequential, or of parts of one whole forward."""

    stages: tuple[Stage, ...]
    graph: StageGraph
    how: SequentialLayout | TracedPartition
    outline: ModelSummary

    def __str__(self) -> str:
        return format_summary(self.outline)

    @property
    def counts(self) -> tuple[int, ...]:
        """The units of each stage: what `stages=` takes."""
        return self.outline.counts

    def draw(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """The model as a chain of units with the cuts, into an SVG or PNG file."""
        chain(self.outline, path, title=title)

    def computing(self) -> list[nn.Module]:
        """The layers, and what the user has put around them."""
        return [module for stage in self.stages for module in (*stage.wrappers, *stage.layers)]

    def parameters(self) -> list[nn.Parameter]:
        """Each once."""
        layers = (layer for stage in self.stages for layer in stage.layers)
        return list(dict.fromkeys(p for layer in layers for p in layer.parameters()))

    def roots(self) -> list[nn.Module]:
        """The modules that all others that compute are in."""
        return [*self.around, *(self.computing() if self.model is None else [self.model])]

    def modules(self) -> list[nn.Module]:
        """Those that compute, each once."""
        todo = self.roots()
        found: dict[nn.Module, None] = {}
        while todo:  # twice as fast as their own `modules`
            module = todo.pop()
            if module not in found:
                found[module] = None
                todo += [child for child in module._modules.values() if child is not None]
        return list(found)

    def names(self) -> dict[nn.Module, str]:
        """The modules that compute, with their names in the model."""
        roots = [(n, m) for s in self.stages for n, m in zip(s.names, s.layers, strict=True)]
        if self.model is not None:
            roots = [("", self.model)]
        found: dict[nn.Module, str] = {}
        for prefix, root in roots:
            for name, module in root.named_modules(prefix=prefix):
                found.setdefault(module, name)
        for module in self.around:
            found.setdefault(module, type(module).__name__)
        return found

    def children(self, stages: Sequence[Stage]) -> dict[str, nn.Module | None]:
        """What a pipe of these stages has as its children, under the model's names."""
        if isinstance(self.how, TracedPartition):
            return self.how.children
        return {
            name: layer
            for stage in stages
            for name, layer in zip(stage.names, stage.layers, strict=True)
        }

    def root(self, model: nn.Module) -> nn.Module:
        """Whose own parameters and buffers a pipe of the model has."""
        return self.how.model if isinstance(self.how, TracedPartition) else model

    @property
    def model(self) -> nn.Module | None:
        """The model whose forward is divided; None of a Sequential."""
        return self.how.model if isinstance(self.how, TracedPartition) else None

    def begin(self) -> None:
        """From here on, what is around the units stays what it is."""
        if isinstance(self.how, TracedPartition):
            self.how.check_unchanged()

    def takes(self, name: str) -> bool:
        """Has the forward of a whole model an input of that name?"""
        model = self.model
        return model is not None and name in inspect.signature(model.forward).parameters

    @property
    def around(self) -> list[nn.Module]:
        """The modules that compute, and are not among a pipe's children."""
        root = [] if self.model is None else [self.model]
        if isinstance(self.how, TracedPartition) and self.how.local_model is not None:
            root += [
                module for unit in self.how.local_model.remote_units for module in unit.modules()
            ]
        return root + [module for stage in self.stages for module in stage.wrappers]

    def refresh(self, cast: TensorCast) -> None:
        """The model was cast."""
        if isinstance(self.how, TracedPartition):
            self.how.apply_cast(cast)
        for stage in self.stages:
            if isinstance(stage.compute, StageForward) and isinstance(self.how, TracedPartition):
                stage.compute.refresh_buffers(self.how.devices[stage.index])
