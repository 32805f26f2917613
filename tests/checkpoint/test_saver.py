"""`pipe.save` and `pipe.load` in one process, also with another cut of the model."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from penstock import ArgumentError, PenstockTypeError, Pipe, saved
from tests.checkpoint.saved_models import (
    build,
    differences,
    optimizer_of,
    plainly_loaded,
    state_of,
    stepped,
)


def piped(model: nn.Sequential, stages: int = 3, **options: Any) -> Pipe:
    given = {"chunks": 2, "stages": stages, "devices": ["cpu"] * stages, **options}
    return Pipe(model, loss_fn=functional.mse_loss, **given)


def deep(seed: int = 0) -> nn.Sequential:
    """Return a model with dropout, so that its results depend on the random state."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(6)).double()


def one_step(pipe: Pipe, optimizer: Optimizer, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    result = pipe.step(x, target=x.cos())
    optimizer.step()
    return result.loss


def stepped_pipe() -> tuple[Pipe, Optimizer]:
    pipe = piped(build())
    optimizer = optimizer_of(pipe)
    stepped(pipe, optimizer)
    return pipe, optimizer


def check_loads(folder: Path, expected: dict[str, Any], stages: int = 3) -> None:
    """Check that another pipe and its optimizer get the expected state from a checkpoint."""
    pipe = piped(build(1), stages)
    optimizer = optimizer_of(pipe, 0.3)
    pipe.load(folder, optimizer=optimizer)
    found = state_of(pipe, optimizer)
    assert found.keys() == expected.keys()  # no parameter has lost its optimizer state
    assert differences(found, expected) == []


# ---- resumed training ---------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_resumed_training_equals_uninterrupted_training(background: bool, tmp_path: Path) -> None:
    pipe = piped(deep())
    optimizer = AdamW(pipe.parameters(), lr=0.05)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for number in range(3):
        one_step(pipe, optimizer, number)
        scheduler.step()
    extra = {"step": 3, "scheduler": scheduler.state_dict()}
    saving = pipe.save(tmp_path, optimizer=optimizer, extra=extra, background=background)
    losses = []
    for number in range(3, 6):
        losses.append(one_step(pipe, optimizer, number))
        scheduler.step()
    assert saving.wait() == saved(tmp_path) == saving.path

    other = piped(deep(1))
    again = AdamW(other.parameters(), lr=0.7)
    clock = OneCycleLR(again, max_lr=0.3, total_steps=10)
    torch.manual_seed(77)
    found = other.load(tmp_path, optimizer=again)
    clock.load_state_dict(found["scheduler"])
    for number in range(found["step"], 6):
        assert torch.equal(one_step(other, again, number), losses[number - 3])
        clock.step()
    assert differences(state_of(other, again), state_of(pipe, optimizer)) == []


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_load_into_another_number_of_stages(stages: int, tmp_path: Path) -> None:
    pipe, optimizer = stepped_pipe()
    pipe.save(tmp_path, optimizer=optimizer)
    check_loads(tmp_path, state_of(pipe, optimizer), stages)


def test_checkpoint_is_loaded_by_pytorch_alone(tmp_path: Path) -> None:
    pipe, optimizer = stepped_pipe()
    pipe.save(tmp_path, optimizer=optimizer)
    assert differences(state_of(*plainly_loaded(tmp_path)), state_of(pipe, optimizer)) == []


def test_load_of_a_checkpoint_saved_by_pytorch_alone(tmp_path: Path) -> None:
    model = build()
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        state_dict_saver.save({**model.state_dict(), "step": 3}, checkpoint_id=tmp_path)
    pipe = piped(build(1))
    assert pipe.load(tmp_path) is None
    assert differences(pipe.state_dict(), model.state_dict()) == []


def test_save_of_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    """Saving takes no optimizer step. PyTorch's `get_state_dict` takes one to create the state."""
    pipe = piped(build())
    optimizer = optimizer_of(pipe)
    before = copy.deepcopy(pipe.state_dict())
    pipe.save(tmp_path, optimizer=optimizer)
    assert not optimizer.state
    assert differences(pipe.state_dict(), before) == []
    other = piped(build(2))
    again = optimizer_of(other, 0.4)
    stepped(other, again)
    other.load(tmp_path, optimizer=again)
    assert not again.state
    assert again.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"]


def test_save_with_frozen_parameters_and_several_optimizers(tmp_path: Path) -> None:
    def halves(pipe: Pipe, rate: float) -> list[Optimizer]:
        held = list(pipe.parameters())
        return [SGD(held[:5], lr=rate, momentum=0.9), AdamW(held[5:], lr=rate, amsgrad=True)]

    pipe = piped(build())
    list(pipe.parameters())[1].requires_grad_(False)
    both = halves(pipe, 0.1)
    for optimizer in both:
        stepped(pipe, optimizer)
    pipe.save(tmp_path, optimizer=both)
    other = piped(build(1), 2)
    again = halves(other, 0.2)
    other.load(tmp_path, optimizer=again)
    for one, two in zip(both, again, strict=True):
        found = one.state_dict(), two.state_dict()
        assert found[0]["param_groups"] == found[1]["param_groups"]
        assert list(found[0]["state"]) == list(found[1]["state"])
        for number, state in found[0]["state"].items():
            assert differences(state, found[1]["state"][number]) == []


class Nested(Optimizer):
    """An optimizer whose state holds nested dicts and numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.5), "betas": (0.1, 0.2)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["turn"] = state.get("turn", 0) + 1
                state["left"] = {"factor": p.detach().clone(), "age": 2.5}


def test_save_of_nested_optimizer_state_and_tensor_settings(tmp_path: Path) -> None:
    pipe, other = piped(build()), piped(build(1))
    optimizer, again = Nested(pipe.parameters()), Nested(other.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    stepped(pipe, optimizer)
    pipe.save(tmp_path, optimizer=optimizer)
    other.load(tmp_path, optimizer=again)
    assert torch.equal(again.param_groups[0]["lr"], torch.tensor(0.25))
    for one, two in zip(pipe.parameters(), other.parameters(), strict=True):
        assert again.state[two]["turn"] == 2
        assert again.state[two]["left"]["age"] == 2.5
        assert torch.equal(
            again.state[two]["left"]["factor"], optimizer.state[one]["left"]["factor"]
        )


# ---- stored tensors and their names -------------------------------------------------------


def test_tied_weight_is_written_once_and_stored_under_every_name(tmp_path: Path) -> None:
    piped(build()).save(tmp_path)
    with open(tmp_path / "save-000001" / ".metadata", "rb") as file:
        stored = {index.fqn: at for index, at in pickle.load(file).storage_data.items()}
    assert set(stored) == {f"model.{name}" for name in build().state_dict()} | {"random.0"}
    assert stored["model.0.weight"] == stored["model.7.weight"]
    places = {(at.relative_path, at.offset) for at in stored.values()}
    assert len(places) == len(stored) - 1
    untied = build(1)
    untied[7].weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    piped(untied).load(tmp_path)
    assert differences(untied.state_dict(), build().state_dict()) == []


def test_save_of_layers_named_like_keys_of_the_checkpoint(tmp_path: Path) -> None:
    def named() -> nn.Sequential:
        layers = {"save": nn.Linear(3, 3), "state": nn.Linear(3, 3), "model": nn.Linear(3, 3)}
        return nn.Sequential(OrderedDict(layers))

    pipe = piped(named())
    optimizer = SGD(pipe.parameters(), lr=0.1, momentum=0.5)
    stepped(pipe, optimizer)
    pipe.save(tmp_path, optimizer=optimizer)
    other = piped(named(), 2)
    again = SGD(other.parameters(), lr=0.2, momentum=0.1)
    other.load(tmp_path, optimizer=again)
    assert differences(state_of(other, again), state_of(pipe, optimizer)) == []


class Counting(nn.Module):
    """A module with extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"calls": 0, "name": "none"}

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = dict(state)


