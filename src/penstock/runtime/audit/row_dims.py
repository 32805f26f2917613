"""The dims of outputs that rows are on, and gradients that differ by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.microbatch import MicrobatchRows


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
