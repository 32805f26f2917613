"""Tests of random numbers: equal for all schedules and runtimes, repeated by recomputation."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from itertools import product

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpointed

from penstock import Pipe
from penstock.errors import RunError
from penstock.stage.rng import CellRngMode, advance_caller_rng, derive_cell_seed, peek_seed
from tests.support import (
    CHECKPOINTS,
    RUNTIMES,
    Do,
    Watch,
    bitwise,
    each_checkpoint,
    each_door,
    each_runtime,
)

WIDTH = 6


def attended(x: Tensor) -> Tensor:
    heads = x.view(-1, 2, 3)
    found = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
    return found.reshape(-1, WIDTH)


DRAWS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.4),
    "alpha": lambda: nn.AlphaDropout(0.4),
    "dropout1d": lambda: nn.Dropout1d(0.4),
    "in place": lambda: nn.Dropout(0.4, inplace=True),
    "rrelu": nn.RReLU,
    "rand_like": lambda: Do(lambda x: x * torch.rand_like(x)),
    "rand": lambda: Do(lambda x: x * torch.rand(WIDTH, dtype=x.dtype)),
    "normal_": lambda: Do(lambda x: x + torch.empty_like(x).normal_()),
    "bernoulli": lambda: Do(lambda x: x * torch.full_like(x, 0.5).bernoulli()),
    "randperm": lambda: Do(lambda x: x[:, torch.randperm(WIDTH)]),
    "randint": lambda: Do(lambda x: x * torch.randint(3, (WIDTH,))),
    "multinomial": lambda: Do(lambda x: x[:, torch.multinomial(torch.ones(WIDTH), 3)].repeat(1, 2)),
    "gumbel": lambda: Do(lambda x: x * functional.gumbel_softmax(x, hard=False)),
    "attention": lambda: Do(attended),
    "random": lambda: Do(lambda x: x * random.random()),
    "numpy": lambda: Do(lambda x: x * float(numpy.random.rand())),
}


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    layers = [linears[0], DRAWS[kind](), linears[1], DRAWS[kind](), linears[2]]
    return nn.Sequential(*layers).double()


def learned(pipe: Pipe, door: str = "call") -> list[Tensor]:
    """Run two seeded steps; return outputs or losses, gradients and the next random numbers."""
    torch.manual_seed(7)
    found = []
    for _ in range(2):
        x = torch.randn(7, WIDTH, dtype=torch.float64)
        pipe.zero_grad()
        if door == "step":
            found.append(pipe.step(x, loss_fn=lambda y: y.square().mean()).loss)
        else:
            output = pipe(x)
            output.square().mean().backward()
            found.append(output.detach())
        found += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    return [*found, torch.rand(3)]


@each_door
@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_are_the_same_for_every_checkpoint_mode_and_runtime(
    kind: str, door: str
) -> None:
    given = model(kind)
    runs = [
        learned(Pipe(copy.deepcopy(given), 3, checkpoint, stages=[2, 1, 2], runtime=runtime), door)
        for checkpoint, runtime in product(CHECKPOINTS, RUNTIMES)
    ]
    assert len(runs[0]) > 10
    for run in runs[1:]:
        assert all(map(bitwise, run, runs[0]))


@each_runtime
@each_checkpoint
def test_random_numbers_depend_on_the_seed_of_the_caller(checkpoint: str, runtime: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Dropout(), nn.Dropout()), 2, checkpoint, stages=2, runtime=runtime)
    x = torch.ones(4, 50)

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        output: Tensor = pipe(x)
        return output

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    assert not torch.equal(pipe(x), pipe(x))


def test_each_cell_draws_different_random_numbers() -> None:
    pipe = Pipe(nn.Sequential(Do(torch.rand_like), Do(torch.rand_like)), 3, stages=2)
    rows = pipe(torch.ones(3, 50))
    assert len({tuple(row.tolist()) for row in rows}) == 3
    cells = {derive_cell_seed(seed, stage, i) for seed, stage, i in product(range(4), repeat=3)}
    assert len(cells) == 64
    assert all(0 <= cell < 2**63 for cell in cells)


@each_runtime
def test_generator_state_is_unchanged_if_the_model_draws_nothing(runtime: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5).eval()), 2, runtime=runtime)
    pipe.eval()
    before = torch.get_rng_state()
    pipe(torch.ones(4, 2)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@each_runtime
def test_explicit_generators_are_used_as_given(runtime: str) -> None:
    mine = torch.Generator()
    pipe = Pipe(
        nn.Sequential(Do(lambda x: x + torch.rand(x.shape, generator=mine)), nn.Identity()),
        2, "never", stages=2, runtime=runtime,
    )  # fmt: skip
    mine.manual_seed(3)
    found = pipe(torch.zeros(4, 2))
    mine.manual_seed(3)
    assert torch.equal(found, torch.cat([torch.rand(2, 2, generator=mine) for _ in range(2)]))


@each_runtime
def test_layer_that_starts_drawing_causes_a_warning(runtime: str) -> None:
    """A stage that drew nothing before runs without its own RNG.

    The call in which it starts to draw warns; later calls are reproducible.
    """

    class Moody(nn.Module):
        rate = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, self.rate) if self.rate else x * 1

    moody = Moody()
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), moody), 2, "always", stages=2, runtime=runtime)
    x = torch.randn(4, 4)
    pipe(x).sum().backward()
    moody.rate = 0.5
    with pytest.warns(UserWarning, match="random numbers were drawn from PyTorch"):
        pipe(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        pipe.zero_grad()
        output = pipe(x)
        output.sum().backward()
    kept = (output != 0).double()
    assert pipe[0].bias.grad is not None
    assert torch.equal(pipe[0].bias.grad.double(), 2 * kept.sum(0))


@each_runtime
def test_dropout_rate_and_mode_may_change_between_calls(runtime: str) -> None:
    dropout = nn.Dropout(0.0)
    pipe = Pipe(nn.Sequential(dropout, nn.Identity()), 2, "always", stages=2, runtime=runtime)
    x = torch.ones(4, 100, requires_grad=True)
    for p, training in ((0.0, True), (0.9, True), (0.9, False), (0.5, True), (0.0, True)):
        dropout.p = p
        pipe.train(training)
        y = pipe(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, gradient)  # the input is 1, so the output is the dropout factor
        assert bool((y == 0).any()) == (training and p > 0)


@each_runtime
def test_torch_checkpoint_around_the_whole_pipe_may_draw(runtime: str) -> None:
    """The search for a checkpoint stops at the cell: a repeated call repeats its seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH))
    pipe = Pipe(model, 2, "never", stages=2, runtime=runtime)
    x = torch.randn(4, WIDTH)
    gradients = []
    calls: list[Callable[[Tensor], Tensor]] = [
        pipe,
        lambda x: checkpointed(pipe, x, use_reentrant=False),
    ]
    for call in calls:
        torch.manual_seed(7)
        pipe.zero_grad()
        call(x).square().mean().backward()
        gradients.append([p.grad for p in pipe.parameters() if p.grad is not None])
    assert len(gradients[0]) == 4
    assert all(map(bitwise, *gradients))


