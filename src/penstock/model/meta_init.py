"""A model that was built on `meta`, given memory: only the layers that are wanted here.

What a module's `reset_parameters`, or the model's `_init_weights`, sets is set, from random numbers
that depend on the module alone, so that every cut of a model begins with the same weights. The
rest waits for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import ArgumentError, RunError
from penstock.stage.rng import (
    advance_caller_rng,
    derive_cell_seed,
    peek_seed,
    seed_shared_generators,
)

# -------------------------------------------------------------------------------------------------
# How a module sets its own tensors: by its `reset_parameters`, or as the model around it says.
#
# A model may have an `_init_weights(module)`, as those of transformers have: it also sets buffers
# that are in no checkpoint, such as the frequencies of rotary embeddings.
# -------------------------------------------------------------------------------------------------

_RESET_METHODS = ("reset_parameters", "_reset_parameters")  # the latter is nn.MultiheadAttention's


@dataclass(frozen=True)
class MetaTensorSlot:
    """Where a module has a tensor."""

    name: str  # in the model
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        found = self.module._parameters.get(self.key)
        return found if found is not None else self.module._buffers.get(self.key)

    @property
    def is_persistent(self) -> bool:
        """Whether a checkpoint has it."""
        return self.key not in self.module._non_persistent_buffers_set

    def is_uninitialized(self, original: torch.Tensor, version: int) -> bool:
        """Has nobody set it, since there was this, at that version?"""
        now = self.tensor
        if now is None:
            return False
        now = now.detach()
        if hasattr(now, "to_local"):  # a DTensor, whose module takes a second to import
            now = now.to_local()
        if now.is_floating_point() or now.is_complex():
            return bool(now.numel()) and bool(now.isnan().all())
        return self.tensor is original and original._version == version


def list_direct_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that it has itself, and not its parts."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any of it has no memory."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def allocate_like(meta_tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same with memory, filled with NaN, so that what stays blank is seen."""
    with torch.no_grad():
        new = torch.empty_like(meta_tensor, device=device)
        new.fill_(torch.nan if new.is_floating_point() or new.is_complex() else 0)
    if isinstance(meta_tensor, nn.Parameter):
        new = nn.Parameter(new, meta_tensor.requires_grad)
    new.__dict__.update(meta_tensor.__dict__)  # what users note down on a parameter
    return new


def find_initializers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module, the innermost one around it that has an `_init_weights`."""
    found: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, initializer: nn.Module | None) -> None:
        if callable(getattr(module, "_init_weights", None)):
            initializer = module
        if initializer is not None:
            found.setdefault(module, initializer)
        for child in module.children():
            visit(child, initializer)

    visit(model, None)
    return found


def initialize_module(
    module: nn.Module,
    initializers: Mapping[nn.Module, nn.Module],
    run_reset_parameters: bool,
    run_init_weights: bool,
) -> None:
    """Set it anew: what it has `itself`, or with all that its parts have."""
    again: Any = next(
        (getattr(module, key) for key in _RESET_METHODS if hasattr(module, key)), None
    )
    if again is not None and run_reset_parameters:
        again()
    if not run_init_weights:
        return
    if module in initializers:
        initializers[module]._init_weights(module)  # type: ignore[operator]
    adapters = getattr(module, "reset_lora_parameters", None)  # peft's: its parts are set together
    if adapters is not None:
        for name in module.lora_A:  # type: ignore[union-attr]
            adapters(name, True)


# -------------------------------------------------------------------------------------------------

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
