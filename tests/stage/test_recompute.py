from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, RunError, is_checkpointing, is_recomputing
from penstock.stage.recompute import (
    find_written,
    mark_checkpointing,
    mark_recomputing,
    snapshot_buffers,
)
from tests.pairs import each_pair
from tests.support import DOORS, Do, each_door, each_runtime, same_gradients


class RecordsRecompute(nn.Module):
    """A layer that records, for each micro-batch, whether it is checkpointing or recomputing.

    The micro-batch is identified by the number in its first row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        # In a closure: what a recomputation appends to a list of the layer is undone.
        records: list[tuple[int, bool, bool]] = []
        self._get_records: Callable[[], list[tuple[int, bool, bool]]] = lambda: records

    @property
    def records(self) -> list[tuple[int, bool, bool]]:
        return self._get_records()

    def forward(self, x: Tensor) -> Tensor:
        self.records.append((int(x[0]), is_checkpointing(), is_recomputing()))
        return x * self.weight


FORWARD, CHECKPOINTED, RECOMPUTED = (False, False), (True, False), (False, True)


@each_runtime
@each_door
@pytest.mark.parametrize(
    ("checkpoint", "chunks", "expected"),
    [
        ("never", 2, [(0, *FORWARD), (1, *FORWARD)]),
        ("except_last", 2, [(0, *CHECKPOINTED), (1, *FORWARD), (0, *RECOMPUTED)]),
        ("always", 2, [(0, *CHECKPOINTED), (1, *CHECKPOINTED), (1, *RECOMPUTED), (0, *RECOMPUTED)]),
        ("except_last", 1, [(0, *FORWARD)]),
        ("always", 1, [(0, *CHECKPOINTED), (0, *RECOMPUTED)]),
    ],
)
def test_is_checkpointing_and_is_recomputing_in_each_forward(
    checkpoint: str, chunks: int, expected: list[tuple[int, bool, bool]], door: str, runtime: str
) -> None:
    layers = nn.Sequential(RecordsRecompute(), RecordsRecompute())
    pipe = Pipe(layers, chunks, checkpoint, stages=2, runtime=runtime, loss_fn=torch.sum)
    x = torch.arange(float(chunks))
    pipe.step(x) if door == "step" else pipe(x).sum().backward()
    assert [layer.records for layer in pipe] == [expected, expected]
    assert not is_checkpointing()
    assert not is_recomputing()


@each_runtime
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_no_recomputation_in_eval_or_without_gradients(mode: str, runtime: str) -> None:
    pipe = Pipe(nn.Sequential(RecordsRecompute()), 2, "always", runtime=runtime)
    x = torch.arange(2.0)
    if mode == "eval":
        pipe.eval()
        pipe(x).sum().backward()
    else:
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            pipe(x)
    assert pipe[0].records == [(0, *FORWARD), (1, *FORWARD)]


def test_is_checkpointing_is_false_outside_a_pipe() -> None:
    layer = RecordsRecompute()
    layer(torch.zeros(1))
    assert layer.records == [(0, *FORWARD)]


def test_recompute_marks_are_reset_after_an_error() -> None:
    for mark, is_marked in (
        (mark_checkpointing, is_checkpointing),
        (mark_recomputing, is_recomputing),
    ):
        with suppress(ZeroDivisionError), mark:
            assert is_marked()
            raise ZeroDivisionError
        assert not is_marked()


class Codebook(nn.Module):
    """A layer whose parameter follows a running mean of its inputs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.max_norm = how, 1.0  # only an embedding has the latter by itself
        self.code = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        new = 0.9 * self.code + 0.1 * x.detach().mean(0)
        if self.how == "assigned":
            self.code = nn.Parameter(new, requires_grad=False)
        elif self.how == ".data":
            self.code.data.copy_(new)
        else:
            with torch.no_grad():
                self.code.copy_(new)
        return x * self.code


@each_door
@pytest.mark.parametrize("how", ["in place", "assigned", ".data"])
def test_recomputed_forward_that_changes_its_parameter_is_refused(door: str, how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Codebook(how))
    pipe = Pipe(model, 2, "always", loss_fn=lambda y: y.square().mean())
    with pytest.raises(RunError, match="the forward of Codebook changes its parameter 'code'"):
        pipe.step(torch.ones(4, 4)) if door == "step" else pipe(torch.ones(4, 4))


