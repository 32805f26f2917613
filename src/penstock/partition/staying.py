"""The stages of a pipe stay on their devices: what would move them is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from penstock.errors import PenstockTypeError
from penstock.stage.places import Device


def check_no_device_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What `Module.to` was given names no device."""
    try:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
    except RuntimeError:  # a device that is not there
        raise build_move_error() from None
    if device is not None:
        raise build_move_error()


def check_keeps_device(tensor_function: Any, devices: Iterable[Device]) -> None:
    """What is done to each tensor leaves it on its device."""
    for place in devices:
        try:
            moved = tensor_function(torch.empty(0, device=place.device)).device != place.device
        except (RuntimeError, AssertionError):  # to a device that is not there
            moved = True
        if moved:
            raise build_move_error()


def build_move_error() -> PenstockTypeError:
    """Says what would work."""
    return PenstockTypeError(
        "the stages of a pipe stay on the devices they were given, so moving it is denied: "
        "make another Pipe, with other devices; casting, as in pipe.to(torch.float16), is allowed"
    )
