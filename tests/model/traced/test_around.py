"""Tests of what surrounds the units of a traced model.

This covers grad modes that the forward sets, state between units, and attributes replaced later.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import ArgumentError, CutError, PenstockTypeError, Pipe, RunError, split
from penstock.torch_compat import pytree
from tests.model.traced import splitting
from tests.model.traced.splitting import ONE_CUT, Four, assert_same, batches, made
from tests.support import same_gradients

WIDTH = 4


class Chain(nn.Module):
    """Four units, with a buffer and a scale around them."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("shift", torch.ones(WIDTH))

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x).square().mean()


class EndsWithoutGrad(Chain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.through(x)
        with torch.no_grad():
            self.steps += 1
        return y.square().mean()


class CutInsideWithoutGrad(Chain):
    def forward(self, x: Tensor) -> Tensor:
        a = self.layers[0](x)
        with torch.no_grad():
            weight = self.layers[1](a).exp()
            norm = a.norm()
        y: Tensor = self.layers[3](self.layers[2](a)) * weight / norm
        return y.square().mean()


def piped(model: nn.Module, x: Any, **options: Any) -> Pipe:
    return Pipe(copy.deepcopy(model).double(), 4, stages=2, example=x, **options)


@pytest.mark.parametrize("runtime", ["threads", "inline"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("model", [EndsWithoutGrad(), CutInsideWithoutGrad()], ids=["end", "cut"])
def test_stage_that_ends_inside_no_grad_restores_the_grad_mode(
    model: nn.Module, schedule: str, runtime: str
) -> None:
    """The next micro-batch of the rank ran without gradients, and its gradients were lost."""
    unsplit, x = copy.deepcopy(model).double(), torch.randn(8, WIDTH).double()
    pipe = piped(model, x, schedule=schedule, runtime=runtime, balance="parameters")
    pipe.step(x)
    for part in x.chunk(4):
        (unsplit(part) / 4).backward()
    assert same_gradients(pipe, unsplit)
    assert torch.is_grad_enabled()


def replaced_parameter(model: Any) -> None:
    model.scale = nn.Parameter(torch.zeros(WIDTH).double())


def replaced_buffer(model: Any) -> None:
    model.shift = torch.zeros(WIDTH).double()


def loaded_by_assigning(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def longer_list(model: Any) -> None:
    model.layers.append(nn.Linear(WIDTH, WIDTH).double())


@pytest.mark.parametrize(
    "change", [replaced_parameter, replaced_buffer, loaded_by_assigning, longer_list]
)
def test_replaced_parameters_or_buffers_between_units_are_refused(change: Any) -> None:
    """The pipe silently kept using the old ones."""
    model, x = Chain().double(), torch.randn(8, WIDTH).double()
    pipe = Pipe(model, 4, stages=2, example=x, balance="parameters")
    change(model)
    with pytest.raises(RunError, match="replaced, added or removed after the pipe was made"):
        pipe.step(x)


def test_child_of_the_pipe_that_is_replaced_or_added_is_refused() -> None:
    """The model itself stays as it was, and is what runs."""
    model, x = Chain().double(), torch.randn(8, WIDTH).double()
    for name in ("layers", "head"):
        pipe = Pipe(model, 4, stages=2, example=x, balance="parameters")
        setattr(pipe, name, nn.ModuleList())
        with pytest.raises(RunError, match="replaced, added or removed after the pipe was made"):
            pipe.step(x)


def test_parameter_between_units_may_change_in_place() -> None:
    model, x = Chain().double(), torch.randn(8, WIDTH).double()
    pipe = Pipe(model, 4, stages=2, example=x, balance="parameters")
    with torch.no_grad():
        model.scale.fill_(0.5)
    assert abs(pipe.step(x).loss - model(x)) < 1e-12


class Counting(Chain):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_forward_that_changes_an_attribute_causes_a_warning() -> None:
    x = torch.randn(8, WIDTH).double()
    with pytest.warns(UserWarning, match="the forward changes calls on modules around the units"):
        piped(Counting(), x, balance="parameters")


class Scaled(Chain):
    """A chain that multiplies its outputs by what a function computes from its state."""

    def __init__(self, state: Any, find_scale: Callable[[Any], float]) -> None:
        super().__init__()
        self.state, self.find_scale = state, find_scale

    def forward(self, x: Tensor) -> Tensor:
        scale = self.find_scale(self)
        return super().forward(x) * scale


def build_scaled(state: Any, find_scale: Callable[[Any], float], chunks: int) -> Pipe:
    x = torch.randn(8, WIDTH).double()
    model = Scaled(state, find_scale).double()
    pipe = Pipe(model, chunks, stages=2, example=x, balance="parameters", devices=["cpu"] * 2)
    pipe.step(x)
    return pipe


def make_generator() -> Iterator[float]:
    yield from (1.0, 0.5, 0.25, 2.0, 0.1) * 9


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "cycle": lambda: itertools.cycle([1.0, 0.5, 0.7]),
    "generator": make_generator,
    "map": lambda: map(float, range(1, 99)),
}


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ITERATORS)
def test_iterator_that_the_forward_advances_is_refused(name: str, chunks: int) -> None:
    """The trace advanced it, and so did each stage."""
    with pytest.raises(CutError, match=rf"advances an iterator \({name}\)"):
        build_scaled(ITERATORS[name](), lambda self: next(self.state), chunks)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ITERATORS)
def test_iterator_that_is_advanced_between_steps_is_equal(name: str, chunks: int) -> None:
    iterator = ITERATORS[name]()
    state = [iterator, 1.0]
    pipe = build_scaled(state, lambda self: self.state[1], chunks)
    x, model = torch.randn(8, WIDTH).double(), Chain().double()
    model.load_state_dict(pipe.state_dict())
    scale = state[1] = next(iterator) * 3
    assert abs(pipe.step(x).loss - model(x) * scale) < 1e-12


def add_a_letter(model: Any) -> float:
    model.state += "."
    return 1 + 0.1 * len(model.state)


def add_an_entry(model: Any) -> float:
    model.state += (1,)
    return 1 + 0.1 * len(model.state)


def move_a_date(model: Any) -> float:
    model.state += timedelta(days=1)
    return 1 + 0.1 * int(model.state.day)


@pytest.mark.parametrize(
    ("state", "find_scale"),
    [("", add_a_letter), ((), add_an_entry), (date(2020, 1, 1), move_a_date)],
)
def test_text_or_date_that_the_next_call_computes_with_is_refused(
    state: Any, find_scale: Callable[[Any], float]
) -> None:
    """Each stage began with the first text, in each micro-batch."""
    with pytest.raises(CutError, match=r"the forward changes state .* an earlier call has left"):
        build_scaled(state, find_scale, 1)


def note_a_mode(model: Any) -> float:
    model.state = "train" if model.training else "eval"
    return 0.5 if model.state == "train" else 1.0


@pytest.mark.parametrize("state", [None, "eval"])
def test_text_that_each_call_writes_before_it_reads_it_is_no_state(state: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_scaled(state, note_a_mode, 4)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor


class Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)
        self.kind = kind

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embed(ids)))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {
            "alone": loss,
            "scaled": loss.to(torch.float64) * 2 / 3,
            "with another": loss + self.head.weight.square().mean(),
            "first": (loss, logits),
            "last": (logits, loss),
            "with accuracy": (loss, (logits.argmax(-1) == labels).double().mean()),
            "dict": {"logits": logits, "loss": loss},
            "attribute": Output(logits, loss),
            "accuracy first": (logits.detach().mean(), loss),
            "two losses": (logits, loss, 2 * loss),
            "weighted": {"loss": loss, "weight": (labels != -100).sum()},
        }[self.kind]


