"""Tests of random numbers: equal for all schedules and runtimes, repeated by recomputation."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from itertools import product
from threading import Event, Thread
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpointed

from penstock import Pipe
from penstock.errors import RunError
from penstock.stage.caller_context import is_inside_cell
from penstock.stage.rng import (
    CellRngKernels,
    CellRngMode,
    DrawRedirect,
    SeededRng,
    advance_caller_rng,
    derive_cell_seed,
    peek_seed,
    restore_shared_cpu_state,
    suspend_cell_rng,
)
from penstock.torch_compat import get_dispatch_modes, set_draw_key
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


def multi_headed(x: Tensor) -> Tensor:
    """A composite that draws in C++, below the functions that Python calls."""
    rows, weight = x.unsqueeze(0), torch.eye(WIDTH, dtype=x.dtype)
    found, _ = functional.multi_head_attention_forward(
        rows, rows, rows, WIDTH, 2, weight.repeat(3, 1), None, None, None, False, 0.3, weight, None,
        need_weights=False,
    )  # fmt: skip
    return found.squeeze(0)


def scripted_dropout(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a DeprecationWarning, and since 2.14 a FutureWarning
        script = torch.jit.script(dropout_in_c)
    dropped: Tensor = script(x)
    return dropped


def dropout_in_c(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.3, True)


@torch.library.custom_op("penstock_tests::noise", mutates_args=())
def custom_noise(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def save_factor(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.factor = torch.where(inputs[0] == 0, 0, output / inputs[0])


custom_noise.register_autograd(
    lambda ctx, gradient: gradient * ctx.factor, setup_context=save_factor
)


def noisy(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


def drawn_in_backward(x: Tensor) -> Tensor:
    """A backward that the layer calls in its forward, which draws."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        copied: Tensor = DrawsInBackward.apply(leaf)  # type: ignore[no-untyped-call]
        (factor,) = torch.autograd.grad(copied.sum(), leaf)
    return x * factor


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
    "multi-head attention": lambda: Do(multi_headed),
    "operator": lambda: Do(lambda x: x * torch.ops.aten.bernoulli.p(torch.ones_like(x), 0.5)),
    "scripted": lambda: Do(scripted_dropout),
    "custom operator": lambda: Do(lambda x: custom_noise(x)),
    "vmap": lambda: Do(torch.vmap(noisy, randomness="different")),
    "backward": lambda: Do(drawn_in_backward),
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
        rates = (0.0,)

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, self.rates[0]) if self.rates[0] else x * 1

    moody = Moody()
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), moody), 2, "always", stages=2, runtime=runtime)
    x = torch.randn(4, 4)
    pipe(x).sum().backward()
    moody.rates = (0.5,)
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


@pytest.mark.parametrize("use_reentrant", [True, False])
@each_runtime
def test_torch_checkpoint_that_draws_in_a_later_call_is_refused(
    runtime: str, use_reentrant: bool
) -> None:
    """Only the first forward of a stage searches the stack for a checkpoint at every draw."""

    calls: list[str] = []

    class Repeats(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not calls:
                return functional.dropout(x)
            out: Tensor = checkpointed(functional.dropout, x, use_reentrant=use_reentrant)
            return out

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Repeats()), 2, "never", stages=2, runtime=runtime)
    for _ in range(2):
        pipe(torch.randn(4, 4)).sum().backward()
    calls.append("later")
    with pytest.raises(RunError, match=r"inside torch\.utils\.checkpoint"):
        pipe(torch.randn(4, 4))


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


# ---- CellRngKernels -----------------------------------------------------------------------


def kernels_of(seed: int) -> CellRngKernels:
    assert CellRngKernels.are_available()
    return CellRngKernels(DrawRedirect(seed))


@each_runtime
def test_only_the_first_forward_of_a_stage_that_draws_runs_under_a_dispatch_mode(
    runtime: str,
) -> None:
    """Every operation of every forward once went through Python if a stage had a dropout."""
    modes: list[int] = []
    layers = [nn.Dropout(0.4), Watch(lambda x: modes.append(len(get_dispatch_modes())))]
    pipe = Pipe(
        nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)), 2, "never", stages=[2, 1], runtime=runtime
    )
    for _ in range(2):
        pipe(torch.ones(4, WIDTH)).sum().backward()
    assert modes == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", [kind for kind in DRAWS if kind not in ("random", "numpy")])
def test_kernels_and_mode_draw_the_same_numbers(kind: str) -> None:
    layer, x = DRAWS[kind]().double(), torch.randn(5, WIDTH, dtype=torch.float64)
    before = torch.get_rng_state()
    with CellRngMode(3) as mode:
        expected = [layer(x.clone()), layer(x.clone())]
    with kernels_of(3) as kernels:
        assert is_inside_cell()
        found = [layer(x.clone()), layer(x.clone())]
    assert mode.has_drawn
    assert kernels.redirect.has_drawn
    assert not torch.equal(*found)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), before)
    assert not is_inside_cell()


def test_kernels_and_modes_of_nested_cells() -> None:
    def draw(*seeds_of_modes: tuple[Callable[[int], Any], int]) -> list[float]:
        numbers: list[float] = []
        if seeds_of_modes:
            (context, seed), *inner = seeds_of_modes
            with context(seed):
                numbers += [torch.rand(1).item(), *draw(*inner), torch.rand(1).item()]
        return numbers

    both: list[Callable[[int], Any]] = [kernels_of, CellRngMode]
    for outer, inner in product(both, repeat=2):
        assert draw((outer, 1), (inner, 2))[1:3] == draw((CellRngMode, 2))
        assert draw((outer, 1), (inner, 2))[::3] == draw((CellRngMode, 1))
        with outer(1), inner(2):
            state = torch.get_rng_state()
            with suspend_cell_rng():
                assert not is_inside_cell()
                torch.rand(1)
            assert is_inside_cell()
            assert not torch.equal(torch.get_rng_state(), state)