def test_save_of_the_extra_state_of_a_layer(tmp_path: Path) -> None:
    layer, other = Counting(), Counting()
    layer.count = {"calls": 5, "name": "five"}
    piped(nn.Sequential(nn.Linear(2, 2), layer), 2).save(tmp_path)
    piped(nn.Sequential(nn.Linear(2, 2), other), 1).load(tmp_path)
    assert other.count == {"calls": 5, "name": "five"}


def test_compiled_layer_is_saved_under_its_original_name(tmp_path: Path) -> None:
    model = build()
    model[2] = torch.compile(model[2], backend="eager")  # type: ignore[assignment]
    piped(model).save(tmp_path)
    other = build(1)
    piped(other).load(tmp_path)
    assert differences(other.state_dict(), build().state_dict()) == []
    model[4] = torch.compile(model[4], backend="eager")  # type: ignore[assignment]
    piped(model).load(tmp_path)


def test_load_into_another_dtype(tmp_path: Path) -> None:
    model = build()
    piped(model).save(tmp_path)
    other = build(1).float()
    piped(other).load(tmp_path)
    assert differences(other.state_dict(), model.float().state_dict()) == []


# ---- repeated and background saves --------------------------------------------------------


def test_background_save_copies_state_before_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is blocked until training has changed everything."""
    gate = threading.Event()
    write = FileSystemWriter.write_data

    def held(self: Any, *given: Any) -> Any:
        assert gate.wait(20)
        return write(self, *given)

    monkeypatch.setattr(FileSystemWriter, "write_data", held)
    pipe, optimizer = stepped_pipe()
    before = copy.deepcopy(state_of(pipe, optimizer))
    saving = pipe.save(tmp_path, optimizer=optimizer, background=True)
    stepped(pipe, optimizer)
    optimizer.param_groups[0]["lr"] = 33.0
    assert not saving.done
    assert saved(tmp_path) is None
    gate.set()
    saving.wait()
    assert saving.done
    check_loads(tmp_path, before)


def test_save_after_a_wait_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a save that waited for the one before made the pipe forget that one. The next save
    then ran beside it, and each removed the lock of the other."""
    gate, write = threading.Event(), FileSystemWriter.write_data

    def held(self: Any, *given: Any) -> Any:
        assert gate.wait(20)
        return write(self, *given)

    pipe = piped(build())
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", held)
        saving = pipe.save(tmp_path, extra=1, background=True)
        main_thread = threading.main_thread().ident
        timer = threading.Timer(0.2, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pipe.save(tmp_path, extra=2)
        timer.join()
        assert not saving.done
        threading.Timer(0.2, gate.set).start()
        pipe.save(tmp_path, extra=3)
    assert saving.done
    assert sorted(os.listdir(tmp_path)) == ["save-000001", "save-000002"]
    assert pipe.load(tmp_path) == 3


def test_failed_background_save_raises_in_wait_and_in_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = piped(build())
    pipe.save(tmp_path, extra=1)
    with monkeypatch.context() as broken:
        broken.setattr(FileSystemWriter, "finish", lambda *_: 1 / 0)
        saving = pipe.save(tmp_path, extra=2, background=True)
        with pytest.raises(ZeroDivisionError):
            saving.wait()
    assert "a save in the background failed" in caplog.text
    with pytest.raises(ZeroDivisionError):
        pipe.save(tmp_path, extra=3)
    assert os.listdir(tmp_path) == ["save-000001"]
    assert pipe.load(tmp_path) == 1
    pipe.save(tmp_path, extra=4)
    assert pipe.load(tmp_path) == 4


def test_copied_and_pickled_pipes_do_not_share_a_pending_save(tmp_path: Path) -> None:
    pipe = piped(build())
    pipe.save(tmp_path / "one", background=True)
    other = copy.deepcopy(pipe)
    other.save(tmp_path / "two")
    pickle.loads(pickle.dumps(pipe)).load(tmp_path / "two")
    pipe.load(tmp_path / "one")


# ---- errors -------------------------------------------------------------------------------


def test_load_from_a_folder_without_checkpoint(tmp_path: Path) -> None:
    pipe = piped(build())
    with pytest.raises(ArgumentError, match="contains no checkpoint yet"):
        pipe.load(tmp_path)
    with pytest.raises(ArgumentError, match=r"nowhere' does not exist.*penstock.saved"):
        pipe.load(tmp_path / "nowhere")


def test_load_into_another_model(tmp_path: Path) -> None:
    piped(build()).save(tmp_path)
    more, less, wider = build(), nn.Sequential(*list(build())[:-1]), build()
    more.append(nn.Linear(2, 2))
    wider[4] = nn.Linear(6, 7)
    with pytest.raises(ArgumentError, match=r"has no tensor for 8.weight, 8.bias"):
        piped(more).load(tmp_path)
    with pytest.raises(ArgumentError, match=r"has 7.bias, 7.weight, which the model does not have"):
        piped(less).load(tmp_path)
    with pytest.raises(
        ArgumentError, match=r"4.weight is \(6, 6\) there and \(7, 6\) in the model"
    ):
        piped(wider).load(tmp_path)


def test_save_and_load_with_wrong_optimizers(tmp_path: Path) -> None:
    pipe = piped(build())
    stranger = SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ArgumentError, match=r"shape \(3,\) that does not belong to the pipe"):
        pipe.save(tmp_path, optimizer=stranger)
    one = SGD(pipe.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"'0.weight' is in several optimizers"):
        pipe.save(tmp_path, optimizer=[one, one])
    scheduler: Any = OneCycleLR(one, max_lr=0.1, total_steps=10)
    with pytest.raises(PenstockTypeError, match=r"not OneCycleLR. Save anything else"):
        pipe.save(tmp_path, optimizer=scheduler)
    assert saved(tmp_path) is None
    pipe.save(tmp_path)
    with pytest.raises(ArgumentError, match=r"no optimizer state for 0.weight, 0.bias"):
        pipe.load(tmp_path, optimizer=one)
    two = optimizer_of(pipe)
    pipe.save(tmp_path, optimizer=two)
    with pytest.raises(ArgumentError, match=r"in one group of the optimizer, but were saved with"):
        pipe.load(tmp_path, optimizer=one)


