"""Random models equal themselves as a pipe. `make fuzz` tries a hundred times as many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from penstock.errors import RunError
from penstock.microbatch import MicrobatchRows
from tests.properties.cases import Case, cases
from tests.properties.comparing import compare
from tests.properties.fuzz import Failed, attempt, read_case
from tests.properties.layers import LAYERS
from tests.properties.losses import LOSSES
from tests.properties.models import Layer, Model


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_models_equal_the_unsplit_model(case: Case) -> None:
    compare(case)


def test_fuzz_reports_a_failure_with_a_reproducible_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The injected bug gives all micro-batches the same weight, however many rows they have."""

    def alike(rows: MicrobatchRows) -> list[float]:
        return [1 / len(rows.counts)] * len(rows.counts)

    monkeypatch.setattr(MicrobatchRows, "fractions", alike)
    reports: list[object] = []
    attempt(0, 60, reports.append)
    (failed,) = (one for one in reports if isinstance(one, Failed))
    assert "the loss is not a mean over the rows" in failed.text
    with pytest.raises(RunError, match="the loss is not a mean over the rows"):
        compare(read_case(failed.case))
    monkeypatch.undo()
    compare(read_case(failed.case))


@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer_with_split_backwards(kind: str) -> None:
    layers = (Layer("linear"), Layer(kind), Layer("linear"), Layer(kind))
    compare(Case(Model(layers), (1, 1, 1, 1), 4, (6, 5), 2, "zb-h1", updates=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_kind_of_loss_under_recomputation(loss: str) -> None:
    layers = (Layer("linear", "tree"), Layer("tanh", "mixed"), Layer("linear"), Layer("linear"))
    case = Case(Model(layers), (1, 1, 1, 1), 2, (7, 5), 3, "interleaved", loss)
    compare(replace(case, runtime="threads", checkpoint="always", learns=True))
