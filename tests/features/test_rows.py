"""The rows of the table that the page does not list are equal, or refused with their text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from torch import Tensor

from penstock.stage import parameter_proxies
from tests.features.rows import ROWS, TIED_ROWS, Row
from tests.features.table import Equal, Refused, Way, verdict_of_way

CELLS = [
    pytest.param(row, way, id=f"{row.name}, {'-'.join(vars(way).values())}")
    for number, row in enumerate(ROWS)
    for way in row.cells(number)
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:size_average and reduce args"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


def check(row: Row, way: Way) -> None:
    found = verdict_of_way(row, way)
    if row.refused:
        assert isinstance(found, Refused)
        assert re.search(row.refused, found.message)
    else:
        assert found == Equal()


@pytest.mark.parametrize(("row", "way"), CELLS)
def test_row_equals_the_unsplit_model_or_is_refused(row: Row, way: Way) -> None:
    check(row, way)


@pytest.mark.parametrize("row", TIED_ROWS, ids=lambda row: row.name)
def test_tied_weights_copied_as_on_another_device(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxies of a tied parameter have their own memory there."""

    def copied(tensor: Tensor, device: object) -> Tensor:
        return tensor.clone()

    monkeypatch.setattr(parameter_proxies, "move_to_device", copied)
    for way in replace(row, most=2).cells(7):
        check(row, way)
