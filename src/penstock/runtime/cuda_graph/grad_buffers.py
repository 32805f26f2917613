"""Where captured steps leave the gradients: for each parameter a tensor that stays in its place.

A replay adds to it. If `.grad` was None before a step, the home begins with zeros and becomes
`.grad`; if it is another tensor, its numbers go through the home and back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.runtime.cuda_graph.capture_guard import CaptureError

DescribeParameter = Callable[[nn.Parameter], str]


class GradBuffer:
    """Memory for one gradient. Its tensor is what `.grad` is, and so the caller may keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._expected_storage_uses = self._count_storage_uses()

    def record_storage_uses(self) -> None:
        """Whatever a recording holds of it is known from now on."""
        self._expected_storage_uses = self._count_storage_uses()

    @property
    def has_external_views(self) -> bool:
        """Does somebody keep a view of it, who does not expect its numbers to change?"""
        return self._count_storage_uses() > self._expected_storage_uses

    def _count_storage_uses(self) -> int:
        memory = self.tensor.untyped_storage()
        return torch._C._storage_Use_Count(memory._cdata)

    @property
    def ref_count(self) -> int:
        """How many hold the tensor."""
        return sys.getrefcount(self.tensor)

    def detach_caller(self) -> None:
        """Who has kept the tensor keeps its numbers; the memory stays the home's."""
        kept, self.tensor = self.tensor, self.tensor.detach()
        kept.data = kept.clone()


def _measure_grad_ref_count() -> int:
    parameter = nn.Parameter(torch.empty(0))
    parameter.grad = torch.empty(0)
    return GradBuffer(parameter.grad).ref_count


_UNSHARED_REF_COUNT = GradBuffer(torch.empty(0)).ref_count
_UNSHARED_STORAGE_USES = GradBuffer(torch.empty(0))._expected_storage_uses
_GRAD_REF_COUNT = _measure_grad_ref_count()  # in some versions of PyTorch the parameter is one more

GradBufferMap = dict[nn.Parameter, GradBuffer]


class GradBufferPool:
    """Of one pipe's parameters; all its recordings add to the same."""

    def __init__(self) -> None:
        self._buffers: GradBufferMap = {}

    @contextmanager
    def redirect_grads_for_capture(
        self, parameters: Iterable[nn.Parameter], describe: DescribeParameter
    ) -> Iterator[GradBufferMap]:
        """Within, for a capture, the `.grad` of those that learn is at home; after it, as it was.

        Gives those that the capture adds to, once it has ended.
        """
        homes = {p: self._get_or_create(p) for p in parameters}
        before = {p: p.grad for p in homes}
        touched: GradBufferMap = {}
        try:
            for parameter, home in homes.items():
                parameter.grad = home.tensor
            versions = {p: home.tensor._version for p, home in homes.items()}
            yield touched
            for parameter, home in homes.items():
                if parameter.grad is not home.tensor:
                    raise CaptureError(
                        f"the gradient of {describe(parameter)} is not added to the one before: a "
                        "hook takes it away, or it is sparse"
                    )
                if home.tensor._version != versions[parameter]:
                    touched[parameter] = home
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient
        for home in touched.values():
            home.record_storage_uses()

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """For new ones: their memory is somebody else's now."""
        for parameter in parameters:
            self._buffers.pop(parameter, None)

    def _get_or_create(self, parameter: nn.Parameter) -> GradBuffer:
        """Where its gradient is already, if nobody else knows that one."""
        found = self._buffers.get(parameter)
        if found is None or not _matches_parameter(found.tensor, parameter):
            found = _adopt_existing_grad(parameter) or GradBuffer(torch.zeros_like(parameter))
            self._buffers[parameter] = found
        return found


def _adopt_existing_grad(parameter: nn.Parameter) -> GradBuffer | None:
    if parameter.grad is None or not _matches_parameter(parameter.grad, parameter):
        return None
    home = GradBuffer(parameter.grad)
    alone = (
        home.ref_count <= _GRAD_REF_COUNT and home._expected_storage_uses <= _UNSHARED_STORAGE_USES
    )
    return home if alone and not _is_partial_view(home.tensor) else None


def _matches_parameter(tensor: Tensor, parameter: nn.Parameter) -> bool:
    kinds = [(t.shape, t.dtype, t.device) for t in (tensor, parameter)]
    return kinds[0] == kinds[1]


def _is_partial_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def check_dense_grads(parameters: Iterable[nn.Parameter], describe: DescribeParameter) -> None:
    """All gradients are such as homes can hold."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or (type(gradient) is Tensor and gradient.layout is torch.strided):
            continue
        raise CaptureError(
            f"the gradient of {describe(parameter)} is a {type(gradient).__name__} with layout "
            f"{gradient.layout}, and a replay adds to plain tensors alone"
        )


class GradUpdateDetector:
    """Which parameters a step gives a gradient; made before it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._grads_before = {
            p: (p.grad, _grad_version(p.grad)) for p in parameters if p.requires_grad
        }

    def find_updated_parameters(self) -> list[nn.Parameter]:
        """After it."""
        return [
            p
            for p, (gradient, version) in self._grads_before.items()
            if p.grad is not gradient or _grad_version(p.grad) != version
        ]


def _grad_version(gradient: Tensor | None) -> int:
    return -1 if gradient is None or gradient.is_inference() else gradient._version


def find_viewed_grads(grad_buffers: GradBufferMap) -> set[nn.Parameter]:
    """Those of whose last gradient somebody keeps a view: a replay would change its numbers."""
    return {
        p
        for p, home in grad_buffers.items()
        if p.grad is not home.tensor and home.has_external_views
    }


@contextmanager
def redirect_grads_for_replay(grad_buffers: GradBufferMap) -> Iterator[None]:
    """Around a replay."""
    away = [(p, home) for p, home in grad_buffers.items() if p.grad is not home.tensor]
    for _, home in away:
        if home.ref_count > _UNSHARED_REF_COUNT:
            home.detach_caller()
    strangers = [(p, p.grad, home.tensor) for p, home in away if p.grad is not None]
    _zero_tensors([home.tensor for p, home in away if p.grad is None])
    _copy_tensors([(home, gradient) for _, gradient, home in strangers])
    for parameter, home in away:
        parameter.grad = home.tensor
    try:
        yield
        _copy_tensors([(gradient, home) for _, gradient, home in strangers])
    finally:
        for parameter, gradient, _ in strangers:
            parameter.grad = gradient


@torch.no_grad()
def _zero_tensors(tensors: list[Tensor]) -> None:
    """With zeros."""
    if tensors:
        torch._foreach_zero_(tensors)


@torch.no_grad()
def _copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """To the one from the other, in as few launches as can be."""
    if pairs:
        to, of = zip(*pairs, strict=True)
        torch._foreach_copy_(to, of)