def words() -> dict[str, Any]:
    """Return a batch with more ignored labels in one micro-batch than in another."""
    ids = torch.randint(0, 9, (4, 3))
    labels = ids.clone()
    labels[0], labels[1, 1:] = -100, -100
    return {"ids": ids, "labels": labels}


def loss_in(output: Any) -> Any:
    return next(v for v in pytree.tree_leaves(getattr(output, "loss", output)) if not v.dim())


@pytest.mark.parametrize(
    "kind", ["alone", "scaled", "first", "last", "with accuracy", "dict", "attribute"]
)
def test_cross_entropy_inside_the_model_is_weighted_by_its_targets(kind: str) -> None:
    model, batch = Words(kind).double(), words()
    unsplit = copy.deepcopy(model)
    pipe = Pipe(model, 4, stages=2, example=batch, balance="parameters")
    loss = loss_in(unsplit(**batch))
    loss.backward()
    assert abs(pipe.step(**batch).loss - loss) < 1e-12
    assert same_gradients(pipe, unsplit)
    assert abs(loss_in(pipe(**batch)) - loss) < 1e-12


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("with another", "averages over targets that count 3 in micro-batch 3 and 1 in"),
        ("accuracy first", "whose first number does not require grad, although another"),
        ("two losses", "returned a tuple of 3 values, and it is not clear what they are"),
    ],
)
def test_loss_of_the_model_that_is_not_clear_is_refused(kind: str, message: str) -> None:
    model, batch = Words(kind), words()
    if kind != "with another":
        batch["labels"] = batch["ids"]
    pipe = Pipe(model, 4, stages=2, example=batch, balance="parameters")
    with pytest.raises(RunError, match=message):
        pipe.step(**batch)


