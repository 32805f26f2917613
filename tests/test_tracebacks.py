"""Tracebacks lead from the call of a pipe to the user's own code, without frames of Penstock."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, Pipe, RemoteError
from penstock.tracebacks import add_hint, entry_point, fold_frames
from tests.distributed.ranks import ranks
from tests.support import each_runtime

PACKAGE = str(Path(penstock.__file__).parent)
X, Y = torch.randn(4, 3), torch.randn(4, 3)


class Boom(Exception):
    """The error of the user's own code."""


class Broken(nn.Module):
    """A layer that fails, in its forward or in its backward."""

    def __init__(self, in_backward: bool = False) -> None:
        super().__init__()
        self.in_backward = in_backward

    def forward(self, x: Tensor) -> Tensor:
        if self.in_backward:
            if x.requires_grad:  # not in a forward that will be recomputed
                x.register_hook(fail)
            return x
        return fail(x)


def fail(x: Tensor) -> Tensor:
    try:
        raise KeyError("root")
    except KeyError as root:
        raise Boom("mine") from root


def make_pipe(layer: nn.Module, runtime: str = "threads") -> Pipe:
    layers = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3))
    return Pipe(layers, 2, stages=2, devices=["cpu", "cpu"], runtime=runtime, loss_fn=nn.MSELoss())


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def names_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture
def _all_frames() -> Iterator[None]:
    penstock.full_tracebacks(True)
    yield
    penstock.full_tracebacks(False)


@each_runtime
@pytest.mark.parametrize("in_backward", [False, True])
def test_traceback_of_a_layer_has_frames_of_the_user_and_none_of_penstock(
    runtime: str, in_backward: bool
) -> None:
    pipe = make_pipe(Broken(in_backward), runtime)
    with pytest.raises(Boom) as caught:
        pipe.step(X, target=Y)
    assert not [file for file in files_of(caught.value) if file.startswith(PACKAGE)]
    assert names_of(caught.value)[-1] == "fail"
    assert in_backward or names_of(caught.value)[-2] == "forward"
    assert isinstance(caught.value.__cause__, KeyError)
    assert names_of(caught.value.__cause__) == ["fail"]


def test_traceback_of_pipe_call_and_of_its_backward_is_folded() -> None:
    with pytest.raises(Boom) as caught:
        make_pipe(Broken())(X)
    assert names_of(caught.value)[-2:] == ["forward", "fail"]
    assert len([file for file in files_of(caught.value) if file.startswith(PACKAGE)]) <= 1
    loss = make_pipe(Broken(in_backward=True))(X).sum()
    with pytest.raises(Boom) as caught:
        loss.backward()
    assert not [file for file in files_of(caught.value) if file.startswith(PACKAGE)]
    assert names_of(caught.value)[-1] == "fail"


def test_traceback_of_a_loss_function_ends_there() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output[99]

    with pytest.raises(IndexError) as caught:
        make_pipe(nn.ReLU()).step(X, target=Y, loss_fn=loss_fn)
    assert names_of(caught.value)[-1] == "loss_fn"


def test_traceback_of_an_argument_error_ends_at_the_call() -> None:
    with pytest.raises(ArgumentError) as caught:
        Pipe(nn.Sequential(nn.Linear(3, 3)), chunks=0)
    assert names_of(caught.value) == ["test_traceback_of_an_argument_error_ends_at_the_call"]
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.usefixtures("_all_frames")
def test_full_tracebacks_shows_all_frames() -> None:
    with pytest.raises(Boom) as caught:
        make_pipe(Broken()).step(X, target=Y)
    assert "run_step" in names_of(caught.value)
    assert not any("not shown" in note for note in caught.value.__notes__)


def test_note_says_how_to_see_all_frames_once() -> None:
    inner = make_pipe(Broken())
    outer = Pipe(nn.Sequential(nn.Linear(3, 3), inner), 2, stages=2, devices=["cpu", "cpu"])
    with pytest.raises(Boom) as caught:
        outer.step(X, target=Y, loss_fn=nn.MSELoss())
    assert sum("not shown" in note for note in caught.value.__notes__) == 1


def test_bug_of_penstock_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyError inside the library is nothing that the user could fix."""
    pipe = make_pipe(nn.ReLU())
    pipe._prepared_pipe.program_cache.__dict__.clear()  # AttributeError inside of the cache
    with pytest.raises(AttributeError) as caught:
        pipe.step(X, target=Y)
    assert {"step", "run_step"} <= set(names_of(caught.value))


def test_an_error_with_a_hint_is_not_a_bug() -> None:
    namespace: dict[str, object] = {"add_hint": add_hint, "entry_point": entry_point}
    code = "@entry_point\ndef call():\n    error = KeyError(1)\n    add_hint(error, 'do this')\n"
    exec(compile(code + "    raise error", f"{PACKAGE}/made_up.py", "exec"), namespace)
    with pytest.raises(KeyError) as caught:
        namespace["call"]()  # type: ignore[operator]
    assert names_of(caught.value) == ["test_an_error_with_a_hint_is_not_a_bug"]
    assert caught.value.__notes__ == ["do this"]


def test_folding_leaves_a_traceback_without_frames_of_penstock_alone() -> None:
    with pytest.raises(Boom) as caught:
        fail(X)
    before = caught.value.__traceback__
    fold_frames(caught.value)
    assert caught.value.__traceback__ is before


def test_variable_of_the_environment_shows_all_frames() -> None:
    code = "import penstock.tracebacks as t; print(t._shows_all_frames)"
    environment = {**os.environ, "PENSTOCK_TRACEBACK": "1"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[True]"


def step_with_a_broken_layer() -> tuple[str, str]:
    mesh = penstock.init()
    layers = nn.Sequential(nn.Linear(3, 3), Broken())
    pipe = Pipe(layers, 2, mesh=mesh, loss_fn=nn.MSELoss())
    with pytest.raises(RemoteError) as caught:
        pipe.step(X, target=Y)
    return caught.value.traceback, type(caught.value.__cause__).__name__


def test_every_rank_prints_the_folded_traceback_of_the_rank_that_failed() -> None:
    (first, _), (second, cause) = ranks(2).run(step_with_a_broken_layer)
    assert first == second
    assert cause == "Boom"
    assert "in fail" in first
    assert PACKAGE not in first
    assert "KeyError: 'root'" in first
