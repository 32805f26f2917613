"""Every test of this folder captures steps with an emulated graph."""

from __future__ import annotations

import pytest

from tests.runtime.cuda_graph.support import emulate


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
