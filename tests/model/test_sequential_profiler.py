from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError, BatchShapeError
from penstock.microbatch import Chunk, NoChunk
from penstock.model.sequential_profiler import measure_layer_bytes, measure_layer_times
from penstock.stage.skip import Namespace, SkipKey, Skips, pop, skippable, stash, use_skips
from tests.support import Marked

Measure = Callable[..., list[float]]
brief_times = partial(measure_layer_times, timeout=0.0)  # one warm-up pass and one measured pass
both = pytest.mark.parametrize(
    "measure", [brief_times, measure_layer_bytes], ids=["times", "bytes"]
)


def nothing() -> None: ...


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class SumOfPair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class Drop(nn.Module):
    """Returns the first output of an LSTM; the second one is a tuple itself."""

    def forward(self, sequence: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return sequence


class Choice(nn.Module):
    """A layer with an integer output, after which nothing needs a gradient."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"choice": x.argmax(1)}


class Pick(nn.Module):
    def forward(self, picked: dict[str, Tensor]) -> Tensor:
        return picked["choice"].float()


@skippable(stash=["far"])
class Top(nn.Module):
    """A layer that stashes the result of `far`, on which its output does not depend."""

    def __init__(self, far: nn.Module) -> None:
        super().__init__()
        self.far = far

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", self.far(x))
        return x


@skippable(pop=["far"])
class Bottom(nn.Module):
    """A layer that applies `near` to what it pops."""

    def __init__(self, near: nn.Module) -> None:
        super().__init__()
        self.near = near

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        far: Tensor = self.near((yield pop("far")))
        return x.detach() * far


class Watched(nn.Module):
    """Calls one function in its forward and one in its backward, also after deepcopy."""

    def __init__(self, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        super().__init__()
        self.calls = forward, backward

    def __deepcopy__(self, memo: object) -> Watched:
        return Watched(*self.calls)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0]()
        watched: Tensor = Marked.apply(x, self.calls[1])  # type: ignore[no-untyped-call]
        return watched


class Backwards(Watched):
    """A layer that counts its backwards."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__(nothing, self._add)

    def _add(self) -> None:
        self.count += 1


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("no")


def convnet() -> list[nn.Module]:
    return [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5),
    ]


# ---- times and bytes ----------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("layers", "example", "unpack"),
    [
        (convnet(), (torch.randn(2, 3, 6, 6),), False),
        ([nn.ReLU(inplace=True), nn.Tanh()], (torch.randn(4, 3, requires_grad=True),), False),
        ([nn.Linear(3, 3), nn.ReLU(inplace=True)], (torch.randn(4, 3),), False),
        ([nn.Embedding(9, 3), nn.Linear(3, 3)], (torch.arange(8),), False),
        ([nn.Linear(3, 3), Choice(), Pick(), nn.Unflatten(0, (2, 2))], (torch.randn(4, 3),), False),
        ([nn.ReLU(), nn.Tanh()], (torch.randn(4, 3),), False),
        ([Sum(), Twice(), Sum()], (torch.ones(3), 1.0), True),
        ([Sum(), Twice(), SumOfPair()], (torch.ones(3), torch.tensor(1.0)), False),
        ([nn.LSTM(3, 3), Drop(), nn.Linear(3, 3)], (torch.ones(2, 4, 3),), True),
        (
            [nn.Linear(3, 3), Top(nn.Tanh()), Bottom(nn.ReLU(inplace=True))],
            (torch.randn(4, 3),),
            False,
        ),
        ([Top(Choice()), Bottom(Pick())], (torch.randn(4, 4),), False),
        ([], (torch.ones(3),), False),
    ],
    ids=lambda value: "-".join(type(l).__name__ for l in value) if isinstance(value, list) else "",
)
def test_profiler_measures_every_layer(
    measure: Measure, layers: Sequence[nn.Module], example: tuple[object, ...], unpack: bool
) -> None:
    found = measure(layers, example, unpack=unpack)
    assert len(found) == len(layers)
    assert all(number >= 0 for number in found)


