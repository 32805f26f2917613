"""The gradients of parts of a batch, and of all of them together.

A backward begins with gradients that do not depend on how the rows are split: those of a loss in a
step, and numbers of each row's own for the outputs of `pipe(x)`. Then the gradients of the parts
must add up to those of all together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.microbatch import MicrobatchRows
from penstock.runtime.audit.batch_rows import Rows
from penstock.runtime.audit.digest import Digest
from penstock.runtime.audit.reference import ReferenceForward
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.stage.payload import Payload, flatten_values

# Returns the tensors of a forward with which a backward begins, and their gradients.
Seeds = Callable[[tuple[Any, ...]], Sequence[tuple[Tensor, Tensor]]]


class RowDims:
    """The dims of the outputs that the rows are on: dim 0, or that of the inputs.

    Of few rows, an output may have as many entries on both.
    """

    def __init__(self, rows: MicrobatchRows) -> None:
        self._input_dim, self._dims = rows.dim, dict(rows.output_dims)
        self.shapes: Sequence[torch.Size] = ()  # of the outputs of another number of rows, if known

    def find(self, index: int, output: Tensor, row_count: int) -> int:
        """Return the dim of an output, given its index, for so many rows."""
        if not self._input_dim:
            return 0
        if index not in self._dims and index < len(self.shapes):
            pairs = zip(self.shapes[index], output.shape, strict=False)
            others = [dim for dim, (size, other) in enumerate(pairs) if size != other]
            if len(others) == 1:
                self._dims[index] = others[0]
        dims = [self._dims[index]] if index in self._dims else [self._input_dim, 0]
        return next((d for d in dims if d < output.dim() and not output.size(d) % row_count), 0)


def vary_by_row(tensor: Tensor, row_numbers: Sequence[int], dim: int) -> Tensor:
    """Return a gradient for a tensor with these rows of the batch, whatever rows are beside.

    Its rows are on `dim`.
    """
    rows = tensor.detach().movedim(dim, 0)
    times = max(len(rows) // len(row_numbers), 1)
    numbers = torch.tensor(row_numbers, device=tensor.device).repeat_interleave(times)
    if len(numbers) != len(rows):  # it has none
        numbers = torch.zeros(len(rows), device=tensor.device)
    columns = torch.arange(rows[:1].numel(), device=tensor.device)
    angles = 0.7 * columns + numbers[:, None]
    return angles.cos().add(0.1).to(tensor.dtype).view(rows.shape).movedim(0, dim)


@dataclass(frozen=True)
class LossSeeds:
    """The gradients of the losses of parts in a step."""

    losses: LossAccumulator

    def for_part(self, index: int, ranges: Sequence[Rows]) -> Seeds:
        """Return the seeds of one part, which has these rows."""

        def list_pairs(values: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
            tensors, layout = flatten_values(values)
            gradients = self.losses.compute_output_gradients(
                index, Payload(tuple(tensors), layout)
            ).tensors
            pairs = zip(tensors, gradients, strict=True)
            return [(t, g) for t, g in pairs if g is not None and t.requires_grad]

        return list_pairs

    def read_scale(self) -> float:
        """Return the factor that the gradients still need, after the last part."""
        factor = self.losses.rescale_factor
        return 1.0 if factor is None else float(factor)


@dataclass(frozen=True)
class OutputSeeds:
    """Gradients for the outputs of `pipe(x)`: each row has one of its own, a loss its share."""

    shares: Sequence[float]
    row_dims: RowDims

    def for_part(self, index: int, ranges: Sequence[Rows]) -> Seeds:
        """Return the seeds of one part, which has these rows."""

        def list_pairs(values: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
            row_numbers = [row for start, stop in ranges for row in range(start, stop)]
            pairs = []
            for leaf_index, tensor in enumerate(flatten_values(values)[0]):
                if not tensor.requires_grad:
                    continue
                if tensor.dim():
                    dim = self.row_dims.find(leaf_index, tensor, len(row_numbers))
                    pairs.append((tensor, vary_by_row(tensor, row_numbers, dim)))
                else:
                    pairs.append((tensor, torch.full_like(tensor, self.shares[index])))
            return pairs

        return list_pairs

    def read_scale(self) -> float:
        """Return 1: the gradients have their final size."""
        return 1.0


def select_seeds(
    seeds: LossSeeds | OutputSeeds | None, index: int, ranges: Sequence[Rows], factor: float
) -> Seeds | None:
    """Return the seeds of one part, multiplied by a factor. None: it has no backward."""
    if seeds is None:
        return None
    list_pairs = seeds.for_part(index, ranges)
    return lambda values: [(tensor, gradient * factor) for tensor, gradient in list_pairs(values)]


@dataclass(frozen=True)
class RowsResult:
    """The forward of some rows, and perhaps its backward.

    Attributes:
        forward: The forward.
        gradients: The gradients, by id of their leaves.
        input_ids: The ids of the inputs.
        writes: What the backward has added to beside gradients, by name: buffers, say.
    """

    forward: ReferenceForward
    gradients: Mapping[int, Digest]
    input_ids: frozenset[int] = frozenset()
    writes: Mapping[str, Digest] = field(default_factory=dict)

    def measure_input_gradients(self) -> float:
        """Return the norm of the gradients of all inputs."""
        return math.hypot(*(d.norm for k, d in self.gradients.items() if k in self.input_ids))


def compare_gradients(
    parts: Sequence[RowsResult],
    whole: RowsResult,
    names: Mapping[int, str],
    scale: float,
    tolerance: float,
) -> str | None:
    """Return whose gradients of the parts do not add up to that of the whole, or None.

    Args:
        parts: The results of the parts.
        whole: The result of all of them together.
        names: The names of the parameters, by id.
        scale: By what the gradients of the whole have to be multiplied.
        tolerance: The relative difference that is rounding.
    """
    sums: dict[int, Digest] = {}
    for part in parts:
        for key, digest in part.gradients.items():
            sums[key] = digest.plus(sums.get(key))
    zero = Digest(0.0, 0.0)
    # Some gradients are 0 but for rounding, such as that of the bias of the keys of attention.
    norms = [digest.norm for key, digest in sums.items() if key in names]
    least_size = tolerance * max(filter(math.isfinite, norms), default=0.0)
    for key, name in names.items():
        digest, expected = sums.get(key, zero), whole.gradients.get(key, zero)
        if digest.find_difference(expected, tolerance, scale, least_size):
            return _describe_gradient(f"the gradient of '{name}'")
    for name in dict.fromkeys(name for part in (*parts, whole) for name in part.writes):
        digest = zero
        for part in parts:
            digest = digest.plus(part.writes.get(name))
        if digest.find_difference(whole.writes.get(name, zero), tolerance):
            if scale != 1:
                return describe_weighted_write(name)
            return _describe_gradient(f"what a backward adds to '{name}'")
    # Those of the inputs have other places in the whole, so only their sizes are compared.
    size = whole.measure_input_gradients() * scale
    part_size = math.hypot(*(part.measure_input_gradients() for part in parts))
    if abs(size - part_size) > tolerance * max(size, part_size):
        return _describe_gradient("the gradient of the inputs")
    return None


def _describe_gradient(what: str) -> str:
    return (
        f"{what} for some rows together is not the sum of those for two parts of them, although "
        "their losses or outputs combine. So the backward mixes rows, or depends on their number: "
        "in a hook of a tensor or a module, in the backward of an autograd.Function, or by a value "
        "that is detached. Or a forward calls backward by itself, on a mean over its rows. Or it "
        "mixes rows, and weights that are very small so far hide it in the results. Let each row "
        "have its own gradient, change the gradients after the step, or use chunks=1."
    )


def describe_weighted_write(name: str) -> str:
    """Return what is wrong if a backward adds to a buffer before gradients have their scale."""
    return (
        f"a backward adds to '{name}', and the loss has weights, so gradients have their final "
        "scale only after the backwards. Use reduction='sum' and divide by the weight of the whole "
        "batch in loss_fn, or compute it after the step."
    )