def test_weight_that_the_model_returns_is_used_by_step_and_refused_by_a_call() -> None:
    model, batch = Words("weighted").double(), words()
    pipe = Pipe(model, 4, stages=2, example=batch, balance="parameters")
    assert abs(pipe.step(**batch).loss - model(**batch)["loss"]) < 1e-12
    with pytest.raises(RunError, match="the model returned a loss with a weight"):
        pipe(**batch)


@pytest.mark.parametrize("memory", ["3 furlongs", -1, [1e9, "a"], True, [1e9], 0.9])
def test_memory_must_be_a_number_of_bytes(memory: Any) -> None:
    with pytest.raises((ArgumentError, PenstockTypeError), match=r"memory|bytes"):
        split(Chain(), 2, torch.randn(8, WIDTH), memory=memory)


def test_memory_limits_the_cut() -> None:
    model, x = Chain(), torch.randn(8, WIDTH)
    one = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of the parameters of one unit
    room = [1e9, 4 * one + 2e4]
    assert split(model, 2, x, memory=room).counts[1] <= 3
    with pytest.raises(ArgumentError, match="memory"):
        split(model, 2, x, memory=10)


class Codes(nn.Module):
    """A module that is not called itself; the model calls its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.into(x).transpose(1, 2))
        return y.transpose(1, 2)

    def decode(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x)
        return y


class Scales(nn.Module):
    """A module without submodules, of which only a method is called."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))
        self.shift: Tensor
        self.register_buffer("shift", torch.full((4,), 0.5))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.by + self.shift


class ByMethods(Four):
    def __init__(self) -> None:
        super().__init__()
        self.codes, self.scales = Codes(), Scales()

    def forward(self, x: Tensor) -> Any:
        x = self.a(self.codes.encode(self.scales.scaled(x)))
        return self.d(self.c(self.codes.decode(self.b(x))))


def test_modules_whose_methods_are_called_instead_of_forward() -> None:
    """All their work was one unit, and stages without it lacked their buffers."""
    assert_same(ByMethods)
    partition = split(made(ByMethods), 3, example=batches(5)[0], balance="parameters")
    names = [name for stage in partition.stages for name in stage.names]
    assert {"codes.into", "codes.norm", "codes.out"} <= set(names)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts[0](x) + self.parts[1](x)
        return y


