"""After an error that every rank catches, the next step of the same pipe is exact.

The tests cover schedules of each kind, and errors in layers, hooks, messages and recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipe, RemoteError
from penstock.runtime.distributed.channels import ProcessTransport
from tests.distributed.ranks import ranks
from tests.faults.disposable_ranks import remaining_threads
from tests.faults.training_run import Fault, FaultInjector, batch, burst, model_of, pipe_of

PLACES = ("forward", "backward", "loss", "hook", "gradient", "send", "recomputation")


def caught(call: Callable[[], object], injector: FaultInjector) -> RemoteError:
    """Run a call that fails, and return its error."""
    injector.step, injector.triggered = 1, False
    with pytest.raises(RemoteError) as found:
        call()
    injector.step = 0
    assert remaining_threads(lambda thread: "penstock" in thread.name) == []
    return found.value


def check_right(pipe: Pipe) -> None:
    """Check that a step gives the loss and the gradients of plain PyTorch."""
    model = model_of()
    x, target = batch(7)
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    pipe.zero_grad()
    found = pipe.step(x, target=target).loss
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-10)
    right = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, right[name].grad, rtol=0, atol=1e-10)


@contextmanager
def hooked(pipe: Pipe, injector: FaultInjector) -> Iterator[None]:
    """Let hooks of layers, hooks of gradients and sending fail."""
    send = ProcessTransport.send

    def fails(self: ProcessTransport, *given: Any) -> Any:
        injector("send")
        return send(self, *given)

    def hook(layer: nn.Module, given: tuple[Tensor], made: Tensor) -> None:
        microbatch = int(made.detach()[0, 0].round())
        injector("hook", microbatch)
        if made.requires_grad:
            made.register_hook(lambda gradient: injector("gradient", microbatch))

    for layer in pipe:
        layer.register_forward_hook(hook)
    with patch.object(ProcessTransport, "send", fails):
        yield


def goes_on(schedule: str, checkpoint: str) -> dict[tuple[int, str], RemoteError]:
    rank, size = dist.get_rank(), dist.get_world_size()
    injector = FaultInjector(rank, Fault(-1, "", burst))
    pipe = pipe_of(injector, schedule=schedule, checkpoint=checkpoint)
    x, target = batch(1)
    found = {}
    with hooked(pipe, injector):
        check_right(pipe)
        for place in PLACES:
            for failing in range(size):
                nowhere = place == "loss" and failing != last_rank(pipe)
                if nowhere or (place == "recomputation" and checkpoint == "never"):
                    continue
                injector.fault = Fault(failing, place, burst)
                error = caught(lambda: pipe.step(x, target=target), injector)
                expected = type(None) if rank != failing else Exception
                assert isinstance(error.__cause__, expected), repr(error.__cause__)
                check_right(pipe)
                found[failing, place] = error
    return found


def last_rank(pipe: Pipe) -> int:
    return pipe.forecast().program.schedule.placement[-1]


@pytest.mark.parametrize(
    ("size", "schedule", "checkpoint"),
    [
        (2, "gpipe", "always"),
        (3, "1f1b", "never"),
        (2, "interleaved", "always"),
        (2, "zb-v", "never"),
    ],
)
def test_step_after_an_error_is_exact(size: int, schedule: str, checkpoint: str) -> None:
    found = ranks(size).run(goes_on, schedule, checkpoint)
    places = PLACES if checkpoint == "always" else PLACES[:-1]
    assert {place for _, place in found[0]} == set(places)
    for (rank, place), error in found[0].items():
        assert {str(errors[rank, place]) for errors in found} == {str(error)}
        assert (error.kind, error.rank) == ("raised", rank)
        assert "in burst\n" in error.traceback
        if place == "send":
            continue
        assert error.microbatch == 1
        assert error.layers
        assert error.action is not None
        letters = {"forward": "F", "loss": "FR", "hook": "FRB"}.get(place, "RBIW")
        assert error.action[-2] in letters, (place, error.action)


def without_gradients() -> RemoteError:
    injector = FaultInjector(dist.get_rank(), Fault(1, "forward", burst))
    pipe = pipe_of(injector, outputs="all")
    x, _ = batch(1)
    with torch.no_grad():
        error = caught(lambda: pipe(x), injector)
        torch.testing.assert_close(pipe(x), model_of()(x), rtol=0, atol=1e-10)
    check_right(pipe)
    return error


def test_error_in_pipe_call_without_gradients() -> None:
    found = ranks(2).run(without_gradients)
    assert {(error.kind, error.rank, error.action) for error in found} == {("raised", 1, "1F1")}


def bad_data(data: str) -> list[RemoteError]:
    """Give one rank a batch that cannot be split; the error comes before anything is sent."""
    injector = FaultInjector(dist.get_rank(), Fault(-1, "", burst))
    pipe = pipe_of(injector, data=data)
    found = []
    x, target = batch(1)
    for at in range(1 if data == "first" else 2):
        given = x[:5] if dist.get_rank() == at else x
        found.append(caught(partial(pipe.step, given, target=target), injector))
        check_right(pipe)
    return found


@pytest.mark.parametrize("data", ["all", "first"])
def test_invalid_batch_on_one_rank_is_raised_on_all_ranks(data: str) -> None:
    first, second = ranks(2).run(bad_data, data)
    assert [(e.kind, e.rank) for e in first] == [(e.kind, e.rank) for e in second]
    assert [(e.kind, e.rank) for e in first] == [("raised", at) for at in range(len(first))]
    assert "in step (call 1), at its beginning: penstock.errors.BatchShapeError: " in str(first[0])
