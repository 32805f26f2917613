"""What carries a step out, of what was asked for and what there is; and why."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from penstock.errors import ArgumentError
from penstock.gradients.replicas import Replicas
from penstock.run.capture.watching import CaptureError, is_capturing
from penstock.run.training import RuntimeUsed
from penstock.stage.places import Device, Gpu


def select_runtime(requested: str, devices: Sequence[Device], replicas: Replicas) -> RuntimeUsed:
    """Before the step."""
    if is_capturing():
        return RuntimeUsed("inline", "it is part of a step that is captured")
    if requested in ("threads", "inline"):
        return RuntimeUsed(requested)
    if requested == "auto" and (sys.gettrace() is not None or torch.is_anomaly_enabled()):
        return RuntimeUsed("inline", "a debugger follows it, or autograd looks for anomalies")
    against = _find_graph_obstacle(devices, replicas)
    if against is None:
        return RuntimeUsed("graph")
    if requested == "graph":
        raise ArgumentError(f"runtime='graph' cannot be, as {against}: take 'threads', or 'auto'")
    return RuntimeUsed("threads", against)


def _find_graph_obstacle(devices: Sequence[Device], replicas: Replicas) -> str | None:
    elsewhere = [place for place in devices if not isinstance(place, Gpu)]
    if elsewhere:
        return f"a rank is on {elsewhere[0]!r}, which has no CUDA graphs"
    if replicas:
        return "a stage is in DistributedDataParallel, replicate or fully_shard"
    return None


def fall_back_to_threads(
    requested: str, error: CaptureError, already_warned: set[str]
) -> RuntimeUsed:
    """After it could not be captured. What is known has been warned of."""
    if requested == "graph":
        if error.is_transient and error.__cause__ is not None:
            error.__cause__.add_note("while the step was captured as a CUDA graph")
            raise error.__cause__
        raise CaptureError(
            f"the step cannot be captured as a CUDA graph: {error}; runtime='auto' takes threads "
            "for such a step"
        ) from error
    text = str(error)
    if text not in already_warned:
        already_warned.add(text)
        warnings.warn(
            f"the step is not captured as a CUDA graph, and runs in threads: {text}", stacklevel=7
        )
    return RuntimeUsed("threads", text)
