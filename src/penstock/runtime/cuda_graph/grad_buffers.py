"""Persistent buffers for the gradients of captured steps.

A CUDA graph adds gradients at fixed addresses. So each parameter has one `GradBuffer` that stays in
its place, and all graphs of a pipe add to it. The caller may use `.grad` as usual:

| `.grad` before the step | the replay | `.grad` after the step |
|---|---|---|
| the buffer | adds to the buffer | the buffer |
| None | zeroes the buffer and adds to it | the buffer |
| another tensor | starts from a copy of its numbers | that tensor, with the sum copied back |

The caller may also have kept the buffer of an earlier step (`g = p.grad`, then `zero_grad()`) and
does not expect `g` to change. The tensor object `g` then gets memory of its own, with the same
numbers (`GradBuffer.detach_caller`). A view of `g` cannot be moved like that. In this case the
buffer is left to the caller, and the graphs that add to it are captured again with a new buffer
(`find_viewed_grads`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.runtime.cuda_graph.capture_guard import CaptureError
from penstock.tensor_spec import is_replaceable_by
from penstock.torch_compat import foreach_copy_, foreach_zero_, get_storage_use_count

DescribeParameter = Callable[[nn.Parameter], str]


class GradBuffer:
    """A persistent buffer for one gradient. It becomes `.grad`, so the caller may keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._expected_storage_uses = self._count_storage_uses()

    def record_storage_uses(self) -> None:
        """Count the references that a captured graph holds as expected from now on."""
        self._expected_storage_uses = self._count_storage_uses()

    @property
    def has_external_views(self) -> bool:
        """Return whether the caller holds a view of the buffer, whose numbers must not change."""
        return self._count_storage_uses() > self._expected_storage_uses

    def _count_storage_uses(self) -> int:
        return get_storage_use_count(self.tensor.untyped_storage())

    @property
    def ref_count(self) -> int:
        """Return how many references there are to the tensor object."""
        return sys.getrefcount(self.tensor)

    def detach_caller(self) -> None:
        """Give the tensor that the caller holds memory of its own, and keep the buffer's memory."""
        caller_tensor, self.tensor = self.tensor, self.tensor.detach()
        caller_tensor.data = caller_tensor.clone()


# Reference counts of a buffer that only Penstock holds. They are measured, not written as numbers:
# they depend on the releases of Python and PyTorch. In some releases of PyTorch a parameter counts
# as one more reference to its gradient.


def _measure_grad_ref_count() -> int:
    parameter = nn.Parameter(torch.empty(0))
    parameter.grad = torch.empty(0)
    return GradBuffer(parameter.grad).ref_count


_UNSHARED_REF_COUNT = GradBuffer(torch.empty(0)).ref_count
_UNSHARED_STORAGE_USES = GradBuffer(torch.empty(0))._expected_storage_uses
_GRAD_REF_COUNT = _measure_grad_ref_count()

GradBufferMap = dict[nn.Parameter, GradBuffer]


class GradBufferPool:
    """The gradient buffers of one pipe, shared by all its graphs."""

    def __init__(self) -> None:
        self._buffers: GradBufferMap = {}

    @contextmanager
    def redirect_grads_for_capture(
        self, parameters: Iterable[nn.Parameter], describe: DescribeParameter
    ) -> Iterator[GradBufferMap]:
        """Set `.grad` of the parameters to their buffers for a capture, and restore it afterwards.

        Yields a dict that is empty at first. When the context ends, it holds the buffers that the
        capture adds to.
        """
        buffers = {p: self._get_or_create(p) for p in parameters}
        grads_before = {p: p.grad for p in buffers}
        touched: GradBufferMap = {}
        try:
            for parameter, buffer in buffers.items():
                parameter.grad = buffer.tensor
            versions = {p: buffer.tensor._version for p, buffer in buffers.items()}
            yield touched
            for parameter, buffer in buffers.items():
                if parameter.grad is not buffer.tensor:
                    raise CaptureError(
                        f"the gradient of {describe(parameter)} is replaced instead of being added "
                        "to .grad. Remove the hook that replaces it, or use a dense gradient if it "
                        "is sparse"
                    )
                # The version counter counts in-place writes, in a capture, too.
                if buffer.tensor._version != versions[parameter]:
                    touched[parameter] = buffer
        finally:
            for parameter, gradient in grads_before.items():
                parameter.grad = gradient
        for buffer in touched.values():
            buffer.record_storage_uses()

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the buffers of some parameters to the caller. The next capture makes new ones."""
        for parameter in parameters:
            self._buffers.pop(parameter, None)

    def _get_or_create(self, parameter: nn.Parameter) -> GradBuffer:
        """Return the parameter's buffer. An unshared `.grad` becomes one."""
        buffer = self._buffers.get(parameter)
        if buffer is None or not is_replaceable_by(buffer.tensor, parameter):
            buffer = _adopt_existing_grad(parameter) or GradBuffer(torch.zeros_like(parameter))
            self._buffers[parameter] = buffer
        return buffer


