"""Checks of what a unit has returned and left, on the stage that runs it.

Stages that do not run a unit go on with its output as the trace has it: the structure, None, Python
values, and of tensors whatever the forward reads (shape, dtype). So the stage that runs the unit
compares with the trace, and raises if data has led to anything else than other numbers in tensors.
An output that no other stage sees is not compared. The common output, one tensor, costs nothing.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.traced.containers import copy_container, has_same_state
from penstock.model.traced.stage_program import ANY_TENSOR, FlatOutput, Instruction
from penstock.model.traced.trace import ArgumentLeaf
from penstock.nested_values import flatten, unflatten
from penstock.stage.payload import storage_addresses
from penstock.torch_compat import pytree


def are_same_values(expected: Any, actual: Any, depth: int = 6) -> bool:
    """Return whether arguments or outputs are those of the trace, as far as can be told."""
    if expected is actual or not depth:
        return True
    if expected is ANY_TENSOR:
        return isinstance(actual, Tensor)
    if isinstance(expected, Tensor):  # a constant; it may be made anew, as by `from_numpy`
        is_alike = isinstance(actual, Tensor) and expected.shape == actual.shape
        return is_alike and torch.equal(expected, actual)
    if type(expected) is not type(actual):  # 1 == 1.0 == True
        return False
    if isinstance(expected, _SEQUENCE_TYPES):
        if len(expected) != len(actual):
            return False
        for value, other in zip(expected, actual, strict=True):
            if value is not other and not are_same_values(value, other, depth - 1):
                return False
        return True
    if isinstance(expected, _MAPPING_TYPES):
        if expected.keys() != actual.keys():
            return False
        for key, value in expected.items():
            if not are_same_values(value, actual[key], depth - 1):
                return False
        return True
    if isinstance(expected, slice):
        ends = (actual.start, actual.stop, actual.step)
        return are_same_values((expected.start, expected.stop, expected.step), ends)
    if hasattr(expected, "tobytes"):  # a NumPy array; `==` would compare element by element
        return bool(expected.shape == actual.shape and expected.tobytes() == actual.tobytes())
    if isinstance(expected, _COMPARABLE_TYPES):
        return bool(expected == actual or (expected != expected and actual != actual))
    if callable(expected) or isinstance(expected, nn.Module):
        return True
    attributes = getattr(actual, "__dict__", {})
    return are_same_values(getattr(expected, "__dict__", {}), attributes, depth - 1)


_SEQUENCE_TYPES = (list, tuple, deque)
_MAPPING_TYPES = (dict, UserDict)
_COMPARABLE_TYPES = (
    *(int, float, complex, str, bytes, range, set, frozenset, Enum, type),
    *(torch.dtype, torch.device, pytree.TreeSpec),
)


def check_unit_output(instruction: Instruction, output: Any) -> None:
    """Raise if a unit returned another structure or other Python values than in the trace."""
    expected = instruction.expected_output
    actual = FlatOutput(*flatten(output)) if isinstance(expected, FlatOutput) else output
    if are_same_values(expected, actual):
        return
    raise CutError(
        f"unit '{instruction.node.func}' returned {_describe_output(actual)}, but the trace has "
        f"{_describe_output(expected)} for inputs like these ({instruction.node.location}). Stages "
        "that do not run the unit go by the trace, so only tensors may differ. Return the value as "
        "a tensor, decide inside the unit, or put all that depends on it into one unit with units=."
    )


def read_watched_attributes(unit: nn.Module, instruction: Instruction) -> list[Any]:
    """Return the attributes of a unit that the forward around it reads; containers as copies."""
    return [
        copy_container(vars(unit.get_submodule(path)).get(key))
        for path, key in instruction.watched_attributes
    ]


def check_watched_attributes(
    unit: nn.Module, instruction: Instruction, before: Sequence[Any]
) -> None:
    """Raise if a unit has changed an attribute that the forward around it reads."""
    attributes = zip(instruction.watched_attributes, before, strict=True)
    for ((path, key), old), new in zip(
        attributes, read_watched_attributes(unit, instruction), strict=True
    ):
        if not has_same_state(new, old):
            name = f"{path}.{key}".lstrip(".")
            raise CutError(
                f"unit '{instruction.node.func}' changes its attribute '{name}' from {old!r:.60} "
                f"to {new!r:.60}, and the forward around it reads that attribute. Other stages "
                "would find what another micro-batch has left there. Return the value as a tensor, "
                "decide inside the unit, or put all that depends on it into one unit with units=."
            )


def _describe_output(output: Any) -> str:
    """Return an output of a unit as short text, with "tensor" for tensors."""
    leaves, spec = output if isinstance(output, FlatOutput) else flatten(output)
    names = [ANY_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_plain = spec.type in (None, tuple, list, dict)
    text = repr(unflatten(names, spec)) if is_plain else f"{spec.type.__name__} of {names}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_unit_tensors(instruction: Instruction, output: Any) -> None:
    """Raise if a tensor of a unit's output is not as in the trace, which other stages go by."""
    leaves = [output] if isinstance(output, Tensor) else flatten(output)[0]
    for leaf, expected in zip(leaves, instruction.expected_tensors, strict=False):
        if expected is None:
            continue
        is_tensor = isinstance(leaf, Tensor)
        shape, dtype = (tuple(leaf.shape), leaf.dtype) if is_tensor else (None, None)
        is_same_shape = expected.shape in (None, shape)
        if not is_same_shape or expected.ndim not in (None, len(shape or ())):
            raise CutError(
                f"unit '{instruction.node.func}' returned a tensor of shape {shape}, but the trace "
                f"has {expected.shape or f'{expected.ndim} dims'} for inputs like these "
                f"({instruction.node.location}). The "
                "shape depends on data, and the forward relies on it on stages that do not have "
                "the tensor. Let the unit return one shape (pad, or mask instead of indexing), or "
                "put all that depends on the shape into one unit with units=."
            )
        if expected.dtype not in (None, dtype):
            raise CutError(
                f"unit '{instruction.node.func}' returned a tensor of {dtype}, but the trace has "
                f"{expected.dtype} for inputs like these ({instruction.node.location}). The "
                "forward relies on it on stages that do not have the tensor. Let the unit return "
                "one dtype."
            )


def check_unit_aliases(instruction: Instruction, output: Any, arguments: Sequence[Tensor]) -> None:
    """Raise if a unit returns an argument where it returned a new tensor in the trace, or not.

    A view of an argument counts as well: a change in place of one of them also changes the other.
    """
    assert instruction.node.output is not None
    memory = storage_addresses(arguments) if instruction.must_not_alias else set()
    leaves = [output] if isinstance(output, Tensor) else flatten(output)[0]
    for leaf, traced in zip(leaves, instruction.node.output.leaves, strict=True):
        if isinstance(traced, ArgumentLeaf):
            is_same = leaf is arguments[traced.argument_index]
        else:
            is_same = not (isinstance(leaf, Tensor) and storage_addresses([leaf]) & memory)
        if not is_same:
            names = "one of its arguments or a view of it", "a new tensor"
            traced_name, name = names if isinstance(traced, ArgumentLeaf) else names[::-1]
            raise CutError(
                f"unit '{instruction.node.func}' returned {name}, but the trace has {traced_name} "
                f"for inputs like these ({instruction.node.location}). Stages that do not run the "
                "unit go by the trace. Let the unit return a new tensor in every case, as with "
                "x.clone()."
            )
