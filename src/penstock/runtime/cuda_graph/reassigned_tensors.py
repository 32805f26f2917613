"""Tensors that layers replace in every step, such as `self.mean = 0.9 * self.mean + 0.1 * new`.

A graph reads the tensor that was there when the capture began, and writes a new one. The next
replay would read the old tensor again, and the running mean would never advance. So such a tensor
gets a static place:

    first step   the reassignment is noticed, and the attribute gets a static tensor
    capture      ends with a copy of the new numbers into the static tensor, as part of the graph;
                 the attribute is the static tensor again
    replay       reads the static tensor and updates it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.runtime.cuda_graph.capture_guard import CaptureError

DescribeModule = Callable[[nn.Module], str]


class TensorAttribute(NamedTuple):
    """The name of a tensor of a module, which is a buffer or a plain attribute."""

    is_buffer: bool
    name: str

    def get_table(self, module: nn.Module) -> dict[str, Any]:
        """Return the dict in which the module keeps the tensor."""
        return module._buffers if self.is_buffer else vars(module)


TensorsByAttribute = dict[tuple[nn.Module, TensorAttribute], Tensor]


def collect_module_tensors(modules: Sequence[nn.Module]) -> TensorsByAttribute:
    """Return all buffers of the modules, and all tensors that are plain attributes."""
    return dict(_iter_module_tensors(modules))


def _iter_module_tensors(
    modules: Sequence[nn.Module],
) -> Iterator[tuple[tuple[nn.Module, TensorAttribute], Tensor]]:
    for module in modules:
        for is_buffer, table in ((True, module._buffers), (False, vars(module))):
            for name, value in table.items():
                if isinstance(value, Tensor):
                    yield (module, TensorAttribute(is_buffer, name)), value


class ReassignedTensors:
    """The static tensors of attributes that steps reassign, as long as their modules live."""

    def __init__(self) -> None:
        self._static_tensors: WeakKeyDictionary[nn.Module, dict[TensorAttribute, Tensor]] = (
            WeakKeyDictionary()
        )

    @torch.no_grad()
    def restore_static_tensors(self) -> None:
        """Put the static tensors back into their modules, with the current numbers.

        An eager step (of another kind, or in threads) has replaced them in the meantime. An
        attribute that is not a tensor of the same shape, dtype and device any more is forgotten.
        """
        for module, static_tensors in list(self._static_tensors.items()):
            for attribute, static_tensor in list(static_tensors.items()):
                table = attribute.get_table(module)
                value = table.get(attribute.name)
                if value is static_tensor:
                    continue
                if isinstance(value, Tensor) and _has_same_spec(value, static_tensor):
                    static_tensor.copy_(value)
                    table[attribute.name] = static_tensor
                else:
                    del static_tensors[attribute]

    def register_reassigned(
        self, before: TensorsByAttribute, modules: Sequence[nn.Module], describe: DescribeModule
    ) -> None:
        """Make static tensors for the attributes that an eager step has reassigned."""
        for (module, attribute), value in collect_module_tensors(modules).items():
            old_value = before.get((module, attribute))
            if old_value is value:
                continue
            if old_value is not None and not _has_same_spec(value, old_value):
                raise CaptureError(
                    _describe_reassignment(describe(module), attribute.name, old_value, value)
                )
            if value.requires_grad:
                raise CaptureError(
                    f"{describe(module)}: it stores a tensor with an autograd history in "
                    f"'{attribute.name}' in every step. Store tensor.detach() instead"
                )
            static_tensors = self._static_tensors.setdefault(module, {})
            if attribute not in static_tensors:
                static_tensors[attribute] = value.detach().clone()
        self.restore_static_tensors()

    @torch.no_grad()
    def write_back(
        self, before: TensorsByAttribute, modules: Sequence[nn.Module], describe: DescribeModule
    ) -> None:
        """Copy reassigned values into their static tensors, as the last part of a capture."""
        for (module, attribute), value in collect_module_tensors(modules).items():
            old_value = before.get((module, attribute))
            if old_value is value:
                continue
            if (
                old_value is None
                or attribute not in self._static_tensors.get(module, ())
                or not _has_same_spec(value, old_value)
            ):
                raise CaptureError(
                    _describe_reassignment(describe(module), attribute.name, old_value, value)
                )
            # The old value is the static tensor: it was put back into the module before the step.
            old_value.copy_(value)
            attribute.get_table(module)[attribute.name] = old_value


def _has_same_spec(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)


def _describe_reassignment(layer: str, name: str, old: Tensor | None, new: Tensor) -> str:
    before = "none" if old is None else f"{tuple(old.shape)} of {old.dtype} on {old.device}"
    return (
        f"{layer}: its '{name}' is another tensor after the step ({before} before, "
        f"{tuple(new.shape)} of {new.dtype} on {new.device} now), and a replay would not replace "
        "it. Update it in place, or keep its shape, dtype and device"
    )