class Casting(nn.Linear):
    """A layer that computes in another dtype, as the router of Switch Transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        self.to(torch.float32)
        return super().forward(x.float()).double()


def test_recomputed_forward_may_cast_its_weight() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Casting(4, 4)).double(), torch.randn(4, 4).double()
    pipe = Pipe(copy.deepcopy(model), 2, "always", loss_fn=lambda y: y.square().mean())
    loss, expected = pipe.step(x).loss, model(x).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    pairs = zip(pipe.parameters(), model.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


@each_door
@pytest.mark.parametrize("how", ["in place", "assigned", ".data"])
def test_forward_that_changes_its_parameter_without_recomputation(door: str, how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Codebook(how))
    pipe = Pipe(model, 2, "never", schedule="gpipe", loss_fn=lambda y: y.square().mean())

    def train(pipe: Pipe) -> None:
        x = torch.ones(4, 4)
        pipe.step(x) if door == "step" else pipe(x).sum().backward()

    if how != "in place":  # autograd does not notice, and computes with what it has saved
        train(pipe)
        return
    for _ in range(2):
        with pytest.raises(RunError, match="Codebook changes its parameter 'code', and the back"):
            train(pipe)
    train(Pipe(model, 1, "never", loss_fn=lambda y: y.square().mean()))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_parameter_that_is_frozen_between_the_call_and_its_backward_is_refused(
    checkpoint: str,
) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, checkpoint, stages=2)
    loss = pipe(torch.ones(4, 4)).sum()
    pipe[0].requires_grad_(False)
    with pytest.raises(RunError, match=r"a parameter of stage 0 .* was frozen with requires_grad_"):
        loss.backward()


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("gpipe", "except_last"), ("1f1b", "never"), ("zb-h1", "never")]
)
def test_optimizer_that_steps_in_the_backward(schedule: str, checkpoint: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1)

            def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        return model

    def train(model: nn.Sequential, chunks: int, door: str = "step") -> None:
        options: dict[str, Any] = {"stages": 2, "devices": ["cpu"] * 2, "schedule": schedule}
        pipe = Pipe(model, chunks, checkpoint, loss_fn=lambda y: y.square().mean(), **options)
        pipe.step(x) if door == "step" else pipe(x).square().mean().backward()

    x, unsplit = torch.randn(4, 4).double(), build()
    unsplit(x).square().mean().backward()
    for chunks, door in ((1, "step"), (4, "step"), (4, "call")):  # the hooks run once
        model = build()
        train(model, chunks, door)
        for first, second in zip(model.parameters(), unsplit.parameters(), strict=True):
            assert torch.allclose(first, second, rtol=1e-10)


class CountingCalls(nn.Module):
    """A layer that depends on how often it was called, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4).double(), 0
        self.seen: list[int] = []
        self.counts: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.counts["calls"] = self.counts.get("calls", 0) + 1
        self.largest = max(self.seen)
        x = self.linear(x) * self.calls
        return torch.tanh(x / len(self.seen)) * self.counts["calls"] * self.largest


