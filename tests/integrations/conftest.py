"""Threads, messages and settings of the tests of frameworks, whose libraries may be missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from unittest.mock import patch

import pytest
import torch

# Not collected for doctests: they import the libraries.
collect_ignore = [
    "curves.py",
    "frameworks.py",
    "lightning_curves.py",
    "lightning_processes.py",
    "processes.py",
    "sft.py",
]


@pytest.fixture(autouse=True)
def apart() -> Generator[None]:
    """Use one thread, as the models are tiny, and undo what frameworks set for a whole process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.logging.set_verbosity_error()
    # With CI, TRL does not count its users over the network. transformers leaves the precision of
    # a Trainer in the environment and in accelerate's state.
    with patch.dict(os.environ, CI="1"):
        yield
    if (accelerate := sys.modules.get("accelerate")) is not None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(threads)
