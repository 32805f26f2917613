"""The comparison of steps with the audit and without it. `make zoo` compares all models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.runtime.audit.audited_call import Audit
from tests.models.audited import Finding, compare_steps, describe

# Reformer's backward gives gradients to parameters of a stage before that of its function.
NAMES = [
    "ResNet",
    "buffers that count",
    "attributes set in forward",
    "CLIP towers",
    "Reformer (transformers)",
]


# It keeps seeds in attributes, and seeds PyTorch's generator itself.
@pytest.mark.filterwarnings(
    "ignore:the forward changes reformer", "ignore:random numbers were drawn"
)
@pytest.mark.parametrize("name", NAMES)
def test_audit_leaves_no_trace_in_zoo_models(name: str) -> None:
    finding = compare_steps(name, most_stages=2)
    assert finding == Finding(name, finding.seconds, refused=finding.refused)
    assert finding.refused == ("its loss compares all rows" if name == "CLIP towers" else "")


def test_traces_of_an_audit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Audit.check_step

    def leave_traces(self: Audit, *args: Any) -> None:
        original(self, *args)
        torch.rand(())
        next(m for m in self._reference.modules if isinstance(m, nn.BatchNorm2d)).eps = 1e-4

    monkeypatch.setattr(Audit, "check_step", leave_traces)
    traces = compare_steps("ResNet").traces
    assert len(traces) == 4  # in two trials
    assert "generator of torch" in traces[0]
    assert "eps" in traces[1]


def test_equal_values_have_equal_descriptions() -> None:
    assert describe([torch.ones(2), {"a": 1}]) == describe([torch.ones(2), {"a": 1}])
    assert describe(torch.zeros(())) != describe(-torch.zeros(()))
    assert describe(1) != describe(1.0)
