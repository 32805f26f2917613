"""Allocate the layers of this process for a model that was built on the `meta` device.

    on meta  --allocate-->  NaN  --reset_parameters / _init_weights-->  initial weights
                             |
                             +--nothing initializes it-->  waits for a checkpoint; the first call
                                                           of the pipe raises if none was loaded

New memory is filled with NaN, so that a tensor that nothing has initialized can be recognized. The
random numbers of an initialization depend on the seed and on the module alone. Every way of cutting
a model therefore starts with the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.device.accelerator import fork_rng
from penstock.errors import ArgumentError, RunError
from penstock.stage.rng import (
    advance_caller_rng,
    derive_cell_seed,
    peek_seed,
    seed_shared_generators,
)

# ---- initialization of one module ----------------------------------------------------------------
#
# A module initializes itself by `reset_parameters()`. A model around it may have
# `_init_weights(module)`, as models of transformers do. That method also sets buffers that are not
# in a checkpoint, such as the frequencies of rotary embeddings, so it must run, too.

_RESET_METHODS = ("reset_parameters", "_reset_parameters")  # the second: nn.MultiheadAttention


@dataclass(frozen=True)
class MetaTensorSlot:
    """The place of a parameter or buffer: a module, and a key in it."""

    name: str  # the name in the model's state_dict
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        parameter = self.module._parameters.get(self.key)
        return parameter if parameter is not None else self.module._buffers.get(self.key)

    @property
    def is_persistent(self) -> bool:
        """Whether the tensor is part of a state_dict."""
        return self.key not in self.module._non_persistent_buffers_set

    def is_uninitialized(self, original: torch.Tensor, version: int) -> bool:
        """Return whether nothing has written the tensor since it was `original` at `version`.

        A floating-point tensor counts as not written if it is all NaN. Integers have no NaN, so
        for them the version counter decides, which every in-place write raises.
        """
        tensor = self.tensor
        if tensor is None:
            return False
        tensor = tensor.detach()
        if hasattr(tensor, "to_local"):  # a DTensor; importing its class takes a second
            tensor = tensor.to_local()
        if tensor.is_floating_point() or tensor.is_complex():
            return bool(tensor.numel()) and bool(tensor.isnan().all())
        return self.tensor is original and original._version == version


def list_direct_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module without those of its submodules."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def has_meta_tensors(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of a module is on `meta`."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def allocate_like(meta_tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with memory, filled with NaN (integers: 0), in place of one on `meta`."""
    with torch.no_grad():
        new = torch.empty_like(meta_tensor, device=device)
        new.fill_(torch.nan if new.is_floating_point() or new.is_complex() else 0)
    if isinstance(meta_tensor, nn.Parameter):
        new = nn.Parameter(new, meta_tensor.requires_grad)
    new.__dict__.update(meta_tensor.__dict__)  # attributes that users put on a parameter
    return new


