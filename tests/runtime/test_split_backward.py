"""Schedules with I and W: exact gradients, one recomputation per cell, no memory kept too long."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, is_recomputing
from penstock.errors import RunError
from penstock.schedules.ir import Op
from tests.features.more import attending
from tests.pairs import each_pair
from tests.schedules.texts import schedule
from tests.support import (
    CHECKPOINTS,
    RUNTIMES,
    SCHEDULES,
    Doubled,
    Fails,
    batch,
    closely,
    differences,
    each_checkpoint,
    each_runtime,
    same_gradients,
    trained,
    whole,
    without_gc,
)

ZERO_BUBBLE = ("zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v", "fit")
each_zero_bubble = pytest.mark.parametrize("schedule", ZERO_BUBBLE)
RANKS, CHUNKS = 2, 4


class Counted(nn.Module):
    """A linear layer that counts its forwards and recomputations per micro-batch."""

    def __init__(self, at: int, count: Counter[tuple[int, int, bool]]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        # In a closure: what a recomputation counts in an attribute is undone.
        self.at = at
        self.get_count: Callable[[], Counter[tuple[int, int, bool]]] = lambda: count

    def forward(self, x: Tensor) -> Tensor:
        self.get_count()[self.at, len(x), is_recomputing()] += 1
        y: Tensor = self.inner(x).tanh()
        return y


@each_pair(schedule=ZERO_BUBBLE, checkpoint=CHECKPOINTS, runtime=RUNTIMES)
def test_split_backward_recomputes_each_cell_once(
    schedule: str, checkpoint: str, runtime: str
) -> None:
    count: Counter[tuple[int, int, bool]] = Counter()
    stages = RANKS * SCHEDULES[schedule]
    torch.manual_seed(0)
    model = nn.Sequential(*(Counted(at, count) for at in range(stages)))
    pipe = Pipe(
        model, CHUNKS, checkpoint, stages=stages, devices=["cpu"] * RANKS, schedule=schedule,
        runtime=runtime, loss_fn=lambda y, t: (y[:, :3] - t).square().mean(),
    )  # fmt: skip
    x, target = batch(2 * CHUNKS)
    pipe.step(x, target=target)
    forwards = {key[0]: n for key, n in count.items() if not key[2]}
    again = {key[0]: n for key, n in count.items() if key[2]}
    times = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[checkpoint]
    assert forwards == dict.fromkeys(range(stages), CHUNKS)
    assert again == (dict.fromkeys(range(stages), times) if times else {})


def test_dualpipe_v_has_full_and_split_backwards() -> None:
    """Check that DualPipeV has both, so that the tests above cover a mixture."""
    schedule = penstock.schedules.make("dualpipe-v", 2, 6)
    ops = Counter(action.op for lane in schedule.lanes for action in lane)
    assert ops[Op.B]
    assert ops[Op.I] == ops[Op.W] > 0


# ---- memory -------------------------------------------------------------------------------


class Block(nn.Module):
    """A linear layer and a nonlinearity whose inputs are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = Doubled(), Doubled(), Doubled()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(self.before(x))
        y: Tensor = self.after(self.between(hidden).sin() * 2)
        return y


LATE = """
0F0 0F1 0F2 0I0 0I1 0I2 0W2 0W0 0W1
1F0 1I0 1F1 1I1 1W1 1F2 1I2 1W0 1W2
"""


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_linear_keeps_only_its_input_between_i_and_w(checkpoint: str) -> None:
    first, second = Block(), Block()
    seen: dict[str, list[tuple[int, int, int]]] = {}

    def look(block: Block, name: str) -> None:
        seen.setdefault(name, []).append(
            (block.before.alive, block.between.alive, block.after.alive)
        )

    pipe = Pipe(
        nn.Sequential(first, second), 3, checkpoint, stages=2, devices=["cpu"] * 2,
        schedule=schedule(LATE), runtime="inline", loss_fn=lambda y: y.square().mean(),
    )  # fmt: skip
    runner = penstock.stage.stage_runner.StageRunner
    weights = runner.backward_weights

    def watched(self: Any, microbatch: int) -> None:
        block = (first, second)[self.stage.index]
        look(block, f"{self.stage.index} before W{microbatch}")
        weights(self, microbatch)
        look(block, f"{self.stage.index} after W{microbatch}")

    with pytest.MonkeyPatch.context() as patch, without_gc():
        patch.setattr(runner, "backward_weights", watched)
        pipe.step(torch.randn(6, 6, dtype=torch.float64))
        assert seen["0 before W2"] == [(3, 0, 0)]
        assert seen["0 after W2"] == [(2, 0, 0)]
        assert seen["0 before W0"] == [(2, 0, 0)]
        assert seen["0 after W0"] == [(1, 0, 0)]
        assert seen["0 after W1"] == [(0, 0, 0)]
        assert seen["1 before W1"] == [(2, 0, 0)]
        assert seen["1 after W1"] == [(1, 0, 0)]
        assert seen["1 after W2"] == [(0, 0, 0)]


