"""Penstock: pipeline parallelism for PyTorch that computes what your model computes, and proves it.

`Pipe` splits a model into stages and trains it. Everything else on this page helps to choose, check
and understand what it does. A schedule is a value: generate one (`schedules`), add its messages
(`lower`), check it (`verify`), simulate it (`simulate`), draw it (`draw`).

Names that need torch are imported when they are first used, so `import penstock` takes a fraction
of a second and works without torch.

>>> import penstock
>>> schedule = penstock.schedules.one_f_one_b(ranks=4, chunks=8)
>>> timeline = penstock.simulate(penstock.lower(schedule))
>>> f"{timeline.bubble:.1%} idle, at most {max(timeline.peak):g} micro-batches alive"
'27.3% idle, at most 4 micro-batches alive'
"""

import importlib as _importlib
import opcode as _opcode
import sys as _sys
import types as _types
import typing as _typing

from penstock import draw, schedules
from penstock.errors import (
    ArgumentError,
    AuditError,
    BatchShapeError,
    CheckpointError,
    CutError,
    FormatError,
    InvalidScheduleError,
    MissingExtra,
    PenstockError,
    PenstockTypeError,
    RemoteError,
    RunError,
    TorchVersionError,
)
from penstock.errors import get_deprecated as _get_deprecated_error
from penstock.planning.plan import Plan
from penstock.planning.profile import Profile
from penstock.schedules.cost import Cost
from penstock.schedules.ir import (
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
from penstock.schedules.lowering import lower, recompute, recompute_mode
from penstock.schedules.notation import dumps, loads
from penstock.schedules.simulator import Deadlock, Sends, Span, Wait, play
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import require_sound, verify
from penstock.tracebacks import full_tracebacks
from penstock.vocabulary import PACKAGE_NAMES as _PACKAGE_NAMES
from penstock.vocabulary import suggest as _suggest

if _typing.TYPE_CHECKING:
    from penstock.checker.check import check
    from penstock.checker.report import Mismatch, Report
    from penstock.checkpoint.directory import saved
    from penstock.device.nvidia import virtual_devices
    from penstock.launch.init import init
    from penstock.microbatch import Chunk, NoChunk
    from penstock.model.partition import Partition
    from penstock.model.placement import split
    from penstock.model.planner import plan
    from penstock.model.sequential import PipeSequential, WithDevice
    from penstock.pipe import Pipe
    from penstock.runtime.memory import Memory
    from penstock.runtime.step import StepResult
    from penstock.stage.aux_loss import add_loss, added_losses
    from penstock.stage.loss import Weighted
    from penstock.stage.recompute import is_checkpointing, is_recomputing
    from penstock.stage.skip import Namespace, pop, skippable, stash, verify_skippables

__version__ = "0.1.0"

__all__ = [
    "Action",
    "ArgumentError",
    "AuditError",
    "BatchShapeError",
    "CheckpointError",
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
    "Plan",
    "Profile",
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
    "TorchVersionError",
    "Wait",
    "Weighted",
    "WithDevice",
    "add_loss",
    "added_losses",
    "check",
    "draw",
    "dumps",
    "full_tracebacks",
    "init",
    "is_checkpointing",
    "is_recomputing",
    "loads",
    "lower",
    "plan",
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

# The names that need torch, each with its module. `__getattr__` imports the module when the name is
# first used.
_ON_DEMAND = {
    "Chunk": "microbatch",
    "Memory": "runtime.memory",
    "Mismatch": "checker.report",
    "Namespace": "stage.skip",
    "NoChunk": "microbatch",
    "Partition": "model.partition",
    "Pipe": "pipe",
    "PipeSequential": "model.sequential",
    "Report": "checker.report",
    "StepResult": "runtime.step",
    "Weighted": "stage.loss",
    "WithDevice": "model.sequential",
    "add_loss": "stage.aux_loss",
    "added_losses": "stage.aux_loss",
    "check": "checker.check",
    "init": "launch.init",
    "is_checkpointing": "stage.recompute",
    "is_recomputing": "stage.recompute",
    "plan": "model.planner",
    "pop": "stage.skip",
    "saved": "checkpoint.directory",
    "skippable": "stage.skip",
    "split": "model.placement",
    "stash": "stage.skip",
    "verify_skippables": "stage.skip",
    "virtual_devices": "device.nvidia",
}


def _is_import(frame: _types.FrameType) -> bool:
    """Return whether a frame is at `from penstock import name`."""
    return frame.f_code.co_code[frame.f_lasti] == _opcode.opmap["IMPORT_FROM"]


def __getattr__(name: str) -> _typing.Any:
    if (error := _get_deprecated_error(name)) is not None:
        return error
    if name in _PACKAGE_NAMES:
        # `hasattr` needs an AttributeError, of which `from penstock import name` drops the text.
        error_class = ImportError if _is_import(_sys._getframe(1)) else AttributeError
        raise error_class(f"penstock has no {name}. {_suggest(name, _PACKAGE_NAMES)}")
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    value = getattr(_importlib.import_module(f"penstock.{_ON_DEMAND[name]}"), name)
    globals()[name] = value
    return value
