"""The comparison of every recomputation with its forward.

If the layers of a stage depend on something that changes between the two, the recomputation builds
the graph of another function, and gradients are wrong. The outputs of the forward are not kept for
the comparison. Each leaves one number, its product with a fixed vector, and so does the output of
the recomputation:

    on the CPU           the numbers are compared when the recomputation is done
    on an accelerator    they stay on the device, and are read once, when the lanes have run
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.data_parallel.dtensor import to_local
from penstock.device.accelerator import has_double_precision
from penstock.errors import RunError
from penstock.stage.stage import Stage
from penstock.torch_compat import wait_for_collective

# How far a recomputation may be from its forward, relative to the norm of a tensor. With a graph
# PyTorch may choose another kernel, and some kernels add in no fixed order.
_TOLERANCES = {
    torch.float64: 4e-9,
    torch.complex128: 4e-9,
    torch.float32: 4e-4,
    torch.complex64: 4e-4,
}
_LOW_PRECISION_TOLERANCE = 0.03
_PRODUCT_DTYPES = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))

_BLOCK = 1 << 16  # the length of the fixed vector; longer tensors use it block by block

Product = float | Tensor | None  # a number, one that is on a device, or None for no comparison


class _Pair(NamedTuple):
    """An output of a forward and of its recomputation, as numbers on a device."""

    microbatch: int
    forward: Tensor
    repeated: Tensor
    norm: Tensor
    tolerance: float


class RepeatCheck:
    """Compares the recomputations of one stage in one call with their forwards.

    Args:
        stage: The stage, for the message.
        has_low_precision: Whether autocast lets the layers compute with fewer bits than the dtypes
            of the outputs have.
    """

    def __init__(self, stage: Stage, has_low_precision: bool) -> None:
        self._stage, self._has_low_precision = stage, has_low_precision
        self._pairs: list[_Pair] = []

    def compare(
        self, microbatch: int, forward: Sequence[Product], outputs: Sequence[Tensor]
    ) -> None:
        """Compare the outputs of a recomputation with the products of those of the forward.

        On an accelerator, `finish` raises if they differ.
        """
        if len(forward) != len(outputs):
            self._raise_difference(microbatch)
        for product, output in zip(forward, outputs, strict=True):
            repeated = compute_product(output)
            if product is None or repeated is None:
                continue
            if isinstance(product, Tensor) and isinstance(repeated, Tensor):
                norm, tolerance = _compute_norm(output), self._get_tolerance(output.dtype)
                self._pairs.append(_Pair(microbatch, product, repeated, norm, tolerance))
            elif product != repeated and not _is_close(
                float(product),
                float(repeated),
                float(_compute_norm(output)),
                self._get_tolerance(output.dtype),
            ):
                self._raise_difference(microbatch)

    def _get_tolerance(self, dtype: torch.dtype) -> float:
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        if self._has_low_precision:
            return _LOW_PRECISION_TOLERANCE
        return _TOLERANCES.get(dtype, _LOW_PRECISION_TOLERANCE)

    def finish(self) -> None:
        """Read the numbers on devices, and raise if a recomputation differs from its forward."""
        pairs, self._pairs = self._pairs, []
        for device in {pair.forward.device for pair in pairs}:
            on_device = [pair for pair in pairs if pair.forward.device == device]
            dtype = torch.float64 if has_double_precision(device.type) else torch.float32
            numbers = [number.to(dtype) for pair in on_device for number in pair[1:4]]
            values = iter(torch.stack(numbers).tolist())
            for pair in on_device:
                if not _is_close(next(values), next(values), next(values), pair.tolerance):
                    self._raise_difference(pair.microbatch)

    def _raise_difference(self, microbatch: int) -> None:
        raise RunError(
            f"the recomputation of {self._stage} gave another output for micro-batch {microbatch} "
            "than its forward, so the gradients would be wrong. A layer depends on something that "
            "changed in between: on a closure, a generator object or a global, on an attribute "
            "that was set after pipe(x), or on torch.is_grad_enabled() or x.requires_grad, which "
            "are False in a forward that will be recomputed. Keep its state in buffers or in "
            "attributes of the layer, which are put back (is_recomputing() tells the second run), "
            "or set checkpoint='never'."
        )


def _is_close(forward: float, repeated: float, norm: float, tolerance: float) -> bool:
    """Return whether two products differ by rounding only. One that is not finite says nothing."""
    if not (math.isfinite(forward) and math.isfinite(repeated)):
        return math.isfinite(forward) == math.isfinite(repeated)
    return abs(forward - repeated) <= tolerance * max(norm, abs(forward), abs(repeated))


# ---- products with a fixed vector ----------------------------------------------------------------


def compute_product(tensor: Tensor) -> Product:
    """Return the product of a tensor with a fixed vector, or None for a kind that has none.

    The entries of the vector differ, so rows that change places give another product. A sum, or a
    norm, would be the same for all outputs of a LayerNorm.
    """
    if type(tensor) is not Tensor:
        tensor = wait_for_collective(to_local(tensor))
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return None
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    product = multiply_by_fixed_vector(_flatten(tensor))
    return product.item() if product.is_cpu else product


def multiply_by_fixed_vector(flat: Tensor) -> Tensor:
    """Return the product of a tensor of one dimension with a fixed vector, on its device."""
    length = flat.numel()
    if length <= _BLOCK:
        return torch.dot(flat, _get_vector(length, flat.dtype, flat.device))
    count = length // _BLOCK
    vector = _get_vector(_BLOCK, flat.dtype, flat.device)
    sums = flat[: count * _BLOCK].view(count, _BLOCK) @ vector
    sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
    remainder = flat[count * _BLOCK :]
    # Blocks that change places give another product, too.
    weights = torch.arange(count, 2 * count, dtype=sums.dtype, device=sums.device) / count
    return sums @ weights + remainder @ vector[: len(remainder)]


def _flatten(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, in a dtype that has products."""
    flat = tensor.detach()
    if flat.dtype not in _PRODUCT_DTYPES:
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        else:
            flat = flat.to(torch.float32)
    return flat.flatten()


def _compute_norm(tensor: Tensor) -> Tensor:
    local = wait_for_collective(to_local(tensor))
    flat = _flatten(local)
    dtype = torch.promote_types(flat.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=dtype)
    return norm


@lru_cache(maxsize=64)
def _get_vector(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if length < _BLOCK:
        return _get_vector(_BLOCK, dtype, device)[:length]
    # Copied from the host, and not computed on the device: the copy is done when this returns, so
    # the streams of all ranks can use it.
    with torch.inference_mode(False):
        # With cosines alone, the product of a constant tensor would be close to 0.
        vector = torch.arange(_BLOCK, dtype=torch.float64, device="cpu").mul_(0.7).cos_().add_(0.1)
        return vector.to(dtype).to(device)
