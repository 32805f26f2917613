"""Schedules with I and W: exact gradients, one recomputation per cell, no memory kept too long."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, Schedule, is_recomputing
from penstock.errors import RunError
from penstock.schedules.ir import Op
from penstock.schedules.notation import loads
from tests.support import (
    SCHEDULES,
    Do,
    Fails,
    batch,
    closely,
    differences,
    each_checkpoint,
    each_runtime,
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
        self.at, self.count = at, count

    def forward(self, x: Tensor) -> Tensor:
        self.count[self.at, len(x), is_recomputing()] += 1
        y: Tensor = self.inner(x).tanh()
        return y


@each_runtime
@each_checkpoint
@each_zero_bubble
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
    found = trained(pipe, x, target, "step")
    forwards = {key[0]: n for key, n in count.items() if not key[2]}
    again = {key[0]: n for key, n in count.items() if key[2]}
    times = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[checkpoint]
    assert forwards == dict.fromkeys(range(stages), CHUNKS)
    assert again == (dict.fromkeys(range(stages), times) if times else {})
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected = whole(model, x, target, lambda y, t: (y[:, :3] - t).square().mean())
    assert closely(found.loss, expected.loss)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert closely(gradient, expected.gradients[name]), name  # type: ignore[arg-type]


def test_dualpipe_v_has_full_and_split_backwards() -> None:
    """Check that DualPipeV has both, so that the tests above cover a mixture."""
    schedule = penstock.schedules.make("dualpipe-v", 2, 6)
    ops = Counter(action.op for lane in schedule.lanes for action in lane)
    assert ops[Op.B]
    assert ops[Op.I] == ops[Op.W] > 0


# ---- memory -------------------------------------------------------------------------------


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[weakref.ref[Any]]) -> Tensor:
        memory = array("d", bytes(8 * x.numel()))
        made.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.float64).view(x.shape).copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Noted(nn.Module):
    """A layer that records the memory of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Noted.apply(x, self.made)  # type: ignore[no-untyped-call]
        return y

    def alive(self) -> list[bool]:
        return [memory() is not None for memory in self.made]


class Block(nn.Module):
    """A linear layer and a nonlinearity whose inputs are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = Noted(), Noted(), Noted()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(self.before(x))
        y: Tensor = self.after(self.between(hidden).sin() * 2)
        return y


LATE = """
0F0 0F1 0F2 0I0 0I1 0I2 0W2 0W0 0W1
1F0 1I0 1F1 1I1 1W1 1F2 1I2 1W0 1W2
"""


def schedule_of(text: str) -> Schedule:
    made = loads(text)
    assert isinstance(made, Schedule)
    return made


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_linear_keeps_only_its_input_between_i_and_w(checkpoint: str) -> None:
    first, second = Block(), Block()
    seen: dict[str, list[tuple[int, int, int]]] = {}

    def look(block: Block, name: str) -> None:
        seen.setdefault(name, []).append(
            tuple(sum(part.alive()) for part in (block.before, block.between, block.after))  # type: ignore[arg-type]
        )

    pipe = Pipe(
        nn.Sequential(first, second), 3, checkpoint, stages=2, devices=["cpu"] * 2,
        schedule=schedule_of(LATE), runtime="inline", loss_fn=lambda y: y.square().mean(),
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
            assert not any(block.before.alive() + block.between.alive() + block.after.alive())
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


@each_runtime
@each_zero_bubble
@pytest.mark.parametrize("op", ["I", "W"])
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


def tied() -> nn.Sequential:
    """Return a model tied within a stage and partly frozen, with attention and a convolution."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return x + y

    torch.manual_seed(0)
    first, last = nn.Linear(6, 6), nn.Linear(6, 3)
    same = nn.Linear(6, 6)
    same.weight = first.weight
    last.weight.requires_grad_(False)
    return nn.Sequential(
        nn.Sequential(first, Do(lambda x: x.unsqueeze(1).expand(-1, 4, -1)), same),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), Heads()),
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm(6)),
        nn.Sequential(Do(lambda x: x.mean(1)), nn.Linear(6, 6), last),
    ).double()


@each_runtime
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("odd", ODD)
def test_split_backward_with_handwritten_schedules(odd: str, checkpoint: str, runtime: str) -> None:
    loss_fn = nn.functional.mse_loss
    model = tied()
    pipe = Pipe(
        model, 2, checkpoint, stages=2, devices=["cpu"] * 2,
        schedule=schedule_of(ODD[odd]), runtime=runtime, loss_fn=loss_fn,
    )  # fmt: skip
    x, target = batch(5)
    x.requires_grad_()
    for _ in range(2):  # gradients accumulate
        found = trained(pipe, x, target, "step")
    reference = tied()
    other = x.detach().clone().requires_grad_()
    for _ in range(2):
        expected = whole(reference, other, target, loss_fn)
    assert differences(found, expected, closely) == []


@each_runtime
@each_zero_bubble
def test_split_backward_runs_parameter_hooks_as_often_as_a_full_backward(
    schedule: str, runtime: str
) -> None:
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
        return sorted(seen, key=lambda g: float(g.sum())), len(after)

    found, expected = run(schedule), run("gpipe")
    assert found[1] == expected[1] == CHUNKS
    assert all(map(closely, found[0], expected[0]))
    assert len(found[0]) == len(expected[0]) == CHUNKS


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

    def gradients(model: nn.Module) -> list[Tensor]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    x, target = batch(8)
    model, reference = made(True), made(False)
    pipe = Pipe(
        model, 2, checkpoint, stages=3, devices=["cpu"] * 3, schedule="zb-h1", runtime=runtime,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    pipe.step(x, target=target)
    nn.functional.mse_loss(reference(x), target).backward()
    assert len(gradients(model)) == len(gradients(reference)) == 8
    assert all(map(closely, gradients(model), gradients(reference)))


@each_runtime
def test_weight_sent_to_the_next_stage_under_zero_bubble(runtime: str) -> None:
    """The model ties by hand: the last stage multiplies with the embedding weight of the first."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 6)

        def forward(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            return self.table(indices), self.table.weight

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.linear(self.inner(both[0]), both[1])

    torch.manual_seed(0)
    model = nn.Sequential(First(), Last()).double()
    indices, target = torch.randint(7, (6, 3)), torch.randint(7, (6, 3))
    loss_fn = Do(lambda y, t: nn.functional.cross_entropy(y.transpose(1, 2), t)).function
    pipe = Pipe(
        model, 3, stages=2, devices=["cpu"] * 2, schedule="zb-h1", runtime=runtime, loss_fn=loss_fn
    )
    pipe.step(indices, target=target)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss_fn(model(indices), target).backward()
    assert all(closely(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))  # type: ignore[arg-type]
