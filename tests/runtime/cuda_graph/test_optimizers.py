"""The optimizer step as a part of a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipe
from tests.runtime.cuda_graph.support import PipePair, batch, emulate, pipe_pair, recordings, stack
from tests.runtime.cuda_graph.test_grad_buffers import Unused

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    # It also contains AdamW. PyTorch does not support capturable optimizers on the host.
    adam = import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


def trained(
    pair: PipePair, optimizers: Sequence[torch.optim.Optimizer], first: int, count: int
) -> None:
    for number in range(first, first + count):
        x, y = batch(number)
        torch.manual_seed(number)
        found = pair.graph.step(x, target=y, optimizer=optimizers[0])
        torch.manual_seed(number)
        expected = pair.inline.step(x, target=y, optimizer=optimizers[1])
        assert torch.equal(found.loss, expected.loss)
        for (name, a), b in zip(
            pair.graph.named_parameters(), pair.inline.parameters(), strict=True
        ):
            assert torch.equal(a, b), (number, name)
        assert found.ran.runtime == "graph"
        for optimizer in optimizers:
            optimizer.zero_grad()


def lr(value: float) -> Any:
    return torch.tensor(value, dtype=torch.float64)


MAKES: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "plain": lambda p: torch.optim.SGD(p, 0.1, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, 0.1, capturable=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr(0.1), capturable=True, foreach=False),
    "foreach": lambda p: torch.optim.Adam(p, 0.1, capturable=True, foreach=True),
}


@pytest.mark.parametrize("name", MAKES)
def test_captured_optimizer_equals_inline_optimizer(name: str) -> None:
    pair = pipe_pair(stack(Unused().double(), nn.Dropout(0.1)))
    optimizers = [MAKES[name](pipe.parameters()) for pipe in pair.both]
    trained(pair, optimizers, 0, 6)
    assert sum(recordings(pair.graph)) >= 4
    states = [o.state_dict() for o in optimizers]
    assert str(states[0]) == str(states[1])


def test_captured_optimizer_with_a_changing_learning_rate() -> None:
    """A tensor learning rate needs no new recording; a Python number selects another one."""
    pair = pipe_pair(stack())
    optimizers = [
        torch.optim.AdamW(pipe.parameters(), lr(0.1), capturable=True, foreach=False)
        for pipe in pair.both
    ]
    for number in range(6):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"].fill_(0.1 / (number + 1))
        trained(pair, optimizers, number, 1)
    assert recordings(pair.graph) == [4]
    plain = [torch.optim.SGD(pipe.parameters(), 0.1) for pipe in pair.both]
    for number in range(6):
        for sgd in plain:
            sgd.param_groups[0]["lr"] = 0.1 if number < 3 else 0.01
        trained(pair, plain, number, 1)
    assert sum(recordings(pair.graph)) == 4 + 4


@pytest.mark.parametrize("loaded", [False, True])
def test_captured_optimizer_whose_state_is_replaced(loaded: bool) -> None:
    pair = pipe_pair(stack())
    optimizers = [MAKES["sgd"](pipe.parameters()) for pipe in pair.both]
    trained(pair, optimizers, 0, 4)
    for optimizer in optimizers:
        state = optimizer.state_dict()
        for one in state["state"].values():
            one["momentum_buffer"] = one["momentum_buffer"] * 3
        if loaded:
            optimizer.load_state_dict(state)
    trained(pair, optimizers, 4, 3)


def test_captured_optimizer_uses_gradients_set_by_the_caller() -> None:
    """An unused parameter has a gradient that the caller set; the optimizer must use it."""
    pair = pipe_pair(stack(Unused().double()))
    optimizers = [MAKES["sgd"](pipe.parameters()) for pipe in pair.both]
    for number in range(7):
        if number > 2:
            for pipe in pair.both:
                weight = pipe[1].unused.weight
                weight.grad = torch.ones_like(weight)
        trained(pair, optimizers, number, 1)


def test_captured_optimizer_with_python_state_falls_back_to_threads() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["times"] = self.state[p].get("times", 0) + 1
            return super().step(closure)

    pair = pipe_pair(stack(), "auto")
    optimizers = [Counting(pipe.parameters(), 0.1) for pipe in pair.both]
    ran = []

    def train(number: int) -> None:
        x, y = batch(number)
        ran.append(pair.graph.step(x, target=y, optimizer=optimizers[0]).ran.runtime)
        pair.inline.step(x, target=y, optimizer=optimizers[1])
        for optimizer in optimizers:
            optimizer.zero_grad()

    for number in range(3):
        train(number)
    with pytest.warns(match="Counting changes 'times' of its state"):
        train(3)
    train(4)
    assert ran == ["graph", "graph", "graph", "threads", "threads"]
    assert all(map(torch.equal, pair.graph.parameters(), pair.inline.parameters()))


def test_step_with_optimizer_is_refused_without_gradients_or_with_a_scaler() -> None:
    pipe = Pipe(stack(), chunks=2, stages=2, devices=["cpu"] * 2, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    x, y = batch(0)
    with torch.no_grad(), pytest.raises(ValueError, match="no gradients"):
        pipe.step(x, target=y, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="scaler"):
        pipe.step(x, target=y, optimizer=optimizer, scaler=scaler)
    with pytest.raises(TypeError, match="Optimizer"):
        pipe.step(x, target=y, optimizer="sgd")  # type: ignore[arg-type]
