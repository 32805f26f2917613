from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, PipeSequential
from penstock.nested_values import iter_hidden_tensors
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
def test_flatten_and_unflatten_values_round_trip(
    values: tuple[Any, ...], tensors: list[Tensor]
) -> None:
    found, layout = flatten_values(values)
    assert list(map(id, found)) == list(map(id, tensors))
    again = unflatten_values(found, layout)
    assert str(again) == str(values)
    assert type(again) is tuple


def test_flatten_values_of_a_single_tensor_has_no_layout() -> None:
    assert flatten_values((A,)) == ((A,), None)
    assert unflatten_values([B], None) == (B,)


def test_unflatten_values_with_other_tensors() -> None:
    _, layout = flatten_values(({"a": A, "same": A, "b": [B, 5]},))
    (found,) = unflatten_values([B, A], layout)
    assert found["a"] is found["same"] is B
    assert found["b"][0] is A
    assert found["b"][1] == 5


def test_payload_map_tensors() -> None:
    payload = Payload((A, None, B), None, (True, False, False)).map_tensors(lambda t: t + 5)
    assert [None if t is None else t.item() for t in payload.tensors] == [5, None, 6]
    assert payload.needs_grad == (True, False, False)


# ---- between stages -----------------------------------------------------------------------


@dataclass
class Hidden:
    inner: Tensor


@each_checkpoint
def test_stages_pass_nested_values_with_tensors(checkpoint: str) -> None:
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


class RunningSum(nn.Module):
    """Returns a view of its buffer, which the forward of the next micro-batch changes."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.total += x.detach().sum()
        return x, self.total[:]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_buffer_that_is_sent_has_the_values_of_its_micro_batch(checkpoint: str) -> None:
    """Stage 0 is a micro-batch ahead of stage 1, and both are in the memory of one process."""
    layers = PipeSequential(RunningSum(), Do(lambda x, total: x * total))
    pipe = Pipe(layers, 3, checkpoint, stages=2, devices=["cpu", "cpu"], runtime="inline")
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = pipe(x)
    assert y.tolist() == [1.0, 6.0, 18.0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 3.0, 6.0]


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


HIDING: dict[str, Callable[[Tensor], Any]] = {
    "attribute": Hidden,
    "object in an object": lambda x: Hidden(Hidden(x)),  # type: ignore[arg-type]
    "list in an object": lambda x: Hidden([x]),  # type: ignore[arg-type]
    "slot": Slotted,
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False),
}
each_hiding = pytest.mark.parametrize("hide", HIDING.values(), ids=list(HIDING))


@each_hiding
def test_tensor_hidden_in_an_object_between_stages_is_refused(
    hide: Callable[[Tensor], Any],
) -> None:
    pipe = Pipe(nn.Sequential(Do(hide), Do(lambda hidden: hidden.inner)), 2, stages=2)
    with pytest.raises(TypeError, match=r"a \w+ that goes from one stage to another has a tensor"):
        pipe(torch.zeros(4))


@each_hiding
@each_checkpoint
def test_tensor_hidden_in_the_output_of_a_pipe_is_refused_if_it_may_be_differentiated(
    hide: Callable[[Tensor], Any], checkpoint: str
) -> None:
    """A backward from it reached the last stage only."""
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Do(hide)), 2, checkpoint, stages=2)
    x = torch.zeros(4, 2)
    with pytest.raises(TypeError, match=r"the model returned a \w+ with a tensor inside"):
        pipe(x)
    with torch.no_grad():
        assert len(pipe(x)) == 2
    pipe.step(x, loss_fn=lambda hidden: next(iter_hidden_tensors(hidden)).sum())


def test_constant_tensor_hidden_in_the_output_of_a_pipe_is_passed_on() -> None:
    ones = Hidden(torch.ones(2))
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Do(lambda x: (x, ones))), 2, "never", stages=2)
    y, (first, second) = pipe(torch.zeros(4, 2))
    assert y.requires_grad
    assert first is second is ones
