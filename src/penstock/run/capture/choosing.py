"""What carries a step out, of what was asked for and what there is; and why."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from penstock.errors import ArgumentError
from penstock.gradients.replicas import Replicas
from penstock.run.capture.watching import Uncapturable
from penstock.run.training import Ran
from penstock.stage.places import Gpu, Place


def chosen(asked: str, places: Sequence[Place], replicas: Replicas) -> Ran:
    """Before the step."""
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


def fallen_back(asked: str, reason: Uncapturable) -> Ran:
    """After it could not be captured."""
    if asked == "graph":
        raise Uncapturable(
            f"the step cannot be captured as a CUDA graph: {reason}; runtime='auto' takes threads "
            "for such a step"
        ) from reason
    warnings.warn(
        f"the step is not captured as a CUDA graph, and runs in threads: {reason}", stacklevel=7
    )
    return Ran("threads", str(reason))
