"""Models to save without a pipe, in one process or split among several."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import AdamW, Optimizer

from penstock import saved
from penstock.checkpoint.local_state import LocalState
from penstock.checkpoint.save_group import SaveGroup
from penstock.checkpoint.saver import SaveHistory, Saver
from penstock.model.tied import find_tied_names
from penstock.runtime.distributed.control_channel import ControlChannel

LAYERS = 8


def build(seed: int = 0) -> nn.Sequential:
    """Return eight layers with buffers; the first and the last layer share a weight."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(4, 6)]
    for _ in range(3):
        layers += [nn.BatchNorm1d(6), nn.Linear(6, 6)]
    layers.append(nn.Linear(4, 6))
    model = nn.Sequential(*layers).double()
    model[7].weight = model[0].weight
    return model


def optimizer_of(module: nn.Module, rate: float = 0.01) -> Optimizer:
    """Return an optimizer with two groups: weight decay for matrices, none for the rest."""
    held = list(module.parameters())
    thick = [p for p in held if p.dim() > 1]
    return AdamW(
        [
            {"params": thick, "weight_decay": 0.1},
            {"params": [p for p in held if p.dim() < 2], "weight_decay": 0.0, "lr": rate * 2},
        ],
        lr=rate,
    )


def stepped(module: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    """Take steps with gradients computed from the parameters alone, so that every split agrees."""
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()
        with torch.no_grad():
            for buffer in module.buffers():
                buffer.add_(1)


def part(model: nn.Sequential, numbers: Sequence[int]) -> nn.Module:
    """Return some of the layers under their names; a weight tied to other layers is a copy."""
    mine = {str(n): model[n] for n in numbers}
    holder = nn.Module()
    holder._modules.update(copy.deepcopy(mine))
    return holder


def interleaved(rank: int, size: int) -> list[int]:
    """Return the layers that an interleaved schedule places on this rank."""
    return list(range(rank, LAYERS, size))


def saver_of(module: nn.Module, same: dict[str, str] | None = None) -> Saver:
    """Return a saver for all processes of the group, or for this one if there is no group."""
    if not distributed.is_initialized():
        return Saver(
            LocalState(module, find_tied_names(module) if same is None else same), SaveHistory()
        )
    same = {"7.weight": "0.weight"} if same is None else same
    group = distributed.group.WORLD
    assert group is not None
    first = distributed.get_rank() == 0
    return Saver(
        LocalState(module, same, SaveGroup(ControlChannel(group)), saves_rng_state=first),
        SaveHistory(),
    )


def alone(module: nn.Module) -> Saver:
    """Return a saver for this process only, whether or not there is a group."""
    return Saver(LocalState(module, find_tied_names(module), SaveGroup()), SaveHistory())


def plainly_loaded(folder: Path) -> tuple[nn.Sequential, Optimizer]:
    """Return the model and its optimizer, loaded with `torch.distributed.checkpoint` alone."""
    model = build(seed=5)
    optimizer = optimizer_of(model, rate=0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(state, checkpoint_id=saved(folder))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    return model, optimizer


def state_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return parameters, buffers, optimizer state and optimizer settings by name."""
    found: dict[str, Any] = dict(module.state_dict())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names = [
                n for n, p in module.named_parameters(remove_duplicate=False) if p is parameter
            ]
            for name in names:
                settings = {k: v for k, v in group.items() if k != "params"}
                for key, value in {**settings, **optimizer.state[parameter]}.items():
                    found[f"{name}:{key}"] = value
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names in `found` whose values are not bitwise as expected."""
    return [key for key, value in found.items() if not _equal(value, expected[key])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
