"""Models that cannot be cut are refused with a message."""

from __future__ import annotations

import pytest

from tests.models.refused import REFUSED, Refused


@pytest.mark.parametrize("refused", REFUSED, ids=lambda one: one.name)
def test_model_that_cannot_be_cut_is_refused(refused: Refused) -> None:
    assert refused.words in refused.message()
