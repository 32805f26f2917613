from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe
from penstock.stage.payload import Payload, flatten_values, unflatten_values
from tests.support import Do, closely, each_checkpoint

Point = namedtuple("Point", ["x", "y"])
A, B = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("values", "tensors"),
    [
        ((A,), [A]),
        ((A, B), [A, B]),
        ((A, A, B, A), [A, B]),
        (([A, {"b": B}], None, 3), [A, B]),
        ((Point(A, [B]),), [A, B]),
        ((OrderedDict(z=B, a=A),), [B, A]),
        (("no", "tensors"), []),
        ((None,), []),
        ((), []),
    ],
)
def test_values_are_taken_apart_and_put_together(
    values: tuple[Any, ...], tensors: list[Tensor]
) -> None:
    found, layout = flatten_values(values)
    assert list(map(id, found)) == list(map(id, tensors))
    again = unflatten_values(found, layout)
    assert str(again) == str(values)
    assert type(again) is tuple


def test_one_tensor_needs_no_layout() -> None:
    assert flatten_values((A,)) == ([A], None)
    assert unflatten_values([B], None) == (B,)


def test_other_tensors_can_be_put_in() -> None:
    _, layout = flatten_values(({"a": A, "same": A, "b": [B, 5]},))
    (found,) = unflatten_values([B, A], layout)
    assert found["a"] is found["same"] is B
    assert found["b"][0] is A
    assert found["b"][1] == 5


def test_a_parcel_is_moved_tensor_by_tensor() -> None:
    parcel = Payload((A, None, B), None, (True, False, False)).map_tensors(lambda t: t + 5)
    assert [None if t is None else t.item() for t in parcel.tensors] == [5, None, 6]
    assert parcel.needs_grad == (True, False, False)


# ---- between stages -----------------------------------------------------------------------


@dataclass
class Hidden:
    inner: Tensor


@each_checkpoint
def test_stages_pass_on_whatever_is_made_of_tensors(checkpoint: str) -> None:
    def made(x: Tensor) -> Any:
        return {"point": Point(x, [x * 2, None]), "name": "kept", "count": (x > 0).long()}

    def used(value: Any) -> Any:
        x, (double, nothing) = value["point"]
        assert nothing is None
        assert value["name"] == "kept"
        return x + double * value["count"], value["name"]

    pipe = Pipe(nn.Sequential(Do(made), Do(lambda value: value), Do(used)), 2, checkpoint, stages=3)
    x = torch.tensor([[1.0], [-1.0], [2.0]], requires_grad=True)
    y, names = pipe(x)
    assert closely(y, torch.tensor([[3.0], [-1.0], [6.0]]))
    assert names == ["kept", "kept"]
    y.sum().backward()
    assert x.grad is not None
    assert closely(x.grad, torch.tensor([[3.0], [1.0], [3.0]]))


def test_a_tensor_hidden_in_an_object_is_refused() -> None:
    pipe = Pipe(nn.Sequential(Do(Hidden), Do(lambda hidden: hidden.inner)), 2, stages=2)
    with pytest.raises(TypeError, match="a Hidden that goes from one stage to another has a"):
        pipe(torch.zeros(4))
