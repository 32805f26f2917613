"""`StepMonitor`: what the callbacks of all frameworks share. It logs and draws every N-th step.

A framework calls a callback when a step of its optimizer has ended. The callback does not get the
result of `pipe.step`, so the monitor registers a hook with each pipe and keeps the last result.
Reading its numbers waits for a GPU, so only the results that are logged are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from penstock import draw
from penstock.errors import ArgumentError, MissingExtra
from penstock.pipe import Pipe
from penstock.runtime.step import StepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Called with the name of a picture, its figure and the number of the step.
FigureLogger = Callable[[str, "Figure", int], object]


class StepMonitor:
    """Keeps the last training step of some pipes, and logs its numbers and draws its timeline.

    Args:
        every: How many steps of the optimizer lie between two logged ones.
        draw_timeline: Whether to draw the timeline of these steps. Needs matplotlib.
        folder: Where to write the pictures. None leaves it to the framework.
        prefix: A text in front of the names of all numbers and pictures.
        log_figure: Called with the name, the figure and the step of each picture, for a logger that
            takes pictures.

    Raises:
        ArgumentError: `every` is not a whole number from 1 up.
        MissingExtra: Timelines are to be drawn, and matplotlib is not installed.
    """

    def __init__(
        self,
        every: int = 50,
        *,
        draw_timeline: bool = True,
        folder: str | PathLike[str] | None = None,
        prefix: str = "pipe/",
        log_figure: FigureLogger | None = None,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ArgumentError(f"every must be a number of steps from 1 up, not {every!r}.")
        if draw_timeline and find_spec("matplotlib") is None:  # now, and not after `every` steps
            raise MissingExtra("matplotlib", "draw", "a picture of the timeline")
        self.every, self.draw_timeline, self.prefix = every, draw_timeline, prefix
        self.folder = None if folder is None else Path(folder)
        self.log_figure = log_figure
        self.last_result: StepResult | None = None
        self._handles: WeakKeyDictionary[Pipe, Any] = WeakKeyDictionary()

    def attach(self, pipes: Iterable[Pipe]) -> None:
        """Keep the results of these pipes from now on."""
        for pipe in pipes:
            if pipe not in self._handles:
                self._handles[pipe] = pipe.register_step_hook(self._keep)

    def detach(self) -> None:
        """Forget the pipes and the last result."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.last_result = None

    def _keep(self, result: StepResult) -> None:
        # An evaluation runs `pipe.step` without gradients. It would be logged as a training step.
        if torch.is_grad_enabled():
            self.last_result = result

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be logged: it is an N-th one, and a pipe has run."""
        return step > 0 and step % self.every == 0 and self.last_result is not None

    def read_metrics(self) -> dict[str, float]:
        """Return the numbers of the last step."""
        assert self.last_result is not None
        return self.last_result.metrics(self.prefix)

    def draw(
        self, step: int, default_folder: str | PathLike[str], loggers: Iterable[Any] = ()
    ) -> None:
        """Draw the timeline of the last step into a file, and give it to loggers of figures.

        Args:
            step: The number of the step.
            default_folder: The folder of the framework, where pictures go to `timelines/`.
            loggers: Writers of TensorBoard, or anything else with `add_figure`.
        """
        if not self.draw_timeline or self.last_result is None:
            return
        folder = Path(default_folder, "timelines") if self.folder is None else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        timeline, title = self.last_result.timeline, f"step {step}"
        figure = draw.picture(timeline, folder / f"step-{step:06}.svg", title=title)
        name = f"{self.prefix}timeline"
        for logger in loggers:
            logger.add_figure(name, figure, step)
        if self.log_figure is not None:
            self.log_figure(name, figure, step)
