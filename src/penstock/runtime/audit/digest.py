"""Digests of tensors: two numbers that tell whether a pipe and the unsplit model agree.

A digest is small, so an audit can keep those of all gradients without a second copy of them. It is
linear in its first number, so the digest of what a cell adds to `.grad` is the digest after it
minus the digest before.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.data_parallel.dtensor import to_local
from penstock.device.accelerator import has_double_precision, may_use_tf32
from penstock.stage.recompute import get_fixed_vector, multiply_by_fixed_vector

K = TypeVar("K", bound=Hashable)


class Digest(NamedTuple):
    """The digest of a tensor: its product with a fixed vector, and its norm or a bound of it."""

    product: float
    norm: float

    def minus(self, before: Digest | None) -> Digest:
        """Return the digest of the difference of two tensors."""
        if before is None:
            return self
        return Digest(self.product - before.product, self.norm + before.norm)

    def plus(self, other: Digest | None) -> Digest:
        """Return the digest of the sum of two tensors."""
        if other is None:
            return self
        return Digest(self.product + other.product, self.norm + other.norm)

    def find_difference(
        self, expected: Digest, tolerance: float, scale: float = 1.0, least_size: float = 0.0
    ) -> float:
        """Return the relative difference from `expected` times a scale; 0 if it is rounding.

        A number that is not finite equals any other such number. A tensor below `least_size` is
        rounding itself.
        """
        product, other = self.product, expected.product * scale
        if not (math.isfinite(product) and math.isfinite(other)):
            return math.inf if math.isfinite(product) or math.isfinite(other) else 0.0
        # The product with a vector of cosines is about the norm of the tensor.
        size = max(self.norm, expected.norm * abs(scale), abs(product), abs(other))
        difference = abs(product - other) / size if size > least_size else 0.0
        return difference if difference > tolerance else 0.0


class Digester:
    """Makes digests."""

    def digest(self, tensor: Tensor) -> Digest:
        """Return the digest of a tensor.

        >>> Digester().digest(torch.zeros(3))
        Digest(product=0.0, norm=0.0)
        """
        return self.digest_all({"": tensor})[""]

    @torch.no_grad()
    def digest_all(self, tensors: Mapping[K, Tensor]) -> dict[K, Digest]:
        """Return the digests of several tensors, and wait for their devices only once.

        Small tensors of one size are digested together. A model has many of them, and each
        operation takes longer than their numbers.
        """
        sums: dict[tuple[K, ...], Tensor] = {}
        groups: dict[Any, dict[K, Tensor]] = {}
        for key, tensor in tensors.items():
            if is_small(tensor):
                kind = tensor.numel(), tensor.dtype, tensor.device
                groups.setdefault(kind, {})[key] = tensor.detach().reshape(-1)
            else:
                sums[(key,)] = self.compute_sums(tensor)[None]
        for group in groups.values():
            rows = _to_float(torch.stack(list(group.values())))
            vector = get_fixed_vector(rows.shape[1], rows.dtype, rows.device)
            # Not a product of matrices: the digest of a tensor must not depend on the others.
            pairs = [(rows * vector).sum(1), rows.square().sum(1)]
            sums[tuple(group)] = torch.stack(pairs, 1)
        return self._read(sums)

    def read(self, sums: Mapping[K, Tensor]) -> dict[K, Digest]:
        """Return the digests from what `compute_sums` has returned."""
        return self._read({(key,): pair[None] for key, pair in sums.items()})

    def _read(self, sums: Mapping[tuple[K, ...], Tensor]) -> dict[K, Digest]:
        """Return the digests of groups of tensors from their products and squares."""
        groups_by_device: dict[torch.device, list[tuple[K, ...]]] = {}
        for group, pairs in sums.items():
            groups_by_device.setdefault(pairs.device, []).append(group)
        digests = {}
        for groups in groups_by_device.values():
            numbers = torch.cat([sums[group] for group in groups]).tolist()
            keys = [key for group in groups for key in group]
            for key, (product, square) in zip(keys, numbers, strict=True):
                digests[key] = Digest(product, math.sqrt(square))
        return digests

    @torch.no_grad()
    def compute_sums(self, tensor: Tensor) -> Tensor:
        """Return the product with the fixed vector, and the square of the norm, on the device."""
        values = to_local(tensor.detach())
        if values.layout is not torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values)
        flat = _to_float(values.reshape(-1))
        return torch.stack([multiply_by_fixed_vector(flat), flat @ flat])


_SMALL_SIZE = 4096


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is digested together with others of its size."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and 0 < tensor.numel() <= _SMALL_SIZE and not tensor.is_complex()


def _to_float(values: Tensor) -> Tensor:
    """Return numbers in a dtype for sums. Not every device has double precision."""
    is_double = values.dtype in (torch.float64, torch.int64)
    is_double = is_double and has_double_precision(values.device.type)
    return values.to(torch.float64 if is_double else torch.float32)


# The relative difference that rounding may cause. Pipe and reference run the same operations on
# the same shapes, but a kernel may add in another order.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def find_rounding(dtypes: Iterable[torch.dtype], devices: Iterable[torch.device] = ()) -> float:
    """Return the relative difference that counts as rounding, for numbers of these dtypes.

    On devices that compute float32 with TF32, it has the precision of float16. Another stream or
    share of a GPU may choose another algorithm, and so another rounding.
    """
    precisions = set(dtypes)
    if torch.float32 in precisions and any(may_use_tf32(device.type) for device in devices):
        precisions.add(torch.float16)
    return max((_ROUNDING.get(dtype, 0.0) for dtype in precisions), default=0.0) or 1e-9
