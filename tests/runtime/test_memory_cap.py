"""`memory=`: a cap in bytes, under every schedule, and what the error says if nothing fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import ArgumentError, Pipe, lower
from penstock.runtime.memory_forecast import StepTrace, StorageLife, forecast_peak
from penstock.schedules import one_f_one_b
from tests.support import batch, plain


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())))


X, Y = torch.randn(512, 64), torch.randn(512, 64)


def capped(memory: Any, **options: Any) -> Pipe:
    given: dict[str, Any] = {
        "chunks": 8,
        "checkpoint": "never",
        "stages": 3,
        "devices": ["cpu"] * 3,
        "loss_fn": nn.MSELoss(),
        "example": X,
        "target": Y,
        **options,
    }
    return Pipe(layers(), **given, memory=memory)


def used(pipe: Pipe) -> int:
    """Return the most bytes of any rank, with the two states of Adam."""
    memory = pipe.memory(X, target=Y)
    return max(
        held + (held // 2) * 2 + peak for held, peak in zip(memory.held, memory.peak, strict=True)
    )


def test_memory_is_a_cap_under_gpipe_too() -> None:
    """The cut assumed the micro-batches in flight of 1f1b, and the peak was four times the cap."""
    assert used(capped("400KB", schedule="1f1b")) <= 4e5
    assert used(capped("400KB", schedule="gpipe")) <= 4e5
    with pytest.raises(ArgumentError) as error:
        capped(3e5, schedule="gpipe", stages=[4, 4, 4])
    assert str(error.value) == (
        "no cut fits the memory. In the nearest: rank 2 would need 395 KB and may use 300 KB, "
        "which is 95.3 KB too little: 133 KB are for parameters, gradients and the optimizer, and "
        "262 KB for a step (2 other ranks lack memory, too). What would fit: checkpoint='always' "
        "(297 KB), schedule='1f1b' (231 KB), both (215 KB), chunks=16 and checkpoint='always' "
        "(281 KB), half the batch, about 4 devices."
    )
    # Each of these does fit.
    assert used(capped(3e5, checkpoint="always", stages=[4, 4, 4])) <= 3e5
    assert used(capped(3e5, schedule="1f1b", stages=[4, 4, 4])) <= 3e5
    assert used(capped(3e5, chunks=16, checkpoint="always", stages=[4, 4, 4])) <= 3e5


def test_memory_moves_the_cut_where_the_cap_is_tight() -> None:
    tight = capped([1.5e5, 4e5, 4e5], schedule="1f1b")
    assert tight._placed_partition.partition.counts[0] < 4
    assert tight._memory_forecast is not None
    assert tight._memory_forecast.total[0] <= 1.5e5
    assert tight.summary().splitlines()[-1].startswith("memory   rank 0: ")
    assert "of 150 KB" in tight.summary()


def test_cap_below_one_layer_is_refused() -> None:
    with pytest.raises(ArgumentError, match="parameters, gradients and the state of an optimizer"):
        capped("20KB")


def test_cap_of_a_given_cut_is_checked() -> None:
    assert used(capped(1e6, stages=[10, 1, 1])) <= 1e6
    with pytest.raises(ArgumentError, match="rank 0 would need"):
        capped(4e5, stages=[10, 1, 1])


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), lambda y: y.sum(), None])
def test_cap_without_a_target_counts_a_copy_of_the_output(loss_fn: Any) -> None:
    x = batch(8, torch.float32)[0]
    pipe = Pipe(
        plain(torch.float32),
        2,
        stages=2,
        devices=["cpu"] * 2,
        loss_fn=loss_fn,
        example=x,
        memory=1e6,
    )
    assert pipe._memory_forecast is not None
    assert max(pipe._memory_forecast.total) < 1e6


def test_memory_forecast_leaves_no_trace() -> None:
    model = plain()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, y = batch(8)
    state = torch.get_rng_state()
    Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=x, target=y, memory=1e6)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_transient_bytes_count_where_an_allocator_does() -> None:
    """On an accelerator, memory that is used during an action only can be what is missing."""
    program = lower(one_f_one_b(1, 1))
    forward, backward = program.lanes[0]
    trace = StepTrace(
        {(forward, 0): StorageLife(0, 10, backward)}, {forward: {0: 5}, backward: {0: 40}}
    )
    assert forecast_peak(program, [trace], with_transient=False) == (10,)
    assert forecast_peak(program, [trace], with_transient=True) == (40,)