def _adopt_existing_grad(parameter: nn.Parameter) -> GradBuffer | None:
    """Return `.grad` as a buffer, or None if something else refers to it or to its memory."""
    if parameter.grad is None or not is_replaceable_by(parameter.grad, parameter):
        return None
    buffer = GradBuffer(parameter.grad)
    is_unshared = (
        buffer.ref_count <= _GRAD_REF_COUNT
        and buffer._expected_storage_uses <= _UNSHARED_STORAGE_USES
    )
    return buffer if is_unshared and not _is_partial_view(buffer.tensor) else None


def _is_partial_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def check_dense_grads(parameters: Iterable[nn.Parameter], describe: DescribeParameter) -> None:
    """Raise `CaptureError` if a gradient is sparse, or of a tensor subclass."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or (type(gradient) is Tensor and gradient.layout is torch.strided):
            continue
        raise CaptureError(
            f"the gradient of {describe(parameter)} is a {type(gradient).__name__} with layout "
            f"{gradient.layout}, but a replay can add to plain, dense tensors only. Use a dense "
            "gradient, for example nn.Embedding(sparse=False)"
        )


class GradUpdateDetector:
    """Finds the parameters that get a gradient in a step. Create it before the step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._grads_before = {
            p: (p.grad, _grad_version(p.grad)) for p in parameters if p.requires_grad
        }

    def find_updated_parameters(self) -> list[nn.Parameter]:
        """Return, after the step, the parameters whose `.grad` was replaced or added to."""
        return [
            p
            for p, (gradient, version) in self._grads_before.items()
            if p.grad is not gradient or _grad_version(p.grad) != version
        ]


def _grad_version(gradient: Tensor | None) -> int:
    # Tensors of inference mode do not count their versions: reading it raises.
    return -1 if gradient is None or gradient.is_inference() else gradient._version


def find_viewed_grads(grad_buffers: GradBufferMap) -> set[nn.Parameter]:
    """Return the parameters of whose buffer the caller keeps a view.

    A replay would change the numbers in that view.
    """
    return {
        p
        for p, buffer in grad_buffers.items()
        if p.grad is not buffer.tensor and buffer.has_external_views
    }


@contextmanager
def redirect_grads_for_replay(grad_buffers: GradBufferMap) -> Iterator[None]:
    """Set `.grad` to the buffers for a replay, with the numbers that `.grad` had before."""
    redirected = [(p, buffer) for p, buffer in grad_buffers.items() if p.grad is not buffer.tensor]
    # Must come before any write: a caller who keeps the buffer's tensor sees its old numbers.
    for _, buffer in redirected:
        if buffer.ref_count > _UNSHARED_REF_COUNT:
            buffer.detach_caller()
    caller_grads = [(p, p.grad, buffer.tensor) for p, buffer in redirected if p.grad is not None]
    _zero_tensors([buffer.tensor for p, buffer in redirected if p.grad is None])
    _copy_tensors([(buffer, gradient) for _, gradient, buffer in caller_grads])
    for parameter, buffer in redirected:
        parameter.grad = buffer.tensor
    try:
        yield
        _copy_tensors([(gradient, buffer) for _, gradient, buffer in caller_grads])
    finally:
        for parameter, gradient, _ in caller_grads:
            parameter.grad = gradient


@torch.no_grad()
def _zero_tensors(tensors: list[Tensor]) -> None:
    """Fill all tensors with zeros, in a few kernels."""
    if tensors:
        foreach_zero_(tensors)


@torch.no_grad()
def _copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, in a few kernels."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        foreach_copy_(targets, sources)
