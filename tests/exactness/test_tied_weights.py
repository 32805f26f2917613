"""Tests of parameters, modules and buffers that ranks share: exact, and owned by one rank."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from penstock import Pipe, RunError
from penstock.runtime.tied_gradients import build_local_tied_weights
from penstock.stage import parameter_proxies
from tests.pairs import each_pair
from tests.support import (
    CHECKPOINTS,
    DOORS,
    RUNTIMES,
    SCHEDULES,
    Do,
    Pop,
    Stash,
    bitwise,
    closely,
    differences,
    each_checkpoint,
    each_door,
    each_runtime,
    ends,
    trained,
    whole,
)

WORDS, WIDTH = 11, 8


class Head(nn.Module):
    """A head that holds the embedding itself, and has its own bias."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.bias = nn.Parameter(torch.randn(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.embedding.weight, self.bias)


class Inner(nn.Module):
    """A module that holds the head one level further down."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"head": head, "act": nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts["act"](self.parts["head"](x))
        return y


def by_weight(embedding: nn.Embedding) -> nn.Module:
    head = nn.Linear(WIDTH, WORDS)
    head.weight = embedding.weight
    return head


KINDS: dict[str, Callable[[nn.Embedding], nn.Module]] = {
    "weight": by_weight,
    "module": Head,
    "inner": lambda embedding: Inner(Head(embedding)),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def language(kind: str = "weight") -> nn.Sequential:
    """Return eight layers with a skip connection, of which the last is tied to the first."""
    torch.manual_seed(0)
    embedding = nn.Embedding(WORDS, WIDTH)
    layers = [
        embedding,
        Stash(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        Pop(),
        nn.LayerNorm(WIDTH),
        KINDS[kind](embedding),
    ]
    return nn.Sequential(*layers).double()


CUTS = {2: [3, 5], 3: [3, 3, 2], 4: [2, 2, 2, 2]}


def tokens(rows: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, WORDS, (rows, 3)), torch.randint(0, WORDS, (rows, 3))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def piped(model: nn.Sequential, ranks: int = 4, **options: Any) -> Pipe:
    given = {"chunks": 3, "stages": CUTS.get(ranks), "loss_fn": cross_entropy, **options}
    return Pipe(copy.deepcopy(model), **given)


def same_gradients(pipe: nn.Module, model: nn.Module) -> bool:
    pairs = zip(pipe.parameters(), model.parameters(), strict=True)
    return all(
        (p.grad is None) == (q.grad is None)
        and (p.grad is None or q.grad is None or closely(p.grad, q.grad))
        for p, q in pairs
    )


@pytest.fixture(params=["here", "elsewhere"])
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let proxies share the memory of their parameter, or copy it as on another device."""
    if request.param == "elsewhere":
        monkeypatch.setattr(
            parameter_proxies, "move_to_device", lambda tensor, device: tensor.clone()
        )


both_places = pytest.mark.usefixtures("_where")


# ---- training -----------------------------------------------------------------------------


@each_pair(
    door=DOORS,
    checkpoint=CHECKPOINTS,
    runtime=RUNTIMES,
    schedule=SCHEDULES,
    kind=["weight", "module"],
)
def test_tied_weights_train_as_the_unsplit_model(
    schedule: str, runtime: str, checkpoint: str, door: str, kind: str
) -> None:
    model = language(kind)
    pipe = piped(
        model,
        checkpoint=checkpoint,
        runtime=runtime,
        schedule=schedule,
        devices=["cpu"] * (4 // SCHEDULES[schedule]),
    )
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, pipe)]
    for rows in (7, 2, 6):
        x, target = tokens(rows)
        expected = whole(model, x, target, cross_entropy)
        assert differences(trained(pipe, x, target, door), expected, closely) == []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@both_places
@each_pair(kind=KINDS, door=DOORS, checkpoint=CHECKPOINTS, ranks=CUTS)
def test_tied_weights_on_any_number_of_ranks(
    ranks: int, checkpoint: str, door: str, kind: str
) -> None:
    model = language(kind)
    pipe = piped(model, ranks, schedule="1f1b", checkpoint=checkpoint)
    x, target = tokens()
    for _ in range(2):
        expected = whole(model, x, target, cross_entropy)
        assert differences(trained(pipe, x, target, door), expected, closely) == []


