"""How a model is set: what its parents' forwards may go by, beside the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

_SETTING_TYPES = (
    *(bool, int, float, str, type(None), Enum, torch.dtype, torch.device),
    *(type, FunctionType, BuiltinFunctionType),
)

ModelSettings = tuple[Any, ...]


def read_model_settings(parents: Iterable[nn.Module]) -> ModelSettings:
    """Whether they train, and their plain attributes, with those of their configurations.

    Tensors and other objects are left out: what follows from these is not what is done next.
    """
    seen: set[int] = set()
    found: list[Any] = []
    for module in parents:
        found.append(tuple(_find_settings(module.__dict__)))
        config = module.__dict__.get("config")
        if config is not None and id(config) not in seen and hasattr(config, "__dict__"):
            seen.add(id(config))
            found.append(tuple(_find_settings(vars(config))))
    return tuple(found)


def _find_settings(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in attributes.items():
        if isinstance(value, _SETTING_TYPES):
            yield key, value
        elif isinstance(value, tuple | list) and all(
            isinstance(one, _SETTING_TYPES) for one in value
        ):
            yield key, tuple(value)


def read_torch_state() -> tuple[Any, ...]:
    """What of PyTorch's own state a forward may go by."""
    autocasts = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, torch.get_default_dtype(), *autocasts
