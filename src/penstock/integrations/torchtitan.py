"""torchtitan: a pipe behind the `pipelining_fn` of a model.

torchtitan's trainer calls `pipelining_fn` once and gets a schedule, the parts of the model in this
process, and whether it has the first and the last stage. Then it calls `schedule.step` with lists
of micro-batches, and `schedule.eval` to validate. Nothing of torchtitan is imported here.

    torchtitan                          here
    schedule                            `PipeSchedule`, over `pipe.step`
    model parts                         the pipe, whose parameters are those of this process
    has the first and the last stage    True on every rank: all of them read the same batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.pipe import Pipe

# Settings of a run that torchtitan's own `parallelize_fn` would follow.
_OTHER_DIMS = ("dp", "tp", "cp", "ep")

PipelinedModel = tuple["PipeSchedule", list[nn.Module], bool, bool]


def make_pipelining_fn(
    example: Any, *, seed: int = 0, **pipe_options: Any
) -> Callable[..., PipelinedModel]:
    """Return a function for the `pipelining_fn` of torchtitan's ModelSpec.

    The schedule and the number of micro-batches are those of torchtitan's configuration.

    Args:
        example: A batch of the model, to trace it.
        seed: The seed with which every rank initialises the model before it is split.
        **pipe_options: Options of `penstock.Pipe`, such as `checkpoint` or `balance`.

    Returns:
        The function. It raises an ArgumentError for settings that it cannot follow.
    """

    def pipelining_fn(
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        loss_fn: Callable[..., Any],
        compile_config: Any = None,
        ac_config: Any = None,
        **_: Any,
    ) -> PipelinedModel:
        enabled = [name for name in _OTHER_DIMS if getattr(parallel_dims, f"{name}_enabled", False)]
        enabled += ["compile"] if getattr(compile_config, "enable", False) else []
        enabled += ["ac"] if getattr(ac_config, "mode", "none") != "none" else []
        if enabled:
            raise ArgumentError(
                f"torchtitan was set up with {', '.join(enabled)}, which its parallelize_fn would "
                "apply. Pass stage_fn= for that, which wraps each stage, or checkpoint= for "
                "activation checkpointing, and switch the settings off."
            )
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device="cpu")
            # torchtitan seeds the ranks of a pipeline differently, and all start from one model.
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(seed)
                model.init_weights(buffer_device=torch.device("cpu"))  # type: ignore[operator]
        chunks = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        pipe = _PartOfModel(
            model,
            chunks,
            mesh=parallel_dims.get_mesh("pp"),
            schedule=parallelism.pipeline_parallel_schedule,
            example=example,
            **pipe_options,
        )
        return PipeSchedule(pipe, loss_fn), [pipe], True, True

    return pipelining_fn


class _PartOfModel(Pipe):
    """A pipe as a part of torchtitan's model. Its weights are there when it is made."""

    def to_empty(self, *, device: Any, recurse: bool = True) -> _PartOfModel:
        """Keep the weights: the pipe has put them on its device."""
        return self

    def init_weights(self, buffer_device: Any = None) -> None:
        """Keep the weights: `make_pipelining_fn` has initialised the whole model."""


class PipeSchedule:
    """The schedule object that torchtitan's trainer and validator call.

    Args:
        pipe: The pipe.
        loss_fn: torchtitan's loss: a sum, divided by the number of tokens of all micro-batches.
    """

    def __init__(self, pipe: Pipe, loss_fn: Callable[..., Any]) -> None:
        self.pipe, self._loss_fn = pipe, loss_fn

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]],
        target_mbs: Sequence[Tensor],
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Run a training step, or only its forwards under `torch.no_grad()`.

        Args:
            arg_mbs: The positional inputs of each micro-batch.
            target_mbs: The target of each micro-batch.
            kwarg_mbs: The keyword inputs of each micro-batch.
            losses: A list to which the loss of the step is added.
            loss_kwargs: Keyword arguments of the loss.
            return_outputs: Whether to return the outputs of the model.

        Returns:
            The outputs, or None.
        """
        if len(arg_mbs) != self.pipe.chunks:
            raise ArgumentError(
                f"{len(arg_mbs)} micro-batches were given, but the pipe was made for "
                f"{self.pipe.chunks}: local_batch_size // pipeline_parallel_microbatch_size."
            )
        options = dict(loss_kwargs or {})

        def compute_loss(output: Any, target: Any) -> Any:
            result = self._loss_fn(output, target, **options)
            return result[0] if isinstance(result, tuple) else result

        compute_loss.reduction = "sum"  # type: ignore[attr-defined]
        keywords = kwarg_mbs[0].keys() if kwarg_mbs else ()
        result = self.pipe.step(
            *(_join(values) for values in zip(*arg_mbs, strict=True)),
            target=_join(target_mbs),
            loss_fn=compute_loss,
            outputs=return_outputs,
            **{name: _join([keyword[name] for keyword in kwarg_mbs or ()]) for name in keywords},
        )
        if losses is not None:
            losses.append(result.loss)
        return result.outputs

    def eval(self, **arguments: Any) -> Any:
        """Run the forwards of a batch. The arguments are those of `step`."""
        with torch.no_grad():
            return self.step(**arguments)


def _join(values: Sequence[Any]) -> Any:
    """Return the batch of which `values` are the micro-batches. All must have the same rows."""
    if isinstance(values[0], Tensor):
        if len({len(value) for value in values}) > 1:
            raise ArgumentError(
                f"the micro-batches have {[len(value) for value in values]} rows, and a pipe "
                "splits a batch evenly. Give all of them the same number of rows."
            )
        return torch.cat(list(values))
    if any(value != values[0] for value in values):
        raise ArgumentError(
            f"the micro-batches have different values of type {type(values[0]).__name__}, and only "
            "tensors can differ. Pass tensors, or one value for all."
        )
    return values[0]
