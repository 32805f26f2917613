"""Models that cannot be captured are detected and named in one warning, and the pipe works on."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from penstock import PenstockError
from penstock.runtime.cuda_graph.capture_guard import CaptureError, is_capturing
from tests.runtime.cuda_graph.support import (
    batch,
    pipe_pair,
    recordings,
    same_state,
    same_value,
    stack,
    steps,
)

FILE = "test_refusals.py"


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().abs().max().item()


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(x[x[:, 0] > 0])


class Finds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + len((x > 0).nonzero())


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(8, generator=self.generator, dtype=x.dtype)

    def __deepcopy__(self, memo: Any) -> OwnGenerator:
        return OwnGenerator()


class OnlyCaptured(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if is_capturing():
            raise ValueError("not while it is captured")
        return x


class Overwhelmed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if is_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


FOUND_AT_CAPTURE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "item": (Asks, r"layer 1 \(Asks\), .*test_refusals.py:\d+: it waits for a value on the device"),
    "branch": (Branches, r"layer 1 \(Branches\), .*test_refusals.py:\d+: it waits"),
    "mask": (Picks, r"layer 1 \(Picks\), .*test_refusals.py:\d+: it waits .*aten.index.Tensor"),
    "nonzero": (Finds, r"layer 1 \(Finds\), .*test_refusals.py:\d+: it waits .*nonzero"),
    "generator": (OwnGenerator, r"layer 1 \(OwnGenerator\), .*: it draws .* its own torch.Gen"),
    "raises": (OnlyCaptured, r"layer 1 \(OnlyCaptured\), .*ValueError: not while it is captured"),
    "memory": (Overwhelmed, r"layer 1 \(Overwhelmed\), .*OutOfMemoryError: CUDA out of memory"),
}


@pytest.mark.parametrize("name", FOUND_AT_CAPTURE)
def test_uncapturable_layer_warns_once_and_falls_back_to_threads(name: str) -> None:
    make, text = FOUND_AT_CAPTURE[name]
    pair = pipe_pair(stack(make(), nn.BatchNorm1d(8)), "auto", checkpoint="never")
    own = torch.ones_like(pair.graph[0].weight)
    pair.graph[0].weight.grad, pair.inline[0].weight.grad = own, own.clone()
    steps(pair, "gttt", text)
    assert pair.graph[0].weight.grad is own
    assert recordings(pair.graph) == []
    for pipe in pair.both:
        pipe[1].forward = lambda x: x
    pair.train(3)
    assert recordings(pair.graph) == [2]


@pytest.mark.parametrize("name", ["item", "branch", "mask", "nonzero", "generator"])
def test_uncapturable_layer_raises_under_runtime_graph(name: str) -> None:
    make, text = FOUND_AT_CAPTURE[name]
    pair = pipe_pair(stack(make(), nn.BatchNorm1d(8), nn.Dropout(0.1)), checkpoint="never")
    x, y = batch(0)
    pair.step(x, target=y)
    gradients = [p.grad for p in pair.graph.parameters()]
    before, state = copy.deepcopy(gradients), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(CaptureError, match=f"{text}.*Use runtime='auto', which runs"):
            pair.graph.step(x, target=y)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is g for p, g in zip(pair.graph.parameters(), gradients, strict=True))
    same_value(before, gradients)
    same_state(*pair.both)
    pair.graph.runtime = "threads"
    pair.step(x, target=y, ran="threads")


def test_layer_error_during_capture_is_raised_unchanged() -> None:
    """A batch that a layer refuses does not prevent the capture of the next one."""

    class Refuses(nn.Module):
        bad = False

        def forward(self, x: Tensor) -> Tensor:
            if type(self).bad:
                raise KeyError("a bad batch")
            return x

    for runtime in ("graph", "auto"):
        pair = pipe_pair(stack(Refuses()), runtime)
        x, y = batch(0)
        pair.step(x, target=y)
        Refuses.bad = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(KeyError, match="a bad batch") as found:
                pair.graph.step(x, target=y)
        assert any("stage 0" in note for note in found.value.__notes__)
        Refuses.bad = False
        pair.train(2)
        assert recordings(pair.graph) == [2]


def test_failing_capture_is_retried_only_once() -> None:
    tried = 0

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal tried
            if is_capturing():
                tried += 1
                raise KeyError("never works")
            return x

    pair = pipe_pair(stack(Fails()), "auto")
    steps(pair, "gtttt", "KeyError: 'never works'")
    assert tried == 2


def test_too_little_memory_is_one_reason_wherever_it_runs_out() -> None:
    """It warned again for each layer in which the memory ran out, and for each number of bytes."""
    attempts = 0

    class Overwhelms(nn.Module):
        def __init__(self, attempt: int) -> None:
            super().__init__()
            self.attempt = attempt

        def forward(self, x: Tensor) -> Tensor:
            nonlocal attempts
            if is_capturing() and attempts == self.attempt:
                attempts += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory: {attempts} MiB are free")
            return x

    pair = pipe_pair(stack(Overwhelms(0), Overwhelms(1)), "auto", checkpoint="never")
    steps(pair, "gttt", r"layer 1 \(Overwhelms\), .*CUDA out of memory: 1 MiB are free")
    assert attempts == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_during_capture(error: type[BaseException]) -> None:
    class Interrupted(nn.Module):
        seen: Tensor
        times = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            if is_capturing() and type(self).times == 0:
                type(self).times = 1
                raise error
            return x

    pair = pipe_pair(stack(Interrupted()))
    x, y = batch(0)
    pair.step(x, target=y)
    with pytest.raises(error):
        pair.graph.step(x, target=y)
    assert not _get_current_dispatch_mode_stack()
    same_state(*pair.both)
    pair.train(3)
    assert recordings(pair.graph) == [3]


class Script(nn.Module):
    """A layer to be scripted, which moves its attributes and buffers out of Python dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.seen.add_(x.detach().sum(0))  # type: ignore[operator]
        return x * float(self.count)


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
def test_script_module_is_not_captured() -> None:
    pair = pipe_pair(stack(torch.jit.script(Script())), "auto", checkpoint="never")
    steps(pair, "tttt", r"layer 1 \(RecursiveScriptModule\) is a ScriptModule, whose changes")


def test_inference_mode_and_saved_tensor_hooks_are_not_captured() -> None:
    pair = pipe_pair(stack(), "auto")
    x, y = batch(0)
    with torch.inference_mode(), pytest.warns(match="inference_mode. Use torch.no_grad"):
        pair.graph.step(x, target=y)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks, pytest.warns(match="saved_tensors_hooks"):
        pair.step(x, target=y, ran="threads")
    pair.graph.runtime = "graph"
    with torch.inference_mode(), pytest.raises(PenstockError, match="inference_mode"):
        pair.graph.step(x, target=y)


def test_steps_with_ever_new_shapes_warn_once() -> None:
    pair = pipe_pair(stack())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows in range(4, 24):
            x, y = batch(rows, rows)
            pair.step(x, target=y)
    (one,) = found
    assert re.search("16 steps in a row .* The last two differ in the inputs", str(one.message))
    assert one.filename == __file__.replace(FILE, "support.py")
