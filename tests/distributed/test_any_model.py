"""Random models over processes compute what the unsplit model computes.

`make fuzz PROCESSES=1` tries more of them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import distributed

from tests.distributed.ranks import SIZES
from tests.properties import gathering
from tests.properties.cases import Case, cases
from tests.properties.comparing import compare
from tests.properties.gathering import as_one, on_rank
from tests.properties.models import Layer, Model
from tests.properties.oracle import Numbers

EXAMPLES = {2: 30, 3: 25, 4: 20}
PLAIN = Case(
    Model((Layer("linear"), Layer("linear"))), (1, 1), 2, (3,), 2, "gpipe", runtime="processes"
)


@pytest.mark.parametrize("size", SIZES)
def test_random_models_over_processes_match_the_unsplit_model(size: int) -> None:
    @settings(max_examples=EXAMPLES[size], deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases(size))
    def each(case: Case) -> None:
        compare(case)

    each()


# ---- the comparison fails when it should --------------------------------------------------


def off_by_little(at: int, case: Case) -> list[Numbers]:
    found = on_rank(case)
    if distributed.get_rank() == at:
        gradient = found[0][f"the gradient of {at}.weight"]
        assert gradient is not None
        gradient *= 1 + 1e-8
    return found


@pytest.mark.parametrize("at", [0, 1])
def test_comparison_finds_a_small_gradient_error_on_any_rank(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(PLAIN)
    monkeypatch.setattr(gathering, "on_rank", partial(off_by_little, at))
    with pytest.raises(AssertionError, match=f"the gradient of {at}.weight differs by"):
        compare(PLAIN)


def test_merging_ranks_requires_equal_values_of_shared_parameters() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    names = {"0.weight": "0.weight", "3.weight": "0.weight"}
    own: Numbers = {"the parameter 0.weight": one, "the gradient of the input x": one}
    copy: Numbers = {"the parameter 3.weight": one, "the gradient of the input x": two}
    found = as_one([own, copy], names)
    assert found.keys() == own.keys()
    assert found["the gradient of the input x"].tolist() == [3, 3]  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match=r"the parameter 0.weight is another on another rank"):
        as_one([own, {**copy, "the parameter 3.weight": two}], names)
