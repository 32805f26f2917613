"""How a module sets its own tensors: by its `reset_parameters`, or as the model around it says.

A model may have an `_init_weights(module)`, as those of transformers have: it also sets buffers
that are in no checkpoint, such as the frequencies of rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
