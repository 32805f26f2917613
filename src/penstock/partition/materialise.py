"""A model that was built on `meta`, given memory: only the layers that are wanted here.

What a layer's `reset_parameters` sets is set, from random numbers that depend on the layer alone,
so that every cut of a model begins with the same weights. The rest waits for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import ArgumentError, RunError
from penstock.stage.randomness import move_on, next_seed, seed_generators, seed_of_cell

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


@dataclass
class Blanks:
    """What nobody has set yet, with the version that each tensor had then."""

    slots: list[tuple[Slot, torch.Tensor, int]] = field(default_factory=list)

    def check(self) -> None:
        """All of it has been loaded or set since, or else nothing can be computed with it."""
        left = [slot.name for slot, was, version in self.slots if _is_blank(slot, was, version)]
        if left:
            shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
            raise RunError(
                f"the model was built on meta, and nothing has set {shown} yet: load a checkpoint "
                "(pipe.load), or give the layer a reset_parameters() that sets it"
            )
        self.slots.clear()


def is_on_meta(module: nn.Module) -> bool:
    """Whether any of it has no memory."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialise(module: nn.Module, where: Mapping[str, torch.device]) -> Blanks:
    """Give memory to the layers named in `where`, each on its device; the others stay on meta.

    A tensor that several of them share stays one, on the device of the first. The caller's
    generator moves on alike on every rank, whichever layers it has.
    """
    if not is_on_meta(module):
        return Blanks()
    seed = next_seed()
    move_on()
    made: dict[torch.Tensor, torch.Tensor] = {}
    blank: list[tuple[Slot, torch.Tensor, int]] = []
    for number, (name, layer) in enumerate(module.named_children()):
        if name not in where:
            continue
        settled = list(made.values())
        built = [m for m in layer.modules() if all(t.is_meta for t in _own(m))]
        fresh = list(_give_memory(name, layer, where[name], made))
        _check_reachable(name, layer)
        with torch.random.fork_rng([where[name]] if where[name].type == "cuda" else []):
            seed_generators(seed_of_cell(seed, number, 0), where[name])
            _reset(built, {slot.module for slot, _, _ in fresh}, settled)
        blank += [entry for entry in fresh if _is_blank(*entry)]
    lost = [slot.name for slot, _, _ in blank if not slot.kept]
    if lost:
        raise ArgumentError(
            f"the model was built on meta, and {', '.join(lost)} would be lost: a buffer that is "
            "in no state_dict (persistent=False) has to be set by its layer's reset_parameters(), "
            "or built on a real device, under torch.device('cpu')"
        )
    return Blanks(blank)


def _give_memory(
    name: str, layer: nn.Module, device: torch.device, made: dict[torch.Tensor, torch.Tensor]
) -> Iterator[tuple[Slot, torch.Tensor, int]]:
    """Filled with NaN, so that what stays blank is seen."""
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
                first = old not in made
                if first:
                    made[old] = _like(old, device)
                held[key] = made[old]
                if first:
                    yield Slot(f"{inner}.{key}", module, key), made[old], made[old]._version


def _like(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        new = torch.empty_like(old, device=device)
        new.fill_(torch.nan if new.is_floating_point() or new.is_complex() else 0)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    new.__dict__.update(old.__dict__)  # what users note down on a parameter
    return new


def _check_reachable(name: str, layer: nn.Module) -> None:
    """Nothing of it is left on meta, where no checkpoint could reach it."""
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


def _reset(
    modules: Collection[nn.Module], fresh: set[nn.Module], settled: Collection[torch.Tensor]
) -> None:
    """What is inside first, as when they were built.

    A module that has something real keeps it, and what an earlier layer has set stays so.
    """
    mine = {t for module in modules for t in _own(module)}
    kept = [(t, t.detach().clone()) for t in settled if t in mine]
    for module in reversed(list(modules)):
        reset = next((getattr(module, key) for key in _RESETS if hasattr(module, key)), None)
        if module in fresh and reset is not None:
            reset()
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_blank(slot: Slot, was: torch.Tensor, version: int) -> bool:
    now = slot.tensor
    if now is None:
        return False
    now = now.detach()
    if hasattr(now, "to_local"):  # a DTensor, whose module takes a second to import
        now = now.to_local()
    if now.is_floating_point() or now.is_complex():
        return bool(now.numel()) and bool(now.isnan().all())
    return slot.tensor is was and was._version == version
