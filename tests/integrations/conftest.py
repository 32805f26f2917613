"""Threads and messages of the tests of frameworks, whose libraries may be missing."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

# Not collected for doctests: they import the libraries.
collect_ignore = ["curves.py", "frameworks.py", "processes.py", "sft.py"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Use one thread, as the models are tiny, and hide what transformers tells in every run."""
    monkeypatch.setenv("CI", "1")  # elsewhere, TRL counts its users over the network
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