def test_kernels_leave_other_threads_and_generators_of_layers_alone() -> None:
    drawn: list[Tensor] = []
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with kernels_of(1) as kernels:
        other = Thread(target=lambda: drawn.append(torch.rand(3)))
        other.start()
        other.join()
        drawn.append(torch.rand(3, generator=torch.Generator().manual_seed(0)))
        functional.dropout(torch.ones(3), 0.5, training=False)
        assert not kernels.redirect.has_drawn
        assert kernels.redirect.used_own_generator
    assert torch.equal(drawn[0], expected)
    assert torch.equal(drawn[1], expected)


def test_threads_of_autograd_draw_from_the_only_cell_or_not_at_all() -> None:
    """Autograd gives its threads the dispatch key of the thread that calls a backward."""
    drawn: list[Any] = []

    def draw() -> None:
        set_draw_key(True)
        try:
            drawn.append(torch.rand(1).item())
        except RunError as error:
            drawn.append(str(error))
        set_draw_key(False)

    def run() -> None:
        thread = Thread(target=draw)
        thread.start()
        thread.join()

    with CellRngMode(1):
        expected = torch.rand(1).item()
    with kernels_of(1):
        run()
    run()
    assert drawn[0] == expected
    assert "draws random numbers in the thread" in drawn[1]


def test_operator_that_draws_and_is_defined_later() -> None:
    """The mode of the first forward registers a kernel for it."""
    CellRngKernels.are_available()
    library = torch.library.Library("penstock_tests_later", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    library.impl("noise", lambda x: x + torch.rand_like(x), "CPU")
    noise: Any = torch.ops.penstock_tests_later.noise
    pipe = Pipe(nn.Sequential(Do(noise), nn.Linear(WIDTH, 1)), 2, stages=2)
    outputs = []
    with torch.no_grad():
        for _ in range(2):
            torch.manual_seed(0)
            outputs.append(pipe(torch.zeros(4, WIDTH)))
    assert torch.equal(*outputs)


def test_higher_order_operators_run_in_a_stage_that_draws() -> None:
    """They look up their kernels in Python, where no fallback of the dispatcher is seen."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(x: Tensor) -> Tensor:
        heads = functional.dropout(x, 0.3).view(1, 2, -1, WIDTH)
        found: Tensor = flex_attention(heads, heads, heads)
        return found.view_as(x)

    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Do(attend)), 2, "never", stages=2)
    outputs = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it computes without a fused kernel
        for _ in range(2):
            torch.manual_seed(0)
            outputs.append(pipe(torch.ones(16, WIDTH)))
    assert torch.equal(*outputs)


def test_function_compiled_inside_a_layer_that_draws() -> None:
    """Only modules are known to be compiled; fake tensors must not draw from the cell."""
    drop = torch.compile(lambda x: functional.dropout(x, 0.3) * 2, backend="aot_eager")
    pipe = Pipe(nn.Sequential(Do(drop), nn.Linear(WIDTH, 1)), 2, "never", stages=2)
    outputs = []
    for _ in range(3):
        torch.manual_seed(0)
        outputs.append(pipe(torch.ones(4, WIDTH)))
        outputs[-1].sum().backward()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


@each_checkpoint
@each_runtime
def test_state_of_a_cell_that_torch_checkpoint_restores_later_is_undone(
    runtime: str, checkpoint: str
) -> None:
    """Attention draws from the default generator, which carries the state of its cell meanwhile.

    `torch.utils.checkpoint` in another thread reads that state, and sets it when it ends. After one
    step of thousands, the caller drew other numbers.
    """

    def restore_late(x: Tensor) -> Tensor:
        with SeededRng(1).replace_shared_generator(torch.Generator().manual_seed(4)):
            state = torch.get_rng_state()
        torch.set_rng_state(state)
        return functional.dropout(x, 0.5)

    pipe = Pipe(
        nn.Sequential(nn.Linear(4, 4), Do(restore_late)), 2, checkpoint, stages=2, runtime=runtime,
        devices=["cpu"] * 2, loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    for seed in range(2):
        torch.manual_seed(seed)
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        advance_caller_rng()
        assert torch.equal(state, torch.get_rng_state())


def test_state_that_a_cell_of_another_pipe_draws_from_is_left_to_it() -> None:
    before = torch.get_rng_state()
    has_ended = Event()

    def end_call() -> None:
        restore_shared_cpu_state(before)
        has_ended.set()

    with SeededRng(1).replace_shared_generator(torch.Generator().manual_seed(5)):
        state = torch.get_rng_state()
        other = Thread(target=end_call)
        other.start()
        assert not has_ended.wait(0.05)
        assert torch.equal(torch.get_rng_state(), state)
    other.join()
    assert torch.equal(torch.get_rng_state(), before)


class SetsOldState(torch.autograd.Function):
    """Leaves the state of the forward behind, as two checkpoints in two threads may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        torch.set_rng_state(ctx.state)
        return gradients[0]


@each_runtime
def test_state_of_the_forward_that_a_backward_leaves_is_not_kept(runtime: str) -> None:
    apply: Any = SetsOldState.apply
    layers = nn.Sequential(nn.Linear(4, 4), Do(apply), nn.Linear(4, 4), nn.Dropout(0.5))
    pipe = Pipe(layers, 2, "never", stages=[2, 2], runtime=runtime, devices=["cpu"] * 2)
    for _ in range(2):
        output = pipe(torch.ones(8, 4))
        torch.rand(3)  # between the two
        state = torch.get_rng_state()
        output.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
