"""What one process has of a model, and under which names it is saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from penstock.checkpoint.save_group import LocalSaveGroup, SaveGroup
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.tied import strip_compile_prefix


@dataclass(frozen=True)
class LocalState:
    """The layers of this process, under the unsplit model's names, and with whom it saves.

    same     every further name of a tied tensor, with the one that it is saved under: of the
             whole model, and alike on every rank
    replica  which copy of the model this is part of, where there are several
    first    whether random numbers of that copy begin here
    model    the unsplit model as its user has it, if it is of a kind with folders of its own
    """

    module: nn.Module
    tied_names: Mapping[str, str]
    save_group: SaveGroup = field(default_factory=LocalSaveGroup)
    replica: int = 0
    saves_rng_state: bool = True
    pretrained_model: nn.Module | None = None

    def saved_name(self, name: str) -> str:
        """The one that it is saved under."""
        return self.tied_names.get(name, name)

    def all_names(self, name: str) -> list[str]:
        """All that the tensor has, the one that it is saved under first."""
        kept = self.saved_name(name)
        return [kept, *(other for other, one in self.tied_names.items() if one == kept)]

    def unique_state(self) -> dict[str, tuple[str, Any]]:
        """What the state_dict has, each tied tensor once: its key there, and the value.

        A rank that has only another name's copy of a tied tensor has it under that name.
        """
        values = {
            strip_compile_prefix(key): (key, value)
            for key, value in self.module.state_dict().items()
        }
        return {
            n: v
            for n, v in values.items()
            if self.saved_name(n) == n or self.saved_name(n) not in values
        }

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """The name that each is saved under."""
        found = self.module.named_parameters(remove_duplicate=False)
        return {parameter: self.saved_name(strip_compile_prefix(name)) for name, parameter in found}


# -------------------------------------------------------------------------------------------------
# An optimizer's state by the names of its parameters, so that it fits any split of the model.
#
# The names are those of `torch.distributed.checkpoint.state_dict` with its option
# `flatten_optimizer_state_dict`: `state.0.weight.exp_avg`, `param_groups.0.weight.lr`. That module
# itself takes a step with an optimizer that has not been used; here none is touched.
# -------------------------------------------------------------------------------------------------

OptimizerArgument = Optimizer | Sequence[Optimizer] | None

STATE_KEY, PARAM_GROUPS_KEY = "state", "param_groups"


def as_optimizer_list(optimizer: OptimizerArgument) -> list[Optimizer]:
    """One, several or none, as a list."""
    if optimizer is None:
        return []
    several: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    strange = [type(one).__name__ for one in several if not isinstance(one, Optimizer)]
    if strange:
        raise PenstockTypeError(
            f"optimizer is a torch.optim.Optimizer or a list of them, and not {strange[0]}: what "
            "else there is to save, such as a scheduler's state_dict(), goes into extra="
        )
    return several


def check_optimizer_parameters(local_state: LocalState, optimizers: Sequence[Optimizer]) -> None:
    """Every parameter of the optimizers is the pipe's, and in one place of them."""
    known = local_state.parameter_names()
    seen: set[nn.Parameter] = set()
    for parameter in (
        p for one in optimizers for group in one.param_groups for p in group["params"]
    ):
        if parameter not in known:
            raise ArgumentError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of "
                "the pipe's: make it from pipe.parameters(), and put the state_dict() of others "
                "into extra="
            )
        if parameter in seen:
            raise ArgumentError(
                f"'{known[parameter]}' is in several optimizers, and their states would have one "
                "name: save one of them, and put the state_dict() of the others into extra="
            )
        seen.add(parameter)


def flatten_optimizer_state(
    local_state: LocalState, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """The state and the settings of each parameter; of a tied one, each rank has the same."""
    check_optimizer_parameters(local_state, optimizers)
    names = local_state.parameter_names()
    found: dict[str, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                name = names[parameter]
                found.update({f"{PARAM_GROUPS_KEY}.{name}.{key}": v for key, v in settings.items()})
                state = optimizer.state.get(parameter, {})
                found.update({f"{STATE_KEY}.{name}.{key}": v for key, v in _flatten(state)})
    return found


def _flatten(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def allocate_optimizer_state(
    local_state: LocalState, optimizers: Sequence[Optimizer], stored: Mapping[str, Any]
) -> dict[str, Any]:
    """Room for what is stored of these optimizers' parameters: tensors to read into."""
    check_optimizer_parameters(local_state, optimizers)
    names = local_state.parameter_names()
    held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    settings = _group_by_parameter(PARAM_GROUPS_KEY, stored, names.values())
    missing = [names[parameter] for parameter in held if names[parameter] not in settings]
    if missing:
        raise ArgumentError(
            f"the checkpoint has no optimizer state of {', '.join(missing)}: load it without "
            "optimizer=, or with the optimizers that it was saved with"
        )
    room: dict[str, Any] = {}
    for kind, found in (
        (PARAM_GROUPS_KEY, settings),
        (STATE_KEY, _group_by_parameter(STATE_KEY, stored, names.values())),
    ):
        for parameter in held:
            for key, value in found.get(names[parameter], {}).items():
                room[f"{kind}.{names[parameter]}.{key}"] = _allocate_entry(parameter, value)
    return room


def _allocate_entry(parameter: nn.Parameter, stored: Any) -> Any:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    dtype = stored.properties.dtype
    if isinstance(parameter, DTensor) and stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if stored.size else "cpu"  # a counter of steps stays on the host
    return torch.empty(stored.size, dtype=dtype, device=device)


def restore_optimizer_state(
    local_state: LocalState, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
) -> None:
    """Put what was read into the optimizers."""
    names = local_state.parameter_names()
    states = _group_by_parameter(STATE_KEY, state, names.values())
    settings = _group_by_parameter(PARAM_GROUPS_KEY, state, names.values())
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = []
        numbered: dict[int, Any] = {}
        for group in optimizer.param_groups:
            mine = [names[parameter] for parameter in group["params"]]
            first = sum(len(one["params"]) for one in groups)
            numbers = list(range(first, first + len(mine)))
            groups.append({**group, **_common_group_settings(mine, settings), "params": numbers})
            for number, name in zip(numbers, mine, strict=True):
                if name in states:
                    numbered[number] = _unflatten(states[name])
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _common_group_settings(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Those of a group: its parameters were all saved with the same."""
    for name in names:
        for key, value in settings[name].items():
            first = settings[names[0]].get(key)
            if not _equal(first, value):
                raise ArgumentError(
                    f"'{names[0]}' and '{name}' are in one group of the optimizer, and were saved "
                    f"with {key}={first} and {key}={value}: make the groups as they were"
                )
    return dict(settings[names[0]]) if names else {}


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _group_by_parameter(
    section: str, flat: Mapping[str, Any], names: Collection[str]
) -> dict[str, dict[str, Any]]:
    """What belongs to each of the names: `state.0.weight.step` to `0.weight`, as `step`."""
    known = set(names)
    found: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        begin, *parts = key.split(".")
        if begin != section:
            continue
        for end in range(1, len(parts)):
            if (name := ".".join(parts[:end])) in known:
                found.setdefault(name, {})[".".join(parts[end:])] = value
                break
    return found


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dots are levels, as they were before."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *levels, last = key.split(".")
        place = found
        for level in levels:
            place = place.setdefault(level, {})
        place[last] = value
    return found
