"""`PipelineCallback`: logs the numbers of a pipe and draws its timeline, in a `PipeTrainer`."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import TrainerCallback

from penstock.errors import RunError
from penstock.integrations.step_monitor import StepMonitor


class PipelineCallback(TrainerCallback):  # type: ignore[misc]
    """A callback for `PipeTrainer` that logs `result.metrics()` and draws the timeline.

    The numbers go wherever the Trainer reports to, as `pipe/bubble`, `pipe/tokens_per_second` and
    so on. They are those of the last `pipe.step`: with accumulation, of its last batch. Pictures go
    to `timelines/` in the output folder, and to TensorBoard if the Trainer reports to it.

    Args:
        every: How many steps of the optimizer lie between two logged ones.
        **options: The options of `StepMonitor`: `draw_timeline`, `folder`, `prefix`, `log_figure`.

    Raises:
        ArgumentError: `every` is not a whole number from 1 up.
        MissingExtra: Timelines are to be drawn, and matplotlib is not installed.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        self._monitor = StepMonitor(every, **options)
        self._trainer: Any = None

    def bind(self, trainer: Any) -> None:
        """Remember the Trainer, which a `PipeTrainer` calls with itself."""
        self._trainer = weakref.ref(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to keep the results of the pipe."""
        if self._trainer is None:
            raise RunError(
                "PipelineCallback logs the steps of a pipe, which only a PipeTrainer runs. Use "
                "PipeTrainer, or PipeTrainerMixin, in place of this Trainer."
            )
        self._monitor.attach([self._trainer().model])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log and draw the last step, if it is an N-th one."""
        trainer, step = self._trainer(), state.global_step
        if not self._monitor.is_due(step):
            return
        # `Trainer.log` clears the flag that makes the Trainer write its own line for this step.
        should_log = control.should_log
        trainer.log(self._monitor.read_metrics())
        control.should_log = should_log
        if state.is_world_process_zero:
            writers = [
                writer
                for callback in trainer.callback_handler.callbacks
                if hasattr(writer := getattr(callback, "tb_writer", None), "add_figure")
            ]
            self._monitor.draw(step, args.output_dir, writers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the pipe as it was."""
        self._monitor.detach()
