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
from penstock.partition.forward.faking import FakeTensorFactory
from penstock.partition.forward.trace import Trace
from penstock.partition.setting import (
    MetaTensorSlot,
    allocate_like,
    find_initializers,
    has_meta_tensors,
    initialize_module,
)


@dataclass
class UninitializedBuffers:
    """The buffers of parents that nothing sets before a checkpoint is loaded."""

    names: set[str] = field(default_factory=set)

    def check_not_read(self, trace: Trace) -> None:
        """The forward must not decide by them."""
        if not self.names:
            return
        without = {at for at, value in enumerate(trace.values) if value.buffer_name in self.names}
        for step in trace.nodes:
            if without.isdisjoint(step.inputs):
                continue
            if step.is_guard:
                raise ArgumentError(
                    f"at {step.location}, the forward looks at numbers that follow from a buffer, "
                    f"{', '.join(sorted(self.names))}, and the model was built on meta, where it "
                    "has none: build the buffer under torch.device('cpu'), or let its module's "
                    "reset_parameters() set it"
                )
            without |= {
                *(step.output.value_indices if step.output else ()),
                *step.mutations.values(),
            }


@contextmanager
def replace_meta_tensors(
    model: nn.Module, units: Collection[nn.Module], fake_factory: FakeTensorFactory
) -> Iterator[UninitializedBuffers]:
    """Within, nothing of the model is on meta."""
    unset = UninitializedBuffers()
    if not has_meta_tensors(model):
        yield unset
        return
    device = fake_factory.device
    inside = {module for unit in units for module in unit.modules()}
    before = [(m, dict(m._parameters), dict(m._buffers), dict(m.__dict__)) for m in model.modules()]
    made: dict[Tensor, Tensor] = {}
    blank: list[MetaTensorSlot] = []
    try:
        for path, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for key, old in held.items():
                    if old is None or not old.is_meta:
                        continue
                    real = held is module._buffers and module not in inside
                    if old not in made:
                        made[old] = (
                            allocate_like(old, device) if real else fake_factory.from_tensor(old)
                        )
                        if real:
                            blank.append(
                                MetaTensorSlot(f"{path}.{key}" if path else key, module, key)
                            )
                    held[key] = made[old]
            _replace_meta_attributes(module, made)
        unset.names = set(_find_uninitialized(model, blank))
        yield unset
    finally:
        for module, parameters, buffers, attributes in before:
            module.__dict__.update(attributes)
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _replace_meta_attributes(module: nn.Module, replacements: dict[Tensor, Tensor]) -> None:
    for key, value in module.__dict__.items():
        if isinstance(value, Tensor) and value in replacements:
            module.__dict__[key] = replacements[value]


def _find_uninitialized(model: nn.Module, slots: Sequence[MetaTensorSlot]) -> Iterator[str]:
    """The names of those that their modules do not set."""
    was = [(slot, slot.tensor, slot.tensor._version) for slot in slots if slot.tensor is not None]
    setters = find_initializers(model)
    with torch.random.fork_rng([]):
        for module in dict.fromkeys(slot.module for slot in slots):
            initialize_module(module, setters, run_reset_parameters=True, run_init_weights=True)
    return (slot.name for slot, tensor, version in was if slot.is_uninitialized(tensor, version))