class Recurrent(nn.Module):
    """A layer that computes only with a module of another layer."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.block(x)
        return y


def repeated() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))
    return nn.Sequential(*(Recurrent(block) for _ in range(8)), nn.Linear(6, 3)).double()


@both_places
@each_door
@each_runtime
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_one_block_shared_by_all_layers(schedule: str, runtime: str, door: str) -> None:
    model = repeated()
    pipe = Pipe(
        copy.deepcopy(model),
        3,
        stages=[2, 2, 2, 3],
        devices=["cpu"] * (4 // SCHEDULES[schedule]),
        schedule=schedule,
        runtime=runtime,
        loss_fn=functional.mse_loss,
    )
    x, target = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    for _ in range(2):
        expected = whole(model, x, target, functional.mse_loss)
        assert differences(trained(pipe, x, target, door), expected, closely) == []


def test_layer_that_is_also_inside_an_earlier_layer() -> None:
    torch.manual_seed(0)
    last = nn.Linear(6, 6).double()
    model = nn.Sequential(Recurrent(nn.Sequential(last)), nn.Linear(6, 6).double(), last)
    x, target = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    for door in ("step", "call"):
        model.zero_grad()
        pipe = Pipe(copy.deepcopy(model), 3, stages=3, loss_fn=functional.mse_loss)
        expected = whole(model, x, target, functional.mse_loss)
        assert differences(trained(pipe, x, target, door), expected, closely) == []


@each_door
def test_tied_weight_gradients_of_several_steps_add_up(door: str) -> None:
    model = language()
    pipe = piped(model, schedule="1f1b")
    for rows in (7, 5, 1):
        x, target = tokens(rows)
        expected = whole(model, x, target, cross_entropy)
        assert differences(trained(pipe, x, target, door), expected, closely) == []


@each_kind
@each_checkpoint
def test_tied_weights_with_retain_graph(checkpoint: str, kind: str) -> None:
    model = language(kind)
    pipe = piped(model, checkpoint=checkpoint)
    x, target = tokens()
    for module in (model, pipe):
        loss = cross_entropy(module(x), target)
        loss.backward(retain_graph=True)
        loss.backward()
    assert same_gradients(pipe, model)


def test_tied_weights_with_autograd_grad() -> None:
    model = language()
    pipe = piped(model)
    x, target = tokens()
    found, wanted = (
        torch.autograd.grad(cross_entropy(m(x), target), list(m.parameters()))
        for m in (pipe, model)
    )
    assert all(map(closely, found, wanted))
    assert all(p.grad is None for p in pipe.parameters())


@each_runtime
def test_tied_weight_gradients_are_bitwise_reproducible(runtime: str) -> None:
    """The caller adds the gradients rank by rank, whichever rank is ready first."""
    found = []
    for _ in range(5):
        pipe = Pipe(repeated(), 3, stages=9, runtime=runtime, loss_fn=functional.mse_loss)
        y = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)
        pipe.step(y, target=y[:, :3])
        found.append([p.grad for p in pipe.parameters() if p.grad is not None])
    for gradients in found[1:]:
        assert all(map(bitwise, found[0], gradients))


def test_tied_weight_with_sparse_and_dense_gradients() -> None:
    model = language()
    model[0].sparse = True  # type: ignore[assignment]
    pipe = piped(model)
    x, target = tokens()
    expected = whole(model, x, target, cross_entropy)
    assert differences(trained(pipe, x, target, "step"), expected, closely) == []


def test_weight_tied_after_the_pipe_was_made() -> None:
    model = language()
    head = nn.Linear(WIDTH, WORDS).double()
    pipe = Pipe(nn.Sequential(*list(copy.deepcopy(model))[:-1], head), 3, stages=4)
    pipe.load_state_dict(model.state_dict())
    head.weight = pipe[0].weight
    x, target = tokens()
    expected = whole(model, x, target, cross_entropy)
    pipe.step(x, target=target, loss_fn=cross_entropy)
    assert pipe[0].weight.grad is not None
    gradient = expected.gradients["0.weight"]
    assert gradient is not None
    assert closely(pipe[0].weight.grad, gradient)


def test_module_shared_after_the_pipe_was_made() -> None:
    model = language("module")
    pipe = piped(model)
    pipe[7].embedding = copy.deepcopy(pipe[0])  # separate
    x, target = tokens()
    pipe.step(x, target=target)
    pipe.zero_grad()
    pipe[7].embedding = pipe[0]  # shared again
    expected = whole(model, x, target, cross_entropy)
    assert differences(trained(pipe, x, target, "step"), expected, closely) == []


# ---- frozen weights, and no gradients -----------------------------------------------------


@both_places
@each_kind
@each_door
def test_frozen_tied_weights(door: str, kind: str) -> None:
    model = language(kind)
    model[0].requires_grad_(False)
    pipe = piped(model)
    x, target = tokens()
    for _ in range(2):
        expected = whole(model, x, target, cross_entropy)
        assert differences(trained(pipe, x, target, door), expected, closely) == []
        assert pipe[0].weight.grad is None
        for module in (model[0], pipe[0]):  # unfreeze
            module.requires_grad_()
        model.zero_grad()
        pipe.zero_grad()
        expected = whole(model, x, target, cross_entropy)
        assert differences(trained(pipe, x, target, door), expected, closely) == []
        for module in (model, pipe):
            module.zero_grad()
            module[0].requires_grad_(False)


@each_runtime
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weight_is_copied_once_per_device_and_call(
    frozen: bool, elsewhere: bool, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Sees(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.block.get_parameter("weight").data_ptr())
            return super().forward(x)

    if elsewhere:
        monkeypatch.setattr(
            parameter_proxies, "move_to_device", lambda tensor, device: tensor.clone()
        )
    block = nn.Linear(6, 6).requires_grad_(not frozen)
    model = nn.Sequential(Sees(block), nn.Linear(6, 6), Sees(block), Sees(block))
    pipe = Pipe(model, 2, stages=4, devices=["cpu", "cpu"], runtime=runtime)
    pipe(torch.randn(4, 6))  # stage 0 and 2 on the first rank, stage 3 on the second
    owners = block.weight.data_ptr()
    assert len(seen) == 6
    assert seen.count(owners) == (4 if elsewhere else 6)
    assert len(set(seen)) == (2 if elsewhere else 1)


@both_places
@each_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tied_weights_without_gradients(mode: Callable[[], Any], kind: str) -> None:
    model = language(kind).eval()
    pipe = piped(model)
    x, target = tokens()
    with mode():
        assert closely(pipe(x), model(x))
        assert closely(pipe.step(x, target=target).loss, cross_entropy(model(x), target))
        with torch.no_grad():
            for module in (model, pipe):
                module.get_parameter("0.weight").mul_(2)
        assert closely(pipe(x), model(x))


def test_tied_weights_under_autocast() -> None:
    model = language().float()
    pipe = piped(model, chunks=1)
    x, target = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(model, x, target, cross_entropy)
        pipe.step(x, target=target)
    found = {name: p.grad for name, p in pipe.named_parameters()}
    for name, gradient in expected.gradients.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=2e-2, atol=1e-3)


# ---- hooks --------------------------------------------------------------------------------


@each_kind
@each_runtime
def test_hooks_of_tied_weights_see_the_summed_gradient_in_a_call(runtime: str, kind: str) -> None:
    model = language(kind)
    pipe = piped(model, runtime=runtime)
    seen: dict[nn.Module, list[Tensor]] = {model: [], pipe: []}
    x, target = tokens()
    for module, found in seen.items():
        weight = module.get_parameter("0.weight")
        weight.register_hook(lambda g, found=found: (found.append(g.clone()), g / 2)[1])
        weight.register_post_accumulate_grad_hook(
            lambda p, found=found: found.append(p.grad.clone())
        )
        cross_entropy(module(x), target).backward()
    assert len(seen[pipe]) == 2
    assert all(map(closely, seen[pipe], seen[model]))
    assert same_gradients(pipe, model)


@each_runtime
def test_hooks_of_tied_weights_in_a_step_see_the_other_ranks_as_one_part(runtime: str) -> None:
    model = repeated()
    pipe = Pipe(
        copy.deepcopy(model),
        3,
        stages=[4, 3, 2],
        runtime=runtime,
        loss_fn=functional.mse_loss,
    )
    seen: list[Tensor] = []
    threads = []

    def halved(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        threads.append(threading.current_thread())
        return gradient / 2

    model.get_parameter("0.block.0.weight").register_hook(lambda gradient: gradient / 2)
    pipe[0].block[0].weight.register_hook(halved)
    x, target = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    pipe.step(x, target=target)
    whole(model, x, target, functional.mse_loss)
    assert len(seen) == 4  # three micro-batches of the first rank, and one sum of the others
    assert threads[-1] is threading.current_thread()
    assert same_gradients(pipe, model)


def test_hooks_of_a_shared_module_run_on_every_stage() -> None:
    model = repeated()
    pipe = Pipe(model, 2, stages=[4, 5], runtime="inline")
    calls: list[type[nn.Module]] = []
    model.get_submodule("0.block").register_forward_hook(
        lambda m, given, made: calls.append(type(m))
    )
    with torch.no_grad():
        pipe(torch.randn(4, 6, dtype=torch.float64))
    assert calls == [nn.Sequential] * 16


# ---- proxies ------------------------------------------------------------------------------


def test_stages_of_one_rank_need_no_proxies() -> None:
    for ranks, any_needed in ((1, False), (2, True)):
        split = Pipe(
            language("module"), 1, stages=[2, 2, 2, 2], devices=["cpu"] * ranks
        )._placed_partition
        devices = list(split.devices.values())
        tied = build_local_tied_weights(
            split.partition.stages, devices, split.placement, False, chunks=1
        )
        assert (tied is not None) == any_needed


@each_kind
def test_tied_modules_are_unchanged_after_a_step(kind: str) -> None:
    model = language(kind)
    held = [(m, dict(m._parameters), dict(m._modules)) for m in model.modules()]
    pipe = Pipe(model, 3, stages=4, loss_fn=cross_entropy)
    x, target = tokens()
    pipe.step(x, target=target)
    cross_entropy(pipe(x), target).backward()
    assert list(pipe) == list(model)
    for module, parameters, modules in held:
        assert module._parameters == parameters
        assert module._modules == modules


def test_proxies_are_removed_after_a_failure() -> None:
    model = language("module")
    fails = [True]

    def burst(x: Tensor) -> Tensor:
        if fails:
            raise ZeroDivisionError("here")
        return x

    layers = [*list(model)[:-1], nn.Sequential(model[-1], Do(burst))]
    pipe = Pipe(nn.Sequential(*layers), 3, stages=4, loss_fn=cross_entropy)
    x, target = tokens()
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, target=target)
    assert pipe[7][0].embedding is pipe[0]
    fails.clear()
    pipe.zero_grad()
    pipe.step(x, target=target)
    whole_model = language("module")
    whole(whole_model, x, target, cross_entropy)
    assert same_gradients(pipe, whole_model)


@pytest.fixture
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@each_kind
@pytest.mark.usefixtures("_switching")
def test_threads_share_one_pipe_with_tied_weights(kind: str) -> None:
    """A thread that starts a call must not take the proxies of another call for parameters.

    There were also two sets of worker threads if the first calls came at the same time.
    """
    model = language(kind)
    pipe = piped(model)
    x, target = tokens()
    times = 30

    def train() -> None:
        for _ in range(times):
            pipe.step(x, target=target)

    def both() -> None:
        threads = [threading.Thread(target=train, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert ends(both, within=60)
    whole(model, x, target, cross_entropy)
    for p, q in zip(pipe.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert closely(p.grad, q.grad * 3 * times)


def test_tied_weight_changed_between_forward_and_backward_is_refused() -> None:
    """The error is that of the unsplit model, also through a proxy."""
    model = language()
    pipe = piped(model, checkpoint="never")
    x, target = tokens()
    for module in (model, pipe):
        loss = cross_entropy(module(x), target)
        with torch.no_grad():
            module.get_parameter("0.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- buffers ------------------------------------------------------------------------------


class Rotated(nn.Module):
    """A layer that reads a table, and may count its calls in it."""

    table: Tensor

    def __init__(self, table: Tensor, change: str = "never") -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "in place":
            self.table.add_(1)
        if self.change == "anew":
            self.table = self.table + 1
        return x * self.table


def rotated(first: str = "never", second: str = "never") -> nn.Sequential:
    torch.manual_seed(0)
    table = torch.randn(6, dtype=torch.float64)
    linear = [nn.Linear(6, 6).double() for _ in range(2)]
    return nn.Sequential(Rotated(table, first), linear[0], linear[1], Rotated(table, second))


@both_places
@each_door
@each_checkpoint
def test_buffer_shared_by_ranks(checkpoint: str, door: str) -> None:
    model = rotated()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4, loss_fn=functional.mse_loss)
    x, target = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    for _ in range(2):
        expected = whole(model, x, target, functional.mse_loss)
        assert differences(trained(pipe, x, target, door), expected, closely) == []
        for module in (model, pipe):
            module.get_buffer("0.table").mul_(2)  # all layers see the change
    assert pipe[0].table is pipe[3].table


CHANGED = "a layer changed 'table' in its forward, but layers of several stages share it"


@both_places
@each_runtime
@pytest.mark.parametrize("change", ["in place", "anew"])
@pytest.mark.parametrize("at", [0, 3])
def test_buffer_shared_by_ranks_and_changed_by_a_layer_is_refused(
    at: int, change: str, runtime: str
) -> None:
    model = rotated(change if at == 0 else "never", change if at == 3 else "never")
    x = torch.randn(7, 6, dtype=torch.float64)
    alone = Pipe(copy.deepcopy(model), 1, stages=4, devices=["cpu"], runtime=runtime)
    assert closely(alone(x), copy.deepcopy(model)(x))
    for devices in (None, ["cpu"]):  # on one rank, stages alternate between micro-batches
        pipe = Pipe(copy.deepcopy(model), 3, stages=4, devices=devices, runtime=runtime)
        with pytest.raises(RunError, match=CHANGED) as caught:
            pipe(x)
        assert f"in stage {at}" in caught.value.__notes__[0]


@pytest.mark.parametrize("deferred", [False, True])
def test_batch_norm_shared_by_ranks_is_refused_in_training(deferred: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Linear(6, 6), nn.Sequential(norm)).double()
    pipe = Pipe(copy.deepcopy(model), 2, deferred_batch_norm=deferred, stages=3)
    x = torch.randn(6, 6, dtype=torch.float64)
    with pytest.raises(RunError, match="but layers of several stages share it"):
        pipe(x)
    fresh = Pipe(copy.deepcopy(model), 2, deferred_batch_norm=deferred, stages=3).eval()
    assert closely(fresh(x), model.eval()(x))


def test_tied_embedding_with_max_norm_is_refused() -> None:
    model = language()
    model[0].max_norm = 0.5  # type: ignore[assignment]
    x, _ = tokens()
    with pytest.raises(RunError, match="a layer changed 'weight' in its forward, but layers"):
        piped(model)(x)


# ---- parametrized weights -----------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "custom": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
}


@both_places
@each_pair(door=DOORS, checkpoint=CHECKPOINTS, how=PARAMETRIZATIONS, kind=["module", "inner"])
def test_parametrized_tied_weights(kind: str, how: str, checkpoint: str, door: str) -> None:
    model = language(kind)
    PARAMETRIZATIONS[how](model[0])
    pipe = piped(model, checkpoint=checkpoint, schedule="1f1b")
    x, target = tokens()
    for _ in range(2):
        expected = whole(model, x, target, cross_entropy)
        assert differences(trained(pipe, x, target, door), expected, closely) == []


@each_door
def test_tied_original_of_two_parametrizations(door: str) -> None:
    model = language()
    for layer in (model[0], model[7]):
        parametrize.register_parametrization(layer, "weight", Doubled())
    model[7].parametrizations.weight.original = model[0].parametrizations.weight.original  # type: ignore[union-attr]
    pipe = piped(model)
    x, target = tokens()
    expected = whole(model, x, target, cross_entropy)
    assert differences(trained(pipe, x, target, door), expected, closely) == []


# ---- state dicts, copies and norms --------------------------------------------------------


@each_kind
def test_state_dict_of_tied_weights_equals_the_unsplit_model(kind: str) -> None:
    model = language(kind)
    pipe = piped(model)
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in pipe.named_modules()] == [n for n, _ in model.named_modules()]
    assert list(pipe.state_dict()) == list(model.state_dict())
    x, target = tokens()
    pipe.step(x, target=target)
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    saved = io.BytesIO()
    torch.save(pipe.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved)
    tied = [tensor for tensor in state.values() if tensor.shape == (WORDS, WIDTH)]
    assert len(tied) == 2
    assert tied[0].data_ptr() == tied[1].data_ptr()  # saved once
    model.load_state_dict(state)
    assert closely(model(x), pipe(x))
    other = piped(language(kind), ranks=2)
    other.load_state_dict(model.state_dict())
    assert closely(other(x), pipe(x))


class Scaled(nn.Module):
    """A layer whose use of a weight cannot be deferred to W."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[0]


