"""`PipelineMonitor`: logs the numbers of a pipe and draws its timeline, in a Trainer of Lightning.

It imports `lightning` if that is installed, and `pytorch_lightning` otherwise. The Trainers of both
accept it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from penstock.integrations.step_monitor import StepMonitor
from penstock.pipe import Pipe

_PACKAGE = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
_Callback: Any = import_module(_PACKAGE).Callback


class PipelineMonitor(_Callback):  # type: ignore[misc]
    """A callback for Lightning's Trainer that logs `result.metrics()` and draws the timeline.

    The numbers go to all loggers of the Trainer, as `pipe/bubble`, `pipe/tokens_per_second` and so
    on. They are those of the last `pipe.step`: with accumulation, of its last batch. The pipe is
    that of the strategy, or one that the LightningModule holds. Pictures go to `timelines/` in the
    folder of the Trainer, and to TensorBoard if it is among the loggers.

    Args:
        every: How many steps of the optimizer lie between two logged ones.
        **options: The options of `StepMonitor`: `draw_timeline`, `folder`, `prefix`, `log_figure`.

    Raises:
        ArgumentError: `every` is not a whole number from 1 up.
        MissingExtra: Timelines are to be drawn, and matplotlib is not installed.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        super().__init__()
        self._monitor = StepMonitor(every, **options)
        self._logged_step = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Start to keep the results of pipes that are new."""
        self._monitor.attach(_find_pipes(trainer, pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Log and draw the last step, if it is an N-th one."""
        step = trainer.global_step
        # A strategy makes its pipe from the first batch, when this callback cannot know it yet.
        strategy_result = getattr(trainer.strategy, "result", None)
        if strategy_result is not None:
            self._monitor.last_result = strategy_result
        # While gradients are accumulated, several batches have the same step.
        if step == self._logged_step or not self._monitor.is_due(step):
            return
        self._logged_step = step
        metrics = self._monitor.read_metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        if trainer.is_global_zero:
            writers = [
                writer
                for logger in trainer.loggers
                if hasattr(writer := getattr(logger, "experiment", None), "add_figure")
            ]
            self._monitor.draw(step, trainer.default_root_dir, writers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the pipes as they were."""
        self._monitor.detach()
        self._logged_step = 0


def _find_pipes(trainer: Any, pl_module: Any) -> Iterator[Pipe]:
    """Yield the pipe of the strategy, and those that the module holds."""
    pipe = getattr(trainer.strategy, "pipe", None)
    if isinstance(pipe, Pipe):
        yield pipe
    yield from (module for module in pl_module.modules() if isinstance(module, Pipe))