@both
def test_profiler_leaves_layers_and_example_unchanged(measure: Measure) -> None:
    layers = convnet()
    layers[3].eval()
    example = torch.randn(4, 3, 6, 6, requires_grad=True)
    model = nn.Sequential(*layers)
    model(example).sum().backward()
    gradients = [p.grad for p in model.parameters()]

    def everything() -> list[Tensor]:
        grads = [g for g in (*gradients, example.grad) if g is not None]
        return [t.clone() for t in (*model.state_dict().values(), *grads, example.detach())]

    before, modes = everything(), [m.training for m in model.modules()]
    measure([nn.ReLU(inplace=True), *layers], (example,))
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


@both
def test_profiler_restores_the_random_state(measure: Measure) -> None:
    before = torch.get_rng_state()
    measure([nn.Dropout(0.5)], (torch.ones(8),))
    assert torch.equal(torch.get_rng_state(), before)


@both
def test_profiler_keeps_skips_of_the_caller(measure: Measure) -> None:
    key = SkipKey("", "far")
    mine = Skips()
    mine.stash(key, "mine", shared=False)
    with use_skips(mine):
        measure([Top(nn.Tanh()), Bottom(nn.Tanh())], (torch.ones(3),))
        with pytest.raises(ZeroDivisionError):
            measure([Top(nn.Tanh()), Broken()], (torch.ones(3),))
    assert mine.pop(key) == "mine"


@both
def test_profiler_separates_skips_by_namespace(measure: Measure) -> None:
    a, b = Namespace(), Namespace()
    layers: list[Any] = [Top(nn.Tanh()), Top(Choice()), Bottom(Pick()), Bottom(nn.Tanh())]
    for layer, namespace in zip(layers, (a, b, b, a), strict=True):
        layer.isolate(namespace)
    assert len(measure(layers, (torch.ones(2, 2),))) == 4


@both
def test_profiler_error_names_the_layer(measure: Measure) -> None:
    with pytest.raises(ZeroDivisionError) as error:
        measure([nn.Tanh(), Broken()], (torch.ones(3),))
    assert error.value.__notes__ == [
        "This happened while Penstock measured layer 1 (Broken) on the example."
    ]


# ---- times --------------------------------------------------------------------------------


