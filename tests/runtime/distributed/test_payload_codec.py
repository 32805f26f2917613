from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock import PenstockTypeError
from penstock.model.sequential_stage import SideInputs
from penstock.runtime.distributed.payload_codec import (
    PayloadSpec,
    decode_spec,
    encode_spec,
    flatten_dense,
)
from penstock.stage.payload import Payload, flatten_values, unflatten_values
from penstock.tensor_spec import TensorSpec


class Pair(NamedTuple):
    one: Any
    two: Any


VALUES: list[tuple[Any, ...]] = [
    (torch.zeros(2, 3),),
    (torch.zeros(2), torch.zeros(2)),
    ([torch.zeros(1), {"a": 1, "b": None, 3: (2.5, True)}], "text"),
    (Pair(torch.zeros(2), Pair(1, "x")), OrderedDict(z=torch.ones(1), a=2)),
    ({("a", 1): torch.zeros(1)},),
    (SideInputs({"mask": torch.ones(3, dtype=torch.bool)}),),
    ((), [], {}, None, 1j, torch.float16, torch.device("cpu")),
    (float("inf"), -0.0, 10**30, '\n"é'),
]


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_payload_spec_round_trip_restores_containers(values: tuple[Any, ...]) -> None:
    tensors, layout = flatten_values(values)
    payload = Payload(tuple(tensors), layout, tuple(bool(i % 2) for i in range(len(tensors))))
    meta = decode_spec(encode_spec(PayloadSpec.from_payload(payload)))
    assert meta == PayloadSpec.from_payload(payload)
    back = unflatten_values(tensors, meta.layout)
    assert str(back) == str(values)
    assert [type(value) for value in back] == [type(value) for value in values]


def test_payload_spec_round_trip_with_missing_gradients() -> None:
    payload = Payload((None, torch.zeros(2), None))
    meta = decode_spec(encode_spec(PayloadSpec.from_payload(payload)))
    assert [shape is None for shape in meta.tensor_specs] == [True, False, True]
    assert str(meta) == "none, float32[2], none"


TENSORS: list[Tensor] = [
    torch.randn(2, 0, 3),
    torch.randn(3, 4),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(4, 6).t(),
    torch.randn(4, 6)[:, ::2],
    torch.randn(4, 1).expand(4, 6),
    torch.randn(()),
    torch.randn(0, 3),
    torch.randn(3, 1, 2).transpose(0, 2),
    torch.randint(9, (3,)).bool(),
    torch.randn(2, 2).to(torch.bfloat16),
    torch.randn(2, 2, dtype=torch.complex64),
    torch.randn(2, 3, dtype=torch.complex64).conj(),
]


@pytest.mark.parametrize(
    "tensor", TENSORS, ids=lambda t: f"{t.dtype} {tuple(t.shape)} {t.stride()}"
)
def test_tensor_survives_the_wire_format(tensor: Tensor) -> None:
    """Values are sent in memory order; the order of dims is kept, gaps are not."""
    there = TensorSpec.of_packed(tensor).allocate("cpu")
    flatten_dense(there).copy_(flatten_dense(tensor).reshape(flatten_dense(there).shape))
    assert torch.equal(there, tensor)
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if channels_last or tensor.is_contiguous():
        assert there.stride() == tensor.stride()


class Odd:
    pass


def test_payload_spec_refuses_unknown_types() -> None:
    tensors, layout = flatten_values((torch.zeros(1), Odd()))
    with pytest.raises(PenstockTypeError, match="a Odd cannot be sent to another process"):
        encode_spec(PayloadSpec.from_payload(Payload(tuple(tensors), layout, (False,))))
