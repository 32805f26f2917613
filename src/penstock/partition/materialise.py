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
from penstock.partition.setting import Slot, is_on_meta, like, own, reset, setters_of
from penstock.stage.randomness import move_on, next_seed, seed_generators, seed_of_cell

Made = dict[torch.Tensor, torch.Tensor]  # tensors on meta: those in their places
Layer = tuple[str, nn.Module, torch.device]  # its name, and where it is wanted


@dataclass
class Blanks:
    """What nobody has set yet, with the version that each tensor had then."""

    slots: list[tuple[Slot, torch.Tensor, int]] = field(default_factory=list)

    def check(self) -> None:
        """All of it has been loaded or set since, or else nothing can be computed with it."""
        left = [slot.name for slot, was, version in self.slots if slot.is_blank(was, version)]
        if left:
            shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
            raise RunError(
                f"the model was built on meta, and nothing has set {shown} yet: load a checkpoint "
                "(pipe.load), or give the layer a reset_parameters() that sets it"
            )
        self.slots.clear()


def materialise(model: nn.Module, layers: Iterable[Layer]) -> Blanks:
    """Give memory to these layers of a model, each on its device; the others stay on meta.

    A layer may be a copy that has tensors of the model: what they share stays one, on the device
    of the first, and the model has it, too. The caller's generator moves on alike on every rank,
    whichever layers it has.
    """
    if not is_on_meta(model):
        return Blanks()
    seed = next_seed()
    move_on()
    whole = {module for module in model.modules() if _all_on_meta(module)}
    built = {module for module in model.modules() if all(t.is_meta for t in own(module))}
    made: Made = {}
    for name, layer, device in layers:
        _give_memory(name, layer, device, made)
        _give_model(model, name, layer, made)
    fresh = list(_made_in(model, made))
    having = {slot.module for slot, _, _ in fresh}
    setters = setters_of(model)
    for number, module in reversed(list(enumerate(model.modules()))):  # what is inside first
        tensors = (*module.parameters(), *module.buffers())
        home = next((t.device for t in tensors if not t.is_meta), None)
        if home is not None:
            with torch.random.fork_rng([home] if home.type == "cuda" else []):
                seed_generators(seed_of_cell(seed, number, 0), home)
                reset(module, setters, module in built & having, module in whole)
    blank = [entry for entry in fresh if entry[0].is_blank(*entry[1:])]
    lost = [slot.name for slot, _, _ in blank if not slot.kept]
    if lost:
        raise ArgumentError(
            f"the model was built on meta, and {', '.join(lost)} would be lost: a buffer that is "
            "in no state_dict (persistent=False) has to be set by its layer's reset_parameters(), "
            "or built on a real device, under torch.device('cpu')"
        )
    return Blanks(blank)


def _all_on_meta(module: nn.Module) -> bool:
    return all(t.is_meta for t in (*module.parameters(), *module.buffers()))


def _give_memory(name: str, layer: nn.Module, device: torch.device, made: Made) -> None:
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
                if old not in made:
                    made[old] = like(old, device)
                held[key] = made[old]
    _check_reachable(name, layer, made)


def _give_model(model: nn.Module, name: str, layer: nn.Module, made: Made) -> None:
    """What a layer has that is a copy of one of the model's modules, the module has."""
    for inner, copy in layer.named_modules(prefix=name):
        module = model.get_submodule(inner)
        if module is not copy:
            for held in (module._parameters, module._buffers):
                for key, old in held.items():
                    if old in made and (key in copy._parameters or key in copy._buffers):
                        held[key] = made[old]  # type: ignore[assignment]
            _replace_attributes(module, made)


def _made_in(model: nn.Module, made: Made) -> Iterator[tuple[Slot, torch.Tensor, int]]:
    """Where each is first, and its version."""
    left = set(made.values())
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor in left:
                left.remove(tensor)
                name = f"{path}.{key}" if path else key
                yield Slot(name, module, key), tensor, tensor._version


def _replace_attributes(module: nn.Module, made: Made) -> None:
    """A buffer may be there under a further name, as an attribute."""
    for key, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and value in made:
            module.__dict__[key] = made[value]


def _check_reachable(name: str, layer: nn.Module, made: Made) -> None:
    """Nothing of it is left on meta, where no checkpoint could reach it."""
    for module in layer.modules():
        _replace_attributes(module, made)
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