class Placed(nn.Module):
    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.positions, self.linear = positions, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.positions(x))
        return y


class Sharing(nn.Module):
    """The blocks share a submodule that the model holds as well and does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.blocks = nn.ModuleList(Placed(self.positions) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_module_list_inside_units_that_share_it() -> None:
    """The elements of the list were units although they were inside other units: a KeyError."""
    assert_same(Sharing)


class TiedHead(nn.Module):
    """A model whose first and last stage use one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.matmul(x, self.embedding.weight.t())


def _assign_state(model: TiedHead) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)


def _add_norm(model: TiedHead) -> None:
    nn.utils.parametrizations.weight_norm(model.embedding)


def _assign_weight(model: TiedHead) -> None:
    model.embedding.weight = nn.Parameter(torch.ones(9, 4).double())


@pytest.mark.parametrize("change", [_assign_state, _add_norm, _assign_weight])
def test_tensor_of_a_unit_on_two_stages_that_is_replaced_later(change: Any) -> None:
    """One of the stages went on with the old tensor."""
    model, ids = made(TiedHead), torch.randint(9, (4, 5))
    pipe = splitting.piped(model, ids, 3)
    pipe.step(ids)
    change(model)
    with pytest.raises(RunError, match="in a unit that several stages use"):
        pipe.step(ids)


def test_forward_that_is_replaced_on_the_model_later() -> None:
    """A closure over the model was not taken over by the stages."""
    model, (x,) = made(Four), batches(5)
    model.forward = lambda x: model.d(model.c(model.b(model.a(x))))  # type: ignore[operator]
    pipe = splitting.piped(model, x, 3)
    first = model.forward
    with torch.no_grad():
        assert torch.equal(pipe(x), model(x))
        model.forward = lambda x: first(x) * 2
        assert torch.equal(pipe(x), model(x))
        model.forward = first
        assert torch.equal(pipe(x), model(x))


class Rotary(nn.Module):
    """A module with a buffer and no parameters, which caches a table in another buffer."""

    frequencies: Tensor
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = (torch.arange(x.shape[1])[:, None] * self.frequencies).cos()
        return x * self.table[: x.shape[1]]


