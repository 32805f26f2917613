"""`PipeTrainer`: the Trainer of Hugging Face transformers for a pipe, under any schedule.

A plain `Trainer(model=pipe)` calls `pipe(**batch)` and `loss.backward()`, so all forwards come
before all backwards, and it trains in one process. `PipeTrainer` calls `pipe.step`:

    what the Trainer does                     what a PipeTrainer does
    compute_loss, accelerator.backward        pipe.step: the loss is computed in the last stage
    a process is a data-parallel replica      a replica of the pipe is (integrations/accelerate.py)
    rank 0 writes the model                   every rank writes its own layers
    optimizer.pt, by number of parameter      a folder of pipe.save, by name, for any other cut

`PipeTrainerMixin` does the same for subclasses of Trainer that keep its loss, and for TRL's
`SFTTrainer`. `PipelineCallback` logs the steps of the pipe and draws their timelines.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_loss, find_labels

from penstock.checkpoint.pretrained_names import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    find_weights_file,
    is_pretrained,
)
from penstock.errors import ArgumentError, PenstockTypeError, RunError
from penstock.integrations.accelerate import adapt, count_replicas
from penstock.integrations.step_monitor import StepMonitor
from penstock.model.framework_attributes import find_base_model
from penstock.pipe import Pipe
from penstock.runtime.step import StepResult
from penstock.stage.loss import Weighted
from penstock.torch_compat import pytree

# Beside the files of the Trainer in a checkpoint: the optimizer's state under parameter names.
OPTIMIZER_FOLDER = "penstock_optimizer"
SCHEDULER_FILE, OPTIMIZER_FILE, ARGUMENTS_FILE = "scheduler.pt", "optimizer.pt", "training_args.bin"

# For the type checker, the mixin has all attributes of a Trainer.
_Base: Any = Trainer if TYPE_CHECKING else object


class PipeTrainerMixin(_Base):  # type: ignore[misc]
    """The methods of a Trainer that trains a pipe. Put it in front of the class of the Trainer.

    The model is a `penstock.Pipe`. All other arguments are those of the Trainer.

    Raises:
        PenstockTypeError: If the model is not a pipe.
        ArgumentError: If an argument of the Trainer cannot be followed.
    """

    # ---- set-up ---------------------------------------------------------------------------

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._restore_forwards()
        model = self.model._placed_partition.partition.model
        if model is not None:  # the Trainer has looked at the class of the pipe
            base_class = type(find_base_model(model))
            self.can_return_loss = can_return_loss(base_class)
            if self.args.label_names is None:
                self.label_names = find_labels(base_class)
        for callback in self.callback_handler.callbacks:
            self._bind_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback. A `PipelineCallback` logs through this Trainer."""
        super().add_callback(callback)
        self._bind_callback(self.callback_handler.callbacks[-1])

    def _bind_callback(self, callback: Any) -> None:
        if isinstance(callback, PipelineCallback):
            callback.bind(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and make the accelerator count replicas of the pipe."""
        pipe, args = self.model, self.args
        if not isinstance(pipe, Pipe):
            raise PenstockTypeError(
                f"{type(self).__name__} trains a penstock.Pipe, not {type(pipe).__name__}. Add "
                "adapters to the model, make the pipe from it, and pass model=pipe."
            )
        _check_computes_own_loss(type(self), args)
        if args.device.type != pipe.device.type:
            raise ArgumentError(
                f"the Trainer puts batches on {args.device}, but the first stage of the pipe is on "
                f"{pipe.device}. Set use_cpu={pipe.device.type == 'cpu'} in the arguments, or make "
                "the pipe on other devices."
            )
        if count_replicas(pipe) > 1 and not args.average_tokens_across_devices:
            raise ArgumentError(
                "average_tokens_across_devices=False is not supported with several replicas: a "
                "pipe averages over the tokens of all of them. Leave it True."
            )
        args._n_gpu = 1  # the batch is that of one replica, and DataParallel would copy the pipe
        super().create_accelerator_and_postprocess()
        adapt(self.accelerator, pipe)
        model = pipe._placed_partition.partition.model
        modules = [pipe] if model is None else [pipe, find_base_model(model)]
        self._forwards = [(vars(module), vars(module).get("forward")) for module in modules]

    def _restore_forwards(self) -> None:
        """Undo what SFTTrainer has done: its forward would run the model unsplit."""
        for attributes, forward in self._forwards:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of an optimizer step, over all replicas of the pipe."""
        rows: int = self._train_batch_size * args.gradient_accumulation_steps
        return rows * count_replicas(self.model)

    # ---- training and evaluation ----------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward, loss and backward of a batch under the schedule of the pipe."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        # As in Trainer.training_step: a loss that was not divided by the items of all accumulated
        # batches is averaged over these batches.
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)  # older releases have none
        if is_scaled is None:
            counts_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counts_items or self.compute_loss_func is not None
        scale = 1.0 if is_scaled else 1 / self.current_gradient_accumulation_steps
        scaler = getattr(self.accelerator, "scaler", None)
        result = self._run_step(inputs, num_items_in_batch, scaler=scaler, scale=scale)
        return (result.loss * scale).to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return the loss of a batch, and its logits and labels unless only the loss is asked for.

        The loss is that of all replicas.
        """
        pipe = self.model
        inputs = self._prepare_inputs(inputs)
        has_labels = bool(self.label_names) and all(
            inputs.get(name) is not None for name in self.label_names
        )
        returns_loss = inputs.get("return_loss")
        returns_loss = self.can_return_loss if returns_loss is None else returns_loss
        has_loss = has_labels or (not self.label_names and bool(returns_loss))
        is_local = pipe._topology is None
        if not (prediction_loss_only or is_local or pipe._engine.data_policy.outputs == "all"):
            raise RunError(
                "predictions are gathered from all ranks, but only the last rank of the pipe has "
                "outputs. Make it with outputs='all', or set prediction_loss_only=True."
            )
        labels = tuple(inputs.get(name) for name in self.label_names) if has_loss else None
        loss = None
        with torch.no_grad():
            if has_loss:
                num_items = self._get_num_items_in_batch([inputs], self.args.device)
                result = self._run_step(inputs, num_items, outputs=not prediction_loss_only)
                loss, outputs = result.loss.to(self.args.device), result.outputs
            else:
                with self.accelerator.autocast():
                    outputs = pipe(**inputs)
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(pipe, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        if isinstance(outputs, dict):
            outputs = tuple(v for k, v in outputs.items() if k not in (*ignore_keys, "loss"))
        elif has_loss and isinstance(outputs, tuple):
            outputs = outputs[1:]
        outputs = pytree.tree_map_only(Tensor, lambda t: t.detach().to(self.args.device), outputs)
        return loss, _unwrap_single(outputs), _unwrap_single(labels)

    def _run_step(self, inputs: dict[str, Any], num_items: Any, **options: Any) -> StepResult:
        """Run `pipe.step` with the loss that `Trainer.compute_loss` would compute."""
        inputs = dict(inputs)
        loss_fn, target = None, None
        if self.compute_loss_func is not None or self.label_smoother is not None:
            target = inputs.pop("labels", None)
        if self.compute_loss_func is not None:
            loss_fn = _make_loss_fn(self.compute_loss_func, num_items)
        elif target is not None:
            loss_fn = _make_smoothed_loss(self.label_smoother, self._shifts_labels, num_items)
        elif self.model_accepts_loss_kwargs and num_items is not None:
            inputs["num_items_in_batch"] = num_items
        # accelerate puts autocast around `forward`, which a step does not call.
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            return self.model.step(**inputs, target=target, loss_fn=loss_fn, **options)  # type: ignore[no-any-return]

    @property
    def _shifts_labels(self) -> bool:
        return self.model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # ---- checkpoints ----------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `from_pretrained` reads it. Every rank writes its own layers."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if is_pretrained(self.model._placed_partition.partition.model):
            self.model.save_pretrained(folder)
        else:
            self.model.export(folder / WEIGHTS_FILE)
        if not self.args.should_save:
            return
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(folder)
        torch.save(self.args, folder / ARGUMENTS_FILE)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        folder = Path(resume_from_checkpoint)
        weights = find_weights_file(folder)
        if weights is None:
            raise ArgumentError(
                f"'{folder}' has no {WEIGHTS_FILE} and no {ADAPTER_FILE}. Resume from a folder "
                "checkpoint-N of a Trainer."
            )
        self.model.load(weights)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir, OPTIMIZER_FOLDER)
        if self.args.should_save and folder.exists():
            shutil.rmtree(folder)  # of an earlier run, which got further than this one resumed from
        self.model.save(folder, self.optimizer.optimizer, keep=1, model=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint, OPTIMIZER_FOLDER)
        if folder.is_dir():
            self.model.load(folder, self.optimizer.optimizer, model=False)
            state = torch.load(Path(checkpoint, SCHEDULER_FILE), weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        elif self.model._topology is None:
            # That of a plain Trainer numbers the parameters of the whole model.
            super()._load_optimizer_and_scheduler(checkpoint)
        elif Path(checkpoint, OPTIMIZER_FILE).exists():
            raise ArgumentError(
                f"'{checkpoint}' was saved by a plain Trainer, which numbers the parameters of the "
                "whole model, and a process has only some of them. Resume in one process, save "
                "with PipeTrainer, and go on with several."
            )


class PipeTrainer(PipeTrainerMixin, Trainer):  # type: ignore[misc]
    """The Trainer of transformers for a `penstock.Pipe`, under any schedule.

    The arguments are those of `transformers.Trainer`, with a pipe as the model. Loss and gradients
    are those of the unsplit model: with accumulation, ignored labels, clipping and mixed precision.
    In one process, the pipe may use several devices. Under torchrun, each rank of the pipe is a
    process, and only replicas of the pipe get different rows.

    Raises:
        PenstockTypeError: If the model is not a pipe.
        ArgumentError: If an argument of the Trainer cannot be followed.
    """


def _check_computes_own_loss(trainer: type, args: Any) -> None:
    """Raise if a subclass computes another loss, which would never be called."""
    owner = next(cls for cls in trainer.__mro__ if "compute_loss" in vars(cls))
    if owner is Trainer:
        return
    if owner.__module__.startswith("trl.") and owner.__name__ == "SFTTrainer":
        if args.loss_type == "nll" and not args.activation_offloading:
            return
        raise ArgumentError(
            f"loss_type={args.loss_type!r} and activation_offloading={args.activation_offloading} "
            "were given, but a pipe computes the loss of the model in its last stage. Use "
            "loss_type='nll' and no offloading; checkpoint='always' of the pipe saves memory."
        )
    raise ArgumentError(
        f"{owner.__name__}.compute_loss would not be called: a pipe computes the loss in its last "
        "stage. Pass compute_loss_func= instead, or use a plain Trainer(model=pipe), which runs in "
        "one process."
    )


def _make_loss_fn(compute_loss_func: Callable[..., Any], num_items: Any) -> Callable[..., Any]:
    """Return a loss for `pipe.step` from the `compute_loss_func` of a Trainer.

    A loss that is divided by the number of items of all batches is a part of a sum.
    """
    count = None if num_items is None else int(num_items)

    def loss_fn(outputs: Any, labels: Any = None) -> Any:
        return compute_loss_func(outputs, labels, num_items_in_batch=count)

    loss_fn.reduction = "mean" if count is None else "sum"  # type: ignore[attr-defined]
    return loss_fn


def _make_smoothed_loss(smoother: Any, shifts_labels: bool, num_items: Any) -> Callable[..., Any]:
    """Return the loss of a Trainer with a label_smoothing_factor."""
    count = None if num_items is None else int(num_items)

    def loss_fn(outputs: Any, labels: Tensor) -> Any:
        loss = smoother(outputs, labels, shift_labels=shifts_labels, num_items_in_batch=count)
        if count is not None:
            return loss
        counted = labels[..., 1:] if shifts_labels else labels
        return Weighted(loss, (counted != smoother.ignore_index).sum())

    loss_fn.reduction = "mean" if count is None else "sum"  # type: ignore[attr-defined]
    return loss_fn


def _unwrap_single(values: Any) -> Any:
    """Return the only element of a tuple, or else the value itself."""
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values


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
