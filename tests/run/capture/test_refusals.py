"""What cannot be captured: found, named, warned of once; and the pipe goes on."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from penstock import PenstockError
from penstock.run.capture.watching import Uncapturable, captured_around
from tests.run.capture.support import Twins, batch, emulate, recordings, same_state, stack, twins

FILE = "test_refusals.py"


def steps(pair: Twins, runtimes: str, text: str, **named: Any) -> None:
    """One after the other, g in a graph and t in threads; warned of once."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number, runtime in enumerate(runtimes):
            x, y = batch(number)
            ran = "graph" if runtime == "g" else "threads"
            random.seed(number)
            state = random.getstate()
            pair.step(x, target=y, seed=number, ran=ran, before=lambda: random.setstate(state))  # noqa: B023
    assert [bool(re.search(text, str(one.message))) for one in found] == [True], found
    assert found[0].filename == __file__.replace(FILE, "support.py")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


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
        if captured_around():
            raise ValueError("not while it is captured")
        return x


class Overwhelmed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if captured_around():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


FOUND_AT_CAPTURE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "item": (Asks, r"layer 1 \(Asks\), .*test_refusals.py:\d+: it waits for what the device"),
    "branch": (Branches, r"layer 1 \(Branches\), .*test_refusals.py:\d+: it waits"),
    "mask": (Picks, r"layer 1 \(Picks\), .*test_refusals.py:\d+: it waits .*aten.index.Tensor"),
    "nonzero": (Finds, r"layer 1 \(Finds\), .*test_refusals.py:\d+: it waits .*nonzero"),
    "generator": (OwnGenerator, r"layer 1 \(OwnGenerator\), .*: it draws .* generator of its own"),
    "raises": (OnlyCaptured, r"layer 1 \(OnlyCaptured\), .*ValueError: not while it is captured"),
    "memory": (Overwhelmed, r"layer 1 \(Overwhelmed\), .*OutOfMemoryError: CUDA out of memory"),
}


@pytest.mark.parametrize("name", FOUND_AT_CAPTURE)
def test_found_at_capture_one_warning_and_the_pipe_goes_on(name: str) -> None:
    make, text = FOUND_AT_CAPTURE[name]
    pair = twins(stack(make(), nn.BatchNorm1d(8)), "auto", checkpoint="never")
    own = torch.ones_like(pair.graph[0].weight)
    pair.graph[0].weight.grad, pair.inline[0].weight.grad = own, own.clone()
    steps(pair, "gttt", text)
    assert pair.graph[0].weight.grad is own
    assert recordings(pair.graph) == []
    for pipe in pair.both:
        pipe[1].forward = lambda x: x
    for number in range(3):
        x, y = batch(number)
        pair.step(x, target=y, seed=number)
    assert recordings(pair.graph) == [2]


@pytest.mark.parametrize("name", ["item", "branch", "mask", "nonzero", "generator"])
def test_an_error_if_it_is_insisted_on(name: str) -> None:
    make, text = FOUND_AT_CAPTURE[name]
    pair = twins(stack(make(), nn.BatchNorm1d(8), nn.Dropout(0.1)), checkpoint="never")
    x, y = batch(0)
    pair.step(x, target=y)
    gradients = [p.grad for p in pair.graph.parameters()]
    before, state = [t.clone() for t in gradients if t is not None], torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(Uncapturable, match=f"{text}.*runtime='auto' takes threads"):
            pair.graph.step(x, target=y)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is g for p, g in zip(pair.graph.parameters(), gradients, strict=True))
    assert all(map(torch.equal, before, gradients))
    same_state(*pair.both)
    pair.graph.runtime = "threads"
    pair.step(x, target=y, ran="threads")


def test_what_a_layer_raises_by_itself_is_raised_as_it_is() -> None:
    """A batch that it refuses is no reason not to capture the next one."""

    class Refuses(nn.Module):
        bad = False

        def forward(self, x: Tensor) -> Tensor:
            if type(self).bad:
                raise KeyError("a bad batch")
            return x

    for runtime in ("graph", "auto"):
        pair = twins(stack(Refuses()), runtime)
        x, y = batch(0)
        pair.step(x, target=y)
        Refuses.bad = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(KeyError, match="a bad batch") as found:
                pair.graph.step(x, target=y)
        assert any("stage 0" in note for note in found.value.__notes__)
        Refuses.bad = False
        for number in range(2):
            x, y = batch(number)
            pair.step(x, target=y)
        assert recordings(pair.graph) == [2]


def test_it_is_not_tried_for_ever() -> None:
    tried = 0

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal tried
            if captured_around():
                tried += 1
                raise KeyError("never works")
            return x

    pair = twins(stack(Fails()), "auto")
    steps(pair, "gtttt", "KeyError: 'never works'")
    assert tried == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted(error: type[BaseException]) -> None:
    class Interrupted(nn.Module):
        times = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            if captured_around() and type(self).times == 0:
                type(self).times = 1
                raise error
            return x

    pair = twins(stack(Interrupted()))
    x, y = batch(0)
    pair.step(x, target=y)
    with pytest.raises(error):
        pair.graph.step(x, target=y)
    assert not _get_current_dispatch_mode_stack()
    same_state(*pair.both)
    for number in range(3):
        x, y = batch(number)
        pair.step(x, target=y)
    assert recordings(pair.graph) == [3]


