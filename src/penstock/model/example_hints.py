"""The example of a model: a check, and a hint if it does not fit the forward.

A wrong example fails while the model is traced, with an error of PyTorch from inside a layer. The
hint is looked for after the error, in the arguments and in the signature of the model, and never in
the text of the error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockTypeError
from penstock.microbatch import explain_objects, has_split_rows, list_tensors
from penstock.model.traced.build_stages import TracedModel
from penstock.nested_values import flatten
from penstock.tracebacks import add_hint


def check_example(example: Any) -> None:
    """Raise if an example is given and has no tensor in it."""
    if example is None or isinstance(example, TracedModel):  # the example was traced before
        return
    values = list(example.values()) if isinstance(example, Mapping) else example
    if list_tensors(flatten(values)[0]):
        return
    kind = "a class" if isinstance(example, type) else f"of type {type(example).__name__}"
    advice = "Pass a tensor, a tuple of inputs, or a dict of inputs by name."
    if isinstance(example, type):
        advice = "Pass an object: a batch of data."
    elif hasattr(example, "__array__"):
        advice = "Make it a tensor: torch.as_tensor(array)."
    elif isinstance(example, torch.Size):
        advice = "Pass a batch of that shape, such as torch.randn(8, 32)."
    elif isinstance(example, Iterable) and not isinstance(example, str | Mapping | Sequence):
        advice = "Pass one batch of it: next(iter(loader))."
    advice += explain_objects(example if isinstance(example, tuple | list) else [example])
    raise PenstockTypeError(
        f"example is a batch to trace and measure the model with, but this one, {kind}, has no "
        f"tensor in it. {advice}"
    )


@contextmanager
def explained_example(module: Any, example: Any) -> Iterator[None]:
    """Add a note to an error, if the example does not fit the forward of the model."""
    try:
        yield
    except Exception as error:
        # An error about the type of an argument says itself what to do.
        if example is not None and not isinstance(error, PenstockTypeError):
            hint = _explain_example(module, example)
            if hint:
                add_hint(error, hint)
        raise


def _explain_example(module: Any, example: Any) -> str:
    if not isinstance(module, nn.Module) or isinstance(example, TracedModel):
        return ""
    tensors = list_tensors(list(example.values()) if isinstance(example, Mapping) else example)
    if any(tensor.is_nested for tensor in tensors):
        return (
            "A forward with a nested tensor cannot be traced. Pad it, "
            "torch.nested.to_padded_tensor(x, 0.0), and pass a mask."
        )
    if isinstance(example, list):
        return (
            "example is a list, which counts as one input. Pass a tuple of the model's inputs, "
            "without the target."
        )
    layers = list(module.children()) if isinstance(module, nn.Sequential) else []
    forward = layers[0].forward if layers else module.forward
    if isinstance(example, Mapping):
        parameters = inspect.signature(forward).parameters
        strays = [name for name in example if name not in parameters]
        if not strays or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return explain_split_input(tensors)
        return (
            f"example has {', '.join(map(repr, strays))}, which the forward does not take. Its "
            f"inputs are: {', '.join(parameters)}."
        )
    names = list_positional_names(forward)
    num_values = len(example) if isinstance(example, tuple) else 1
    if names is None or num_values <= len(names):
        return explain_split_input(tensors)
    return (
        f"example has {num_values} values, but the forward takes {len(names)} "
        f"({', '.join(names)}). Leave the target out, or pass it as target=."
    )


def explain_split_input(tensors: Sequence[Tensor]) -> str:
    """Explain a tensor that was split, and may have no rows: a mask, a table, or numbers of rows.

    The first tensor sets the rows of the batch. One that has their number on dim 0 by chance shows
    itself if another dim of the batch has that size, too.
    """
    tensors = [tensor for tensor in tensors if has_split_rows(tensor) and not tensor.is_nested]
    if not tensors:
        return ""
    count, others = len(tensors[0]), tensors[1:]
    sizes = {size for tensor in tensors for size in tensor.shape[1:]}
    for tensor in others:
        if len(tensor) != count:
            continue
        shape = tuple(tensor.shape)
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dim() < 3:
            is_index = tensor.dtype is not torch.bool and 0 < int(tensor.max()) < count
            if is_index and int(tensor.min()) >= -count:
                return (
                    f"An input of shape {shape} has whole numbers below {count}, the rows of the "
                    "batch. If they are numbers of rows, a micro-batch does not have those rows: "
                    "select the rows before the call or after it, or use chunks=1."
                )
        if count in sizes:
            return (
                f"An input of shape {shape} is split into micro-batches, because its dim 0 has the "
                f"batch's {count} rows, and so has another dim of the inputs. If it is a mask or a "
                "table for all rows, pass it as penstock.NoChunk(mask), in the example and in "
                "each call."
            )
    return ""


def list_positional_names(forward: Callable[..., Any]) -> list[str] | None:
    """Return the parameters that can be given by position, or None if any number can."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
