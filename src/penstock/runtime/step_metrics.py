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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.device.accelerator import get_peak_bytes
from penstock.torch_compat import pytree

if TYPE_CHECKING:
    from penstock.schedules.timeline import Timeline


class HasTimeline(Protocol):
    """The interface of a run that can build its timeline."""

    @property
    def timeline(self) -> Timeline:
        """The measured timeline."""


class BatchSize(NamedTuple):
    """The numbers of rows and tokens of a batch, and the devices that compute it.

    Attributes:
        rows: The rows of the batch.
        tokens: The token ids of the batch, or None if it has none.
        devices: The devices of this process.
    """

    rows: int = 0
    tokens: int | None = None
    devices: tuple[torch.device, ...] = ()


class StepMetrics(dict[str, Any]):
    """The metrics that `loss_fn` returned beside the loss. Call it for the numbers of the step.

    Args:
        metrics: The metrics, combined over the micro-batches.
        loss: The loss of the step.
        measured: The run, with its timestamps.
        size: The size of the batch, and the devices.
    """

    # It does not refer to the result, so that a step and its outputs are freed without the garbage
    # collector.
    def __init__(
        self,
        metrics: Mapping[str, Any],
        loss: Tensor,
        measured: HasTimeline,
        size: BatchSize = BatchSize(),  # noqa: B008 (a value)
    ) -> None:
        super().__init__(metrics)
        self._loss, self._measured, self._size = loss, measured, size

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
        for name, count in (("rows", self._size.rows), ("tokens", self._size.tokens)):
            if count:
                numbers[name] = count
                if seconds:
                    numbers[f"{name}_per_second"] = count / seconds
        peak = max((get_peak_bytes(device) for device in self._size.devices), default=0)
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
