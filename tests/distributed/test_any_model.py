"""Random models over processes compute what the unsplit model computes.

`make fuzz PROCESSES=1` tries more of them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, distributed, nn

from tests.distributed.ranks import SIZES
from tests.oracle import Outcome, merged
from tests.properties import comparing
from tests.properties.cases import Case, cases
from tests.properties.comparing import Step, compare, on_rank
from tests.properties.models import Layer, Model

EXAMPLES = {2: 15, 3: 10, 4: 10}
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


def off_by_little(at: int, case: Case) -> list[Step]:
    found = on_rank(case)
    if distributed.get_rank() == at:
        gradient = found[0][0].gradients[f"{at}.weight"]
        assert gradient is not None
        gradient *= 1 + 1e-8
    return found


@pytest.mark.parametrize("at", [0, 1])
def test_comparison_finds_a_small_gradient_error_on_any_rank(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(PLAIN)
    monkeypatch.setattr(comparing, "on_rank", partial(off_by_little, at))
    with pytest.raises(AssertionError, match=f"the gradient of {at}.weight differs by"):
        compare(PLAIN)


def test_merging_ranks_requires_equal_values_of_shared_parameters() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight

    def held(name: str, value: Tensor, gradient: Tensor) -> Outcome:
        return Outcome(torch.zeros(()), None, {"x": gradient}, {}, {name: value})

    found = merged([held("0.weight", one, one), held("1.weight", one, two)], model)
    assert list(found.values) == ["0.weight"]
    assert found.gradients["x"].tolist() == [3, 3]  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match=r"0.weight is another on rank 1"):
        merged([held("0.weight", one, one), held("1.weight", two, two)], model)
