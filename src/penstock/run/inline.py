"""Everything in the caller's thread, in the order of `play`: the reference, and for debuggers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.run.phase import Phase
from penstock.run.worker import Worker


def run_inline(workers: Sequence[Worker], phase: Phase) -> None:
    """Carry out a phase, step by step."""
    before = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        for rank, step in phase.order:
            with workers[rank].place.entered():
                workers[rank].do(step)
    finally:
        torch.autograd.set_multithreading_enabled(before)
