"""`pipe.step`: its loss, its outputs and its timeline."""

from __future__ import annotations

import copy
import sys
from itertools import count, pairwise
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Compute, Cost, NoChunk, Op, Pipe, Recv, StepResult, Timeline, draw
from penstock.schedules.ir import consumes, produces
from tests.pairs import each_pair
from tests.support import (
    CHECKPOINTS,
    RUNTIMES,
    SCHEDULES,
    Do,
    Traced,
    batch,
    both,
    closely,
    each_checkpoint,
    each_runtime,
    each_schedule,
    numbered,
    plain,
    same_gradients,
)

# ---- the loss -----------------------------------------------------------------------------


@each_runtime
@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize(
    "options",
    [
        {"loss_fn": functional.mse_loss},
        {"loss_fn": nn.MSELoss()},
        {"loss_fn": nn.MSELoss(reduction="sum")},
        {"loss_fn": lambda y, t: functional.mse_loss(y, t, reduction="sum"), "reduction": "sum"},
        {"loss_fn": nn.MSELoss(), "reduction": "mean"},
    ],
    ids=["function", "module", "sum", "sum by option", "mean by option"],
)
def test_step_loss_and_gradients_match_the_whole_batch(
    options: dict[str, Any], rows: int, runtime: str
) -> None:
    """The loss is the mean by rows, or the sum, over any split into micro-batches."""
    model, pipe = both(**options, runtime=runtime)
    x, target = batch(rows)
    result = pipe.step(x, target=target)
    loss = options["loss_fn"](model(x), target)
    loss.backward()
    assert closely(result.loss, loss.detach())
    assert same_gradients(pipe, model)
    assert not result.loss.requires_grad
    assert result.loss.shape == ()
    assert result.metrics == {}


def test_loss_fn_argument_of_step() -> None:
    model, pipe = both(loss_fn=None)
    x, target = batch(7)
    result = pipe.step(x, target=target, loss_fn=functional.l1_loss)
    assert closely(result.loss, functional.l1_loss(model(x), target).detach())


@pytest.mark.parametrize("stages", [1, 4])
def test_step_with_structured_targets(stages: int) -> None:
    """Tensors are split like the inputs; NoChunk values and non-tensors go to every micro-batch."""

    def loss_fn(y: Tensor, target: dict[str, Any]) -> Tensor:
        gap: Tensor = y * target["scale"] - target["value"][0]
        return gap.abs().mean() * float(target["factor"])

    model, pipe = both(loss_fn=loss_fn, stages=stages)
    x, value = batch(7)
    scale = torch.tensor(3.0, dtype=torch.float64)
    target = {"value": [value], "scale": NoChunk(scale), "factor": 2}
    result = pipe.step(x, target=target)
    loss = loss_fn(model(x), {**target, "scale": scale})
    loss.backward()
    assert closely(result.loss, loss.detach())
    assert same_gradients(pipe, model)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda y, t: y - t, r"a loss must be .*, but loss_fn returned shape \(3, 3\). Reduce it"),
        (lambda y, t: 1.0, "a loss must be a tensor .*, but loss_fn returned <class 'float'>"),
        (nn.MSELoss(reduction="none"), r"loss_fn returned shape \(3, 3\)"),
        (None, r"the model, without a loss_fn, returned shape \(3, 3\)"),
    ],
)
def test_step_refuses_a_loss_that_is_not_one_number(loss_fn: Any, message: str) -> None:
    _, pipe = both(loss_fn=loss_fn, checkpoint="never")
    x, target = batch(7)
    with pytest.raises(RuntimeError, match=message):
        pipe.step(x, target=None if loss_fn is None else target)


def test_step_accepts_a_one_element_loss_of_any_shape() -> None:
    _, pipe = both(loss_fn=lambda y, t: (y - t).mean().reshape(1, 1))
    x, target = batch(7)
    assert pipe.step(x, target=target).loss.shape == ()


def test_step_refuses_a_target_with_a_different_number_of_rows() -> None:
    _, pipe = both()
    with pytest.raises(RuntimeError, match="micro-batches"):
        pipe.step(batch(7)[0], target=batch(2)[1])


# ---- outputs ------------------------------------------------------------------------------