class Rotated(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.linear, self.rotary = nn.Linear(4, 4), rotary

    def forward(self, x: Tensor) -> Any:
        return self.rotary(self.linear(x))


class SharedRotary(nn.Module):
    """The model registers a module that all blocks hold, before or after them."""

    def __init__(self, first: bool = True, calls: bool = False) -> None:
        super().__init__()
        rotary, self.calls = Rotary(), calls
        if first:
            self.rotary = rotary
        self.blocks = nn.ModuleList(Rotated(rotary) for _ in range(4))
        self.rotary = rotary

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.rotary(x) if self.calls else x


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("calls", [True, False])
def test_parameterless_module_of_the_model_that_its_blocks_hold(first: bool, calls: bool) -> None:
    """The cut failed with `KeyError: 'rotary'`."""
    assert_same(partial(SharedRotary, first, calls), (5, 5), buffers=False, cuts=ONE_CUT)


class ThroughContainers(nn.Module):
    """Calls its blocks through a dict of lists, partials and bound methods."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        a, b, c, d, e = self.blocks
        self.paths: Any = {"first": [a, (b, "second")], "last": [partial(c), partial(d.forward)]}
        self.final = partial(self.run, [[e]])

    def run(self, blocks: Any, x: Tensor) -> Any:
        return blocks[0][0](x)

    def forward(self, x: Tensor) -> Any:
        first, (second, _) = self.paths["first"]
        third, fourth = self.paths["last"]
        return self.final(fourth(third(second(first(x)))))


def test_blocks_called_through_nested_containers_and_partials() -> None:
    """The forward called the user's blocks, past the proxies: "0 calls of units"."""
    assert_same(ThroughContainers, (5,), cuts=ONE_CUT)


GLOBAL_BLOCKS: list[nn.Module] = []


class ThroughAGlobal(Four):
    def forward(self, x: Tensor) -> Any:
        for block in GLOBAL_BLOCKS:
            x = block(x)
        return x


def test_blocks_called_through_a_global_are_refused() -> None:
    model, (x,) = made(ThroughAGlobal), batches(5)
    GLOBAL_BLOCKS[:] = model.children()
    with pytest.raises(ArgumentError, match="the forward does not call any of its units"):
        split(model, 2, x)


class NewOfASize(Four):
    """Makes tensors with the legacy `Tensor.new`, from a size and from numbers."""

    def forward(self, x: Tensor) -> Any:
        ones = x.new(x.size()).fill_(1)
        y = self.b(self.a(x) + ones)
        return self.d(self.c(y) + y.new(y.size()).fill_(2) + y.new([1.0, 2.0, 3.0, 4.0]))


def test_new_of_a_size_between_units() -> None:
    """The size became a tuple, of which `new` makes a tensor with these numbers."""
    assert_same(NewOfASize, (5,), cuts=ONE_CUT)


class AsksForGradMode(Four):
    """Branches on the grad mode, also inside a `no_grad` of its own."""

    def forward(self, x: Tensor) -> Any:
        for unit in (self.a, self.b, self.c, self.d):
            x = unit(x)
            with torch.no_grad():
                if torch.is_grad_enabled():
                    x = x * 100
            if torch.is_grad_enabled():
                x = x * 2
        return x


def test_grad_mode_in_a_forward_that_is_recomputed() -> None:
    """A forward without a graph found the mode off and took another path."""
    assert_same(AsksForGradMode, (5,), cuts=ONE_CUT)


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hook_of_a_module_that_is_cut_is_refused(register: str) -> None:
    """The stages took different paths, with and without a graph."""
    model = nn.ModuleDict({"inner": made(AsksForGradMode)})
    model.forward = lambda x: model["inner"](x)
    getattr(model["inner"], register)(lambda *_: None)
    with pytest.raises(CutError, match=r"'inner' \(AsksForGradMode\) has a backward hook"):
        split(model, 2, *batches(5))


class FrozenInInferenceMode(Four):
    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            x = self.b(self.a(x))
        return self.d(self.c(x.clone()))


def test_backbone_in_inference_mode() -> None:
    """Its outputs were to get a gradient, which PyTorch refuses."""
    assert_same(FrozenInInferenceMode, (5,), cuts=ONE_CUT)


def test_wrong_input_shape_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Fake tensors logged 20 lines for each operation that failed."""
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        split(made(AsksForGradMode), 2, torch.ones(4, 5, 3, dtype=torch.float64))
    assert not caplog.records


def test_traced_pipe_can_be_pickled_after_a_step() -> None:
    """The settings that a stage remembers could not be pickled."""
    ids = torch.randint(9, (4, 5))
    pipe = splitting.piped(made(TiedHead), ids, 3)
    pipe.step(ids, loss_fn=torch.mean)
    copied = pickle.loads(pickle.dumps(pipe))
    with torch.no_grad():
        assert torch.equal(copied(ids), pipe(ids))


@pytest.mark.parametrize("kind", ["forward", "forward pre"])
def test_hook_that_is_registered_on_the_model_later(kind: str) -> None:
    """It was an error: the operations of the hook were not in the trace."""
    model, x = made(Chain), batches(5)[0]
    pipe = splitting.piped(model, x, 2)
    with torch.no_grad():
        before = pipe(x)
        if kind == "forward":
            handle = model.register_forward_hook(lambda module, args, output: output * 2)
        else:
            handle = model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        torch.testing.assert_close(pipe(x), model(x))
        handle.remove()
        assert torch.equal(pipe(x), before)
