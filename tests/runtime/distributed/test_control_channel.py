from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipe, RemoteError
from penstock.runtime.distributed.control_channel import ControlChannel, sample_tensors
from tests.distributed.ranks import ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def piped(**options: Any) -> Pipe:
    given: dict[str, Any] = {"chunks": 2, "group": dist.group.WORLD, "loss_fn": nn.MSELoss()}
    return Pipe(model(), **{**given, **options})


def batch() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def disagrees(what: str) -> tuple[str, str, float]:
    """Make a different call on one rank, then the same step on all; return error and loss."""
    odd = dist.get_rank() == 1
    pipe = piped()
    x = batch()
    try:
        if what == "chunks":
            pipe.chunks = 4 if odd else 2
            pipe.step(x, target=x)
        elif what == "steps":
            if not odd:
                pipe.step(x, target=x)
            with torch.no_grad():
                pipe(x)
        elif what == "autocast":
            with torch.autocast("cpu", torch.bfloat16, enabled=odd):
                pipe.step(x, target=x)
    except RemoteError as error:
        kind, text = error.kind, str(error)
    pipe.chunks = 2
    return kind, text, float(pipe.step(x, target=x).loss)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("chunks", "chunks: 2 on rank 0; 4 on rank 1"),
        ("steps", "the call: step (call "),
        ("autocast", "autocast: none on rank 0; cpu torch.bfloat16 on rank 1"),
    ],
)
def test_disagreeing_step_calls_raise_an_error_that_says_how(what: str, said: str) -> None:
    (kind, text, loss), (other, same, also) = ranks(2).run(disagrees, what)
    assert kind == other == "disagreed"
    assert text.splitlines()[1:] == same.splitlines()[1:]
    assert "the ranks disagree about" in text
    assert all(part in text for part in said.split("*"))
    assert loss == also


def made_differently(what: str) -> str:
    odd = dist.get_rank() == 1
    options: dict[str, dict[str, Any]] = {
        "chunks": {"chunks": 4},
        "schedule": {"schedule": "1f1b"},
        "data": {"data": "first"},
        "checkpoint": {"checkpoint": "never"},
    }
    with pytest.raises(RemoteError) as error:
        piped(**(options[what] if odd else {}))
    return str(error.value)


@pytest.mark.parametrize("what", ["chunks", "schedule", "data", "checkpoint"])
def test_different_pipe_options_raise_an_error_that_says_how(what: str) -> None:
    for text in ranks(2).run(made_differently, what):
        assert "the ranks disagree about making the pipe" in text
        assert what in text


def gathered() -> list[Any]:
    rank = dist.get_rank()
    group: Any = dist.group.WORLD
    value = {"rank": rank, "weights": torch.full((2, rank), float(rank)), "none": None}
    found = ControlChannel(group).all_gather_value((value, [f"é{rank}"]), "values")
    return [*found, ControlChannel(group).broadcast_value(1, value, "a value")]


def test_values_with_tensors_arrive_on_all_ranks() -> None:
    for *values, broadcast in ranks(3).run(gathered):
        for rank, (value, names) in enumerate(values):
            assert value["rank"] == rank
            assert value["weights"].tolist() == [[float(rank)] * rank] * 2
            assert names == [f"é{rank}"]
        assert list(broadcast) == ["rank", "weights", "none"]
        assert broadcast["weights"].tolist() == [[1.0], [1.0]]


def summed() -> list[Any]:
    rank = dist.get_rank()
    group: Any = dist.group.WORLD
    channel, like = ControlChannel(group), torch.zeros(2)
    tensors = [torch.full((2,), 10.0**rank), torch.ones(2) if rank == 2 else None, None]
    return [channel.all_reduce_sum([0, 1, 2], tensor, like) for tensor in tensors]


def test_sum_over_ranks_leaves_out_those_without_a_tensor() -> None:
    for total, single, nothing in ranks(3).run(summed):
        assert total.tolist() == [111.0, 111.0]
        assert single.tolist() == [1.0, 1.0]
        assert nothing is None


def test_sample_tensors_distinguishes_batches_and_is_short() -> None:
    one, other = torch.randn(1000, 100), torch.randn(1000, 100)
    assert sample_tensors([one]) != sample_tensors([other])
    assert sample_tensors([one]) == sample_tensors([one.clone()])
    assert sample_tensors([one]) != sample_tensors([torch.cat([one[:500], other[500:]])])
    assert len(str(sample_tensors([one]))) < 400
    sample_tensors([torch.zeros(()), torch.zeros(0, 3), torch.ones(3, dtype=torch.bool)])
