"""What stages of several ranks share: a parameter or buffer that stands in layers of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.stage.stage import Stage

_COMPILE_PREFIX = (
    "_orig_mod."  # torch.compile puts it into names; PyTorch's checkpoints leave it out
)

TensorLocation = tuple[nn.Module, str]  # a module, and a name of its own


@dataclass(frozen=True)
class TiedTensor:
    """One tensor that ranks share, each in a process of its own, where it is a tensor of its own.

    `holders` are the ranks, its owner's first; `spots` are where this process has it.
    """

    name: str  # that of its owner's
    ranks: tuple[int, ...]
    locations: tuple[TensorLocation, ...]

    @property
    def owner_rank(self) -> int:
        """The rank of the first stage that has it."""
        return self.ranks[0]

    @property
    def local_tensor(self) -> Tensor | None:
        """This process's; None if it has none."""
        for module, name in self.locations:
            return _registered_tensors(module)[name]
        return None


def find_tied_tensors(
    stages: Sequence[Stage], placement: Sequence[int], rank: int
) -> tuple[TiedTensor, ...]:
    """The tensors that several ranks have, in the order of their first stages, as `rank` sees."""
    found: dict[Tensor, list[tuple[int, str, TensorLocation]]] = {}
    for stage in stages:
        for name, tensor, spot in _iter_stage_tensors(stage):
            found.setdefault(tensor, []).append((placement[stage.index], name, spot))
    ties = []
    for places in found.values():
        holders = tuple(dict.fromkeys(holder for holder, _, _ in places))
        if len(holders) > 1:
            spots = tuple(spot for holder, _, spot in places if holder == rank)
            ties.append(TiedTensor(places[0][1], holders, spots))
    return tuple(ties)


def strip_compile_prefix(name: str) -> str:
    """The name without what torch.compile adds to it."""
    return name.replace(_COMPILE_PREFIX, "")


def find_tied_names(module: nn.Module) -> dict[str, str]:
    """The further names of tensors that have several, each with the first.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> layers[1].weight = layers[0].weight
    >>> find_tied_names(layers)
    {'1.weight': '0.weight'}
    """
    first: dict[Tensor, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {
        strip_compile_prefix(name): kept
        for name, tensor in (*parameters, *buffers)
        if (kept := first.setdefault(tensor, strip_compile_prefix(name)))
        != strip_compile_prefix(name)
    }


def describe_tied_parameters(stages: Sequence[Stage], placement: Sequence[int]) -> list[str]:
    """Every parameter that stages of several ranks share, and whose it is."""
    owners: dict[Tensor, tuple[str, int]] = {}
    found = []
    for stage in stages:
        rank = placement[stage.index]
        for layer_name, layer in zip(stage.names, stage.layers, strict=True):
            for inner, parameter in layer.named_parameters():
                name = f"{layer_name}.{inner}"
                first, owner = owners.setdefault(parameter, (name, rank))
                if owner != rank:
                    found.append(f"{name} on rank {rank} is {first} of rank {owner}")
    return found


def _iter_stage_tensors(stage: Stage) -> Iterator[tuple[str, Tensor, TensorLocation]]:
    for layer_name, layer in zip(stage.names, stage.layers, strict=True):
        for path, module in layer.named_modules():
            prefix = ".".join(part for part in (layer_name, path) if part)
            for name, tensor in _registered_tensors(module).items():
                yield f"{prefix}.{name}", tensor, (module, name)


def _registered_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}