@pytest.mark.parametrize("kind", ["dropout", "random"])
@pytest.mark.parametrize("inside", RUNTIMES)
@each_runtime
def test_nested_pipe_that_draws_inside_a_recomputing_pipe(
    runtime: str, inside: str, kind: str
) -> None:
    """The inner pipe draws its seed like any other random number of the stage that contains it."""

    def found(checkpoint: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), DRAWS[kind](), nn.Linear(WIDTH, WIDTH))
        inner = Pipe(layers, 2, "never", stages=3, runtime=inside)
        outer = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)).double()
        return learned(Pipe(outer, 3, checkpoint, stages=2, runtime=runtime))

    assert all(map(bitwise, found("always"), found("never")))


@each_runtime
def test_own_generator_is_refused_also_after_a_batch_without_recomputation(runtime: str) -> None:
    """A batch of one row has one micro-batch, which is not recomputed."""
    own = torch.Generator()
    layers = nn.Sequential(Do(lambda x: x * torch.rand(1, generator=own)), nn.Linear(2, 2))
    pipe = Pipe(layers, 2, stages=2, runtime=runtime)
    x = torch.ones(4, 2, requires_grad=True)
    pipe(x[:1]).sum().backward()
    with pytest.raises(RunError, match="draws random numbers from its own generator"):
        pipe(x)


def seeded_noise(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return x + torch.randn(x.shape)


def seeded_for_good(x: Tensor) -> Tensor:
    torch.manual_seed(torch.initial_seed())
    return x + torch.randn(x.shape)


@each_runtime
@pytest.mark.parametrize("layer", [seeded_noise, seeded_for_good])
def test_seeding_inside_a_layer_is_refused(layer: Callable[[Tensor], Tensor], runtime: str) -> None:
    torch.rand(1)  # leave the beginning of the seed
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Do(layer)), 2, stages=2, runtime=runtime)
    with pytest.raises(RunError, match=r"this layer calls torch.manual_seed\(\d+\)"):
        pipe(torch.ones(4, 2))


# ---- CellRngMode itself -------------------------------------------------------------------


def test_cell_rng_mode_is_reproducible_and_leaves_the_global_generator() -> None:
    before = torch.get_rng_state()

    def draw(seed: int) -> list[float]:
        with CellRngMode(seed) as own:
            assert not own.has_drawn
            drawn = [*torch.rand(2).tolist(), *torch.randperm(5).tolist(), torch.randn(1).item()]
            assert own.has_drawn
        return drawn

    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_cell_rng_mode_reports_no_draw_without_random_ops() -> None:
    with CellRngMode(1) as own:
        functional.dropout(torch.ones(3), 0.5, training=False)
        torch.rand(3, generator=torch.Generator())
        (torch.ones(3) * 2).sum()
    assert not own.has_drawn


def test_peek_seed_follows_the_generator_of_the_caller() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seed = peek_seed()
    assert peek_seed() == seed
    assert torch.equal(torch.get_rng_state(), before)
    advance_caller_rng()
    assert peek_seed() != seed
    torch.manual_seed(5)
    assert peek_seed() == seed


def test_python_random_state_is_unchanged() -> None:
    random.seed(1)
    state = random.getstate()
    Pipe(nn.Sequential(nn.Dropout(), Watch(lambda x: None)), 2, stages=2)(torch.ones(4, 4))
    assert random.getstate() == state
