"""A load changes everything or nothing: damaged files, failing hooks, one process and several."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import distributed
from torch.optim import AdamW

from penstock import ArgumentError, Pipe, RemoteError
from penstock.checkpoint import reader
from tests.checkpoint import corrupt, two_writers
from tests.checkpoint.saved_models import differences, optimizer_of, state_of
from tests.checkpoint.test_resume import build, learned, piped
from tests.distributed.ranks import ranks


def test_damaged_file_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    """One flipped bit was loaded silently in 51 of 360 cases, and most errors left the model half
    loaded. `python -m tests.checkpoint.corrupt` tries hundreds of cases."""
    assert corrupt.run_cases(tmp_path, range(20)).total() == 20


def test_two_writers_leave_a_whole_checkpoint_at_every_look(tmp_path: Path) -> None:
    """Two runs removed each other's checkpoints, and both reported success."""
    assert two_writers.run(tmp_path / "run", 1.0)["loads"]


def refuse(*_: Any) -> None:
    raise ValueError("refused by a hook")


@pytest.mark.parametrize("where", ["module", "extra state", "optimizer", "second optimizer"])
def test_load_that_fails_half_way_is_undone(where: str, tmp_path: Path) -> None:
    saver, saver_optimizer = corrupt.make_pipe(1)
    parameters = list(saver.parameters())
    both = [AdamW(parameters[:2]), AdamW(parameters[2:])]
    saver.save(tmp_path, optimizer=both if where == "second optimizer" else saver_optimizer)
    pipe, optimizer = corrupt.make_pipe(2)
    optimizers: Any = optimizer
    layer: Any = pipe[0]
    if where == "module":
        layer.register_load_state_dict_post_hook(refuse)
    elif where == "extra state":
        layer.set_extra_state = refuse
    elif where == "optimizer":
        optimizer.register_load_state_dict_post_hook(refuse)
    else:
        held = list(pipe.parameters())
        optimizers = [AdamW(held[:2]), AdamW(held[2:])]
        optimizers[1].register_load_state_dict_post_hook(refuse)
    before = corrupt.everything(pipe, optimizer)
    settings = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match="refused by a hook"):
        pipe.load(tmp_path, optimizer=optimizers)
    assert differences(corrupt.everything(pipe, optimizer), before) == []
    assert optimizer.state_dict()["param_groups"] == settings
    assert where != "second optimizer" or not optimizers[0].state


class InterruptAtLine:
    """Raises KeyboardInterrupt, as Ctrl-C does, before one line of `StagedLoad.apply`."""

    def __init__(self, line: int) -> None:
        self.remaining = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> InterruptAtLine | None:
        code = frame.f_code
        if code.co_filename != reader.__file__ or code.co_name not in ("apply", "_swap"):
            return None
        if event == "line":
            self.remaining -= 1
            if self.remaining == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_load_that_is_interrupted_at_any_line_is_undone(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a tensor left a model that was half loaded."""
    saver, saver_optimizer = corrupt.make_pipe(1)
    saver.save(tmp_path, optimizer=saver_optimizer, extra=1)
    pipe, optimizer = corrupt.make_pipe(2)
    before = corrupt.everything(pipe, optimizer)
    trace = sys.gettrace()
    for line in range(1, 1000):
        try:
            sys.settrace(InterruptAtLine(line))
            loaded = pipe.load(tmp_path, optimizer=optimizer)
        except KeyboardInterrupt:
            loaded = None
        finally:
            sys.settrace(trace)
            # An interrupt between the last line of `with torch.no_grad()` and its end leaves it on.
            torch.set_grad_enabled(True)
        if loaded:
            break
        assert differences(corrupt.everything(pipe, optimizer), before) == [], line
    assert line > 50


def test_load_with_other_groups_changes_nothing(tmp_path: Path) -> None:
    saver, saver_optimizer = corrupt.make_pipe(1)
    saver.save(tmp_path, optimizer=saver_optimizer)
    pipe, optimizer = corrupt.make_pipe(2)
    before = corrupt.everything(pipe, optimizer)
    with pytest.raises(ArgumentError, match="in one group of the optimizer"):
        pipe.load(tmp_path, optimizer=AdamW(pipe.parameters()))
    assert differences(corrupt.everything(pipe, optimizer), before) == []


def save_on_ranks(folder: Path) -> None:
    pipe = piped(build())
    optimizer = AdamW(pipe.parameters(), lr=0.05)
    learned(pipe, optimizer, range(1))
    pipe.save(folder, optimizer=optimizer, extra=1)


def load_on_ranks(folder: Path, hooked: int | None) -> tuple[str, list[str]]:
    """Load, and return the error of this rank and what has changed."""
    pipe: Any = piped(build())
    optimizer = optimizer_of(pipe)
    learned(pipe, optimizer, range(2))
    if distributed.get_rank() == hooked:
        pipe.register_load_state_dict_post_hook(refuse)
    before = copy.deepcopy(state_of(pipe, optimizer))
    random = torch.get_rng_state()
    message = "nothing was raised"
    try:
        pipe.load(folder, optimizer=AdamW(pipe.parameters()))
    except RemoteError as error:
        message = error.message
    after = state_of(pipe, optimizer)
    return message, [*differences(after, before), *_changed_random(random)]


def _changed_random(before: torch.Tensor) -> list[str]:
    return [] if torch.equal(torch.get_rng_state(), before) else ["random"]


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "extra.pt"])
def test_damage_that_one_rank_reads_fails_the_load_on_all_ranks(file: str, tmp_path: Path) -> None:
    ranks(2).run(save_on_ranks, tmp_path)
    path = tmp_path / "save-000001" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    for message, changed in ranks(2).run(load_on_ranks, tmp_path, None):
        assert f"CheckpointError: '{path}' is damaged" in message
        assert changed == []


def test_load_that_fails_on_one_rank_is_undone_on_all(tmp_path: Path) -> None:
    ranks(2).run(save_on_ranks, tmp_path)
    for message, changed in ranks(2).run(load_on_ranks, tmp_path, 1):
        assert "rank 1: ValueError: refused by a hook" in message
        assert changed == []


def test_load_into_a_pipe_of_tensors_that_share_memory(tmp_path: Path) -> None:
    """A tied weight is one tensor, which is swapped once."""
    pipe = Pipe(build(), stages=2, devices=["cpu"] * 2)
    pipe.save(tmp_path)
    expected = {name: value.clone() for name, value in pipe.state_dict().items()}
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load(tmp_path)
    assert differences(pipe.state_dict(), expected) == []
