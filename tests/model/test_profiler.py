from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.device import accelerator
from penstock.device.accelerator import TimedWork
from penstock.errors import ArgumentError, BatchShapeError
from penstock.microbatch import Chunk, NoChunk
from penstock.model import profiler as measuring
from penstock.model.profiler import (
    ModuleCall,
    _find_median,
    measure_layer_bytes,
    measure_layer_times,
    measure_unit_layers,
    profile_call,
    profile_calls,
    profile_layers,
)
from penstock.model.traced.traced_partition import UnitCost
from penstock.stage.aux_loss import add_loss
from penstock.stage.skip import Namespace, SkipKey, Skips, pop, skippable, stash, use_skips
from penstock.stage.weight_grad import accumulate_weight_grads
from tests.support import Do, Marked

FLOAT = 4


def nothing() -> None: ...


class Watched(nn.Module):
    """A layer that calls one function in its forward and one in its backward."""

    def __init__(self, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        super().__init__()
        self.calls = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0]()
        watched: Tensor = Marked.apply(x, self.calls[1])  # type: ignore[no-untyped-call]
        return watched


def needing(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# ---- seconds --------------------------------------------------------------------------------


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
    for module in (measuring, accelerator):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    return clock


def test_profile_call_times_forward_input_grad_and_weight_grad(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferred_counts: list[int] = []

    def slowly(pending: list[Any]) -> None:
        deferred_counts.append(len(pending))
        clock.now += 5.0
        plain(pending)

    plain = accumulate_weight_grads
    monkeypatch.setattr(measuring, "accumulate_weight_grads", slowly)
    module = nn.Sequential(Watched(clock.takes(1.0), clock.takes(2.0)), nn.Linear(3, 3))
    found = profile_call(module, (needing(2, 3),))
    assert (found.forward, found.input_grad, found.weight_grad, found.seconds) == (
        1.0,
        2.0,
        5.0,
        8.0,
    )
    assert deferred_counts == [0, 1]  # the warm-up run does not defer weight gradients


@pytest.mark.parametrize(("each", "runs"), [(0.001, 6), (0.2, 3), (60.0, 2)])
def test_profile_call_runs_a_slow_call_less_often(clock: Clock, each: float, runs: int) -> None:
    calls: list[None] = []

    def work() -> None:
        calls.append(None)
        clock.now += each

    profile_call(Watched(work, nothing), (torch.ones(3),), timeout=0.5)
    assert len(calls) == runs


def test_profile_call_reports_the_median_without_the_first_run(clock: Clock) -> None:
    seconds = iter([900.0, 1.0, 70.0, 2.0])
    module = Watched(lambda: clock.takes(next(seconds))(), nothing)
    assert profile_call(module, (torch.ones(3),), runs=3, timeout=999.0).forward == 2.0


def test_profile_call_runs_no_backward_without_gradients() -> None:
    backwards: list[None] = []
    module = Watched(nothing, lambda: backwards.append(None))
    frozen = nn.Sequential(module, nn.Linear(3, 3)).requires_grad_(False)
    assert profile_call(frozen, (torch.ones(2, 3),)).activation_bytes == 0
    assert backwards == []
    profile_call(frozen, (needing(2, 3),), runs=1)
    assert len(backwards) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_profile_call_runs_backwards_under_no_grad(mode: Callable[[], Any]) -> None:
    backwards: list[None] = []
    x = needing(3)
    with mode():
        profile_call(Watched(nothing, lambda: backwards.append(None)), (x,), runs=1)
    assert len(backwards) == 2


def test_profile_call_runs_backwards_in_the_calling_thread() -> None:
    multithreading: list[bool] = []
    enabled = torch._C._is_multithreading_enabled
    profile_call(Watched(nothing, lambda: multithreading.append(enabled())), (needing(3),), runs=1)
    assert multithreading == [False, False]
    assert enabled()


def test_profile_call_of_a_layer_that_cannot_defer_weight_gradients() -> None:
    """The layer computes a gradient in its forward, which deferral does not support."""

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return slope

    found = profile_call(Own(3, 3), (needing(2, 3),))
    assert found.weight_grad < found.input_grad


def test_profile_call_of_a_layer_that_adds_a_loss() -> None:
    class Penalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            add_loss(super().forward(x).mean())
            return super().forward(x)

    assert profile_call(Penalised(3, 3), (needing(2, 3),)).seconds > 0


# ---- bytes ----------------------------------------------------------------------------------


def test_profile_call_activation_bytes() -> None:
    hidden = 10 * 8 * FLOAT
    assert profile_call(nn.Tanh(), (needing(10, 8),)).activation_bytes == hidden
    assert (
        profile_call(nn.Sequential(nn.Tanh(), nn.Linear(8, 2)), (needing(10, 8),)).activation_bytes
        == hidden
    )
    assert profile_call(nn.Linear(8, 8), (torch.ones(10, 8),)).activation_bytes == hidden
    assert (
        profile_call(nn.Linear(8, 8).requires_grad_(False), (needing(10, 8),)).activation_bytes == 0
    )
    assert (
        profile_call(nn.BatchNorm1d(8, affine=False).eval(), (needing(10, 8),)).activation_bytes
        == hidden
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_profile_call_activation_bytes_of_a_torch_checkpoint(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    assert profile_call(Again(), (needing(10, 8),)).activation_bytes == 10 * 8 * FLOAT


def test_profile_call_resident_bytes() -> None:
    linear = 4 * 4 * FLOAT
    norm = nn.BatchNorm1d(4)
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert isinstance(tied[0], nn.Linear)
    assert isinstance(tied[1], nn.Linear)
    tied[1].weight = tied[0].weight
    x = (torch.ones(2, 4),)
    assert profile_call(nn.Linear(4, 4, bias=False), x).resident_bytes == 4 * linear
    assert (
        profile_call(nn.Linear(4, 4, bias=False), x, optimizer_state_scale=0).resident_bytes
        == 2 * linear
    )
    assert (
        profile_call(nn.Linear(4, 4, bias=False).requires_grad_(False), x).resident_bytes == linear
    )
    assert profile_call(norm, x).resident_bytes == 4 * 2 * 4 * FLOAT + 2 * 4 * FLOAT + 8
    assert profile_call(tied, x).resident_bytes == 4 * linear


# ---- arguments ------------------------------------------------------------------------------


@dataclass
class Pair:
    a: Tensor
    b: list[Tensor]


class Named(dict[str, Any]):
    """A dict like the outputs of Hugging Face models."""


class Takes(nn.Module):
    def forward(self, pair: Pair, *, named: Named, scale: float = 1.0) -> Named:
        return Named(out=pair.a * pair.b[0] * named["c"][0] * scale, pair=pair)


def test_profile_call_with_nested_arguments() -> None:
    backwards: list[None] = []
    for at in range(3):
        values = [torch.ones(3, requires_grad=at == which) for which in range(3)]
        module = nn.Module()
        module.inner = Takes()
        module.watched = Watched(nothing, lambda: backwards.append(None))

        def forward(pair: Pair, named: Named, module: Any = module) -> Any:
            out = module.inner(pair, named=named, scale=2.0)
            return [module.watched(out["out"]), out["pair"]]

        module.forward = forward
        given = Pair(values[0], [values[1]]), Named(c=(values[2],))
        profile_call(module, given[:1], {"named": given[1]}, runs=1)
        assert all(value.grad is None for value in values)
    assert len(backwards) == 6


def test_profile_call_keeps_the_identity_of_repeated_tensors() -> None:
    class Same(nn.Module):
        def forward(self, a: Tensor, b: tuple[Tensor, ...]) -> Tensor:
            assert a is b[0]
            return a

    x = needing(3)
    profile_call(Same(), (x, (x,)))


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.script(module)


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (nn.LSTM(3, 3), (torch.ones(2, 4, 3),)),
        (nn.MultiheadAttention(4, 2), (needing(2, 3, 4),) * 3),
        (nn.Embedding(9, 3, max_norm=0.1), (torch.arange(8),)),
        (nn.ReLU(inplace=True), (needing(3),)),
        (nn.LazyLinear(3), (torch.ones(2, 5),)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), (torch.ones(2, 3),)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), (torch.ones(2, 3),)),
        (scripted(nn.BatchNorm1d(3)), (needing(4, 3),)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (needing(2, 3, 5, 5),)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_profile_call_leaves_modules_unchanged(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    kinds, inputs = [type(part) for part in module.modules()], [x.detach().clone() for x in args]
    lazy = any(nn.parameter.is_lazy(p) for p in module.parameters())
    tensors = [] if lazy else [*module.parameters(), *module.buffers()]
    values = [(t, t._version, t.detach().clone()) for t in tensors]
    for part in module.parameters():
        if not lazy:
            part.grad = torch.ones_like(part)
    grads = [part.grad for part in module.parameters()]
    found = profile_call(module, args)
    assert found.seconds > 0
    for tensor, version, value in values:
        assert tensor._version == version
        assert torch.equal(tensor, value)
    assert all(p.grad is g for p, g in zip(module.parameters(), grads, strict=True))
    assert all(bool((g == 1).all()) for g in grads if g is not None)
    assert all(x.grad is None and torch.equal(x, y) for x, y in zip(args, inputs, strict=True))
    assert [type(part) for part in module.modules()] == kinds
    assert lazy == any(nn.parameter.is_lazy(p) for p in module.parameters())


def test_profile_call_keeps_gradients_of_borrowed_parameters() -> None:
    parameter = torch.ones(3, requires_grad=True)
    gradient = parameter.grad = torch.full((3,), 7.0)

    profile_call(Do(lambda x: x * parameter), (torch.ones(2, 3),))
    assert parameter.grad is gradient
    assert gradient.tolist() == [7.0] * 3


def test_profile_call_of_a_meta_model() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        ids = torch.zeros(8, dtype=torch.long)
    found = profile_call(module, (ids,))
    assert found == UnitCost(
        found.forward,
        found.input_grad,
        found.weight_grad,
        found.activation_bytes,
        found.resident_bytes,
    )
    assert found.activation_bytes > 0
    assert all(p.is_meta for p in module.parameters())
    assert (
        profile_call(module, (torch.zeros(8, dtype=torch.long),)).resident_bytes
        == found.resident_bytes
    )


# ---- equal calls ----------------------------------------------------------------------------


def test_profile_calls_measures_equal_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[nn.Module] = []

    def counting(module: nn.Module, *others: Any, **options: Any) -> UnitCost:
        measured.append(module)
        return UnitCost(len(measured), 0.0, 0.0, 0, 0)

    monkeypatch.setattr(measuring, "profile_call", counting)
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)]
    calls: list[ModuleCall] = [(block, (torch.ones(2, 4),), {}) for block in (*blocks, blocks[0])]
    assert [found.forward for found in profile_calls(calls)] == [1, 1, 2, 1]
    assert measured == [blocks[0], blocks[2]]


# ---- layers of a Sequential -----------------------------------------------------------------

Measure = Callable[..., list[float]]
brief_times = partial(measure_layer_times, timeout=0.0)  # a first run and a measured one
both = pytest.mark.parametrize(
    "measure", [brief_times, measure_layer_bytes], ids=["times", "bytes"]
)


TWICE, SUM = Do(lambda x: (x, 2 * x)), Do(lambda a, b: a + b)
# A layer with an integer output, after which nothing needs a gradient.
CHOICE, PICK = Do(lambda x: {"choice": x.argmax(1)}), Do(lambda picked: picked["choice"].float())


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


@both
@pytest.mark.parametrize(
    ("layers", "example", "unpack"),
    [
        (convnet(), (torch.randn(2, 3, 6, 6),), False),
        ([nn.ReLU(inplace=True), nn.Tanh()], (torch.randn(4, 3, requires_grad=True),), False),
        ([nn.Linear(3, 3), nn.ReLU(inplace=True)], (torch.randn(4, 3),), False),
        ([nn.Embedding(9, 3), nn.Linear(3, 3)], (torch.arange(8),), False),
        ([nn.Linear(3, 3), CHOICE, PICK, nn.Unflatten(0, (2, 2))], (torch.randn(4, 3),), False),
        ([nn.ReLU(), nn.Tanh()], (torch.randn(4, 3),), False),
        ([SUM, TWICE, SUM], (torch.ones(3), 1.0), True),
        ([SUM, TWICE, Do(sum)], (torch.ones(3), torch.tensor(1.0)), False),
        (
            [nn.LSTM(3, 3), Do(lambda sequence, state: sequence), nn.Linear(3, 3)],
            (torch.ones(2, 4, 3),),
            True,
        ),
        (
            [nn.Linear(3, 3), Top(nn.Tanh()), Bottom(nn.ReLU(inplace=True))],
            (torch.randn(4, 3),),
            False,
        ),
        ([Top(CHOICE), Bottom(PICK)], (torch.randn(4, 4),), False),
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
    layers: list[Any] = [Top(nn.Tanh()), Top(CHOICE), Bottom(PICK), Bottom(nn.Tanh())]
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


def test_layer_time_includes_forward_and_backward(clock: Clock) -> None:
    layers = [Watched(clock.takes(1.0), clock.takes(2.0)), Watched(clock.takes(50.0), nothing)]
    assert brief_times(layers, (torch.ones(3, requires_grad=True),)) == [3.0, 50.0]


def test_layer_times_repeat_until_the_timeout(clock: Clock) -> None:
    passes: list[None] = []
    layer = Watched(clock.takes(1.0), lambda: passes.append(None))
    measure_layer_times([layer], (torch.ones(3, requires_grad=True),), timeout=9.5)
    assert len(passes) == 10


def test_layer_times_stop_each_backward_at_its_layer() -> None:
    backwards: list[None] = []
    layer = Watched(nothing, lambda: backwards.append(None))
    brief_times([layer, nn.Tanh(), nn.Tanh()], (needing(3),))
    assert len(backwards) == 2


@pytest.mark.parametrize("end", [0, 1])
def test_layer_times_run_a_backward_at_both_ends_of_a_skip(end: int) -> None:
    """The tensors between neighbouring layers do not depend on the skip."""
    backwards: list[None] = []
    ends: list[nn.Module] = [nn.Identity(), nn.Identity()]
    ends[end] = Watched(nothing, lambda: backwards.append(None))
    brief_times([nn.Linear(3, 3), Top(ends[0]), Bottom(ends[1])], (torch.ones(2, 3),))
    assert len(backwards) == 2


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


def test_layer_bytes_refuse_zero_chunks() -> None:
    with pytest.raises(ArgumentError, match="chunks=0: a batch is split into at least one"):
        measure_layer_bytes([nn.Tanh()], (torch.ones(3),), chunks=0)


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


def test_last_layer_counts_with_its_loss(clock: Clock) -> None:
    layers = [nn.Linear(3, 3), Watched(clock.takes(1.0), nothing)]
    loss = Watched(clock.takes(4.0), clock.takes(8.0))

    def compute_loss(output: Tensor) -> Tensor:
        return loss(output).sum()  # type: ignore[no-any-return]

    example = (torch.ones(2, 3),)
    first, last = profile_layers(layers, example, timeout=0.0, loss=compute_loss)
    assert (first.seconds, last.forward, last.input_grad) == (0.0, 5.0, 8.0)
    without = profile_layers(layers, example, timeout=0.0)
    assert last.activation_bytes == without[-1].activation_bytes  # a memory cap counts it apart
    _, unit = measure_unit_layers(layers, example, None, False, timeout=0.0, loss=compute_loss)
    assert (unit.forward, unit.input_grad) == (5.0, 8.0)


# ---- time on a device -----------------------------------------------------------------------


def test_time_of_runs_in_which_the_device_waited_for_the_host_does_not_count() -> None:
    waited, launched = TimedWork(9.0, 9.0, False), TimedWork(1.0, 9.0, True)
    assert _find_median([waited, launched, waited]) == 1.0
    assert _find_median([waited, waited]) == 9.0


def test_backwards_are_timed_while_gradients_are_there() -> None:
    """To add to a gradient takes longer than to be the first."""
    linear = nn.Linear(4, 4)
    seen: list[bool] = []

    def look() -> None:
        seen.extend(parameter.grad is not None for parameter in linear.parameters())

    watched = Watched(nothing, look)
    profile_call(nn.Sequential(linear, watched), (needing(2, 4),), runs=2)
    assert seen
    assert all(seen)
    assert linear.weight.grad is None


# ---- workspace -------------------------------------------------------------------------------


def measure_workspace(module: nn.Module, x: Tensor) -> int:
    with measuring._profiled_call("a layer", module, ((x,), {}), None) as call:
        call.measure_saved_bytes()
        return call.measure_workspace(torch.device("cpu"))


def test_workspace_of_a_forward_is_what_lives_only_in_it() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.repeat(8, 1).sum()  # a copy of eight times the size
        return x * scale

    # The output is made after the copy is gone, so it has room where the copy was.
    assert measure_workspace(Do(forward), needing(10, 4)) == (8 - 1) * 40 * FLOAT
    # In the backward there are two gradients and nothing else.
    assert measure_workspace(Do(lambda x: x * 2), needing(10, 4)) == 2 * 40 * FLOAT


def test_workspace_of_a_backward_has_gradients_of_outputs_and_weights() -> None:
    gradients = {"output": 10 * 8, "input": 10 * 4, "weight": 8 * 4}
    layer = nn.Linear(4, 8, bias=False)
    assert measure_workspace(layer, needing(10, 4)) == sum(gradients.values()) * FLOAT
    assert layer.weight.grad is None
    # The gradients of two layers are not there at the same time: each is added to its sum at once.
    large = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    assert measure_workspace(large, needing(1, 64)) < 2 * 64 * 64 * FLOAT


def test_equal_layers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[nn.Module] = []
    run = measuring._CallProfiler.measure

    def measure(self: Any, runs: float, timeout: float) -> Any:
        measured.append(self._module)
        return run(self, runs, timeout)

    monkeypatch.setattr(measuring._CallProfiler, "measure", measure)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 4), nn.Linear(4, 4)]
    units = measure_unit_layers(layers, (needing(8, 4),), None, False, timeout=0.0)
    assert len(measured) == 3
    assert units[0] == units[1] == units[4]
    assert [unit.output_bytes for unit in units] == [128, 128, 64, 128, 128]
