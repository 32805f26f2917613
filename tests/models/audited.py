"""python -m tests.models.audited: the first step of every model with the audit and without it.

Two equal models make the same first step, one in a pipe with audit="first" and one in a pipe with
audit="off". The audit must raise no error, and everything must be bitwise the same afterwards: the
loss, parameters, buffers, gradients, the state of all random generators, and the attributes of all
modules. It prints a table and the counts, and fails if one of them is not as it should be.

    python -m tests.models.audited --workers 16
    python -m tests.models.audited GPT-2 ViT
    python -m tests.models.audited --dtype bfloat16
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import pickle
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock import AuditError
from penstock.stage.host_rng import HostRngState
from tests.models.architecture import Architecture
from tests.models.comparing import Trial, batch_of, piped, step, trials
from tests.models.exhibits import ZOO

State = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What the audit did to the steps of one model.

    Attributes:
        seconds: How long the steps took, with the audit and without it.
        refused: Why the audit rightly refuses the model, if it does.
        alarm: The message of a false alarm.
        not_audited: Why a step was not audited.
        traces: The names of what differs after a step.
    """

    name: str
    seconds: tuple[float, float] = (0.0, 0.0)
    refused: str = ""
    alarm: str = ""
    not_audited: str = ""
    traces: tuple[str, ...] = ()

    def __str__(self) -> str:
        problems = [
            f"refused, {self.refused}" if self.refused else "",
            f"FALSE ALARM: {self.alarm}" if self.alarm else "",
            f"not audited: {self.not_audited}" if self.not_audited else "",
            f"TRACES: {', '.join(self.traces[:5])}" if self.traces else "",
        ]
        verdict = "; ".join(filter(None, problems)) or "same"
        with_audit, without = self.seconds
        return f"| {self.name} | {without:.2f} | {with_audit:.2f} | {verdict} |"


def compare_steps(name: str, most_stages: int = 4, dtype: torch.dtype = torch.float64) -> Finding:
    """Run a model with the audit and without it, in its trials with at most so many stages."""
    finding = Finding(name)
    for trial in trials(list(ZOO).index(name)):
        if trial.stages > most_stages:
            continue
        finding = _compare_trial(finding, trial, dtype)
        if finding.alarm or finding.refused or finding.not_audited:
            break
    return finding


def _compare_trial(finding: Finding, trial: Trial, dtype: torch.dtype) -> Finding:
    architecture = replace(ZOO[finding.name], dtype=dtype)
    notes = _Notes()
    logging.getLogger("penstock").addHandler(notes)
    try:
        without, plain_seconds = _run_step(architecture, trial, "off")
        with_audit, seconds = _run_step(architecture, trial, "first")
    except AuditError as error:
        if "loss" in architecture.meets:
            return replace(finding, refused=architecture.meets)
        return replace(finding, alarm=" ".join(str(error).split()))
    except Exception as error:  # the other models go on
        return replace(finding, not_audited=f"it raised {error!r}")
    finally:
        logging.getLogger("penstock").removeHandler(notes)
    traces = [key for key in {**without, **with_audit} if without.get(key) != with_audit.get(key)]
    if traces:  # Reformer takes seeds from the operating system
        again, _ = _run_step(architecture, trial, "off")
        traces = [key for key in traces if again.get(key) == without.get(key)]
    return replace(
        finding,
        seconds=(finding.seconds[0] + seconds, finding.seconds[1] + plain_seconds),
        not_audited=finding.not_audited or "; ".join(notes.texts),
        traces=(*finding.traces, *(f"{key} ({trial})" for key in traces)),
    )


class _Notes(logging.Handler):
    """Collects why calls were not audited."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text, if it is about the audit."""
        text = record.getMessage()
        if "was not compared" in text:
            self.texts.append(text)


def _run_step(architecture: Architecture, trial: Trial, audit: str) -> tuple[State, float]:
    model = architecture.made()
    pipe = piped(architecture, model, trial, audit)
    for seed in (torch.manual_seed, random.seed, _seed_numpy):
        seed(3)
    batch, start = batch_of(architecture, 0), time.perf_counter()
    loss = step(pipe, batch).loss
    seconds = time.perf_counter() - start
    if audit == "first":
        records = pipe._prepared_pipe.auditor._records.values()
        assert any(record.is_audited for record in records), "the step was not audited"
    return {
        "loss": describe(loss),
        **_describe_surroundings(),
        **_describe_model(model),
    }, seconds


def _seed_numpy(seed: int) -> None:
    sys.modules["numpy"].random.seed(seed)


# ---- everything that a step may change ------------------------------------------------------


def _describe_surroundings() -> State:
    host = HostRngState()
    states = {"random": host.python_state, "numpy.random": pickle.dumps(host._numpy_state)}
    return {"generator of torch": describe(torch.get_rng_state()), **states}


def _describe_model(model: nn.Module) -> State:
    return {
        f"{path}.{name}".lstrip("."): description
        for path, module in model.named_modules()
        for name, description in _describe_module(module)
    }


def _describe_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            for key, tensor in value.items():
                yield key, describe(tensor)
                yield f"{key}.grad", describe(getattr(tensor, "grad", None))
        elif "_hooks" in name and isinstance(value, dict):  # by numbers of handles, which count on
            yield name, describe(list(value.values()))
        elif name not in ("_modules", "_torchdynamo_wrapper_id"):  # the latter is an address
            yield name, describe(value)


def describe(value: Any, depth: int = 5) -> Any:
    """Return a value that is equal for values with the same contents."""
    if isinstance(value, Tensor):
        flat = value.detach().to_dense().reshape(-1).clone()
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
        return type(value).__name__, value.dtype, tuple(value.shape), value.requires_grad, digest
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.Generator):
        return describe(value.get_state())
    kind = type(value).__name__
    if not depth or isinstance(value, type | nn.Module) or callable(value):
        return kind
    if hasattr(value, "tobytes"):  # an array of NumPy
        return kind, value.tobytes()
    if isinstance(value, Mapping):
        return kind, [(str(key), describe(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return kind, [describe(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(str, value))
    return kind, describe(getattr(value, "__dict__", None), depth - 1)


# ---- the command ----------------------------------------------------------------------------


def main() -> None:
    """Compare the models in parallel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all models if there are none")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="float64", help="of the models, by default float64")
    args = parser.parse_args()
    chosen = [n for n in ZOO if not args.names or any(part in n for part in args.names)]
    print(
        "| model | seconds without | with the audit | afterwards |\n|---|---|---|---|", flush=True
    )
    findings = []
    with multiprocessing.get_context("spawn").Pool(args.workers, initializer=_begin) as pool:
        compare = partial(compare_steps, dtype=getattr(torch, args.dtype))
        for finding in pool.imap_unordered(compare, chosen):
            findings.append(finding)
            print(finding, flush=True)
    counts = {
        "audited": [f for f in findings if not (f.not_audited or f.refused or f.alarm)],
        "rightly refused": [f for f in findings if f.refused],
        "not audited": [f for f in findings if f.not_audited],
        "false alarms": [f for f in findings if f.alarm],
        "with traces": [f for f in findings if f.traces],
    }
    print(f"\n{len(findings)} models: " + ", ".join(f"{len(v)} {k}" for k, v in counts.items()))
    if counts["false alarms"] or counts["with traces"] or counts["not audited"]:
        sys.exit(1)


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # raised by transformers


if __name__ == "__main__":
    main()
