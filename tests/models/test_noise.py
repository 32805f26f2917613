"""Random numbers drawn between units are drawn once, even if several stages use them."""

from __future__ import annotations

import pytest
import torch

from penstock import Pipe
from tests.models.architecture import numbers
from tests.models.models_habits import Noisy
from tests.support import same_gradients


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("runtime", ["inline", "threads"])
def test_noise_drawn_between_units_is_the_same_on_all_stages(stages: int, runtime: str) -> None:
    """The model returns its noise; the unsplit model computes the same with that noise."""
    torch.manual_seed(1)
    model, unsplit = Noisy().double(), Noisy().double()
    unsplit.load_state_dict(model.state_dict())
    x = numbers(8, 5, 4)
    pipe = Pipe(
        model,
        chunks=2,
        stages=stages,
        devices=["cpu"] * stages,
        example=x,
        schedule="zb-h1",
        runtime=runtime,
        balance="parameters",
    )
    result = pipe.step(x, outputs=True)
    expected = unsplit(x, result.outputs["noise"])
    expected["loss"].backward()
    assert not torch.equal(*result.outputs["noise"].chunk(2))
    torch.testing.assert_close(result.loss, expected["loss"].detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.outputs["found"], expected["found"].detach())
    assert same_gradients(model, unsplit)
