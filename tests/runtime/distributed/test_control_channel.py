from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipe, RemoteError
from penstock.runtime.distributed.control_channel import sample_tensors
from tests.distributed.ranks import ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def piped(**options: Any) -> Pipe:
    given: dict[str, Any] = {"chunks": 2, "group": dist.group.WORLD, "loss_fn": nn.MSELoss()}
    return Pipe(model(), **{**given, **options})


def batch(rows: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def disagrees(what: str) -> tuple[str, str, float]:
    """Make a different call on one rank, then the same step on all; return error and loss."""
    odd = dist.get_rank() == 1
    pipe = piped()
    x = batch()
    try:
        if what == "rows":
            pipe.step(batch(6) if odd else x, target=batch(6) if odd else x)
        elif what == "numbers":
            pipe.step(batch(seed=2) if odd else x, target=x)
        elif what == "chunks":
            pipe.chunks = 4 if odd else 2
            pipe.step(x, target=x)
        elif what == "mode":
            pipe.train(not odd)
            pipe.step(x, target=x)
        elif what == "gradients":
            with torch.set_grad_enabled(not odd):
                pipe.step(x, target=x)
        elif what == "the call":
            with torch.no_grad():
                pipe(x) if odd else pipe.step(x, target=x)
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
    pipe.train()
    return kind, text, float(pipe.step(x, target=x).loss)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("rows", "inputs: float32[4, 4] on rank 0; float32[6, 4] on rank 1"),
        ("numbers", "sample values of tensor 0"),
        ("chunks", "chunks: 2 on rank 0; 4 on rank 1"),
        ("mode", "training mode: True on rank 0; False on rank 1"),
        ("gradients", "gradients: True on rank 0; False on rank 1"),
        ("the call", "the call: step (call "),
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


def other_layers() -> str:
    layers = model()
    if dist.get_rank() == 1:
        layers[2] = nn.Linear(4, 5)
    with pytest.raises(RemoteError) as error:
        Pipe(layers, 2, group=dist.group.WORLD)
    return str(error.value)


def test_different_models_raise_an_error_that_names_the_layer() -> None:
    for text in ranks(2).run(other_layers):
        assert "layer 2: Linear" in text


def test_sample_tensors_distinguishes_batches_and_is_short() -> None:
    one, other = torch.randn(1000, 100), torch.randn(1000, 100)
    assert sample_tensors([one]) != sample_tensors([other])
    assert sample_tensors([one]) == sample_tensors([one.clone()])
    assert len(str(sample_tensors([one]))) < 400
    sample_tensors([torch.zeros(()), torch.zeros(0, 3), torch.ones(3, dtype=torch.bool)])
