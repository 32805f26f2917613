"""The attributes of a model that training frameworks read, for a pipe of that model.

`transformers.Trainer`, accelerate, TRL and others ask a model for its config, its device, the
arguments of its forward and more, to decide where to move it, which columns of a dataset to keep
and how to scale its loss. A pipe gives the model's own answers, and its own where it knows better:

    attribute                          answer
    MODEL_ATTRIBUTES                   that of the model, if it has one
    device, dtype, hf_device_map       of the stages in this process
    stages, devices, schedule,         how the model is split, for logs
    partition

Models are recognized by their attributes, and none of these frameworks is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from penstock.model.placement import PlacedPartition

MODEL_ATTRIBUTES = frozenset(
    {
        "accepts_loss_kwargs",  # whether forward takes num_items_in_batch
        "add_model_tags",
        "config",
        "generation_config",
        "loss_type",  # whether the loss shifts the labels
        "main_input_name",
        "model_tags",
        "name_or_path",
    }
)


def find_base_model(model: nn.Module) -> nn.Module:
    """Return the model that peft has wrapped, or else the model itself.

    The forward of a wrapped model takes any arguments, and passes them on to that of the base.
    """
    get_base_model = getattr(model, "get_base_model", None)
    if hasattr(model, "peft_config") and callable(get_base_model):
        base: nn.Module = get_base_model()
        return base
    return model


def build_device_map(placed: PlacedPartition) -> dict[str, str]:
    """Return the devices of the units by name, as `hf_device_map` of a dispatched model.

    If all stages of this process are on one device, it has a single entry for the whole model.
    """
    stage_devices = placed.stage_devices
    devices = {str(device) for device in stage_devices.values()}
    if len(devices) == 1:
        return {"": devices.pop()}
    return {
        name: str(stage_devices[stages[0]])
        for name, stages in placed.partition.find_unit_stages().items()
        if stages and stages[0] in stage_devices
    }


def find_dtype(pipe: nn.Module) -> torch.dtype:
    """Return the dtype of the first parameter that has floating point, or the default dtype."""
    dtypes = (p.dtype for p in pipe.parameters() if p.is_floating_point())
    return next(dtypes, torch.get_default_dtype())


class PlacedPipe(Protocol):
    """The interface of a pipe that a `ModelForward` needs."""

    _placed_partition: PlacedPartition


class BoundForward:
    """The forward of one pipe, with the signature of the model's own forward.

    A bound method has the signature of its function, which is the same for all pipes. So this is
    another callable object.
    """

    def __init__(self, function: Callable[..., Any], pipe: PlacedPipe) -> None:
        self._function, self._pipe = function, pipe
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the pipe."""
        return self._function(self._pipe, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the model's forward. That of a Sequential takes any arguments."""
        model = self._pipe._placed_partition.partition.model
        if model is None:
            method = self._function.__get__(self._pipe)
            return inspect.signature(method)
        return inspect.signature(find_base_model(model).forward)


class ModelForward:
    """A decorator of `Pipe.forward`: the method has the signature of the model's own forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, pipe: PlacedPipe | None, owner: type | None = None) -> Callable[..., Any]:
        """Return the forward of a pipe, or the plain function for the class."""
        return self.function if pipe is None else BoundForward(self.function, pipe)
