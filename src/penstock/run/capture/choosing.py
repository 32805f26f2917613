"""What carries a step out, of what was asked for and what there is; and why."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from penstock.errors import ArgumentError
from penstock.gradients.replicas import Replicas
from penstock.run.capture.watching import Uncapturable, captured_around
from penstock.run.training import Ran
from penstock.stage.places import Gpu, Place


def chosen(asked: str, places: Sequence[Place], replicas: Replicas) -> Ran:
    """Before the step."""
    if captured_around():
        return Ran("inline", "it is part of a step that is captured")
    if asked in ("threads", "inline"):
        return Ran(asked)
    if asked == "auto" and (sys.gettrace() is not None or torch.is_anomaly_enabled()):
        return Ran("inline", "a debugger follows it, or autograd looks for anomalies")
    against = _against(places, replicas)
    if against is None:
        return Ran("graph")
    if asked == "graph":
        raise ArgumentError(f"runtime='graph' cannot be, as {against}: take 'threads', or 'auto'")
    return Ran("threads", against)


def _against(places: Sequence[Place], replicas: Replicas) -> str | None:
    elsewhere = [place for place in places if not isinstance(place, Gpu)]
    if elsewhere:
        return f"a rank is on {elsewhere[0]!r}, which has no CUDA graphs"
    if replicas:
        return "a stage is in DistributedDataParallel, replicate or fully_shard"
    return None


def fallen_back(asked: str, reason: Uncapturable, known: set[str]) -> Ran:
    """After it could not be captured. What is known has been warned of."""
    if asked == "graph":
        if reason.passing and reason.__cause__ is not None:
            reason.__cause__.add_note("while the step was captured as a CUDA graph")
            raise reason.__cause__
        raise Uncapturable(
            f"the step cannot be captured as a CUDA graph: {reason}; runtime='auto' takes threads "
            "for such a step"
        ) from reason
    text = str(reason)
    if text not in known:
        known.add(text)
        warnings.warn(
            f"the step is not captured as a CUDA graph, and runs in threads: {text}", stacklevel=7
        )
    return Ran("threads", text)