def test_extra_accepts_only_plain_values(tmp_path: Path) -> None:
    pipe = piped(build())
    with pytest.raises(PenstockTypeError, match="extra takes numbers, strings, tensors"):
        pipe.save(tmp_path, extra={"f": lambda: 1})
    with pytest.raises(PenstockTypeError, match="extra takes numbers, strings, tensors"):
        pipe.save(tmp_path, extra=Path("x"))
    extra = {"step": 3, "best": (0.5, [torch.ones(2)]), "name": None}
    pipe.save(tmp_path, extra=extra)
    assert str(pipe.load(tmp_path)) == str(extra)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_load_of_a_model_with_a_layer_called_model(kind: str, tmp_path: Path) -> None:
    """Checkpoint folders store names under the prefix "model.". A layer called `model` in a
    safetensors file was mistaken for that prefix."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(model=nn.Linear(3, 3), head=nn.Linear(3, 2))
    pipe = Pipe(nn.Sequential(layers), stages=2, devices=["cpu", "cpu"])
    if kind == "file":
        pytest.importorskip("safetensors")
        path = pipe.export(tmp_path / "whole.safetensors")
    else:
        path = tmp_path / "run"
        pipe.save(path)
    expected = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load(path)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_optimizer_alone_is_saved_and_loaded_under_another_cut(tmp_path: Path) -> None:
    pipe, optimizer = stepped_pipe()
    pipe.save(tmp_path / "run", optimizer, model=False)
    other = piped(build(), stages=2)
    weights = copy.deepcopy(other.state_dict())
    other_optimizer = optimizer_of(other)
    other.load(tmp_path / "run", other_optimizer, model=False)
    assert all(torch.equal(other.state_dict()[key], weights[key]) for key in weights)
    states = zip(optimizer.state.values(), other_optimizer.state.values(), strict=True)
    assert all(torch.equal(s["exp_avg"], t["exp_avg"]) for s, t in states)
    with pytest.raises(ArgumentError):  # there is no model in it
        other.load(tmp_path / "run")