@each_runtime
@each_zero_bubble
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_split_backward_frees_all_activations(schedule: str, checkpoint: str, runtime: str) -> None:
    stages = RANKS * SCHEDULES[schedule]
    blocks = [Block() for _ in range(stages)]
    pipe = Pipe(
        nn.Sequential(*blocks), CHUNKS, checkpoint, stages=stages, devices=["cpu"] * RANKS,
        schedule=schedule, runtime=runtime, loss_fn=lambda y: y.square().mean(),
    )  # fmt: skip
    with without_gc():
        x = torch.randn(8, 6, dtype=torch.float64)
        given = weakref.ref(x)
        result = pipe.step(x)
        del x, result
        for block in blocks:
            assert len(block.before.made) >= CHUNKS
            assert not block.before.alive + block.between.alive + block.after.alive
        assert given() is None


# ---- errors -------------------------------------------------------------------------------


class Spoils(nn.Module):
    """A layer that, while broken, changes the input of a linear layer after its use; W fails."""

    broken = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        y: Tensor = self.linear(h)
        if self.broken:
            h.add_(1)
        return y


@each_pair(schedule=ZERO_BUBBLE, op=["I", "W"], runtime=RUNTIMES)
def test_error_in_i_or_w_has_its_location_and_the_pipe_remains_usable(
    op: str, schedule: str, runtime: str
) -> None:
    stages = RANKS * SCHEDULES[schedule]
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block() for _ in range(stages)]
    spoils = Fails() if op == "I" else Spoils()
    blocks[1] = nn.Sequential(spoils, Block())
    model = nn.Sequential(*blocks)
    pipe = Pipe(
        model, CHUNKS, stages=stages, devices=["cpu"] * RANKS, schedule=schedule,
        runtime=runtime, loss_fn=lambda y, t: (y[:, :3] - t).square().mean(),
    )  # fmt: skip
    x, target = batch(8)
    error: Any = ZeroDivisionError if op == "I" else (RunError, RuntimeError)
    for _ in range(2):
        with without_gc():
            with pytest.raises(error) as caught:
                pipe.step(x, target=target)
            note = "\n".join(caught.value.__notes__)
            assert "stage 1" in note
            assert f"action 1{op}" in note or ("action 1B" in note and schedule == "dualpipe-v")
            del caught
        assert all(type(p) is nn.Parameter for p in model.parameters())
    spoils.broken = False
    model.zero_grad()
    found = trained(pipe, x, target, "step")
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected = whole(model, x, target, lambda y, t: (y[:, :3] - t).square().mean())
    found.gradients.update(gradients)
    assert differences(found, expected, closely) == []


# ---- handwritten schedules, unusual models ------------------------------------------------

ODD = {
    "each W right after its I": "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1",
    "every W at the end": "0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1I0 1F1 1I1 1W0 1W1",
    "mixed with full backwards": "0F0 0F1 0I0 0B1 0W0\n1F0 1B0 1F1 1I1 1W1",
    "a W before the F of another micro-batch": "0F0 0I0 0W0 0F1 0B1\n1F0 1I0 1W0 1F1 1I1 1W1",
    "with recomputation": "0F0 0F1 0R0 0I0 0I1 0W0 0W1\n1F0 1R0 1I0 1F1 1I1 1W1 1W0",
}


@each_runtime
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("odd", ODD)
def test_split_backward_with_handwritten_schedules(odd: str, checkpoint: str, runtime: str) -> None:
    loss_fn = nn.functional.mse_loss
    pipe = Pipe(
        attending(), 2, checkpoint, stages=2, devices=["cpu"] * 2,
        schedule=schedule(ODD[odd]), runtime=runtime, loss_fn=loss_fn,
    )  # fmt: skip
    reference, x, other = attending(), batch(5)[0], batch(5)[0]
    for given in (x, other):
        given.requires_grad_()
    for _ in range(2):  # gradients accumulate
        found = trained(pipe, x, x.detach().cos(), "step")
        expected = whole(reference, other, x.detach().cos(), loss_fn)
    assert differences(found, expected, closely) == []


