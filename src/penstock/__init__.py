"""Penstock: pipeline parallelism for PyTorch that computes what your model computes, and proves it.

A schedule is a value: make one (`schedules`), write its messages in (`lower`), check it
(`verify`), time it (`simulate`), draw it (`draw`).

>>> import penstock
>>> schedule = penstock.schedules.one_f_one_b(ranks=4, chunks=8)
>>> timeline = penstock.simulate(penstock.lower(schedule))
>>> f"{timeline.bubble:.1%} idle, at most {max(timeline.peak):g} micro-batches alive"
'27.3% idle, at most 4 micro-batches alive'
"""

import importlib as _importlib
import typing as _typing

from penstock import draw, schedules
from penstock.cost import Cost
from penstock.errors import (
    ArgumentError,
    BatchShapeError,
    CutError,
    FormatError,
    InvalidScheduleError,
    MissingExtra,
    PenstockError,
    PenstockTypeError,
    RemoteError,
    RunError,
)
from penstock.errors import get_deprecated as _get_deprecated_error
from penstock.ir import (
    Action,
    Compute,
    Message,
    Op,
    Program,
    Recv,
    Schedule,
    Send,
    StageGraph,
)
from penstock.lower import lower, recompute, recompute_mode
from penstock.notation import dumps, loads
from penstock.play import Deadlock, Sends, Span, Wait, play
from penstock.timeline import Timeline, simulate
from penstock.verify import require_sound, verify

if _typing.TYPE_CHECKING:
    from penstock.batch import Chunk, NoChunk
    from penstock.checking.check import check
    from penstock.checking.report import Mismatch, Report
    from penstock.launch.init import init
    from penstock.partition.partition import Partition
    from penstock.partition.preview import split
    from penstock.partition.sequential import PipeSequential, WithDevice
    from penstock.pipe import Pipe
    from penstock.run.memory import Memory
    from penstock.run.training import StepResult
    from penstock.saving.folder import saved
    from penstock.stage.added import add_loss, added_losses
    from penstock.stage.checkpointing import is_checkpointing, is_recomputing
    from penstock.stage.skip import Namespace, pop, skippable, stash, verify_skippables
    from penstock.stage.virtual import virtual_devices

__version__ = "0.1.0"

__all__ = [
    "Action",
    "ArgumentError",
    "BatchShapeError",
    "Chunk",
    "Compute",
    "Cost",
    "CutError",
    "Deadlock",
    "FormatError",
    "InvalidScheduleError",
    "Memory",
    "Message",
    "Mismatch",
    "MissingExtra",
    "Namespace",
    "NoChunk",
    "Op",
    "Partition",
    "PenstockError",
    "PenstockTypeError",
    "Pipe",
    "PipeSequential",
    "Program",
    "Recv",
    "RemoteError",
    "Report",
    "RunError",
    "Schedule",
    "Send",
    "Sends",
    "Span",
    "StageGraph",
    "StepResult",
    "Timeline",
    "Wait",
    "WithDevice",
    "add_loss",
    "added_losses",
    "check",
    "draw",
    "dumps",
    "init",
    "is_checkpointing",
    "is_recomputing",
    "loads",
    "lower",
    "play",
    "pop",
    "recompute",
    "recompute_mode",
    "require_sound",
    "saved",
    "schedules",
    "simulate",
    "skippable",
    "split",
    "stash",
    "verify",
    "verify_skippables",
    "virtual_devices",
]

# The names that need torch, each with the module that has it: loaded when first asked for.
_ON_DEMAND = {
    "Chunk": "batch",
    "Memory": "run.memory",
    "Mismatch": "checking.report",
    "Namespace": "stage.skip",
    "NoChunk": "batch",
    "Partition": "partition.partition",
    "Pipe": "pipe",
    "PipeSequential": "partition.sequential",
    "Report": "checking.report",
    "StepResult": "run.training",
    "WithDevice": "partition.sequential",
    "add_loss": "stage.added",
    "added_losses": "stage.added",
    "check": "checking.check",
    "init": "launch.init",
    "is_checkpointing": "stage.checkpointing",
    "is_recomputing": "stage.checkpointing",
    "pop": "stage.skip",
    "saved": "saving.folder",
    "skippable": "stage.skip",
    "split": "partition.preview",
    "stash": "stage.skip",
    "verify_skippables": "stage.skip",
    "virtual_devices": "stage.virtual",
}


def __getattr__(name: str) -> _typing.Any:
    if (error := _get_deprecated_error(name)) is not None:
        return error
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    value = getattr(_importlib.import_module(f"penstock.{_ON_DEMAND[name]}"), name)
    globals()[name] = value
    return value