class Counts(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0
        self.table, self.log = {"calls": 0}, [0]

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.calls += 1
        elif self.where == "dict":
            self.table["calls"] += 1
        elif self.where == "list":
            self.log.append(self.log[-1] + 1)
        elif self.where == "random":
            x = x * random.random()
        return x * (self.calls + self.table["calls"] + self.log[-1] + 1)


@pytest.mark.parametrize("where", ["attribute", "dict", "list", "random"])
def test_numbers_in_python(where: str) -> None:
    pair = twins(stack(Counts(where)), "auto", chunks=1)
    names = {"attribute": "'calls'", "dict": "'table'", "list": "'log'"}
    what = f"layer 1 .Counts.: it changes its attribute {names.get(where)}"
    steps(pair, "ggtt", "draws from random" if where == "random" else what)


def test_a_number_that_a_layer_counts_only_at_times_is_counted_once() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on, self.calls = False, 0

        def forward(self, x: Tensor) -> Tensor:
            if captured_around():
                self.calls += 1
            return x

    pair = twins(stack(Sometimes()), "auto", chunks=1)
    x, y = batch(0)
    pair.step(x, target=y)
    with pytest.warns(match=r"layer 1 \(Sometimes\): it changes its attribute 'calls'"):
        pair.step(x, target=y, ran="threads")
    assert pair.graph[1].calls == 0


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return x


class KeepsGraph(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.ones(8, dtype=torch.float64, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hidden[0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Grows, r"layer 1 \(Grows\): its 'seen' is another tensor .*keep its shape"),
        (KeepsGraph, r"layer 1 \(KeepsGraph\): it keeps a tensor with its history as its 'last'"),
        (Unregistered, "a layer learns by a tensor of shape .8,. that is no parameter"),
    ],
)
def test_tensors_that_no_replay_would_make(make: Callable[[], nn.Module], text: str) -> None:
    pair = twins(stack(make()), "auto")
    steps(pair, "gttt" if make is Unregistered else "ggtt", text)
    if make is Unregistered:
        assert torch.equal(pair.graph[1].hidden[0].grad, pair.inline[1].hidden[0].grad)


@pytest.mark.parametrize("zero", [False, True])
def test_sparse_gradients(zero: bool) -> None:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), *stack()).double()
    pair = twins(model, "auto")
    text = "the gradient of 0.weight is a Tensor with layout torch.sparse"
    for number in range(4):
        if zero:
            pair.each(nn.Module.zero_grad)
        ids = torch.randint(10, (11,), generator=torch.Generator().manual_seed(number))
        known = number != (2 if zero else 1)
        with nullcontext() if known else pytest.warns(match=text):
            pair.graph.step(ids, target=batch(number)[1])
        pair.inline.step(ids, target=batch(number)[1])
        mine, other = (pipe[0].weight.grad for pipe in pair.both)
        assert mine.is_sparse
        assert torch.equal(mine.to_dense(), other.to_dense())


def test_a_hook_that_takes_the_gradient_away() -> None:
    """As one does that lets an optimizer step while the backward goes on."""
    pair = twins(stack(), "auto")

    def take(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
        p.grad = None

    for pipe in pair.both:
        pipe[3].weight.register_post_accumulate_grad_hook(take)
    for number in range(4):
        x, y = batch(number)
        pair.step(x, target=y)


def test_a_hook_that_takes_it_away_only_at_times() -> None:
    pair = twins(stack(), "auto")

    def take(p: Tensor) -> None:
        if captured_around():
            p.grad = None

    for pipe in pair.both:
        pipe[3].weight.register_post_accumulate_grad_hook(take)
    steps(pair, "gttt", "the gradient of 3.weight is not added to the one before: a hook takes")


def test_modes_that_no_replay_knows() -> None:
    pair = twins(stack(), "auto")
    x, y = batch(0)
    with torch.inference_mode(), pytest.warns(match="inference_mode: take torch.no_grad"):
        pair.graph.step(x, target=y)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks, pytest.warns(match="hooks on saved tensors"):
        pair.step(x, target=y, ran="threads")
    pair.graph.runtime = "graph"
    with torch.inference_mode(), pytest.raises(PenstockError, match="inference_mode"):
        pair.graph.step(x, target=y)


def test_steps_that_are_all_of_another_kind() -> None:
    pair = twins(stack())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows in range(4, 24):
            x, y = batch(rows, rows)
            pair.step(x, target=y)
    (one,) = found
    assert re.search("16 steps in a row .* the last two differ in the inputs", str(one.message))
    assert one.filename == __file__.replace(FILE, "support.py")


def test_what_layers_make_in_their_first_step() -> None:
    """A table for the longest input so far, say: later steps are captured."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.longest, self.table = 0, torch.ones(1, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.longest:
                self.longest = len(x)
                self.table = torch.arange(len(x), dtype=x.dtype)
            return x + self.table[: len(x), None]

    pair = twins(stack(Lazy()))
    for number in range(5):
        x, y = batch(number)
        pair.step(x, target=y)
    assert recordings(pair.graph) == [3]
