"""The attributes of a model that training frameworks read, for a pipe of that model.

`transformers.Trainer`, accelerate, TRL and others ask a model for its config, its device, the
arguments of its forward and more, to decide where to move it, which columns of a dataset to keep
and how to scale its loss. A pipe gives the model's own answers, and its own where it knows better:

    attribute                          answer
    MODEL_ATTRIBUTES                   that of the model, if it has one; so it is when they are set
    WHOLE_MODEL_ATTRIBUTES             the same, if this process has the whole model
    device, dtype, hf_device_map       of the stages in this process
    stages, devices, schedule,         how the model is split, for logs
    partition
    gradient_checkpointing_enable      nothing to do, if the pipe recomputes
    __class__                          for a model of transformers or peft, also the model's class

The Trainer saves with `save_pretrained` only if the model is an instance of PreTrainedModel or
PeftModel. It hands the state dict of any other model to safetensors, which refuses weights that two
layers share. It also looks for the names of labels in `model.__class__.forward`. A pipe has both
answers: Python's `isinstance` asks `__class__` if the type itself does not match. accelerate's data
loaders and `unittest.mock` do the same. The type of a pipe stays `Pipe`, so it has none of the
methods with which a PreTrainedModel would change itself, such as `resize_token_embeddings`.

None of these frameworks is imported here: a model of transformers or peft means that its library is
already in `sys.modules`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from penstock.errors import ArgumentError
from penstock.model.placement import PlacedPartition

MODEL_ATTRIBUTES = frozenset(
    {
        "_keys_to_ignore_on_save",  # a checkpoint need not have these
        "_no_split_modules",
        "active_adapters",  # of peft
        "accepts_loss_kwargs",  # whether forward takes num_items_in_batch
        "add_model_tags",
        "base_model_prefix",
        "config",
        "generation_config",
        "get_base_model",
        "get_input_embeddings",  # peft asks for these layers, and leaves them as they are
        "get_output_embeddings",
        "is_activation_checkpointing",  # whether layers recompute, apart from the pipe
        "is_custom_code",
        "is_gradient_checkpointing",  # its name before transformers 5.23
        "load_adapter",
        "loss_type",  # whether the loss shifts the labels
        "main_input_name",
        "model_tags",
        "name_or_path",
        "peft_config",
    }
)
# What frameworks write to a model for their own use. No layer computes with it.
FRAMEWORK_MARKS = frozenset(
    {
        "_ddp_params_and_buffers_to_ignore",
        "_fsdp_wrap",
        "_hf_hook",
        "_hf_peft_config_loaded",
        "_is_accelerate_prepared",
        "_is_fsdp_managed_module",
        "_is_hf_initialized",
        "_old_forward",
        "_original_forward",
        "is_parallelizable",
        "model_parallel",
        "warnings_issued",
    }
)
# The same, but only where all parameters are: in one process.
WHOLE_MODEL_ATTRIBUTES = frozenset({"num_parameters"})  # the Trainer counts operations with it


def find_base_model(model: nn.Module) -> nn.Module:
    """Return the model that peft has wrapped, or else the model itself.

    The forward of a wrapped model takes any arguments, and passes them on to that of the base.
    """
    get_base_model = getattr(model, "get_base_model", None)
    if hasattr(model, "peft_config") and callable(get_base_model):
        base: nn.Module = get_base_model()
        return base
    return model


def has_attribute(model: object, name: str) -> bool:
    """Return whether a model has an attribute. The function of a property is not called."""
    return isinstance(getattr(type(model), name, None), property) or hasattr(model, name)


def explain_model_attribute(model: object, name: str) -> str:
    """Return a hint for an attribute that the model has, and a pipe of it does not."""
    return (
        f"It is an attribute of {type(model).__name__}: read and write model.{name}, as the pipe "
        "runs the layers of the model itself."
    )


def explain_set_attribute(model: object, name: str, value: Any) -> str:
    """Return the message for an attribute of the model that is set on a pipe of it."""
    is_short = value is None or isinstance(value, bool | int | float | str)
    text = repr(value) if is_short else f"{type(value).__name__}(...)"
    kind = "a method" if has_method(model, name) else "an attribute"
    return (
        f"pipe.{name} = {text} would change nothing: '{name}' is {kind} of the model, a "
        f"{type(model).__name__}, and the pipe runs the layers of the model itself. Set it there: "
        f"model.{name} = {text}."
    )


def has_method(model: object, name: str) -> bool:
    """Return whether a model has a public method. A wrapper of peft also has those of its base."""
    if name.startswith("_") or isinstance(getattr(type(model), name, None), property):
        return False
    return isinstance(getattr(model, name, None), types.MethodType)


def explain_model_method(model: object, name: str, is_partial: bool) -> str:
    """Return a hint for a method that the model has, and a pipe of it does not.

    Args:
        model: The model.
        name: The name of the method.
        is_partial: Whether other processes have some of the parameters.
    """
    hint = f"It is a method of {type(model).__name__}: "
    if is_partial:
        return (
            hint + "save the pipe with save_pretrained or state_dict, and call it on a loaded copy."
        )
    return (
        f"{hint}write model.{name}(...), as the pipe trains the parameters of the model itself. If "
        "that changes the layers, make another pipe."
    )


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


def accept_recomputation(checkpoint: Any) -> Callable[..., None]:
    """Return a method for a framework to switch recomputation on, which a pipe does by itself.

    `checkpoint` is that of the pipe. The recomputation of a pipe needs no inputs with gradients,
    either.
    """

    def accept(*args: Any, **kwargs: Any) -> None:
        if checkpoint == "never":
            raise ArgumentError(
                "gradient_checkpointing=True, but the pipe was made with checkpoint='never'. "
                "Use checkpoint='always', or switch gradient_checkpointing off."
            )

    return accept


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

    def with_signature(self, signature: inspect.Signature) -> ModelForward:
        """Return the same method, with a signature that the function of the class has, too."""

        @functools.wraps(self.function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        return ModelForward(forward)


def find_pipe_class(pipe_class: type[Any], model: nn.Module | None) -> type[Any]:
    """Return the `__class__` of a pipe, which for a model of transformers or peft is also its own.

    It is a subclass of both. PyTorch's `replicate` and accelerate's `compile_regions` derive a new
    class from the `__class__` of a module, and what they make has to be a pipe.
    """
    if not isinstance(model, _find_pretrained_classes()):
        return pipe_class
    if issubclass(pipe_class, type(model)):  # made by `replicate`
        return pipe_class
    classes: Any = pipe_class, type(model)
    return _build_joint_class(*classes)


def _find_pretrained_classes() -> tuple[type, ...]:
    names = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
    modules = ((sys.modules.get(module), name) for module, name in names.items())
    return tuple(getattr(module, name) for module, name in modules if hasattr(module, name))


@functools.cache
def _build_joint_class(pipe_class: type[Any], model_class: type[Any]) -> type:
    forward = inspect.getattr_static(pipe_class, "forward")

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = model_class.__module__
        namespace["__doc__"] = f"A pipe of a {model_class.__name__}."
        # The Trainer finds labels in it.
        namespace["forward"] = forward.with_signature(inspect.signature(model_class.forward))

    # The Trainer also knows some classes by their names.
    return types.new_class(model_class.__name__, (pipe_class, model_class), {}, fill)
