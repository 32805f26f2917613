"""A model that was built on `meta`, given memory: only the layers that are wanted here.

What a module's `reset_parameters`, or the model's `_init_weights`, sets is set, from random numbers
that depend on the module alone, so that every cut of a model begins with the same weights. The
rest waits for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import ArgumentError, RunError
from penstock.partition.setting import (
    MetaTensorSlot,
    allocate_like,
    find_initializers,
    has_meta_tensors,
    initialize_module,
    list_direct_tensors,
)
from penstock.stage.randomness import (
    advance_caller_rng,
    derive_cell_seed,
    peek_seed,
    seed_shared_generators,
)

MetaReplacements = dict[torch.Tensor, torch.Tensor]  # tensors on meta: those in their places
LayerPlacement = tuple[str, nn.Module, torch.device]  # its name, and where it is wanted


@dataclass
class UninitializedTensors:
    """What nobody has set yet, with the version that each tensor had then."""

    slots: list[tuple[MetaTensorSlot, torch.Tensor, int]] = field(default_factory=list)

    def check_initialized(self) -> None:
        """All of it has been loaded or set since, or else nothing can be computed with it."""
        left = [
            slot.name for slot, was, version in self.slots if slot.is_uninitialized(was, version)
        ]
        if left:
            shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
            raise RunError(
                f"the model was built on meta, and nothing has set {shown} yet: load a checkpoint "
                "(pipe.load), or give the layer a reset_parameters() that sets it"
            )
        self.slots.clear()


def materialize(model: nn.Module, layers: Iterable[LayerPlacement]) -> UninitializedTensors:
    """Give memory to these layers of a model, each on its device; the others stay on meta.

    A layer may be a copy that has tensors of the model: what they share stays one, on the device
    of the first, and the model has it, too. The caller's generator moves on alike on every rank,
    whichever layers it has.
    """
    if not has_meta_tensors(model):
        return UninitializedTensors()
    seed = peek_seed()
    advance_caller_rng()
    whole = {module for module in model.modules() if _is_fully_on_meta(module)}
    built = {
        module for module in model.modules() if all(t.is_meta for t in list_direct_tensors(module))
    }
    made: MetaReplacements = {}
    for name, layer, device in layers:
        _allocate_layer(name, layer, device, made)
        _share_with_model(model, name, layer, made)
    fresh = list(_iter_new_slots(model, made))
    having = {slot.module for slot, _, _ in fresh}
    setters = find_initializers(model)
    for number, module in reversed(list(enumerate(model.modules()))):  # what is inside first
        tensors = (*module.parameters(), *module.buffers())
        home = next((t.device for t in tensors if not t.is_meta), None)
        if home is not None:
            with torch.random.fork_rng([home] if home.type == "cuda" else []):
                seed_shared_generators(derive_cell_seed(seed, number, 0), home)
                initialize_module(module, setters, module in built & having, module in whole)
    blank = [entry for entry in fresh if entry[0].is_uninitialized(*entry[1:])]
    lost = [slot.name for slot, _, _ in blank if not slot.is_persistent]
    if lost:
        raise ArgumentError(
            f"the model was built on meta, and {', '.join(lost)} would be lost: a buffer that is "
            "in no state_dict (persistent=False) has to be set by its layer's reset_parameters(), "
            "or built on a real device, under torch.device('cpu')"
        )
    return UninitializedTensors(blank)


def _is_fully_on_meta(module: nn.Module) -> bool:
    return all(t.is_meta for t in (*module.parameters(), *module.buffers()))


def _allocate_layer(
    name: str, layer: nn.Module, device: torch.device, replacements: MetaReplacements
) -> None:
    for inner, module in layer.named_modules(prefix=name):
        for held in (module._parameters, module._buffers):
            for key, old in held.items():
                if old is None or not old.is_meta:
                    continue
                if is_lazy(old):
                    raise ArgumentError(
                        f"'{inner}.{key}' has no shape yet, and is on meta: run the lazy layer "
                        "once on a real device, or give it its sizes"
                    )
                if old not in replacements:
                    replacements[old] = allocate_like(old, device)
                held[key] = replacements[old]
    _check_reachable(name, layer, replacements)


def _share_with_model(
    model: nn.Module, name: str, layer: nn.Module, replacements: MetaReplacements
) -> None:
    """What a layer has that is a copy of one of the model's modules, the module has."""
    for inner, copy in layer.named_modules(prefix=name):
        module = model.get_submodule(inner)
        if module is not copy:
            for held in (module._parameters, module._buffers):
                for key, old in held.items():
                    if old in replacements and (key in copy._parameters or key in copy._buffers):
                        held[key] = replacements[old]  # type: ignore[assignment]
            _replace_tensor_attributes(module, replacements)


def _iter_new_slots(
    model: nn.Module, replacements: MetaReplacements
) -> Iterator[tuple[MetaTensorSlot, torch.Tensor, int]]:
    """Where each is first, and its version."""
    left = set(replacements.values())
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor in left:
                left.remove(tensor)
                name = f"{path}.{key}" if path else key
                yield MetaTensorSlot(name, module, key), tensor, tensor._version


def _replace_tensor_attributes(module: nn.Module, replacements: MetaReplacements) -> None:
    """A buffer may be there under a further name, as an attribute."""
    for key, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and value in replacements:
            module.__dict__[key] = replacements[value]


def _check_reachable(name: str, layer: nn.Module, replacements: MetaReplacements) -> None:
    """Nothing of it is left on meta, where no checkpoint could reach it."""
    for module in layer.modules():
        _replace_tensor_attributes(module, replacements)
    left = [
        f"{inner}.{key}"
        for inner, module in layer.named_modules(prefix=name)
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if left:
        raise ArgumentError(
            f"{', '.join(left)} is a tensor on meta that is no parameter and no buffer, so nothing "
            "can set it: register it as a buffer, or build it under torch.device('cpu')"
        )
