"""Hints for the inputs of a call that failed: which mistake the error looks like.

A wrong batch fails inside a layer, with an error of PyTorch that knows nothing of the call:
"linear(): argument 'input' must be Tensor, not tuple". The functions here look at the arguments
after the error, and say what to write instead. Without an error nothing here runs.

They judge by the arguments, the model and where the error was raised, never by its text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock.errors import ErrorLocation, PenstockTypeError
from penstock.microbatch import list_tensors
from penstock.model.example_hints import explain_split_input, list_positional_names
from penstock.model.framework_attributes import find_base_model
from penstock.model.placement import PlacedPartition
from penstock.model.stage_inputs import Batch
from penstock.torch_compat import pytree
from penstock.tracebacks import add_hint
from penstock.vocabulary import RESULT_ATTRIBUTES, STEP_ARGUMENTS, suggest


def add_call_hint(error: Exception, placed: PlacedPartition, batch: Batch) -> None:
    """Add a note to an error in a call of a pipe, if its arguments look like a known mistake."""
    location = getattr(error, "whereabouts", None)
    model = placed.partition.model
    if location is not None and location.stage > 0:  # the first stage has taken the inputs
        hint = _explain_labels(model, batch) if batch.uses_model_loss else ""
        hint = hint or _explain_single_row(location, placed, batch) or _explain_split_input(batch)
        if hint:
            add_hint(error, hint)
        return
    forward = _find_forward(model, placed)
    hint = (
        _explain_whole_batch(batch)
        or (_explain_positional_target(forward, batch) if forward is not None else "")
        or _explain_names(model, batch)
        or _explain_labels(model, batch)
        or _explain_rows(batch)
        or _explain_target_rows(batch)
        or _explain_moved_model(placed)
        or _explain_dtype(placed, batch)
        or (_explain_single_row(location, placed, batch) if location is not None else "")
        or _explain_split_input(batch)
    )
    if hint:
        add_hint(error, hint)


def _list_inputs(batch: Batch) -> list[Tensor]:
    """Return the tensors among the inputs. Nested ones are left out: they have no shape."""
    values = [*batch.inputs, *batch.keyword_inputs.values()]
    return [tensor for tensor in list_tensors(values) if not tensor.is_nested]


def _find_forward(model: nn.Module | None, placed: PlacedPartition) -> Callable[..., Any] | None:
    """Return the function that takes the positional inputs, if this process has it."""
    if model is not None:
        return model.forward
    layers = placed.partition.stages[0].layers
    return layers[0].forward if layers else None


def _explain_whole_batch(batch: Batch) -> str:
    """Explain a tuple, list or dict that was passed as one input."""
    if len(batch.inputs) != 1 or isinstance(batch.inputs[0], Tensor):
        return ""
    (value,) = batch.inputs
    call = "pipe.step" if batch.is_step else "pipe"
    if isinstance(value, Mapping):
        return (
            f"The input is one {type(value).__name__} with the keys "
            f"{', '.join(map(repr, value))}. If these are the inputs of the model by name, write "
            f"{call}(**batch)."
        )
    if not isinstance(value, tuple | list):
        return _explain_value(value)
    tensors = [element for element in value if isinstance(element, Tensor)]
    if len(tensors) > 2 and len({tensor.shape for tensor in tensors}) == 1:
        return (
            f"The input is one {type(value).__name__} of {len(tensors)} tensors of shape "
            f"{tuple(tensors[0].shape)}. If these are rows, make a batch: torch.stack(rows)."
        )
    unpacked = (
        "x, y = batch; pipe.step(x, target=y)"
        if batch.is_step and not batch.target
        else f"{call}(*batch)"
    )
    return (
        f"The input is one {type(value).__name__} of {len(value)} values. If it is the whole "
        f"batch, unpack it: {unpacked}."
    )


def _explain_value(value: Any) -> str:
    """Explain a value that has no tensors."""
    if hasattr(value, "__array__"):
        return "An array is not split. Make it a tensor: torch.as_tensor(array)."
    if isinstance(value, Iterable) and not isinstance(value, str):
        return (
            f"The input is a {type(value).__name__}. Pass one batch of it: for x, y in loader: "
            "pipe.step(x, target=y)."
        )
    return ""


def _explain_positional_target(forward: Callable[..., Any], batch: Batch) -> str:
    """Explain more positional inputs than the forward takes."""
    names = list_positional_names(forward)
    if names is None or len(batch.inputs) <= len(names):
        return ""
    counts = f"{len(batch.inputs)} inputs were passed by position, but the forward takes "
    counts += f"{len(names)} ({', '.join(names)}). "
    if batch.is_step and not batch.target:
        return f"{counts}If the last one is the target, write pipe.step(x, target=y)."
    if not batch.is_step:
        return f"{counts}A pipe takes what the model takes. For a loss, use pipe.step(x, target=y)."
    return f"{counts}Leave out the others: the target is given by name already."


def _explain_labels(model: nn.Module | None, batch: Batch) -> str:
    """Explain labels that were given by position, or not at all, to a model that computes a loss.

    The second input of a Hugging Face model is a mask or a cache.
    """
    names = None if model is None else list_positional_names(find_base_model(model).forward)
    if names is None or "labels" not in names or "labels" in batch.keyword_inputs:
        return ""
    positional_names = names[: len(batch.inputs)]
    if "labels" in positional_names:
        return ""
    call = "pipe.step" if batch.is_step else "pipe"
    cure = f"{call}(x, labels=y)"
    if len(positional_names) > 1:
        if batch.is_step and not batch.uses_model_loss:
            cure = "pipe.step(x, target=y)"
        return (
            "The inputs that were passed by position are "
            f"{', '.join(map(repr, positional_names))} of the forward. "
            f"If the last one has the labels, write {cure}."
        )
    if not batch.uses_model_loss:
        return ""
    instead = "'target', which the model does not have. " if batch.target else "none. "
    return f"The model computes its loss from 'labels', and was given {instead}Write {cure}."


def _explain_names(model: nn.Module | None, batch: Batch) -> str:
    """Explain inputs by name that the forward of the model does not have."""
    if model is None:  # the layers of a Sequential have taken the names that they know
        words = [suggest(name, STEP_ARGUMENTS) for name in batch.keyword_inputs]
        return " ".join(filter(None, words))
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ""
    strays = [name for name in batch.keyword_inputs if name not in parameters]
    if not strays:
        return ""
    # A word such as `labels` may be misspelt, if the model has such an input.
    advice = {} if get_close_matches(strays[0], parameters) else STEP_ARGUMENTS
    return (
        f"The forward has no input {', '.join(map(repr, strays))}. "
        f"{suggest(strays[0], advice, parameters)} Its inputs are: {', '.join(parameters)}."
    ).replace("  ", " ")


def _explain_rows(batch: Batch) -> str:
    """Explain a batch without rows, or without a dim that could have them."""
    tensors = _list_inputs(batch)
    if tensors and not any(tensor.dim() for tensor in tensors):
        return (
            "No input has a dim for the rows of a batch. Pass a tensor with the rows on dim 0, "
            "such as x[None] for a single row."
        )
    if tensors and all(not tensor.numel() for tensor in tensors):
        return "The batch has no rows. Leave such a batch out."
    return ""


def _explain_target_rows(batch: Batch) -> str:
    """Explain a target with another number of rows than the batch."""
    inputs = _list_inputs(batch)
    targets = list_tensors(list(batch.target))
    if not inputs or not targets or not inputs[0].dim() or not targets[0].dim():
        return ""
    rows, target_rows = len(inputs[0]), len(targets[0])
    if rows == target_rows:
        return ""
    return (
        f"The batch has {rows} rows, and the target {target_rows}. Pass a target for each row of "
        "the batch."
    )


def _explain_split_input(batch: Batch) -> str:
    """Explain an input that was split and may have no rows."""
    if batch.chunks == 1:
        return ""
    # A `NoChunk` is not split, and a `Chunk` is meant.
    leaves = pytree.tree_leaves([*batch.inputs, *batch.keyword_inputs.values()])
    return explain_split_input([leaf for leaf in leaves if isinstance(leaf, Tensor)])


def _explain_single_row(location: ErrorLocation, placed: PlacedPartition, batch: Batch) -> str:
    """Explain a micro-batch of one row for a BatchNorm, which needs several in training."""
    inputs = _list_inputs(batch)
    rows = len(inputs[0]) if inputs and inputs[0].dim() else 0
    # As many micro-batches as `torch.chunk` makes, of which the last may have fewer rows.
    size = -(-rows // batch.chunks)
    layers = placed.partition.stages[location.stage].layers
    if rows - location.microbatch * size != 1 and size != 1:
        return ""
    if not any(
        isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and m.training
        for layer in layers
        for m in layer.modules()
    ):
        return ""
    return (
        f"Micro-batch {location.microbatch} has one of the {rows} rows, and BatchNorm needs "
        "several values for each channel in training. Pass fewer than "
        f"chunks={batch.chunks}, or more rows; "
        "drop_last=True lets a DataLoader leave a small last batch out."
    )


def _explain_moved_model(placed: PlacedPartition) -> str:
    """Explain parameters that are not where the pipe has put them."""
    for stage, device in zip(placed.local_stages, placed.stage_devices.values(), strict=True):
        for layer_name, layer in zip(stage.names, stage.layers, strict=False):
            for name, parameter in layer.named_parameters():
                if parameter.device != device:
                    return (
                        f"'{layer_name}.{name}' is on {parameter.device}, but its stage is on "
                        f"{device}: the model was moved after the pipe was made. Move nothing "
                        "after that, and make the pipe with devices=."
                    )
    return ""


def _explain_dtype(placed: PlacedPartition, batch: Batch) -> str:
    """Explain inputs whose dtype is not that of the parameters.

    Integers may be indices, unless the first layer is linear.
    """
    layer = next(iter(placed.partition.stages[0].layers), None)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return ""
    parameters = (p for stage in placed.local_stages for m in stage.layers for p in m.parameters())
    expected = next((p.dtype for p in parameters if p.is_floating_point()), None)
    tensors = _list_inputs(batch)
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if isinstance(layer, nn.Linear):
        dtypes = {tensor.dtype for tensor in tensors}
    if expected is None or not dtypes or expected in dtypes:
        return ""
    return (
        f"The inputs are {', '.join(sorted(map(str, dtypes)))}, and the parameters of the model "
        f"are {expected}. Cast the batch, x.to({expected}), or the pipe."
    )


# ---- the result of a step ------------------------------------------------------------------------


class ResultHints:
    """The errors of a step result that is used as if it were the loss."""

    def __getattr__(self, name: str) -> Any:
        hint = suggest(name, RESULT_ATTRIBUTES)
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute '{name}'. {hint}".rstrip()
        )

    def __iter__(self) -> NoReturn:
        raise PenstockTypeError(
            "the result of pipe.step is not a tuple. Write result = pipe.step(...), and read "
            "result.loss, and result.outputs after pipe.step(..., outputs=True)."
        )

    def __float__(self) -> float:
        raise self._build_number_error()

    def __add__(self, other: object) -> NoReturn:
        raise self._build_number_error()

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._build_number_error()
        return str(self)

    __radd__ = __add__

    def _build_number_error(self) -> PenstockTypeError:
        return PenstockTypeError(
            "the result of pipe.step is not a number. The loss is result.loss, a tensor without a "
            "graph, and result.loss.item() a number."
        )
