"""A dry run of a model that was built on meta: what stands in for tensors that have no memory.

For a parameter, and for what units have, a fake one on the device of the inputs. The buffers of the
parents are small, and the forward may decide by them: they are set as the model sets them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.partition.forward.faking import Fakes
from penstock.partition.forward.trace import Trace
from penstock.partition.setting import Slot, is_on_meta, like, reset, setters_of


@dataclass
class Unset:
    """The buffers of parents that nothing sets before a checkpoint is loaded."""

    names: set[str] = field(default_factory=set)

    def check(self, trace: Trace) -> None:
        """The forward must not decide by them."""
        if not self.names:
            return
        without = {at for at, value in enumerate(trace.values) if value.buffer in self.names}
        for step in trace.steps:
            if without.isdisjoint(step.takes):
                continue
            if step.asks:
                raise ArgumentError(
                    f"at {step.where}, the forward looks at numbers that follow from a buffer, "
                    f"{', '.join(sorted(self.names))}, and the model was built on meta, where it "
                    "has none: build the buffer under torch.device('cpu'), or let its module's "
                    "reset_parameters() set it"
                )
            without |= {*(step.result.made if step.result else ()), *step.changes.values()}


@contextmanager
def standing_in(model: nn.Module, units: Collection[nn.Module], fakes: Fakes) -> Iterator[Unset]:
    """Within, nothing of the model is on meta."""
    unset = Unset()
    if not is_on_meta(model):
        yield unset
        return
    device = fakes.device
    inside = {module for unit in units for module in unit.modules()}
    before = [(m, dict(m._parameters), dict(m._buffers), dict(m.__dict__)) for m in model.modules()]
    made: dict[Tensor, Tensor] = {}
    blank: list[Slot] = []
    try:
        for path, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for key, old in held.items():
                    if old is None or not old.is_meta:
                        continue
                    real = held is module._buffers and module not in inside
                    if old not in made:
                        made[old] = like(old, device) if real else fakes.of(old)
                        if real:
                            blank.append(Slot(f"{path}.{key}" if path else key, module, key))
                    held[key] = made[old]
            _stand_in_attributes(module, made)
        unset.names = set(_left_blank(model, blank))
        yield unset
    finally:
        for module, parameters, buffers, attributes in before:
            module.__dict__.update(attributes)
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _stand_in_attributes(module: nn.Module, made: dict[Tensor, Tensor]) -> None:
    for key, value in module.__dict__.items():
        if isinstance(value, Tensor) and value in made:
            module.__dict__[key] = made[value]


def _left_blank(model: nn.Module, slots: Sequence[Slot]) -> Iterator[str]:
    """The names of those that their modules do not set."""
    was = [(slot, slot.tensor, slot.tensor._version) for slot in slots if slot.tensor is not None]
    setters = setters_of(model)
    with torch.random.fork_rng([]):
        for module in dict.fromkeys(slot.module for slot in slots):
            reset(module, setters, itself=True, whole=True)
    return (slot.name for slot, tensor, version in was if slot.is_blank(tensor, version))
