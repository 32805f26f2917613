"""The part of a model and of its optimizers that one process holds, by the names it is saved under.

A checkpoint uses the names of the unsplit model, so that it does not depend on how the model was
split into stages. Two classes of names need care:

    tied tensors       one tensor with several names; it is saved once, under its first name
    optimizer state    PyTorch numbers parameters; here each entry carries its parameter's name
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from penstock.checkpoint.save_group import SaveGroup
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.tied import strip_compile_prefix


@dataclass(frozen=True)
class LocalState:
    """The layers of this process under the unsplit model's names, and the group it saves with.

    tied_names        every further name of a tied tensor, mapped to the name it is saved under;
                      it covers the whole model and is the same on every rank
    replica           the index of the data-parallel replica that this process belongs to
    saves_rng_state   True on the process that saves the random state of its replica
    pretrained_model  the user's unsplit model if it is a transformers or peft model, else None
    """

    module: nn.Module
    tied_names: Mapping[str, str]
    save_group: SaveGroup = field(default_factory=SaveGroup)
    replica: int = 0
    saves_rng_state: bool = True
    pretrained_model: nn.Module | None = None

    def saved_name(self, name: str) -> str:
        """Return the name that the tensor called `name` is saved under."""
        return self.tied_names.get(name, name)

    def all_names(self, name: str) -> list[str]:
        """Return all names of a tensor. The name that it is saved under comes first."""
        saved_name = self.saved_name(name)
        return [
            saved_name,
            *(alias for alias, target in self.tied_names.items() if target == saved_name),
        ]

    def unique_state(self) -> dict[str, tuple[str, Any]]:
        """Return the module's state_dict without duplicates: name -> (state_dict key, value).

        A tied tensor appears once, under the name that it is saved under. If that name belongs to
        a stage of another rank, the tensor keeps the name that it has here.
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
        """Return the name that each parameter of this process is saved under."""
        pairs = self.module.named_parameters(remove_duplicate=False)
        return {parameter: self.saved_name(strip_compile_prefix(name)) for name, parameter in pairs}


# -------------------------------------------------------------------------------------------------
# Optimizer state, by the names of the parameters, so that it fits any split of the model.
#
#     state.0.weight.exp_avg        one entry per tensor or number in optimizer.state[parameter]
#     param_groups.0.weight.lr      one entry per setting of the parameter's group
#
# These are the names of `torch.distributed.checkpoint.state_dict` with its option
# `flatten_optimizer_state_dict`, so plain PyTorch can read the checkpoint. That module is not used
# here because it calls `optimizer.step()` on an optimizer that has no state yet.
# -------------------------------------------------------------------------------------------------

OptimizerArgument = Optimizer | Sequence[Optimizer] | None

STATE_KEY, PARAM_GROUPS_KEY = "state", "param_groups"


def as_optimizer_list(optimizer: OptimizerArgument) -> list[Optimizer]:
    """Return the `optimizer` argument of save and load as a list of optimizers."""
    if optimizer is None:
        return []
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    wrong_types = [type(item).__name__ for item in optimizers if not isinstance(item, Optimizer)]
    if wrong_types:
        raise PenstockTypeError(
            f"optimizer must be a torch.optim.Optimizer or a list of them, not {wrong_types[0]}. "
            "Save anything else, such as a scheduler's state_dict(), with extra=."
        )
    return optimizers


def check_optimizer_parameters(local_state: LocalState, optimizers: Sequence[Optimizer]) -> None:
    """Raise unless every parameter of the optimizers belongs to the pipe and occurs only once."""
    names = local_state.parameter_names()
    visited: set[nn.Parameter] = set()
    for parameter in _list_parameters(optimizers):
        if parameter not in names:
            raise ArgumentError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that does not "
                "belong to the pipe. Create the optimizer from pipe.parameters(), and save the "
                "state_dict() of other optimizers with extra=."
            )
        if parameter in visited:
            raise ArgumentError(
                f"'{names[parameter]}' is in several optimizers, and their states would be saved "
                "under the same name. Pass one of them as optimizer=, and save the state_dict() of "
                "the others with extra=."
            )
        visited.add(parameter)


