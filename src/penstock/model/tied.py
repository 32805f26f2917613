"""Find tied tensors: parameters and buffers that several layers share.

In one process a tied tensor is one object, and stages on several devices use it where it is. Under
torchrun each process has a tensor of its own, so the ranks that share one must keep their values
equal and sum their gradients. `find_tied_tensors` says which ranks these are. The first stage that
has the tensor owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from penstock.stage.stage import Stage
from penstock.torch_compat import COMPILED_NAME_PREFIX

TensorLocation = tuple[nn.Module, str]  # the module that registers a tensor, and its name there


@dataclass(frozen=True)
class TiedTensor:
    """A tensor that several ranks share, each with a copy in its own process."""

    name: str  # the name in the owner's stage
    ranks: tuple[int, ...]  # the owner first
    locations: tuple[TensorLocation, ...]  # in this process; empty if it does not have the tensor

    @property
    def owner_rank(self) -> int:
        """The rank of the first stage that has it."""
        return self.ranks[0]

    @property
    def local_tensor(self) -> Tensor | None:
        """The tensor of this process, or None if it does not have it."""
        for module, name in self.locations:
            return _registered_tensors(module)[name]
        return None

    def relocate(self, new_modules: Mapping[nn.Module, nn.Module]) -> TiedTensor:
        """Return the same with modules of its locations replaced by others."""
        locations = tuple((new_modules.get(m, m), name) for m, name in self.locations)
        return replace(self, locations=locations)


def find_tied_tensors(
    stages: Sequence[Stage], placement: Sequence[int], rank: int
) -> tuple[TiedTensor, ...]:
    """Return the tensors that several ranks share, with their locations on this rank.

    The order is that of the stages, which is the same on every rank. All stages must have their
    layers, so this runs before a process drops the layers of other ranks.
    """
    ties = []
    for uses in collect_tensor_uses(stages).values():
        ranks = tuple(dict.fromkeys(placement[use.stage] for use in uses))
        if len(ranks) > 1:
            locations = tuple(use.location for use in uses if placement[use.stage] == rank)
            ties.append(TiedTensor(uses[0].name, ranks, locations))
    return tuple(ties)


class TensorUse(NamedTuple):
    """A place where a stage has a parameter or buffer."""

    stage: int
    name: str  # in the model
    location: TensorLocation


def collect_tensor_uses(stages: Sequence[Stage]) -> dict[Tensor, list[TensorUse]]:
    """Return all uses of each parameter and buffer, in the order of the stages."""
    # A tensor as a key of a dict is compared by identity.
    uses: dict[Tensor, list[TensorUse]] = {}
    for stage in stages:
        # A stage of another process has names, but no layers.
        for layer_name, layer in zip(stage.names, stage.layers, strict=bool(stage.layers)):
            for path, module in layer.named_modules(prefix=layer_name):
                for key, tensor in _registered_tensors(module).items():
                    use = TensorUse(stage.index, f"{path}.{key}".lstrip("."), (module, key))
                    uses.setdefault(tensor, []).append(use)
    return uses


def strip_compile_prefix(name: str) -> str:
    """Return a parameter's name without the prefix that `torch.compile` puts into it."""
    return name.replace(COMPILED_NAME_PREFIX, "")


def find_tied_names(module: nn.Module) -> dict[str, str]:
    """Return the second and later names of tied tensors, each with the first name.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> layers[1].weight = layers[0].weight
    >>> find_tied_names(layers)
    {'1.weight': '0.weight'}
    """
    first_names: dict[Tensor, str] = {}
    # With `remove_duplicate=True`, the default, a tied tensor is listed under its first name only.
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {
        strip_compile_prefix(name): first_name
        for name, tensor in (*parameters, *buffers)
        if (first_name := first_names.setdefault(tensor, strip_compile_prefix(name)))
        != strip_compile_prefix(name)
    }


def describe_tied_parameters(stages: Sequence[Stage], placement: Sequence[int]) -> list[str]:
    """Return a line of text for each parameter that a rank shares with an earlier rank."""
    lines = []
    for tensor, (owner, *uses) in collect_tensor_uses(stages).items():
        owner_rank = placement[owner.stage]
        for use in uses:
            rank = placement[use.stage]
            if isinstance(tensor, nn.Parameter) and rank != owner_rank:
                lines.append(f"{use.name} on rank {rank} is {owner.name} of rank {owner_rank}")
    return lines


def _registered_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    registered = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in registered.items() if tensor is not None}