@each_checkpoint
@pytest.mark.parametrize("stages", [1, 4])
def test_step_returns_outputs_on_request(stages: int, checkpoint: str) -> None:
    model, pipe = both(stages=stages, checkpoint=checkpoint)
    x, target = batch(7)
    assert pipe.step(x, target=target).outputs is None
    result = pipe.step(x, target=target, outputs=True)
    assert closely(result.outputs, model(x).detach())
    assert not result.outputs.requires_grad


# ---- grad modes and frozen parameters -----------------------------------------------------


@each_runtime
@each_schedule
def test_step_under_no_grad_runs_no_backward(schedule: str, runtime: str) -> None:
    per_rank = SCHEDULES[schedule]
    model, pipe = both(schedule=schedule, runtime=runtime, devices=["cpu"] * (4 // per_rank))
    x, target = batch(7)
    with torch.no_grad():
        result = pipe.step(x, target=target, outputs=True)
    assert all(p.grad is None for p in pipe.parameters())
    assert closely(result.loss, functional.mse_loss(model(x), target).detach())
    assert closely(result.outputs, model(x).detach())
    ops = {span.action.op for lane in result.timeline.computes for span in lane}  # type: ignore[union-attr]
    assert ops == {Op.F}


def test_step_with_all_parameters_frozen() -> None:
    model, pipe = both()
    pipe.requires_grad_(False)
    x, target = batch(7)
    result = pipe.step(x, target=target)
    assert closely(result.loss, functional.mse_loss(model(x), target).detach())
    assert all(p.grad is None for p in pipe.parameters())


@each_checkpoint
def test_step_backpropagates_once_to_what_computed_the_input(checkpoint: str) -> None:
    model, pipe = both(checkpoint=checkpoint)
    x, target = batch(7)
    mine, theirs = (nn.Linear(6, 6).double() for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    calls = []
    theirs.weight.register_hook(lambda gradient: calls.append(1))
    functional.mse_loss(model(mine(x)), target).backward()
    pipe.step(theirs(x), target=target)
    assert same_gradients(theirs, mine)
    assert calls == [1]


def test_step_gradient_of_a_nochunk_input() -> None:
    model = nn.Sequential(Do(lambda x, w: x * w), *plain())
    pipe = Pipe(copy.deepcopy(model), 3, stages=5, loss_fn=torch.mean)
    x, _ = batch(7)
    w = torch.randn(6, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(model[1:](x * w).mean(), w)[0]
    pipe.step(x, NoChunk(w))
    assert w.grad is not None
    assert closely(w.grad, wanted)


@each_runtime
def test_step_runs_parameter_hooks_once(runtime: str) -> None:
    """They see the gradient of the whole batch, as in the unsplit model."""
    model, pipe = both(runtime=runtime, schedule="1f1b")
    seen: list[Tensor] = []
    pipe[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x, target = batch(7)
    pipe.step(x, target=target)
    functional.mse_loss(model(x), target).backward()
    assert len(seen) == 1
    assert same_gradients(pipe, model)
    assert torch.equal(seen[-1], pipe[2].weight.grad)


# ---- the timeline -------------------------------------------------------------------------


def check_sound(timeline: Timeline) -> None:
    """Check that each action ran once, in lane order, and after the actions it depends on."""
    program = timeline.program
    found = [(span.rank, span.action) for span in timeline.spans]
    lanes = [(rank, action) for rank, lane in enumerate(program.lanes) for action in lane]
    # receives take no time of their own
    waits = [pair for pair in lanes if isinstance(pair[1], Recv)]
    assert sorted(map(str, {*found, *waits})) == sorted(map(str, lanes))
    assert len(set(found)) == len(found)
    for rank, spans in enumerate(timeline.computes):
        assert tuple(span.action for span in spans) == program.schedule.lanes[rank]
        for before, after in pairwise(spans):
            assert before.start <= before.end <= after.start
    computes = [span for lane in timeline.computes for span in lane]
    made = {
        message: span.end
        for span in computes
        if isinstance(span.action, Compute)
        for message in produces(span.action, program.graph)
    }
    for span in computes:
        assert isinstance(span.action, Compute)
        for message in consumes(span.action, program.graph):
            assert made[message] <= span.start


@each_pair(runtime=RUNTIMES, checkpoint=CHECKPOINTS, schedule=SCHEDULES)
def test_step_timeline_matches_the_program(schedule: str, checkpoint: str, runtime: str) -> None:
    per_rank = SCHEDULES[schedule]
    _, pipe = both(
        schedule=schedule, checkpoint=checkpoint, runtime=runtime, chunks=4,
        devices=["cpu"] * (4 // per_rank),
    )  # fmt: skip
    forecast = pipe.forecast()
    assert forecast.cost == Cost.even(forecast.program.schedule.placement)
    x, target = batch(8)
    timeline = pipe.step(x, target=target).timeline
    check_sound(timeline)
    assert timeline.program == forecast.program
    assert timeline.makespan > 0
    assert timeline.peak == forecast.peak
    after = pipe.forecast()
    check_sound(after)
    assert after.cost == timeline.cost != forecast.cost
    assert min(after.cost.F) > 0
    for drawn in (timeline, after, forecast):
        assert len(draw.text(drawn).splitlines()) >= 4 // per_rank


def test_timeline_spans_match_when_the_layers_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock advances by one whenever it is read."""
    clock = count()
    monkeypatch.setattr("penstock.device.device.perf_counter", lambda: float(next(clock)))
    seen: dict[str, float] = {}

    def look(action: str) -> None:
        seen[action] = next(clock)

    layers = [Traced(look, stage) for stage in range(3)]
    pipe = Pipe(nn.Sequential(*layers), 2, "always", stages=3, runtime="inline", loss_fn=torch.sum)
    spans = pipe.step(numbered(2)).timeline.computes
    found = {str(span.action): span for lane in spans for span in lane}
    assert found.keys() == seen.keys()
    origin = {seen[name] - span.start for name, span in found.items()}
    assert all(span.end - span.start == 2 for span in found.values())
    assert len(origin) == 1


def test_timeline_costs_are_means_of_measured_times() -> None:
    _, pipe = both()
    x, target = batch(7)
    timeline = pipe.step(x, target=target).timeline
    for stage in range(4):
        times: dict[Op, list[float]] = {Op.F: [], Op.B: []}
        for span in timeline.computes[stage]:
            if isinstance(span.action, Compute) and span.action.op in times:
                times[span.action.op].append(span.end - span.start)
        cost = timeline.cost
        assert cost.F[stage] == pytest.approx(sum(times[Op.F]) / 3)
        assert cost.I[stage] + cost.W[stage] == pytest.approx(sum(times[Op.B]) / 3)


def test_forecast_with_given_costs() -> None:
    _, pipe = both(schedule="1f1b")
    x, target = batch(7)
    pipe.step(x, target=target)
    even = Cost.even((0, 1, 2, 3))
    assert pipe.forecast(even).cost == even
    assert pipe.forecast(even).makespan == pytest.approx((3 + 3) * 3 + 2, abs=3)


def test_smaller_batch_uses_a_program_with_fewer_chunks() -> None:
    _, pipe = both(chunks=4, schedule="1f1b")
    x, target = batch(2)
    timeline = pipe.step(x, target=target).timeline
    check_sound(timeline)
    assert timeline.program.schedule.chunks == 2
    assert pipe.forecast().program.schedule.chunks == 4


def test_step_result_repr_shows_the_loss() -> None:
    _, pipe = both(loss_fn=lambda y, t: (y * 0).sum() + 2.5)
    x, target = batch(3)
    result = pipe.step(x, target=target)
    assert isinstance(result, StepResult)
    assert repr(result) == "StepResult(loss=2.5)"
    assert result.timeline is result.timeline


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_later_step_visits_few_modules_and_reaches_layers_in_few_frames(checkpoint: str) -> None:
    package = str(Path(penstock.__file__).parent)
    visited, depths = set[str](), list[int]()

    class Deep(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            frames = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe()))
            depths.append(sum(name.startswith(package) for name in frames))
            return super().forward(x)

    layers = nn.Sequential(Deep(4, 4), nn.Tanh(), Deep(4, 4))
    pipe = Pipe(
        layers,
        chunks=2,
        checkpoint=checkpoint,
        stages=2,
        devices=["cpu", "cpu"],
        runtime="inline",
        loss_fn=nn.functional.mse_loss,
    )
    x = torch.randn(4, 4)
    for _ in range(2):
        pipe.step(x, target=x)
    depths.clear()

    def note_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            visited.add(frame.f_code.co_filename)

    sys.setprofile(note_call)
    try:
        pipe.step(x, target=x)
    finally:
        sys.setprofile(None)
    assert len(visited) <= 25, sorted(visited)
    assert max(depths) <= 12
