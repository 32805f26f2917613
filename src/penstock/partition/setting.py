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

_RESETS = ("reset_parameters", "_reset_parameters")  # the latter is nn.MultiheadAttention's


@dataclass(frozen=True)
class Slot:
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
    def kept(self) -> bool:
        """Whether a checkpoint has it."""
        return self.key not in self.module._non_persistent_buffers_set

    def is_blank(self, was: torch.Tensor, version: int) -> bool:
        """Has nobody set it, since there was this, at that version?"""
        now = self.tensor
        if now is None:
            return False
        now = now.detach()
        if hasattr(now, "to_local"):  # a DTensor, whose module takes a second to import
            now = now.to_local()
        if now.is_floating_point() or now.is_complex():
            return bool(now.numel()) and bool(now.isnan().all())
        return self.tensor is was and was._version == version


def own(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that it has itself, and not its parts."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def is_on_meta(module: nn.Module) -> bool:
    """Whether any of it has no memory."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def like(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same with memory, filled with NaN, so that what stays blank is seen."""
    with torch.no_grad():
        new = torch.empty_like(old, device=device)
        new.fill_(torch.nan if new.is_floating_point() or new.is_complex() else 0)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    new.__dict__.update(old.__dict__)  # what users note down on a parameter
    return new


def setters_of(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module, the innermost one around it that has an `_init_weights`."""
    found: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, setter: nn.Module | None) -> None:
        if callable(getattr(module, "_init_weights", None)):
            setter = module
        if setter is not None:
            found.setdefault(module, setter)
        for child in module.children():
            visit(child, setter)

    visit(model, None)
    return found


def reset(
    module: nn.Module, setters: Mapping[nn.Module, nn.Module], itself: bool, whole: bool
) -> None:
    """Set it anew: what it has `itself`, or with all that its parts have."""
    again: Any = next((getattr(module, key) for key in _RESETS if hasattr(module, key)), None)
    if again is not None and itself:
        again()
    if not whole:
        return
    if module in setters:
        setters[module]._init_weights(module)  # type: ignore[operator]
    adapters = getattr(module, "reset_lora_parameters", None)  # peft's: its parts are set together
    if adapters is not None:
        for name in module.lora_A:  # type: ignore[union-attr]
            adapters(name, True)