@each_runtime
@each_zero_bubble
def test_split_backward_runs_parameter_hooks_once(schedule: str, runtime: str) -> None:
    stages = RANKS * SCHEDULES[schedule]
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(stages)]

    def run(schedule: str) -> tuple[list[Tensor], int]:
        model = nn.Sequential(*layers)
        model.zero_grad()
        seen: list[Tensor] = []
        after: list[int] = []
        hook = layers[0].weight.register_hook(lambda g: seen.append(g.clone()))
        other = layers[1].weight.register_post_accumulate_grad_hook(lambda p: after.append(1))
        pipe = Pipe(
            model, CHUNKS, stages=stages, devices=["cpu"] * RANKS, schedule=schedule,
            runtime=runtime, loss_fn=lambda y: y.square().mean(),
        )  # fmt: skip
        pipe.step(torch.ones(4, 6, dtype=torch.float64).cumsum(0))
        hook.remove()
        other.remove()
        return seen, len(after)

    found, expected = run(schedule), run("gpipe")
    assert found[1] == expected[1] == 1
    assert all(map(closely, found[0], expected[0]))
    assert len(found[0]) == len(expected[0]) == 1


@each_runtime
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_nested_pipe_under_zero_bubble(checkpoint: str, runtime: str) -> None:
    """The gradients of the inner pipe go to the parameters, not to their proxies."""

    def made(inner: bool) -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        middle: nn.Module = layers
        if inner:
            middle = Pipe(layers, 2, checkpoint, stages=2, devices=["cpu"] * 2, runtime=runtime)
        last = nn.Linear(6, 3, dtype=torch.float64)
        return nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Sequential(middle), last)

    x, target = batch(8)
    model, reference = made(True), made(False)
    pipe = Pipe(
        model, 2, checkpoint, stages=3, devices=["cpu"] * 3, schedule="zb-h1", runtime=runtime,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    pipe.step(x, target=target)
    nn.functional.mse_loss(reference(x), target).backward()
    assert same_gradients(model, reference)


class Equilibrium(nn.Module):
    """A deep equilibrium layer: a hook solves for the gradient with `torch.autograd.grad`."""

    def __init__(self, how: str = "grad") -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6, dtype=torch.float64), how

    def forward(self, x: Tensor) -> Tensor:
        def iterate(state: Tensor) -> Tensor:
            return torch.tanh(0.1 * self.linear(state) + x)

        with torch.no_grad():
            state = iterate(iterate(torch.zeros_like(x)))
        state = iterate(state)
        start = state.detach().requires_grad_()
        end = iterate(start)

        def solve(gradient: Tensor) -> Tensor:
            if self.how == "backward":
                end.backward(gradient)
                return gradient
            total = gradient
            for _ in range(3):
                (slope,) = torch.autograd.grad(
                    end, start, total, retain_graph=True, allow_unused=self.how == "unused"
                )
                total = slope + gradient
            return total

        if state.requires_grad:
            state.register_hook(solve)
        return state


@each_runtime
@each_checkpoint
def test_deep_equilibrium_layer_under_zero_bubble(checkpoint: str, runtime: str) -> None:
    """The gradients that pass by the weights in the layer's own `grad` are not the loss's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Equilibrium(), nn.Linear(6, 3)).double()
    reference = copy.deepcopy(model)
    x, target = batch(8)
    pipe = Pipe(
        model, 2, checkpoint, stages=3, devices=["cpu"] * 3, schedule="zb-h1", runtime=runtime,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    pipe.step(x, target=target)
    nn.functional.mse_loss(reference(x), target).backward()
    assert same_gradients(model, reference)


@pytest.mark.parametrize("how", ["unused", "backward"])
def test_layer_that_may_want_weight_gradients_in_its_backward_is_refused(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Equilibrium(how), nn.Linear(6, 3)).double()
    pipe = Pipe(
        model, 2, "never", stages=3, devices=["cpu"] * 3, schedule="zb-h1", loss_fn=torch.sum
    )
    with pytest.raises(RunError, match="a layer computes gradients in its backward"):
        pipe.step(batch(8)[0])
