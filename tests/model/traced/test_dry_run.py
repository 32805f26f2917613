"""Units that run on dummy data, where fake tensors do not work."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.model.traced.dry_run import FakeTensorFactory, Write, run_on_dummy_data


class Roots(nn.Module):
    """Counts its calls in a buffer, and refuses numbers below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        if (x < 0).any():
            raise ValueError("negative")
        return x.sqrt()


def test_writes_of_a_dry_run_that_raised_are_not_noted() -> None:
    """They were noted again for the second run, on numbers that are not below 0."""
    unit, written = Roots(), list[Write]()
    factory = FakeTensorFactory(torch.device("cpu"))
    x = factory.from_tensor(torch.randn(50))
    output = run_on_dummy_data(factory, "unit", unit, (x,), {}, {}, written)
    assert output.shape == (50,)
    assert [(write.tensor is unit.calls, write.is_assigned) for write in written] == [(True, False)]