@both_places
@each_checkpoint
@each_runtime
def test_weighted_loss_with_a_tied_weight_used_in_w_and_in_i(checkpoint: str, runtime: str) -> None:
    """What W had added to a proxy was taken for a gradient of an earlier step, and lost."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    model = nn.Sequential(first, Scaled(first.weight), last, nn.Linear(4, 4)).double()

    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return functional.mse_loss(output, target), len(target)

    pipe = Pipe(
        copy.deepcopy(model),
        chunks=2,
        stages=4,
        devices=["cpu"] * 2,
        schedule="zb-v",
        checkpoint=checkpoint,
        runtime=runtime,
        loss_fn=counted,
    )
    x, target = torch.randn(2, 7, 4, dtype=torch.float64)
    for _ in range(2):
        expected = whole(model, x, target, functional.mse_loss)
        assert differences(trained(pipe, x, target, "step"), expected, closely) == []


@each_kind
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"]
)
def test_copied_or_pickled_pipe_keeps_tied_weights(
    copied: Callable[[Pipe], Pipe], kind: str
) -> None:
    model = language(kind)
    pipe = copied(piped(model, loss_fn=None))
    x, target = tokens()
    assert len(list(pipe.parameters())) == len(list(model.parameters()))
    pipe.step(x, target=target, loss_fn=cross_entropy)
    whole(model, x, target, cross_entropy)
    assert same_gradients(pipe, model)


def test_casting_a_pipe_keeps_tied_weights() -> None:
    model = language("module")
    pipe = piped(model.float()).double()
    model.double()
    x, target = tokens()
    expected = whole(model, x, target, cross_entropy)
    assert differences(trained(pipe, x, target, "step"), expected, closely) == []


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clip_grad_norm_counts_a_tied_parameter_once(max_norm: float, norm_type: float) -> None:
    model = language()
    pipe = piped(model)
    x, target = tokens()
    whole(model, x, target, cross_entropy)
    pipe.step(x, target=target)
    wanted = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert closely(pipe.clip_grad_norm_(max_norm, norm_type), wanted)
    assert same_gradients(pipe, model)


def test_clip_grad_norm_that_is_not_finite() -> None:
    pipe = piped(language())
    pipe[2].weight.grad = torch.full((WIDTH, WIDTH), float("nan"), dtype=torch.float64)
    assert pipe.clip_grad_norm_(1.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
