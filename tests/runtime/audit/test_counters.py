"""Counters and other numbers that a layer reads only when they have moved far, or now and then."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from penstock import AuditError, Pipe

ROWS, WIDTH = 8, 4
GROWN = "computes something else once it has grown"
each_door = pytest.mark.parametrize("door", ["call", "step"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def train(layer: nn.Module, door: str = "step", *, is_traced: bool = False, steps: int = 1) -> None:
    """Train a model with this layer. The dtype is that of its parameters."""
    torch.manual_seed(0)
    dtype = next(layer.parameters()).dtype
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)).to(dtype)
    model = Wrapped(layers) if is_traced else layers
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "checkpoint": "never"}
    batch = torch.randn(ROWS, WIDTH, dtype=dtype)
    if is_traced:
        options |= {"example": batch, "balance": "parameters"}
    pipe = Pipe(model, 4, stages=2, devices=["cpu"] * 2, schedule="1f1b", **options)
    for _ in range(steps):
        target = torch.randn(ROWS, WIDTH, dtype=dtype)
        if door == "step":
            pipe.step(batch, target=target)
        else:
            functional.mse_loss(pipe(batch), target).backward()


class Wrapped(nn.Module):
    """A model that is no Sequential."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.middle, self.last = layers

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


class Layer(nn.Module):
    """A layer that doubles its output when a function of the layer says so."""

    def __init__(
        self, decide: Callable[[Any], Any], dtype: torch.dtype = torch.float64, **attributes: Any
    ) -> None:
        super().__init__()
        self.linear, self.decide = nn.Linear(WIDTH, WIDTH, dtype=dtype), decide
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * (2 if self.decide(self) else 1)


# ---- every so many calls ------------------------------------------------------------------------


def count(layer: Any, step: Any = 1) -> Any:
    """Count a call of a layer, and return how many there were."""
    layer.n += step
    return layer.n


def count_later(layer: Any) -> Any:
    """Count a call of a layer, and return how many there were before."""
    before = layer.n + 0
    layer.n += 1
    return before


@each_door
@pytest.mark.parametrize("is_traced", [False, True], ids=["Sequential", "any model"])
@pytest.mark.parametrize("period", [7, 13, 100])
@pytest.mark.parametrize("count_call", [count, count_later])
def test_layer_that_acts_every_few_calls_is_found(
    count_call: Callable[[Any], Any], period: int, is_traced: bool, door: str
) -> None:
    layer = Layer(lambda self: count_call(self) % period == 0, n=1)
    with pytest.raises(AuditError, match=GROWN):
        train(layer, door, is_traced=is_traced)