def find_initializers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return, for each module, the innermost module around it that has an `_init_weights`."""
    initializers: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, initializer: nn.Module | None) -> None:
        if callable(getattr(module, "_init_weights", None)):
            initializer = module
        if initializer is not None:
            initializers.setdefault(module, initializer)
        for child in module.children():
            visit(child, initializer)

    visit(model, None)
    return initializers


def initialize_module(
    module: nn.Module,
    initializers: Mapping[nn.Module, nn.Module],
    run_reset_parameters: bool,
    run_init_weights: bool,
) -> None:
    """Run the initialization that a module defines for its tensors.

    `reset_parameters` sets the module's direct tensors. `_init_weights` and the adapters of peft
    may also set those of submodules, so they run only on modules that were on `meta` as a whole.
    """
    reset: Any = next(
        (getattr(module, key) for key in _RESET_METHODS if hasattr(module, key)), None
    )
    if reset is not None and run_reset_parameters:
        reset()
    if not run_init_weights:
        return
    if module in initializers:
        initializers[module]._init_weights(module)  # type: ignore[operator]
    reset_lora = getattr(module, "reset_lora_parameters", None)  # a LoRA layer of peft
    if reset_lora is not None:
        for name in module.lora_A:  # type: ignore[union-attr]
            reset_lora(name, True)


# ---- allocation of the layers of this process ----------------------------------------------------

MetaReplacements = dict[torch.Tensor, torch.Tensor]  # from tensors on meta to allocated ones
LayerPlacement = tuple[str, nn.Module, torch.device]  # the name of a layer, the layer, its device


@dataclass
class UninitializedTensors:
    """The tensors that nothing has initialized yet, each with its version at that time."""

    slots: list[tuple[MetaTensorSlot, torch.Tensor, int]] = field(default_factory=list)

    def check_initialized(self) -> None:
        """Raise if one of the tensors has neither been loaded nor set since."""
        names = [
            slot.name
            for slot, original, version in self.slots
            if slot.is_uninitialized(original, version)
        ]
        if names:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise RunError(
                f"the model was built on meta, and nothing has set {shown} yet. Load a checkpoint "
                "with pipe.load, or give the layer a reset_parameters() that sets it."
            )
        self.slots.clear()


def materialize(model: nn.Module, layers: Iterable[LayerPlacement]) -> UninitializedTensors:
    """Allocate and initialize these layers of a model, each on its device.

    All other layers stay on `meta`. A layer may be a copy that shares tensors with a module of the
    model. A shared tensor is allocated once, on the device of the first layer that has it, and the
    model gets it as well. Returns the tensors that nothing has initialized.
    """
    if not has_meta_tensors(model):
        return UninitializedTensors()
    # Every rank advances the caller's generator by one draw, however many layers it has, so that
    # all ranks stay in step.
    seed = peek_seed()
    advance_caller_rng()
    # Looked up before allocation, which ends these states. A module with tensors that are real
    # already must keep their values, so it is not initialized again.
    fully_on_meta = {module for module in model.modules() if _is_fully_on_meta(module)}
    directly_on_meta = {
        module for module in model.modules() if all(t.is_meta for t in list_direct_tensors(module))
    }
    replacements: MetaReplacements = {}
    for name, layer, device in layers:
        _allocate_layer(name, layer, device, replacements)
        _share_with_model(model, name, layer, replacements)
    new_slots = list(_iter_new_slots(model, replacements))
    allocated = {slot.module for slot, _, _ in new_slots}
    initializers = find_initializers(model)
    # Inner modules first, as constructors run: an outer module may overwrite what an inner one set.
    # The number of a module in the whole model, which all ranks agree on, gives its seed.
    for number, module in reversed(list(enumerate(model.modules()))):
        tensors = (*module.parameters(), *module.buffers())
        device_here = next((t.device for t in tensors if not t.is_meta), None)
        if device_here is not None:
            with fork_rng([device_here]):
                seed_shared_generators(derive_cell_seed(seed, number, 0), device_here)
                initialize_module(
                    module,
                    initializers,
                    module in directly_on_meta & allocated,
                    module in fully_on_meta,
                )
    uninitialized = [entry for entry in new_slots if entry[0].is_uninitialized(*entry[1:])]
    lost_names = [slot.name for slot, _, _ in uninitialized if not slot.is_persistent]
    if lost_names:
        raise ArgumentError(
            f"the model was built on meta, and the values of {', '.join(lost_names)} are lost. A "
            "buffer with persistent=False is not in a checkpoint. Set it in its layer's "
            "reset_parameters(), or build the layer under torch.device('cpu')."
        )
    return UninitializedTensors(uninitialized)


def _is_fully_on_meta(module: nn.Module) -> bool:
    return all(t.is_meta for t in (*module.parameters(), *module.buffers()))


def _allocate_layer(
    name: str, layer: nn.Module, device: torch.device, replacements: MetaReplacements
) -> None:
    for path, module in layer.named_modules(prefix=name):
        for tensors in (module._parameters, module._buffers):
            for key, old in tensors.items():
                if old is None or not old.is_meta:
                    continue
                if is_lazy(old):
                    raise ArgumentError(
                        f"'{path}.{key}' has no shape yet, and is on meta. Run the lazy layer "
                        "once on a real device, or give its sizes to its constructor."
                    )
                if old not in replacements:
                    replacements[old] = allocate_like(old, device)
                tensors[key] = replacements[old]
    _check_reachable(name, layer, replacements)


def _share_with_model(
    model: nn.Module, name: str, layer: nn.Module, replacements: MetaReplacements
) -> None:
    """Give the allocated tensors of a layer to the module of the model that it is a copy of."""
    for path, copy in layer.named_modules(prefix=name):
        module = model.get_submodule(path)
        if module is not copy:
            for tensors in (module._parameters, module._buffers):
                for key, old in tensors.items():
                    if old in replacements and (key in copy._parameters or key in copy._buffers):
                        tensors[key] = replacements[old]  # type: ignore[assignment]
            replace_tensor_attributes(module, replacements)


def _iter_new_slots(
    model: nn.Module, replacements: MetaReplacements
) -> Iterator[tuple[MetaTensorSlot, torch.Tensor, int]]:
    """Yield the first place of each allocated tensor in the model, the tensor and its version."""
    remaining = set(replacements.values())
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor in remaining:
                remaining.remove(tensor)
                name = f"{path}.{key}" if path else key
                yield MetaTensorSlot(name, module, key), tensor, tensor._version


def replace_tensor_attributes(module: nn.Module, replacements: MetaReplacements) -> None:
    """Replace tensors on `meta` that a module also has as plain attributes.

    Some modules keep a second reference to a buffer in an attribute.
    """
    for key, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and value in replacements:
            module.__dict__[key] = replacements[value]


def _check_reachable(name: str, layer: nn.Module, replacements: MetaReplacements) -> None:
    """Raise if a plain attribute of the layer is a tensor on `meta`, which nothing could set."""
    for module in layer.modules():
        replace_tensor_attributes(module, replacements)
    names = [
        f"{path}.{key}"
        for path, module in layer.named_modules(prefix=name)
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if names:
        raise ArgumentError(
            f"{', '.join(names)} is a tensor on meta that is neither a parameter nor a buffer, so "
            "nothing can set it. Register it as a buffer, or build it under torch.device('cpu')."
        )