def _list_parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def flatten_optimizer_state(
    local_state: LocalState, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Return the state and the group settings of each parameter as one flat dict.

    Ranks that share a tied parameter return equal entries for it, and one of them writes these.
    """
    check_optimizer_parameters(local_state, optimizers)
    names = local_state.parameter_names()
    flat: dict[str, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                name = names[parameter]
                flat.update({f"{PARAM_GROUPS_KEY}.{name}.{key}": v for key, v in settings.items()})
                state = optimizer.state.get(parameter, {})
                flat.update({f"{STATE_KEY}.{name}.{key}": v for key, v in _flatten(state)})
    return flat


def _flatten(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested mapping. A dot separates the levels of a key."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def allocate_optimizer_state(
    local_state: LocalState, optimizers: Sequence[Optimizer], stored: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a flat dict of empty tensors to read the stored state of these optimizers into.

    `stored` maps the entries of the checkpoint to their metadata. An optimizer that has not taken
    a step has no state yet, so the entries to read follow from the checkpoint.
    """
    check_optimizer_parameters(local_state, optimizers)
    names = local_state.parameter_names()
    parameters = _list_parameters(optimizers)
    settings = _group_by_parameter(PARAM_GROUPS_KEY, stored, names.values())
    missing = [names[parameter] for parameter in parameters if names[parameter] not in settings]
    if missing:
        raise ArgumentError(
            f"the checkpoint has no optimizer state for {', '.join(missing)}. Load it without "
            "optimizer=, or with the optimizers that it was saved with."
        )
    state: dict[str, Any] = {}
    for section, entries in (
        (PARAM_GROUPS_KEY, settings),
        (STATE_KEY, _group_by_parameter(STATE_KEY, stored, names.values())),
    ):
        for parameter in parameters:
            for key, value in entries.get(names[parameter], {}).items():
                state[f"{section}.{names[parameter]}.{key}"] = _allocate_entry(parameter, value)
    return state


def _allocate_entry(parameter: nn.Parameter, stored: Any) -> Any:
    """Return an empty tensor for one stored entry, or None for an entry that is not a tensor."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    dtype = stored.properties.dtype
    if isinstance(parameter, DTensor) and stored.size == parameter.shape:
        # The state of a sharded parameter is sharded alike, so each rank reads only its shard.
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # PyTorch's optimizers keep their step counter, a 0-dim tensor, on the CPU.
    device = parameter.device if stored.size else "cpu"
    return torch.empty(stored.size, dtype=dtype, device=device)


def build_optimizer_state_dicts(
    local_state: LocalState, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the flat state that was read as a state dict for each optimizer.

    `Optimizer.load_state_dict` expects parameters as consecutive numbers, in the order of the
    groups. Each name is translated back to the number that it has in this optimizer.
    """
    names = local_state.parameter_names()
    states = _group_by_parameter(STATE_KEY, state, names.values())
    settings = _group_by_parameter(PARAM_GROUPS_KEY, state, names.values())
    state_dicts = []
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = []
        numbered: dict[int, Any] = {}
        for group in optimizer.param_groups:
            group_names = [names[parameter] for parameter in group["params"]]
            offset = sum(len(earlier["params"]) for earlier in groups)
            numbers = list(range(offset, offset + len(group_names)))
            groups.append(
                {**group, **_common_group_settings(group_names, settings), "params": numbers}
            )
            for number, name in zip(numbers, group_names, strict=True):
                if name in states:
                    numbered[number] = _unflatten(states[name])
        state_dicts.append({"state": numbered, "param_groups": groups})
    return state_dicts


def _common_group_settings(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the saved settings of a parameter group. Raise if its parameters have different ones.

    A group has one learning rate, and so on. It cannot hold parameters that come from groups with
    different settings.
    """
    for name in names:
        for key, value in settings[name].items():
            expected = settings[names[0]].get(key)
            if not _equal(expected, value):
                raise ArgumentError(
                    f"'{names[0]}' and '{name}' are in one group of the optimizer, but were saved "
                    f"with {key}={expected} and {key}={value}. Use the parameter groups that the "
                    "checkpoint was saved with."
                )
    return dict(settings[names[0]]) if names else {}


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _group_by_parameter(
    section: str, flat: Mapping[str, Any], names: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the entries of one section by parameter name and key.

    `state.0.weight.step` becomes the entry `step` of `0.weight`. Parameter names contain dots too,
    so the shortest prefix that is the name of a parameter decides where the name ends.
    """
    known_names = set(names)
    grouped: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        begin, *parts = key.split(".")
        if begin != section:
            continue
        for end in range(1, len(parts)):
            if (name := ".".join(parts[:end])) in known_names:
                grouped.setdefault(name, {})[".".join(parts[end:])] = value
                break
    return grouped


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict whose levels were joined by dots. This inverts `_flatten`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *levels, last = key.split(".")
        branch = nested
        for level in levels:
            branch = branch.setdefault(level, {})
        branch[last] = value
    return nested
