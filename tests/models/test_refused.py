"""What cannot be cut is refused, with words that say why and what to do."""

from __future__ import annotations

import pytest

from tests.models.refused import REFUSED, Refused


@pytest.mark.parametrize("refused", REFUSED, ids=lambda one: one.name)
def test_it_is_refused(refused: Refused) -> None:
    assert refused.words in refused.message()
