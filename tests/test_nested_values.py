"""Tensors are found and replaced in every kind of nested value."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.nested_values import (
    flatten,
    iter_captured_values,
    iter_hidden_tensors,
    iter_tensors,
    map_call_tensors,
    map_tensors,
    unflatten,
)

A, B = torch.zeros(1), torch.ones(1)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    tensor: Tensor
    name: str = "a"


@pytest.mark.parametrize(
    "value", [(A, [2, B]), {"a": A, "b": (B, None)}, (A, slice(0, B)), Pair(A, [B])]
)
def test_map_tensors_replaces_what_iter_tensors_yields(value: Any) -> None:
    assert [*iter_tensors(value)] == [A, B]
    mapped = map_tensors(value, lambda t: t + 5)
    assert type(mapped) is type(value)
    assert [*map(float, iter_tensors(mapped))] == [5, 6]


def test_map_tensors_replaces_leaves_of_another_type() -> None:
    """A leaf that is a named tuple itself is not taken apart."""
    value = Pair(Pair(1, 2), "b"), ["c"]
    assert map_tensors(value, str.upper, str) == (Pair(Pair(1, 2), "B"), ["C"])
    assert map_tensors((Pair(1, 2), [Pair(3, 4)]), sum, Pair) == (3, [7])


@pytest.mark.parametrize("value", [Record(A), UserDict(a=A), [Record(A), {"b": 3}]])
def test_flatten_takes_dataclasses_and_user_dicts_apart(value: Any) -> None:
    leaves, spec = flatten(value)
    assert any(leaf is A for leaf in leaves)
    assert unflatten(leaves, spec) == value
    (mapped,), _ = map_call_tensors((value,), {}, lambda t: t + 5)
    assert [float(leaf) for leaf in flatten(mapped)[0] if isinstance(leaf, Tensor)] == [5]


def test_hidden_tensors_are_found_in_attributes_and_containers() -> None:
    hidden = SimpleNamespace(cache={"keys": [A]}, inner=SimpleNamespace(values={B}), other=3)
    assert {id(tensor) for tensor in iter_hidden_tensors(hidden)} == {id(A), id(B)}


def test_captured_values_of_a_function() -> None:
    captured = [1]

    def function(x: int = 2) -> Any:
        return captured, x, unset

    assert isinstance(function, FunctionType)
    assert [*iter_captured_values(function)] == [2, captured]
    unset = 3
    assert [*iter_captured_values(function)] == [2, captured, unset]
