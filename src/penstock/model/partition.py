"""`Partition`: a model cut into stages, with the graph of which stage feeds which.

There are two kinds. A Sequential is cut between its layers (`SequentialPartition`, sequential.py).
Any other model is traced (`TracedPartition`, traced/traced_partition.py). The rest of the library
uses the interface below and does not know which kind it has.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from penstock.draw.model_picture import chain
from penstock.draw.notebook import partition_html
from penstock.draw.style import PictureFile
from penstock.model.report import describe_for_notebook, format_summary, format_title
from penstock.model.stage_inputs import Batch, InputDevices, StageInputs
from penstock.model_summary import ModelSummary
from penstock.schedules.ir import StageGraph
from penstock.stage.stage import Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The units with the stages of their calls, and the stages of operations between units by function.
StageMap = tuple[list[tuple[nn.Module, list[int]]], Mapping[Any, Sequence[int | None]]]


class TensorExchange(Protocol):
    """The connection between processes that run a method of the model together."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    def broadcast(self, source_rank: int, tensor: Tensor) -> Tensor:
        """Return the tensor of one rank on every rank.

        The other ranks pass a tensor of the same shape and dtype. All get a contiguous one.
        """

    def find_draws(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result of a call, and whether it drew random numbers."""

    def check_same(self, result: Any) -> None:
        """Raise if the ranks have different integers, such as tokens, in their results."""


@dataclass(frozen=True, eq=False, repr=False)
class Partition(ABC):
    """A model cut into stages, as `penstock.split` returns it and `Pipe` runs it.

    `print(partition)` shows a table of the stages, what they send to each other, and advice.

    Attributes:
        stages: The stages in topological order.
        graph: The edges between stages, skip connections included.
        outline: A summary in plain numbers, for reports and pictures.
        model: The model whose forward the stages run, or None for a Sequential. The stages of a
            Sequential call its layers, and nothing calls the Sequential itself.

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
    outline: ModelSummary
    model: nn.Module | None

    # Whether the inputs of a stage depend on the whole batch. If so, all processes need it.
    needs_whole_batch: ClassVar[bool]

    # ---- the same for every model ----------------------------------------------------------------

    def __str__(self) -> str:
        return format_summary(self.outline)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({format_title(self.outline)})"

    def _repr_html_(self) -> str:
        return partition_html(self.outline, *describe_for_notebook(self.outline))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of units of each stage. `stages=` takes such a list."""
        return self.outline.counts

    def draw(
        self, path: PictureFile = None, *, title: str | None = None, format: str | None = None
    ) -> Figure:
        """Draw the model as a chain of units with the cuts.

        Args:
            path: The file to write: a path that ends in .svg or .png, or a file that is open for
                writing. None only returns the figure.
            title: A title above the picture.
            format: "svg" or "png", if the path does not say it.

        Returns:
            The figure of matplotlib.

        Raises:
            ArgumentError: If the path has another suffix.
            MissingExtra: If matplotlib is not installed.
        """
        return chain(self.outline, path, title=title, format=format)

    def compute_modules(self) -> list[nn.Module]:
        """Return the layers of all stages, and the modules that the user put around them."""
        return [module for stage in self.stages for module in (*stage.wrappers, *stage.layers)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all stages, each once."""
        layers = (layer for stage in self.stages for layer in stage.layers)
        return list(dict.fromkeys(p for layer in layers for p in layer.parameters()))

    def roots(self) -> list[nn.Module]:
        """Return the outermost modules, which contain all modules that compute."""
        return [*self.wrapper_modules, *(module for _, module in self.named_roots())]

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
        names: dict[nn.Module, str] = {}
        for prefix, root in self.named_roots():
            for name, module in root.named_modules(prefix=prefix):
                names.setdefault(module, name)
        for module in self.wrapper_modules:
            names.setdefault(module, type(module).__name__)
        return names

    def has_input(self, name: str) -> bool:
        """Return whether the model has an input of this name."""
        if self.model is None:
            return False
        return name in inspect.signature(self.model.forward).parameters

    # ---- the modules of the model ----------------------------------------------------------------

    @abstractmethod
    def named_roots(self) -> list[tuple[str, nn.Module]]:
        """Return the outermost modules of the user's model in this process, with their names."""

    @property
    @abstractmethod
    def wrapper_modules(self) -> list[nn.Module]:
        """The modules that compute and are not among the children of a pipe."""

    @abstractmethod
    def children(self) -> dict[str, nn.Module | None]:
        """Return the child modules of a pipe in this process, under the model's names."""

    @abstractmethod
    def root(self, model: nn.Module) -> nn.Module:
        """Return the module whose direct parameters and buffers a pipe of the model has."""

    @abstractmethod
    def check_unchanged(self, children: Mapping[str, nn.Module | None]) -> None:
        """Raise if modules were replaced since the pipe was made: the stages run the old ones.

        `children` are those of the pipe now. The first call comes when the pipe is built.
        """

    @abstractmethod
    def refresh(self, cast: Callable[[Tensor], Tensor]) -> None:
        """Apply a cast of the pipe, such as `pipe.half()`, to tensors outside of its children."""

    @abstractmethod
    def check_stage_fn_allowed(self) -> None:
        """Raise if a stage is not a module that `stage_fn` could wrap."""

    # ---- a call of the pipe ----------------------------------------------------------------------

    @abstractmethod
    def build_stage_inputs(self, batch: Batch, devices: InputDevices) -> StageInputs:
        """Split a batch into micro-batches and assign its tensors to stages."""

    # ---- descriptions ----------------------------------------------------------------------------

    @abstractmethod
    def describe_skips(self) -> list[str]:
        """Return a line of text for each skip connection that the layers declare."""

    @abstractmethod
    def describe_cut(self) -> dict[str, str]:
        """Return facts about the cut that all processes must agree on, by name."""

    @abstractmethod
    def find_unit_stages(self) -> dict[str, list[int]]:
        """Return the stages of the calls of each unit, in the order of the calls."""

    @abstractmethod
    def find_function_stages(self) -> Mapping[Any, Sequence[int | None]]:
        """Return the stages of the operations between units, by function in the order of calls.

        None stands for an operation that every stage runs. Functions whose results are the same on
        every stage may be left out.
        """

    @abstractmethod
    def run_unsplit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the user's own forward, without any cut, for a micro-batch."""

    def map_stages(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StageMap:
        """Return the stages of the units, and of the operations between them, for a micro-batch.

        Both are in the order of the calls, as in `find_unit_stages` and `find_function_stages`.
        """
        units = dict(self.named_roots())
        by_unit = [(units[name], stages) for name, stages in self.find_unit_stages().items()]
        return by_unit, self.find_function_stages()

    @abstractmethod
    def run_method(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        placement: Sequence[int],
        exchange: TensorExchange | None,
    ) -> Any:
        """Return the result of a method of the model, which calls its forward many times.

        Each unit runs where it is. `placement` has the rank of each stage; if ranks are processes,
        `exchange` connects them, and all of them call this.
        """

    @abstractmethod
    def count_loss_targets(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return how many targets count in the model's own loss, or None if that is not known."""