@each_dtype
@pytest.mark.parametrize("count_call", [count, count_later])
@pytest.mark.parametrize("counter", ["int64", "int32", "float32", "plain"])
def test_counter_in_a_tensor_that_is_read_every_few_calls_is_found(
    counter: str, count_call: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    layer = Layer(lambda self: count_call(self) % 7 == 0, dtype)
    if counter == "plain":
        layer.n = torch.ones((), dtype=torch.int64)
    else:
        layer.register_buffer("n", torch.ones((), dtype=getattr(torch, counter)))
    with pytest.raises(AuditError, match=GROWN):
        train(layer)


def count_in_dict(layer: Any) -> Any:
    layer.counts["calls"] += 1
    return layer.counts["calls"]


def count_share(layer: Any) -> Any:
    layer.share += 0.01
    return layer.share


def restart(layer: Any) -> Any:
    """Go through the numbers below 10, and begin again."""
    layer.n = (layer.n * 3 + 1) % 10
    return layer.n


TESTS: dict[str, Callable[[Any], Any]] = {
    "one call": lambda self: count(self) == 7,
    "one call far ahead": lambda self: count(self) == 1_000_000,
    "window": lambda self: 6 < count(self) < 12,
    "window from the other end": lambda self: 12 > count_later(self) >= 6,
    "every seven calls, one in the middle": lambda self: count(self) % 7 == 5,
    "every second of twelve": lambda self: divmod(count(self), 12)[1] // 2 == 4,
    "after a limit, now and then": lambda self: count(self) > 9 and self.n % 5 == 2,
    "one of a list": lambda self: count(self) in [9, 40],
    "bits": lambda self: count(self) >> 3 & 1,
    "not zero": lambda self: not (count(self) - 8),
    "rounded": lambda self: round(count(self) / 3) == 4,
    "fraction": lambda self: 1.195 < count_share(self) < 1.205,
    "power": lambda self: 0.1 < 0.8 ** count(self) < 0.12,
    "dict": lambda self: count_in_dict(self) == 7,
    "number on the left": lambda self: 0.5 * count(self) == 4 or 9.5 < self.n < 10.5,
    "dim": lambda self: torch.ones(4).sum(self.n * 0) == 4 and count(self) == 7,
    "two counters": lambda self: count(self) - count_in_dict(self) * 2 == -9,
    "numbers that go round": lambda self: restart(self) == 0,
}


@pytest.mark.parametrize("is_traced", [False, True], ids=["Sequential", "any model"])
@pytest.mark.parametrize("name", TESTS)
def test_layer_that_acts_in_few_calls_is_found(name: str, is_traced: bool) -> None:
    layer = Layer(TESTS[name], n=1, share=1.0, counts=Counter())
    with pytest.raises(AuditError, match=GROWN):
        train(layer, is_traced=is_traced)


NO_TESTS: dict[str, Callable[[Any], Any]] = {
    "never": lambda self: count(self) % 4 == 7,
    "always": lambda self: count(self) < 0,
    "what only a log reads": lambda self: count(self) == 7 and self.log.append(self.n),
    "numbers that go round": lambda self: restart(self) == 5,
    "type": lambda self: type(count(self)) is not int,
    "text": lambda self: f"{count(self)}" == "x",
    "table that ends": lambda self: count(self) > 9 and self.table[self.n],
}


@each_door
@pytest.mark.parametrize("name", NO_TESTS)
def test_comparison_of_a_counter_that_makes_no_difference_is_left_alone(
    name: str, door: str
) -> None:
    layer: Any = Layer(NO_TESTS[name], n=1, counts=Counter(), log=[], table=[0] * 9)
    train(layer, door)
    assert type(layer.n) is int
    if name != "numbers that go round":
        assert layer.n == 1 + 4  # micro-batches


def test_list_whose_length_is_read_every_few_calls_is_found() -> None:
    def decide(self: Any) -> bool:
        self.history.append(1.0)
        return len(self.history) % 7 == 0

    with pytest.raises(AuditError, match=GROWN):
        train(Layer(decide, history=[]))


def test_small_counter_of_eight_bits_is_found() -> None:
    layer = Layer(lambda self: count(self) > 100)
    layer.register_buffer("n", torch.ones((), dtype=torch.uint8))
    with pytest.raises(AuditError, match=GROWN):
        train(layer)


# ---- numbers that are not whole ------------------------------------------------------------------


@each_door
@pytest.mark.parametrize("is_traced", [False, True], ids=["Sequential", "any model"])
@pytest.mark.parametrize("step", [0.125, Fraction(1, 8), Decimal("0.125"), numpy.float64(0.125)])
def test_warm_up_by_a_number_that_is_not_whole_is_found(
    step: Any, is_traced: bool, door: str
) -> None:
    layer = Layer(lambda self: count(self, step) > 0.8, n=0 * step)
    with pytest.raises(AuditError, match=GROWN):
        train(layer, door, is_traced=is_traced)


@each_dtype
@pytest.mark.parametrize("is_buffer", [True, False])
def test_warm_up_by_a_tensor_is_found(is_buffer: bool, dtype: torch.dtype) -> None:
    layer = Layer(lambda self: count(self, 0.125) > 0.8, dtype)
    number = torch.zeros((), dtype=dtype)
    if is_buffer:
        layer.register_buffer("n", number)
    else:
        layer.n = number
    with pytest.raises(AuditError, match=GROWN):
        train(layer)


@pytest.mark.parametrize("limit", [-3.0, 0.25, 1e-3])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_number_that_falls_below_a_limit_is_found(is_buffer: bool, limit: float) -> None:
    def decide(self: Any) -> bool:
        if limit < 0:
            self.n -= 0.125
            return bool(self.n < limit)
        self.n *= 0.9
        return bool(abs(self.n) < limit)

    layer = Layer(decide) if is_buffer else Layer(decide, n=1.0)
    if is_buffer:
        layer.register_buffer("n", torch.ones((), dtype=torch.float64))
    with pytest.raises(AuditError, match=GROWN):
        train(layer)


def test_countdown_is_found() -> None:
    with pytest.raises(AuditError, match=GROWN):
        train(Layer(lambda self: count(self, -1) <= 0, n=100))


def compute_once(self: Any) -> bool:
    if not self.scale:
        self.scale = float(self.linear.in_features) ** -0.5
    self.linear.weight * self.scale
    return bool(self.scale != 0.5)  # that of four features


def log_loss(self: Any) -> bool:
    self.loss = 0.9 * self.loss + 0.1 * float(self.linear.weight.detach().norm())
    return False


def keep_average(self: Any) -> bool:
    self.average.lerp_(self.linear.weight.detach(), 0.1)
    self.number.lerp_(self.linear.weight.detach().mean(), 0.1)
    return False


def overwrite(self: Any) -> bool:
    self.largest = float(self.linear.weight.detach().abs().max()) + count(self)
    return bool(self.largest > 1e5 + self.n)


def keep_mask(self: Any) -> bool:
    """Make a mask when rows have another length, as attention does."""
    if self.number != 3.0:
        self.average, self.number = torch.full((3,), 0.25), torch.tensor(3.0)
    return bool(self.average.sum() != 0.75)


def fill_table(self: Any) -> bool:
    """Fill a table of positions in the first call, as one of rotary embeddings is."""
    if not self.n:
        self.n = self.linear.in_features
        self.average.copy_(torch.arange(WIDTH).expand(WIDTH, WIDTH))
    return bool(self.average[0, 1] != 1 or self.n != WIDTH)


def note_time(self: Any) -> bool:
    self.loss += time.perf_counter() - self.largest
    self.largest = time.perf_counter()
    self.n = time.time_ns()
    return False


def keep_table(self: Any) -> bool:
    """Compute a table in the first call, as those of positions are."""
    if not self.tables:
        self.tables = [0.5] * 4
        self.array += 2.5
    return len(self.tables) != 4 or bool(self.array[0] != 2.5)


@each_door
@pytest.mark.parametrize(
    "decide",
    [compute_once, log_loss, keep_average, overwrite, keep_mask, fill_table, note_time, keep_table],
    ids=lambda f: f.__name__,
)
def test_numbers_that_later_results_do_not_depend_on_are_left_alone(
    decide: Callable[[Any], bool], door: str
) -> None:
    layer = Layer(decide, scale=0.0, loss=0.0, largest=0.0, n=0, tables=None, array=numpy.zeros(3))
    layer.register_buffer("average", torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    layer.register_buffer("number", torch.zeros((), dtype=torch.float64))
    train(layer, door)


# ---- places -------------------------------------------------------------------------------------


class Box:
    """An object with a counter."""

    __slots__ = ("calls", "inner")

    def __init__(self) -> None:
        self.calls, self.inner = 0, {"calls": 0}


def count_in(place: str) -> Callable[[], int]:
    """Return a function that counts its calls in some place."""
    numbers: Any = {
        "array": lambda: numpy.zeros(1, int),
        "float array": lambda: numpy.zeros(()),
        "list": lambda: [0],
        "tuple of a list": lambda: ([0],),
        "dict of a list": lambda: {"a": [0]},
    }
    if place in numbers:
        value = numbers[place]()
        inner = value["a"] if isinstance(value, dict) else value
        inner = inner[0] if isinstance(inner, tuple) else inner

        def count_number() -> int:
            inner = value["a"] if isinstance(value, dict) else value
            inner = inner[0] if isinstance(inner, tuple) else inner
            inner[... if place == "float array" else 0] += 1
            return int(inner[() if place == "float array" else 0])

        return count_number
    if place in ("set", "deque", "tuple of a growing list"):
        collection: Any = {"set": set(), "deque": deque(), "tuple of a growing list": ([],)}[place]

        def count_entries() -> int:
            entries = collection[0] if isinstance(collection, tuple) else collection
            (entries.add if isinstance(entries, set) else entries.append)(len(entries))
            return len(entries)

        return count_entries
    if place == "function":

        def count_calls() -> int:
            count_calls.calls += 1  # type: ignore[attr-defined]
            return int(count_calls.calls)  # type: ignore[attr-defined]

        count_calls.calls = 0  # type: ignore[attr-defined]
        return count_calls
    box = Box()

    def count_in_box() -> int:
        if place == "slot":
            box.calls += 1
            return box.calls
        box.inner["calls"] += 1
        return box.inner["calls"]

    return count_in_box


PLACES = [
    *("array", "float array", "list", "tuple of a list", "dict of a list", "set", "deque"),
    *("tuple of a growing list", "function", "slot", "dict in an object"),
]


@each_door
@pytest.mark.parametrize("place", PLACES)
def test_counter_in_a_closure_is_found(place: str, door: str) -> None:
    count_call = count_in(place)
    with pytest.raises(AuditError, match=GROWN):
        train(Layer(lambda _: count_call() > 6), door)


ATTRIBUTES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "array": (numpy.zeros(1, int), lambda self: count_item(self.state)),
    "numpy number": (numpy.int64(0), lambda self: count_attribute(self)),
    "list": ([0], lambda self: count_item(self.state)),
    "dict": ({0: 0}, lambda self: count_item(self.state)),
    "tuple of a list": (([0],), lambda self: count_item(self.state[0])),
    "deque": (deque(), lambda self: count_entry(self.state)),
    "bounded deque": (deque(maxlen=7), lambda self: count_entry(self.state)),
    "set": (set(), lambda self: count_entry(self.state)),
    "set of names": ({"a"}, lambda self: count_entry(self.state, str)),
    "dict of calls": ({}, lambda self: count_entry(self.state)),
    "dict of names": ({"a": 0}, lambda self: count_entry(self.state, str)),
    "tuple of a set": ((set(),), lambda self: count_entry(self.state[0])),
    "object": (SimpleNamespace(calls=0), lambda self: count_attribute(self.state, "calls")),
    "dict in an object": (
        SimpleNamespace(inner={"calls": 0}),
        lambda self: count_item(self.state.inner, "calls"),
    ),
}


def count_item(state: Any, key: Any = 0) -> Any:
    state[key] += 1
    return state[key]


def count_attribute(owner: Any, name: str = "state") -> Any:
    setattr(owner, name, getattr(owner, name) + 1)
    return getattr(owner, name)


def count_entry(state: Any, kind: Callable[[int], Any] = int) -> int:
    if isinstance(state, dict):
        state[kind(len(state))] = 0.5
    else:
        (state.add if isinstance(state, set) else state.append)(kind(len(state)))
    return len(state)


@pytest.mark.parametrize("is_traced", [False, True], ids=["Sequential", "any model"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_counter_in_an_attribute_is_found(name: str, is_traced: bool) -> None:
    state, count_call = copy.deepcopy(ATTRIBUTES[name])
    with pytest.raises(AuditError, match=GROWN):
        train(Layer(lambda self: count_call(self) > 6, state=state), is_traced=is_traced)


@each_door
@pytest.mark.parametrize("is_traced", [False, True], ids=["Sequential", "any model"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_counter_that_is_not_read_is_left_alone(name: str, is_traced: bool, door: str) -> None:
    """It has counted the four micro-batches, and nothing else."""
    state, count_call = copy.deepcopy(ATTRIBUTES[name])
    layer = Layer(lambda self: count_call(self) < 0, state=state)
    before = count_call(copy.deepcopy(layer))
    train(layer, door, is_traced=is_traced)
    assert count_call(layer) == before + 4


@pytest.mark.parametrize("place", PLACES)
def test_counter_in_a_closure_that_is_not_read_is_left_alone(place: str) -> None:
    count_call = count_in(place)
    train(Layer(lambda _: count_call() < 0))
    assert count_call() == 5


class Counts(nn.Module):
    """A layer that counts in default arguments, which an audit does not replace by copies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, box: Any = Box(), numbers: Any = ([0], [Box()])) -> Any:  # noqa: B008
        numbers[0][0] += 1
        numbers[1][0].inner["calls"] += 1
        box.inner["calls"] += 1
        box.calls += 1
        return self.linear(x)


def test_counters_in_default_arguments_are_put_back() -> None:
    box, numbers = Counts.forward.__defaults__ or ()
    train(Counts())
    assert (numbers[0][0], numbers[1][0].inner["calls"], box.inner["calls"]) == (4, 4, 4)
    assert box.calls < 1000  # slots are not put back


class KeepsWeight(nn.Module):
    """A layer that keeps one of two weights, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([*torch.randn(2, 1024, WIDTH, WIDTH, dtype=torch.float64)])
        self.register_buffer("kept", torch.zeros(1024, WIDTH, WIDTH, dtype=torch.float64))
        self.kept_too: Any = torch.zeros(1024, WIDTH, WIDTH, dtype=torch.float64)
        self.array: Any = numpy.zeros((1024, WIDTH, WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        weight = self.weights[self.calls % 2]
        self.kept, self.kept_too, self.array = (weight.detach(),) * 2 + (weight.detach().numpy(),)
        return x @ (self.weights[0].mean(0) + self.weights[1].mean(0))


@pytest.mark.parametrize("parameter_copies", [True, False], ids=["small", "large"])
def test_weights_that_a_layer_keeps_are_not_written_to(
    parameter_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept weight shares memory with the parameter."""
    if not parameter_copies:
        monkeypatch.setattr("penstock.runtime.audit.write_log._SMALL_BYTES", 0)
    layer = KeepsWeight()
    before = copy.deepcopy(layer.state_dict())
    train(layer)
    for name in ("weights.0", "weights.1"):
        assert torch.equal(layer.state_dict()[name], before[name])


# ---- state that has converged --------------------------------------------------------------------


def make_spectral(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    if kind == "own":
        return PowerIteration(linear)
    make: Any = old_spectral_norm if kind == "old" else parametrizations.spectral_norm
    layer: nn.Module = make(linear)
    return layer


class PowerIteration(nn.Module):
    """A spectral norm that a user has written, which makes a new vector in each forward."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("u", torch.ones(WIDTH, dtype=linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        with torch.no_grad():
            v = functional.normalize(weight.T @ self.u, dim=0)
            self.u: Any = functional.normalize(weight @ v, dim=0)
        return functional.linear(x, weight / (self.u @ weight @ v), self.linear.bias)


def converge(layer: nn.Module, dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=dtype)
    with torch.no_grad():
        for _ in range(3000):
            layer(x)


@each_door
@each_dtype
@pytest.mark.parametrize("is_traced", [False, True], ids=["Sequential", "any model"])
@pytest.mark.parametrize("is_converged", [False, True], ids=["new", "converged"])
@pytest.mark.parametrize("kind", ["parametrization", "old", "own"])
def test_spectral_norm_is_found(
    kind: str, is_converged: bool, is_traced: bool, dtype: torch.dtype, door: str
) -> None:
    """The vectors of a trained model do not move any more until the optimizer has stepped."""
    layer = make_spectral(kind, dtype)
    if is_converged:
        converge(layer, dtype)
    with pytest.raises(AuditError, match="and that of the next one computes with it"):
        train(layer, door, is_traced=is_traced)


@pytest.mark.parametrize("kind", ["parametrization", "old"])
def test_spectral_norm_in_evaluation_mode_is_equal(kind: str) -> None:
    layer = make_spectral(kind, torch.float64)
    converge(layer, torch.float64)
    train(layer.eval(), steps=2)


class Rewrites(nn.Module):
    """A layer that writes numbers into its buffers which they have already."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for name in ("limited", "copied", "normed", "fixed", "average"):
            self.register_buffer(name, torch.ones(WIDTH, dtype=torch.float64) / WIDTH)

    def forward(self, x: Tensor) -> Any:
        buffers: Any = self
        with torch.no_grad():
            buffers.limited.clamp_(0.0, 1.0)
            buffers.copied.copy_(torch.arange(WIDTH))
            buffers.normed = buffers.normed / buffers.normed.sum()
            buffers.fixed.lerp_(x.mean(0), 0.0)
            buffers.average.lerp_(torch.ones(WIDTH, dtype=x.dtype) / WIDTH, 0.1)
        y = self.linear(x) * buffers.limited.clone() * buffers.normed
        return y + buffers.copied.clone() + buffers.fixed.clone()


@each_door
def test_buffers_that_are_rewritten_with_the_same_numbers_are_left_alone(door: str) -> None:
    layer = Rewrites()
    layer.copied = torch.arange(WIDTH, dtype=torch.float64)
    train(layer, door, steps=2)


# ---- cost ---------------------------------------------------------------------------------------


class Runs(nn.Module):
    """A layer that notes outside of the model how often it runs."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), change
        self.n, self.p = 0, 0.0
        self.register_buffer("average", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        os.environ["PENSTOCK_TEST_RUNS"] += "."
        self.change(self)
        return self.linear(x)


def test_only_layers_that_count_run_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {}
    for name, change in {
        "nothing": lambda self: None,
        "average": lambda self: self.average.add_(self.linear.weight.detach()[0]),
        "object": lambda self: setattr(self, "last", object()),
        "counter": lambda self: count(self),
        "number": lambda self: setattr(self, "p", self.p + 0.1),
    }.items():
        monkeypatch.setenv("PENSTOCK_TEST_RUNS", "")
        train(Runs(change))
        runs[name] = len(os.environ["PENSTOCK_TEST_RUNS"])
    # The average is not looked at twice, as nothing is read below a limit of it.
    assert runs == {"nothing": 7, "object": 15, "average": 20, "counter": 25, "number": 25}