class Clock:
    """A clock that advances only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def takes(self, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.now += seconds

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("sequential_profiler", "profiler"):
        monkeypatch.setattr(f"penstock.model.{module}.perf_counter", lambda: clock.now)
    return clock


def test_layer_time_includes_forward_and_backward(clock: Clock) -> None:
    layers = [Watched(clock.takes(1.0), clock.takes(2.0)), Watched(clock.takes(50.0), nothing)]
    assert brief_times(layers, (torch.ones(3, requires_grad=True),)) == [3.0, 50.0]


def test_layer_times_repeat_until_the_timeout(clock: Clock) -> None:
    passes: list[None] = []
    layer = Watched(clock.takes(1.0), lambda: passes.append(None))
    measure_layer_times([layer], (torch.ones(3, requires_grad=True),), timeout=9.5)
    assert len(passes) == 10


def test_layer_time_is_the_median_without_the_first_pass(clock: Clock) -> None:
    seconds = iter([900.0, 1.0, 70.0, 2.0])
    layer = Watched(lambda: clock.takes(next(seconds))(), nothing)
    assert measure_layer_times([layer], (torch.ones(3),), timeout=972.5) == [2.0]


def test_layer_times_run_a_backward_in_each_pass() -> None:
    layer = Backwards()
    brief_times([nn.Linear(3, 3), layer], (torch.ones(2, 3),))
    assert layer.count == 2


def test_layer_times_run_backwards_in_the_calling_thread() -> None:
    multithreading: list[bool] = []
    enabled = torch._C._is_multithreading_enabled
    layer = Watched(nothing, lambda: multithreading.append(enabled()))
    brief_times([layer], (torch.ones(3, requires_grad=True),))
    assert multithreading == [False, False]
    assert enabled()


def test_layer_times_stop_each_backward_at_its_layer() -> None:
    layer = Backwards()
    brief_times([layer, nn.Tanh(), nn.Tanh()], (torch.ones(3, requires_grad=True),))
    assert layer.count == 2


def test_layer_times_of_a_frozen_layer_include_its_backward() -> None:
    frozen = nn.Sequential(layer := Backwards(), nn.Linear(3, 3).requires_grad_(False))
    brief_times([nn.Linear(3, 3), frozen], (torch.ones(2, 3),))
    assert layer.count == 2


def test_layer_times_give_no_gradient_to_borrowed_parameters() -> None:
    layer, parameter = Backwards(), torch.ones(3, requires_grad=True)

    class Borrows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            borrowed: Tensor = layer(x * parameter)
            return borrowed

    brief_times([Borrows()], (torch.ones(2, 3),))
    assert layer.count == 0
    assert parameter.grad is None


def test_profiler_frees_activations_before_the_next_layer() -> None:
    class Token:
        def __call__(self) -> None: ...

    tokens: list[ReferenceType[Token]] = []
    alive: list[bool] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            token = Token()
            tokens.append(ref(token))
            kept: Tensor = Marked.apply(x, token)  # type: ignore[no-untyped-call]
            return kept

    look = Watched(lambda: alive.append(tokens[-1]() is not None), nothing)
    measure_layer_bytes([nn.Linear(3, 3), Keeps(), look, look], (torch.ones(2, 3),))
    assert alive == [False, False]


def test_layer_times_without_gradients_run_no_backward() -> None:
    layer = Backwards()
    brief_times([layer, nn.Linear(3, 3)], (torch.ones(2, 3),))
    assert layer.count == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layer_times_run_backwards_under_no_grad(mode: Callable[[], Any]) -> None:
    layer = Backwards()
    with mode():
        brief_times([nn.Linear(3, 3), layer], (torch.ones(2, 3),))
    assert layer.count == 2


@pytest.mark.parametrize("end", [0, 1])
def test_layer_times_run_a_backward_at_both_ends_of_a_skip(end: int) -> None:
    """The tensors between neighbouring layers do not depend on the skip."""
    layer = Backwards()
    ends = [nn.Identity(), nn.Identity()]
    ends[end] = layer  # type: ignore[call-overload]
    brief_times([nn.Linear(3, 3), Top(ends[0]), Bottom(ends[1])], (torch.ones(2, 3),))
    assert layer.count == 2


# ---- bytes --------------------------------------------------------------------------------

FLOAT = 4


def test_layer_bytes_are_activations_plus_parameters() -> None:
    layers = [nn.Linear(4, 8), nn.Sigmoid(), nn.Tanh(), nn.Linear(8, 2, bias=False)]
    inputs, hidden = 10 * 4 * FLOAT, 10 * 8 * FLOAT
    assert measure_layer_bytes(layers, (torch.ones(10, 4),), param_scale=3.0) == [
        inputs + 3 * (4 * 8 + 8) * FLOAT,
        hidden,
        hidden,
        3 * 8 * 2 * FLOAT,  # its input is the output that the Tanh keeps
    ]


@pytest.mark.parametrize(
    ("chunks", "rows"), [(1, 10), (2, 5), (3, 4), (10, 1), (99, 1)], ids=lambda n: str(n)
)
def test_layer_bytes_count_one_micro_batch(chunks: int, rows: int) -> None:
    example = torch.ones(10, 4)
    assert measure_layer_bytes([nn.Linear(4, 1)], (example,), chunks=chunks, param_scale=0.0) == [
        rows * 4 * FLOAT
    ]


def test_layer_bytes_split_only_tensors_with_rows() -> None:
    layers = [Sum(), nn.Linear(4, 1)]
    example = (torch.ones(10, 4), torch.tensor(1.0))
    assert measure_layer_bytes(layers, example, chunks=5, param_scale=0.0) == [0, 2 * 4 * FLOAT]


@pytest.mark.parametrize(
    "layers",
    [
        convnet(),
        [
            nn.Conv2d(3, 3, 1),
            nn.ReLU(),
            nn.Conv2d(3, 3, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 3, 1),
        ],
        [nn.Conv2d(3, 3, 1), Top(nn.Sigmoid()), nn.Conv2d(3, 3, 1), nn.Tanh(), Bottom(nn.Tanh())],
    ],
)
def test_layer_bytes_sum_to_those_of_the_whole_model(layers: list[nn.Module]) -> None:
    example = (torch.randn(2, 3, 6, 6),)
    (whole,) = measure_layer_bytes([nn.Sequential(*layers)], example)
    assert sum(measure_layer_bytes(layers, example)) == whole


def test_layer_bytes_do_not_count_buffers() -> None:
    norm = nn.BatchNorm1d(4, affine=False).eval()
    assert measure_layer_bytes([norm], (torch.ones(10, 4, requires_grad=True),)) == [10 * 4 * FLOAT]


def test_layer_bytes_depend_on_the_training_mode() -> None:
    example = (torch.ones(10, 4, requires_grad=True),)
    (training,) = measure_layer_bytes([nn.Dropout(0.5)], example)
    (evaluating,) = measure_layer_bytes([nn.Dropout(0.5).eval()], example)
    assert training > evaluating == 0


def test_layer_bytes_of_frozen_layers_are_zero() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert measure_layer_bytes([frozen, nn.Tanh()], (torch.ones(10, 4),), param_scale=0.0) == [0, 0]


def test_layer_bytes_on_another_device() -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)]
    example = (torch.ones(10, 4),)
    assert measure_layer_bytes(layers, example, device="meta") == measure_layer_bytes(
        layers, example
    )
    assert {p.device.type for layer in layers for p in layer.parameters()} == {"cpu"}


def test_layer_bytes_refuse_zero_chunks() -> None:
    with pytest.raises(ArgumentError, match="chunks=0: a batch is split into at least one"):
        measure_layer_bytes([nn.Tanh()], (torch.ones(3),), chunks=0)


# ---- on a GPU -----------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both
def test_profiler_on_a_gpu_keeps_its_random_state(measure: Measure) -> None:
    before = torch.cuda.get_rng_state()
    layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)]
    assert len(measure(layers, (torch.ones(10, 4),), device="cuda")) == 3
    assert torch.equal(torch.cuda.get_rng_state(), before)


def sleep() -> None:
    torch.cuda._sleep(100_000_000)  # cycles: 30 ms at least


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("calls", [(sleep, nothing), (nothing, sleep)], ids=["forward", "backward"])
def test_layer_times_on_a_gpu_measure_kernels_not_launches(
    calls: tuple[Callable[[], object], Callable[[], object]],
) -> None:
    layers = [nn.Tanh(), Watched(*calls), nn.Tanh()]
    example = torch.ones(3, requires_grad=True)
    before, sleeper, after = brief_times(layers, (example,), device="cuda")
    assert sleeper > 0.02 > max(before, after)


def test_profiler_splits_an_example_like_a_batch() -> None:
    """A mask was split on dim 0, and NoChunk was not understood."""
    seen = []

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
            seen.append((tuple(x.shape), tuple(mask.shape), tuple(table.shape)))
            return x

    example = torch.ones(8, 4), NoChunk(torch.ones(4, 4)), Chunk(torch.ones(2, 8), dim=1)
    measure_layer_bytes([Masked()], example, chunks=4)
    measure_layer_times([Masked()], example, timeout=0.0)
    assert seen[0] == ((2, 4), (4, 4), (2, 2))
    assert set(seen[1:]) == {((8, 4), (4, 4), (2, 8))}
    with pytest.raises(BatchShapeError, match=r"input 1, of shape \(4, 4\), has size 4 on dim 0"):
        measure_layer_bytes([Masked()], (torch.ones(8, 4), torch.ones(4, 4)), chunks=4)
