"""The losses and outputs of parts of a batch, and those of all of them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.microbatch import gather
from penstock.model.stage_inputs import StageInputs
from penstock.runtime.audit.reference import ReferenceForward
from penstock.stage.loss import LossExtras
from penstock.stage.payload import flatten_values
from penstock.torch_compat import pytree

SPLIT_CURE = (
    "So the loss of a batch depends on how it is split. It is not a mean over rows: it mixes rows, "
    "divides by a number that is given, or does not count all targets. Return "
    "penstock.Weighted(loss, weight) if it is a mean over something else, or pass reduction='sum' "
    "if it is a sum. A loss that mixes rows needs chunks=1."
)


class ShowsNothingError(Exception):
    """The results would be the same if rows were mixed: they are not finite, or count nothing."""


class Losses(NamedTuple):
    """The losses of parts, and of all together.

    Attributes:
        parts: The losses of the parts.
        combined: What they combine to.
        whole: The loss of all together.
        dtype: Its dtype.
    """

    parts: Sequence[float]
    combined: float
    whole: float
    dtype: torch.dtype


def find_loss(forward: ReferenceForward) -> Tensor:
    """Return the loss of a step."""
    loss: Tensor = flatten_values(forward.values)[0][0]
    return loss.detach()


def find_weight(forward: ReferenceForward) -> float | None:
    """Return the weight of the loss of a step, if it has one."""
    extras = (value for value in forward.values if isinstance(value, LossExtras))
    return next((float(e.weight) for e in extras if e.weight is not None), None)


def counts_nothing(forward: ReferenceForward) -> bool:
    """Return whether the loss of a step has counted no targets, so that nothing shows in it."""
    return find_weight(forward) == 0 or not math.isfinite(find_loss(forward))


def find_step_output(forward: ReferenceForward) -> tuple[Any, ...]:
    """Return the output of a model in a tuple, if a step has returned it beside its loss."""
    extras = (value for value in forward.values if isinstance(value, LossExtras))
    return next((extra.output for extra in extras), ())


def compare_losses(measured: Losses, tolerance: float) -> str | None:
    """Return how the losses of parts do not combine to that of all together, or None."""
    losses, combined, total, _ = measured
    distance = abs(combined - total)
    size = max(abs(x) for x in (*losses, total) if math.isfinite(x))
    if distance <= tolerance * size:
        return None
    *others, last = [f"{loss:.6g}" for loss in losses[:4]]
    combined_text, total_text = format_different(combined, total)
    more = " and others" if len(losses) > 4 else ""
    return (
        f"the losses of {_count_parts(losses)} of the batch, "
        f"{', '.join(others)}{', ' if more else ' and '}{last}{more}, combine to "
        f"{combined_text}, but the loss of the same rows together is {total_text}. {SPLIT_CURE}"
    )


def format_different(first: float, second: float) -> tuple[str, str]:
    """Return two numbers with six digits, or with as many as show that they differ.

    >>> format_different(0.5, 0.500000012)
    ('0.5', '0.50000001')
    """
    texts = ((f"{first:.{digits}g}", f"{second:.{digits}g}") for digits in range(6, 17))
    return next((pair for pair in texts if pair[0] != pair[1]), (repr(first), repr(second)))


def compare_outputs(
    parts: Sequence[Any],
    whole: Any,
    merged: Any,
    inputs: StageInputs,
    find_tolerance: Callable[[torch.dtype], float],
) -> str | None:
    """Return how the merged outputs of the parts differ from those of all together, or None.

    Args:
        parts: The outputs of the parts.
        whole: The output of all of them together.
        merged: The outputs of the parts, merged as a pipe does.
        inputs: The batch of the call.
        find_tolerance: Returns the relative difference that is rounding, given a dtype.
    """
    expected = dict(pytree.tree_flatten_with_path(whole)[0])
    tables = _find_tables(parts, whole)
    for path in tables:
        if _is_joined(path, whole, inputs):
            return (
                f"the output{pytree.keystr(path)} of shape {tuple(expected[path].shape)} has "
                "no rows: it is the same size for any number of them. Here it has as many "
                "entries on dim 0 as each micro-batch has rows, so that the pipe would join it "
                "as if they were rows. Return only what has rows, or use another number of "
                "chunks."
            )
    for path, leaf in pytree.tree_flatten_with_path(merged)[0]:
        other = expected.get(path)
        if path in tables or not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
            continue  # the pipe returns a list, with an entry for each micro-batch
        is_equal = leaf.shape == other.shape and is_close(leaf, other, find_tolerance(other.dtype))
        if is_equal:
            if not torch.equal(leaf.isnan(), other.isnan()):
                raise ShowsNothingError
            continue
        where = f"the output{pytree.keystr(path)}, joined from {_count_parts(parts)} of the batch,"
        if leaf.shape == other.shape and leaf.dim():
            difference = float((leaf - other).detach().abs().nan_to_num().max())
            return (
                f"{where} differs by up to {difference:.3g} from that of the same rows together. "
                "So the output depends on how the batch is split: the model mixes rows, or goes by "
                "their number or their positions. Let each row be computed by itself, or use "
                "chunks=1."
            )
        return (
            f"{where} has shape {tuple(leaf.shape)} and is not that of the same rows together, "
            f"which has shape {tuple(other.shape)}. So the output depends on how the batch is "
            "split: it has no rows on dim 0, is a number other than a mean over rows, or mixes "
            "rows. Return what has rows, or use chunks=1."
        )
    return None


def _is_joined(path: Any, whole: Any, inputs: StageInputs) -> bool:
    """Return whether the call joins this output of its micro-batches, which has this shape."""
    joined = gather([whole] * inputs.chunks, inputs.rows)
    return path in dict(pytree.tree_flatten_with_path(joined)[0])


def _find_tables(parts: Sequence[Any], whole: Any) -> list[Any]:
    """Return where an output has tensors without rows, such as tables or weights.

    They have the same shape for every number of rows.
    """
    leaves_by_part = [dict(pytree.tree_flatten_with_path(part)[0]) for part in parts]
    tables = []
    for path, leaf in pytree.tree_flatten_with_path(whole)[0]:
        if isinstance(leaf, Tensor) and leaf.dim():
            others = [leaves.get(path) for leaves in leaves_by_part]
            if all(isinstance(o, Tensor) and o.shape == leaf.shape for o in others):
                tables.append(path)
    return tables


def _count_parts(parts: Sequence[Any]) -> str:
    return "two parts" if len(parts) == 2 else f"{len(parts)} parts"


def is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the largest number."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return True  # an index of a maximum may differ by rounding
    actual, expected = actual.detach(), expected.detach()  # float() warns of what requires grad
    size = max(float(expected.abs().nan_to_num().max()), 1e-30) if expected.numel() else 1.0
    distance = (actual - expected).abs().nan_to_num(0.0, 0.0)
    return not expected.numel() or float(distance.max()) <= tolerance * size