@each_door
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_recomputation_finds_the_python_state_of_its_forward(door: str, checkpoint: str) -> None:
    """A counter advanced twice, and the recomputation computed with another number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).double(), CountingCalls())
    unsplit, x = copy.deepcopy(model), torch.randn(4, 4).double()
    pipe = Pipe(model, 4, checkpoint, stages=2, devices=["cpu"] * 2, schedule="gpipe")
    for _ in range(2):
        for row in x:
            unsplit(row[None]).square().mean().div(4).backward()
        if door == "step":
            pipe.step(x, loss_fn=lambda y: y.square().mean())
        else:
            pipe(x).square().mean().backward()
    mine, theirs = (cast("CountingCalls", each[1]) for each in (model, unsplit))
    assert (mine.calls, mine.seen, mine.counts) == (theirs.calls, theirs.seen, theirs.counts)
    for first, second in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert first.grad is not None
        assert second.grad is not None
        assert torch.allclose(first.grad, second.grad, rtol=1e-10)


@dataclass(slots=True)
class Slots:
    calls: int = 0


class Record:
    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(4).double()


class Keeps(nn.Module):
    """A layer that depends on a count, which it keeps in its attribute `state`."""

    def __init__(self, state: Any, advance: Callable[[Keeps], Any]) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(4, 4).double(), state
        self._advance = advance

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self._advance(self)
        return y


def add_one(layer: Keeps) -> Any:
    layer.state += 1
    return layer.state


def assign(layer: Keeps) -> Any:
    layer.state = 0.9 * layer.state + 1
    return layer.state


def write_data(layer: Keeps) -> Any:
    layer.state.data.mul_(0.9).add_(1)
    return layer.state


def count_call(layer: Keeps) -> Any:
    layer.state.calls += 1
    return layer.state.calls


def update_record(layer: Keeps) -> Any:
    layer.state.mean.mul_(0.9).add_(1)
    return layer.state.mean


def count_key(layer: Keeps) -> Any:
    layer.state["calls"] += 1
    return layer.state["calls"]


def append(layer: Keeps) -> Any:
    layer.state[0].append(1)
    return len(layer.state[0])


STATES: dict[str, tuple[Callable[[], Any], Callable[[Keeps], Any]]] = {
    "tensor": (lambda: torch.zeros(()).double(), add_one),
    "assigned tensor": (lambda: torch.zeros(4).double(), assign),
    "tensor.data": (lambda: torch.zeros(4).double(), write_data),
    "array": (lambda: numpy.zeros(()), lambda layer: float(add_one(layer))),
    "assigned array": (lambda: numpy.zeros(()), lambda layer: float(assign(layer))),
    "object": (Record, count_call),
    "tensor in an object": (Record, update_record),
    "slots": (Slots, count_call),
    "Counter": (Counter, count_key),
    "tensor in a dict": (lambda: {"calls": torch.zeros(()).double()}, count_key),
    "list in a tuple": (lambda: ([],), append),
    "deque": (lambda: [deque()], append),
    "itertools.count": (lambda: itertools.count(1), lambda layer: next(layer.state)),
    "iterator": (lambda: iter(range(1, 99)), lambda layer: next(layer.state)),
    "random.Random": (lambda: random.Random(0), lambda layer: layer.state.random()),
    "numpy Generator": (lambda: numpy.random.default_rng(0), lambda layer: layer.state.random()),
}


# The copy of the unsplit model copies the counter. Python 3.12 and 3.13 warn of that.
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
@each_door
@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("kind", STATES)
def test_state_in_an_attribute_is_put_back(kind: str, checkpoint: str, door: str) -> None:
    """A recomputation advanced the state again: other gradients, or other statistics later."""
    make_state, advance = STATES[kind]
    torch.manual_seed(0)
    layers = nn.Linear(4, 4).double(), Keeps(make_state(), advance), nn.Linear(4, 4).double()
    model, x = nn.Sequential(*layers), torch.randn(4, 4).double()
    unsplit = copy.deepcopy(model)
    pipe = Pipe(model, 4, checkpoint, stages=[2, 1], devices=["cpu"] * 2, schedule="gpipe")
    for _ in range(2):
        for row in x:
            unsplit(row[None]).square().mean().div(4).backward()
        if door == "step":
            pipe.step(x, loss_fn=lambda y: y.square().mean())
        else:
            pipe(x).square().mean().backward()
    assert same_gradients(model, unsplit)
    after = [advance(cast("Keeps", each[1])) for each in (model, unsplit)]
    assert torch.equal(torch.as_tensor(after[0]), torch.as_tensor(after[1]))


def test_large_tensor_that_a_layer_leaves_is_not_kept_for_each_microbatch() -> None:
    """It may be activations. After the recomputation, it is that of the forward again."""

    class Leaves(nn.Linear):
        seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.detach().expand(len(x), -1).repeat(1, 1 << 16)
            return super().forward(x)

    layer = Leaves(4, 4)
    pipe = Pipe(nn.Sequential(layer, nn.Linear(4, 4)), 2, "always", stages=2, loss_fn=torch.mean)
    output = pipe(torch.arange(16.0).view(4, 4))
    left = layer.seen
    output.mean().backward()
    assert layer.seen is left


class Counts(nn.Module):
    """A layer that multiplies by the number of its calls, or by 1 if it leaves out the second."""

    def __init__(self, knows: bool) -> None:
        super().__init__()
        self.knows, self.calls = knows, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not (self.knows and is_recomputing())
        return x * (1 if self.knows else self.calls)


OWN = random.Random(0)


UNREPEATABLE: dict[str, Callable[[], nn.Module]] = {
    "grad mode": lambda: Do(lambda x: x * 2 if torch.is_grad_enabled() else x * 1),
    "requires_grad": lambda: Do(lambda x: x * 2 if x.requires_grad else x * 1),
    "own generator": lambda: Do(lambda x: x * OWN.random()),
}


@each_runtime
@each_door
@pytest.mark.parametrize("kind", UNREPEATABLE)
def test_layer_whose_recomputation_gives_another_output_is_refused(
    kind: str, door: str, runtime: str
) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), UNREPEATABLE[kind](), Do(lambda x: x.sum(1)))
    pipe = Pipe(layers, 2, "always", stages=[2, 1], runtime=runtime, loss_fn=torch.mean)
    with pytest.raises(
        RunError, match=r"the recomputation of stage 0 .* gave another output for micro-batch"
    ):
        pipe.step(torch.ones(4, 4)) if door == "step" else pipe(torch.ones(4, 4)).sum().backward()


class RemembersMean(nn.Module):
    """Keeps the mean of what a function makes of its input, and returns the input."""

    mean: Tensor

    def __init__(self, function: Callable[[Tensor], Tensor], *, assigns: bool = False) -> None:
        super().__init__()
        self.function, self.assigns = function, assigns
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        new = self.function(x).detach().mean(0)
        if self.assigns:
            self.mean = new
        else:
            self.mean.copy_(new)
        return x


REMEMBERED: dict[str, Callable[[Tensor], Tensor]] = {
    "grad mode": lambda x: x * 2 if torch.is_grad_enabled() else x * 1,
    "requires_grad": lambda x: x * 2 if x.requires_grad else x * 1,
    "own generator": lambda x: x * OWN.random(),
}


@each_door
@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize("kind", REMEMBERED)
def test_layer_whose_recomputation_leaves_another_buffer_is_refused(
    kind: str, assigns: bool, door: str
) -> None:
    """One of the two runs is not what the unsplit model computes, though the outputs are equal."""
    layers = nn.Sequential(RemembersMean(REMEMBERED[kind], assigns=assigns), Do(lambda x: x.sum(1)))
    pipe = Pipe(layers, 2, "always", stages=[1, 1], loss_fn=torch.mean, audit="off")
    with pytest.raises(
        RunError, match=r"the recomputation of stage 0 .* left another value in a buffer for micro-"
    ):
        pipe.step(torch.ones(4, 4)) if door == "step" else pipe(torch.ones(4, 4)).sum().backward()


class ScaledBeside(nn.Module):
    """Returns its output, and what it makes of it according to `requires_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, REMEMBERED["requires_grad"](x)


class AssignsBetweenUnits(nn.Module):
    """Assigns a buffer of its own between its blocks, which answer differently without a graph."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ScaledBeside(), ScaledBeside()])
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x, scaled = self.blocks[0](x)
        self.mean = 0.9 * self.mean + scaled.detach().mean(0)
        return cast(Tensor, self.blocks[1](x)[0])


def test_buffer_that_a_model_assigns_between_units_is_compared_with_its_recomputation() -> None:
    pipe = Pipe(
        AssignsBetweenUnits(),
        2,
        "always",
        example=torch.ones(4, 4),
        stages=2,
        loss_fn=lambda y: y.sum(),
        audit="off",
    )
    with pytest.raises(RunError, match="left another value in a buffer"):
        pipe.step(torch.ones(4, 4))


@each_door
def test_buffer_of_a_layer_that_tells_its_two_runs_apart_may_differ(door: str) -> None:
    """Such a layer may write in one of them only."""
    knows = RemembersMean(lambda x: x * 0 if is_recomputing() else x)
    expected = copy.deepcopy(knows)
    layers = nn.Sequential(knows, Do(lambda x: x.sum(1)))
    pipe = Pipe(layers, 2, "always", stages=[1, 1], loss_fn=torch.mean, audit="off")
    x = torch.arange(16.0).view(4, 4)
    pipe.step(x) if door == "step" else pipe(x).sum().backward()
    expected(x[2:])
    assert torch.equal(knows.mean, expected.mean)


@each_door
def test_recomputation_that_rounds_differently_is_accepted(door: str) -> None:
    """Without a graph PyTorch may choose another kernel."""
    noise = Do(lambda x: x * (1 + 1e-6 * torch.is_grad_enabled()))
    layers = nn.Sequential(nn.Linear(4, 4), noise, Counts(knows=True), nn.Linear(4, 4))
    pipe = Pipe(layers, 2, "always", stages=[3, 1], loss_fn=lambda y: y.sum())
    x = torch.full((4, 4), torch.nan)
    pipe.step(x) if door == "step" else pipe(x).sum().backward()


def test_uninitialised_memory_in_an_output_does_not_count_as_a_difference() -> None:
    def half_filled(x: Tensor) -> Tensor:
        whole = x.new_empty(len(x), 512)
        whole[:, :4] = x
        return whole

    layers = nn.Sequential(nn.Linear(4, 4), Do(half_filled), Do(lambda x: x[:, :4].sum(1)))
    pipe = Pipe(layers, 2, "always", stages=[2, 1], loss_fn=torch.mean)
    pipe.step(torch.ones(4, 4))


class Splits(nn.Module):
    """Returns its output, and the same detached."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.detach()


class AsksForGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        y, detached = pair
        result: Tensor = self.linear(y) * (2 if detached.requires_grad else 1)
        return result


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
def test_detached_output_of_a_recomputed_stage_arrives_without_grad(checkpoint: str) -> None:
    """Without a graph, every output of a forward to be recomputed was taken to need a gradient."""
    model = nn.Sequential(Splits(), AsksForGrad()).double()
    unsplit, x = copy.deepcopy(model), torch.randn(4, 4, dtype=torch.float64)
    unsplit(x).square().mean().backward()
    pipe = Pipe(model, 2, checkpoint, stages=2, devices=["cpu"] * 2, runtime="inline")
    # After the first step the model is trained with the record of the first one.
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, loss_fn=lambda y: y.square().mean())
        assert same_gradients(model, unsplit)


def test_output_that_is_no_longer_detached_is_refused() -> None:
    class Sometimes(Splits):
        detaches = True

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, y.detach() if Sometimes.detaches else y * 1

    model = nn.Sequential(Sometimes(), AsksForGrad())
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, runtime="inline")
    pipe.step(torch.ones(4, 4), loss_fn=torch.mean)
    Sometimes.detaches = False
    with pytest.raises(RunError, match="needs a gradient in their recomputation, but did not"):
        pipe.step(torch.ones(4, 4), loss_fn=torch.mean)


class CountsInLateBuffer(nn.Module):
    """A layer that registers its counter in its first forward, and replaces it in each."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(()))
        self.count = self.count + 1
        out: Tensor = self.linear(x)
        return out


def test_buffer_registered_in_the_first_forward_is_put_back_after_recomputations() -> None:
    layer = CountsInLateBuffer()
    model = nn.Sequential(layer, nn.Linear(2, 2))
    pipe = Pipe(model, 4, "always", stages=2, devices=["cpu"], loss_fn=torch.sum, audit="off")
    pipe.step(torch.ones(4, 2))
    assert float(layer.count) == 4


def test_buffers_that_a_forward_has_written_are_found() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("read", "written", "replaced"):
                self.register_buffer(name, torch.ones(2))

    module, other = Buffers(), Buffers()
    snapshots = snapshot_buffers([module, other])
    assert find_written(snapshots, {}) == []
    module.get_buffer("written").mul_(1)  # the version counter tells, although the value is equal
    module.replaced = torch.ones(2)
    other.get_buffer("written").data.add_(1)  # only the value tells
    written = {(snapshot.module, snapshot.name) for snapshot in find_written(snapshots, {})}
    others = {(other, name) for name in ("read", "written", "replaced")}
    assert written == {(module, "written"), (module, "replaced"), *others}


class InPlace(nn.Module):
    """A layer that changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_layer_that_changes_what_a_stage_has_only_passed_on(checkpoint: str, door: str) -> None:
    """The stage before it keeps its input for a recomputation, and returns that very tensor."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.Identity(), InPlace(), nn.Linear(4, 4)
    model = nn.Sequential(*layers).double()
    unsplit = copy.deepcopy(model)
    pipe = Pipe(
        model, 2, stages=[1, 1, 1, 1], devices=["cpu"] * 4, checkpoint=checkpoint,
        loss_fn=nn.functional.mse_loss, schedule="1f1b",
    )  # fmt: skip
    for _ in range(2):
        x, y = torch.randn(2, 8, 4, dtype=torch.float64)
        if door == "step":
            pipe.step(x, target=y)
        else:
            nn.functional.mse_loss(pipe(x), y).backward()
        nn.functional.mse_loss(unsplit(x), y).backward()
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


class TwoViews(nn.Module):
    """A layer that returns two views of its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.view(-1, 2, 2)


class ChangeOneOfTwo(nn.Module):
    """A layer that changes one of two views, and computes with the other."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        pair[0].mul_(2.0)
        return pair[1].reshape(-1, 4) + 1


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_change_of_one_of_two_views_of_a_passed_on_input_is_refused(checkpoint: str) -> None:
    """Each view had a copy of its own, so the other one did not change, without an error."""
    layers = nn.Linear(4, 4), TwoViews(), ChangeOneOfTwo(), nn.Linear(4, 4)
    pipe = Pipe(
        nn.Sequential(*layers), 2, checkpoint, stages=[1, 1, 1, 1], devices=["cpu"] * 4,
        loss_fn=nn.functional.mse_loss, schedule="1f1b", audit="off",
        runtime="inline",  # in threads, a recomputation may be the first to see the change
    )  # fmt: skip
    with pytest.raises(RunError, match="a layer changed a shared tensor"):
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))


class FirstLayer(nn.Linear):
    """A layer with parameters whose output may not depend on them."""

    shift: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind = kind
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        unused = super().forward(x)
        outputs: dict[str, Callable[[], Tensor]] = {
            "input": lambda: x,
            "view": lambda: x[:, :],
            "copy": lambda: x.clone(),
            "constants": lambda: torch.tanh(x + self.shift + torch.zeros(4)),
            "function": lambda: Twice.apply(x),  # type: ignore[no-untyped-call]
            "changed input": lambda: x.mul_(2.0),
            "detached": lambda: unused.detach(),
            "detached copy": lambda: unused.detach().clone(),
            "by data": lambda: x if float(x.detach()[0, 0]) > 0 else unused,
            "written": lambda: x.clone().copy_(unused),
            "written view": lambda: self._write_view(x.clone(), unused),
            "weight": lambda: unused,
            "view from a function": lambda: AddAuxiliaryLoss.apply(x, unused),  # type: ignore[no-untyped-call]
            "unseen write": lambda: self._write_unseen(x.clone(), unused),
            "write to a list": lambda: self._write_to_list(x.clone(), unused),
            "compiled function": lambda: compiled_product(x, self.weight),
            "branch": lambda: torch.cond(x.sum() > 0, torch.sin, torch.cos, (unused,)),
            "vjp": lambda: unused + torch.func.vjp(lambda z: z[:, :] ** 2, x)[0],
            "hessian": lambda: unused + self._compute_hessian(x),
        }
        return outputs[self.kind]()

    @staticmethod
    def _write_unseen(x: Tensor, value: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # as scripted code and kernels of other libraries do
            x.copy_(value)
        return x

    @staticmethod
    def _write_to_list(x: Tensor, value: Tensor) -> Tensor:
        torch._foreach_mul_([x], [value])
        return x

    @staticmethod
    def _compute_hessian(x: Tensor) -> Tensor:
        hessian: Tensor = torch.func.hessian(lambda z: (z[0] ** 2).sum())(x.detach()[:1])
        return hessian[0, :, 0].sum()

    @staticmethod
    def _write_view(x: Tensor, value: Tensor) -> Tensor:
        x[:, :2].copy_(value[:, :2])
        return x


class Twice(torch.autograd.Function):
    """Doubles a tensor in memory that it has allocated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(x * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class AddAuxiliaryLoss(torch.autograd.Function):
    """Returns its first argument, and has a gradient for the second one: an idiom of routers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(gradient)


@torch.compile(backend="eager", fullgraph=True)
def compiled_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh()


class ChangeOwnResult(nn.Module):
    """A layer that changes in place what a backward to its input would need."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).mul_(2.0)


class ChangeInput(nn.Module):
    """A layer that changes its input in place, in a way that a backward to it would refuse."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x).mul_(0.5)


# First layers after which PyTorch lets the second layer do so, because nothing needs a gradient.
WITHOUT_GRADIENT = ["input", "view", "copy", "constants", "changed input"]
WITHOUT_GRADIENT += ["detached", "detached copy", "function"]
ignore_warnings_of_cond = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is:DeprecationWarning", "ignore:The .grad attribute of:UserWarning"
)
# Here a gradient is needed, always or for some micro-batches.
WITH_GRADIENT = [
    "by data", "written", "written view", "weight", "view from a function",
    "unseen write", "write to a list", "compiled function", "branch", "vjp",
    "hessian",
]  # fmt: skip


def compare_with_unsplit(
    layers: Sequence[nn.Module], checkpoint: str, door: str, runtime: str, learns: bool = False
) -> None:
    """Train layers, each of which is a stage, for two steps, and compare with the unsplit model."""
    model = nn.Sequential(*layers).double()
    unsplit = copy.deepcopy(model)
    pipe = Pipe(
        model, 2, checkpoint, stages=[1] * len(layers), devices=["cpu"] * len(layers),
        schedule="1f1b", runtime=runtime, loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    for _ in range(2):
        x, y = torch.randn(2, 8, 4, dtype=torch.float64)
        ours, theirs = (x.clone().requires_grad_(learns) for _ in range(2))
        if door == "step":
            loss = pipe.step(ours, target=y).loss
        else:
            loss = nn.functional.mse_loss(pipe(ours), y)
            loss.backward()
        losses: list[Tensor] = []
        for rows, targets in zip(theirs.chunk(2), y.chunk(2), strict=True):
            losses.append(nn.functional.mse_loss(unsplit(rows.clone()), targets) / 2)
            losses[-1].backward()
        assert torch.allclose(loss.detach(), torch.stack(losses).sum().detach(), rtol=0, atol=1e-10)
        for (name, p), q in zip(model.named_parameters(), unsplit.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-10), name
        if learns and theirs.grad is not None:
            assert ours.grad is not None
            assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-10)


@each_pair(
    kind=WITHOUT_GRADIENT,
    checkpoint=["always", "except_last", "never"],
    door=DOORS,
    runtime=["inline", "threads"],
)
def test_output_of_a_recomputed_stage_that_needs_no_gradient(
    kind: str, checkpoint: str, door: str, runtime: str
) -> None:
    """Without a graph the output counted as one that needs a gradient.

    PyTorch then refused what the next layer does: "one of the variables needed for gradient
    computation has been modified by an inplace operation".
    """
    torch.manual_seed(0)
    seconds: list[nn.Module] = [ChangeOwnResult()]
    if kind not in ("input", "view"):  # a change of the caller's own batch is refused
        seconds.append(ChangeInput())
    for second in seconds:
        compare_with_unsplit((FirstLayer(kind), second, nn.Linear(4, 4)), checkpoint, door, runtime)


@pytest.mark.parametrize("kind", ["input", "constants", "detached", "weight"])
def test_stage_runs_twice_whether_or_not_its_output_needs_a_gradient(kind: str) -> None:
    calls: list[None] = []
    first = FirstLayer(kind)
    first.register_forward_hook(lambda *_: calls.append(None))
    pipe = Pipe(
        nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4)), 2, "always", stages=[1, 1, 1],
        devices=["cpu"] * 3, loss_fn=nn.functional.mse_loss, audit="off",
    )  # fmt: skip
    pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
    assert len(calls) == 4


@ignore_warnings_of_cond
@each_door
@pytest.mark.parametrize("kind", WITH_GRADIENT)
def test_output_of_a_recomputed_stage_that_needs_a_gradient(kind: str, door: str) -> None:
    torch.manual_seed(0)
    compare_with_unsplit((FirstLayer(kind), nn.Tanh(), nn.Linear(4, 4)), "always", door, "inline")


@ignore_warnings_of_cond
@each_door
@pytest.mark.parametrize("kind", [*WITHOUT_GRADIENT[:4], *WITH_GRADIENT])
def test_recomputed_stage_that_passes_on_a_batch_with_a_gradient(kind: str, door: str) -> None:
    torch.manual_seed(0)
    layers = FirstLayer(kind), nn.Tanh(), nn.Linear(4, 4)
    compare_with_unsplit(layers, "always", door, "inline", learns=True)
