"""Tensors that layers replace in every step: `self.mean = 0.9 * self.mean + 0.1 * new`.

A replay reads what was there when it was captured, and writes what was there afterwards. So such a
tensor gets a place of its own. At the end of a capture, as a part of it, the new numbers are copied
there, and the layer has the tensor of that place again.
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
    """Of a tensor of a module's: a buffer, or a plain attribute."""

    is_buffer: bool
    name: str

    def get_table(self, module: nn.Module) -> dict[str, Any]:
        """Where the module has it."""
        return module._buffers if self.is_buffer else vars(module)


TensorsByAttribute = dict[tuple[nn.Module, TensorAttribute], Tensor]


def collect_module_tensors(modules: Sequence[nn.Module]) -> TensorsByAttribute:
    """All of the modules' buffers, and tensors that are plain attributes."""
    return dict(_iter_module_tensors(modules))


def _iter_module_tensors(
    modules: Sequence[nn.Module],
) -> Iterator[tuple[tuple[nn.Module, TensorAttribute], Tensor]]:
    for module in modules:
        for buffer, table in ((True, module._buffers), (False, vars(module))):
            for name, value in table.items():
                if isinstance(value, Tensor):
                    yield (module, TensorAttribute(buffer, name)), value


class ReassignedTensors:
    """The places of those that were seen to be replaced, as long as their modules are there."""

    def __init__(self) -> None:
        self._static_tensors: WeakKeyDictionary[nn.Module, dict[TensorAttribute, Tensor]] = (
            WeakKeyDictionary()
        )

    @torch.no_grad()
    def restore_static_tensors(self) -> None:
        """Before a step, whoever has taken the one before: each is in its place."""
        for module, places in list(self._static_tensors.items()):
            for name, place in list(places.items()):
                table = name.get_table(module)
                value = table.get(name.name)
                if value is place:
                    continue
                if isinstance(value, Tensor) and _has_same_spec(value, place):
                    place.copy_(value)
                    table[name.name] = place
                else:
                    del places[name]

    def register_reassigned(
        self, before: TensorsByAttribute, modules: Sequence[nn.Module], describe: DescribeModule
    ) -> None:
        """After a step: give those a place that it has replaced."""
        for (module, name), value in collect_module_tensors(modules).items():
            old = before.get((module, name))
            if old is value:
                continue
            if old is not None and not _has_same_spec(value, old):
                raise CaptureError(_describe_reassignment(describe(module), name.name, old, value))
            if value.requires_grad:
                raise CaptureError(
                    f"{describe(module)}: it keeps a tensor with its history as its "
                    f"'{name.name}' in every step: keep it detached"
                )
            places = self._static_tensors.setdefault(module, {})
            if name not in places:  # else it has one
                places[name] = value.detach().clone()
        self.restore_static_tensors()

    @torch.no_grad()
    def write_back(
        self, before: TensorsByAttribute, modules: Sequence[nn.Module], describe: DescribeModule
    ) -> None:
        """At the end of a capture, as a part of it."""
        for (module, name), value in collect_module_tensors(modules).items():
            old = before.get((module, name))
            if old is value:
                continue
            if (
                old is None
                or name not in self._static_tensors.get(module, ())
                or not _has_same_spec(value, old)
            ):
                raise CaptureError(_describe_reassignment(describe(module), name.name, old, value))
            old.copy_(value)
            name.get_table(module)[name.name] = old


def _has_same_spec(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)


def _describe_reassignment(layer: str, name: str, old: Tensor | None, new: Tensor) -> str:
    was = "none" if old is None else f"{tuple(old.shape)} of {old.dtype} on {old.device}"
    return (
        f"{layer}: its '{name}' is another tensor after the step ({was} before, "
        f"{tuple(new.shape)} of {new.dtype} on {new.device} now), and a replay would not replace "
        "it: change it in place, or let it keep its shape, its dtype and its device"
    )


class ModuleTablesSnapshot:
    """What modules have, to be put back if a capture fails."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tables = [t for m in modules for t in (vars(m), m._buffers, m._parameters)]
        self._saved_tables = [(table, dict(table)) for table in tables]

    def restore(self) -> None:
        """The names, not the numbers: nothing has been computed."""
        for table, kept in self._saved_tables:
            table.clear()
            table.update(kept)
