"""`result.metrics`: what the loss returned beside the loss, and the numbers of a step for a logger.

As a dictionary, it has the metrics of `loss_fn` as they were returned. Called, it gives these and
the numbers that the step has measured as a flat dictionary of plain numbers, which any logger
takes:

    loss                      the loss of the batch
    step_seconds              from the start of the first action to the end of the last one
    bubble                    the idle fraction of all ranks' time in it
    rows, rows_per_second     of the batch of this replica
    tokens, tokens_per_second the same for batches of token ids
    peak_bytes                the most memory so far: of one device, or of this process on the CPU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from penstock.device.accelerator import get_peak_bytes
from penstock.torch_compat import pytree

if TYPE_CHECKING:
    from penstock.model.stage_inputs import Batch
    from penstock.schedules.timeline import Timeline

TOKEN_INPUTS = ("input_ids", "decoder_input_ids")


class HasTimeline(Protocol):
    """The interface of a run that can build its timeline."""

    @property
    def timeline(self) -> Timeline:
        """The measured timeline."""


class StepMetrics(dict[str, Any]):
    """The metrics that `loss_fn` returned beside the loss. Call it for the numbers of the step.

    Args:
        metrics: The metrics, combined over the micro-batches.
        loss: The loss of the step.
        measured: The run, with its timestamps.
        rows: The rows of the batch.
        tokens: The token ids of the batch, or None if it has none.
        devices: The devices of this process.
    """

    # It does not refer to the result, so that a step and its outputs are freed without the garbage
    # collector.
    def __init__(
        self,
        metrics: Mapping[str, Any],
        loss: Tensor,
        measured: HasTimeline,
        rows: int = 0,
        tokens: int | None = None,
        devices: Iterable[torch.device] = (),
    ) -> None:
        super().__init__(metrics)
        self._loss, self._measured, self._devices = loss, measured, tuple(devices)
        self._rows, self._tokens = rows, tokens

    def replace(self, metrics: Mapping[str, Any], loss: Tensor, measured: HasTimeline) -> Self:
        """Return the metrics of another step on a batch of the same size."""
        return type(self)(metrics, loss, measured, self._rows, self._tokens, self._devices)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # a copy, or one in another process, has no run to measure

    def __call__(self, prefix: str = "") -> dict[str, float]:
        """Return the numbers of the step for a logger. On a GPU, this waits until the step ends.

        Args:
            prefix: A text in front of every name, such as "train/".

        Returns:
            A flat dictionary of plain numbers. Metrics of `loss_fn` that are single numbers have
            their own names, and nested ones are joined by a slash. A metric that is called like one
            of the numbers of the step replaces it.
        """
        timeline = self._measured.timeline
        seconds = timeline.makespan
        numbers: dict[str, float] = {
            "loss": self._loss.item(),
            "step_seconds": seconds,
            "bubble": timeline.bubble,
        }
        for name, count in (("rows", self._rows), ("tokens", self._tokens)):
            if count:
                numbers[name] = count
                if seconds:
                    numbers[f"{name}_per_second"] = count / seconds
        peak = max((get_peak_bytes(device) for device in self._devices), default=0)
        if peak:
            numbers["peak_bytes"] = peak
        numbers.update(_find_numbers(self))
        return {f"{prefix}{name}": number for name, number in numbers.items()}


def _flatten(metrics: StepMetrics) -> tuple[list[Any], list[str]]:
    return list(metrics.values()), list(metrics)


def _flatten_with_keys(metrics: StepMetrics) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(pytree.MappingKey(name), value) for name, value in metrics.items()], list(metrics)


def _unflatten(values: Iterable[Any], names: list[str]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


# pytree takes a subclass of dict for a leaf otherwise, and would not see the tensors in it.
pytree.register_pytree_node(
    StepMetrics, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys
)


def _find_numbers(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the single numbers of nested metrics, by their path. Anything else is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _find_numbers(value, f"{path}{name}/")
        elif isinstance(value, Tensor):
            if value.numel() == 1 and not value.is_complex():
                yield f"{path}{name}", float(value.item())
        elif isinstance(value, Real):
            yield f"{path}{name}", float(value)


def count_tokens(batch: Batch) -> int | None:
    """Return the number of token ids in a batch, padding included, or None if it has none.

    They are the inputs called `input_ids` and `decoder_input_ids`, or the first input if it is a
    matrix of whole numbers.
    """
    named = [batch.keyword_inputs[name] for name in TOKEN_INPUTS if name in batch.keyword_inputs]
    inputs = named or batch.inputs[:1]
    sizes = [value.numel() for value in inputs if isinstance(value, Tensor) and _has_ids(value)]
    return sum(sizes) if sizes else None


def _has_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32)
