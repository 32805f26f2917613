"""The implementation of `Pipe.save`, `Pipe.load`, `Pipe.export` and `Pipe.save_pretrained`.

Every rank calls the same method, and each writes or reads only its own layers. A save may continue
in the background: the tensors are copied to the CPU first, and a thread writes them while training
goes on. The next save, load or export of the pipe waits for that thread.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from threading import Event, Lock, RLock, Thread
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.checkpoint import pretrained, reader
from penstock.checkpoint.directory import SaveId, SaveTransaction, begin_save, list_saves
from penstock.checkpoint.local_state import (
    LocalState,
    OptimizerArgument,
    as_optimizer_list,
    flatten_optimizer_state,
)
from penstock.checkpoint.manifest import FileRecord, find_step
from penstock.checkpoint.pretrained_names import is_pretrained
from penstock.checkpoint.reader import MODEL_KEY, OPTIMIZER_KEY, RNG_KEY
from penstock.checkpoint.safetensors_io import SafetensorsWriter
from penstock.checkpoint.save_group import SaveGroup
from penstock.checkpoint.writer import CheckpointWriter, execute_save, plan_save
from penstock.checkpoint.writer_lock import identify_writer
from penstock.errors import ArgumentError, PenstockTypeError, RunError
from penstock.model.placement import PlacedPartition
from penstock.model.tied import find_tied_names
from penstock.runtime.step import CheckpointPeers

# -------------------------------------------------------------------------------------------------
# A save in progress, and the one that a pipe has to wait for.
# -------------------------------------------------------------------------------------------------

_log = logging.getLogger("penstock")


class SaveHandle:
    """A save that is complete or still being written. It is complete once `wait` has returned.

    Attributes:
        path: The directory of this save.
    """

    def __init__(
        self, path: Path, write: Callable[[], None], abort: Callable[[], None], background: bool
    ) -> None:
        self.path = path
        self._write, self._abort = write, abort
        self._error: BaseException | None = None
        self._begun, self._finished = Lock(), Event()
        self._thread = Thread(target=self._run, name="penstock saving") if background else None

    def start(self) -> None:
        """Write, or begin to write in the background."""
        if self._thread is None:
            self._write()
            return
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C may come before the thread has begun, or after
            if self._begun.acquire(blocking=False):
                self._finished.set()
                self._abort()
            raise

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._write()
        except BaseException as error:
            self._error = error
            # The caller may never call `wait`, so the failure is also logged.
            _log.error("penstock: a save in the background failed: %s", error)
        finally:
            self._finished.set()

    @property
    def done(self) -> bool:
        """True if `wait` would return or raise at once."""
        return self._thread is None or self._finished.is_set()

    def wait(self) -> Path:
        """Wait until the save is on the disk and return its path. Raise if it failed."""
        if self._thread is not None:
            # Ctrl-C in `join` makes Python 3.11 take a running thread for one that has ended.
            self._finished.wait()
        if self._error is not None:
            raise self._error
        return self.path


class SaveHistory:
    """A pipe's memory of its saves and loads.

    handle    the last background save, if it may still be running
    lock      held by the thread that saves, loads or exports; `is_busy` until it has finished
    known     the newest save of each folder when this pipe last saved to it or loaded from it
    """

    def __init__(self) -> None:
        self.handle: SaveHandle | None = None
        self.known: dict[Path, SaveId] = {}
        self.lock, self.is_busy = RLock(), False
        self._tokens = {os.getpid(): uuid4().hex}

    @property
    def token(self) -> str:
        """The name of this pipe as a writer. A forked process gets another one."""
        return self._tokens.setdefault(os.getpid(), uuid4().hex)

    def wait(self) -> None:
        """Wait for the save in progress, if any. Raise if it failed."""
        last = self.handle
        try:
            if last is not None:
                last.wait()
        finally:
            if last is not None and last.done:  # after Ctrl-C, the next call waits for it
                self.handle = None

    # A copied or unpickled pipe is another writer. A lock and a running thread cannot be pickled.
    def __reduce__(self) -> tuple[type[SaveHistory], tuple[()]]:
        return SaveHistory, ()


# -------------------------------------------------------------------------------------------------
# Save, load and export.
# -------------------------------------------------------------------------------------------------

PathLike = str | os.PathLike[str]
P = ParamSpec("P")
T = TypeVar("T")


def build_saver(
    module: nn.Module, placed: PlacedPartition, peers: CheckpointPeers, history: SaveHistory
) -> Saver:
    """Return the saver of a pipe, which saves its part of the model together with its peers."""
    # Under torchrun the module has only the layers of this process. The partition then knows the
    # tied names of the whole model.
    tied_names = {**find_tied_names(module), **placed.tied_names}
    model = placed.partition.model if is_pretrained(placed.partition.model) else None
    group, has_first_stage = SaveGroup(peers.channel), 0 in placed.stage_devices
    local_state = LocalState(module, tied_names, group, peers.replica, has_first_stage, model)
    return Saver(local_state, history)


def check_keep(keep: int) -> None:
    """Raise unless `keep` is a number of checkpoints that a folder can keep."""
    if type(keep) is not int or keep < 1:
        raise ArgumentError(
            f"keep={keep!r} is not a number of checkpoints. Pass 1 or more; the new one counts."
        )


def _one_at_a_time(
    method: Callable[Concatenate[Saver, P], T],
) -> Callable[Concatenate[Saver, P], T]:
    """Let threads that call methods of one pipe's saver take turns, after the pending save."""

    @functools.wraps(method)
    def run(self: Saver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        history = self.history
        with history.lock:
            if history.is_busy:
                raise RunError(
                    f"{method.__name__} of a pipe was called inside another save or load of the "
                    "same pipe, in a hook. Call it afterwards."
                )
            history.wait()
            history.is_busy = True
            try:
                return method(self, *args, **kwargs)
            finally:
                history.is_busy = False

    return run


@dataclass(frozen=True)
class Saver:
    """Saves and loads the state of one process. Each method first waits for the pending save."""

    local_state: LocalState
    history: SaveHistory

    @_one_at_a_time
    def save(
        self,
        folder: PathLike,
        optimizer: OptimizerArgument,
        extra: Any,
        background: bool,
        keep: int = 2,
        with_model: bool = True,
    ) -> SaveHandle:
        """Write a checkpoint to a new directory in `folder`.

        The plan and, for a background save, the copy to the CPU are made before this returns. Only
        the writing moves to the background thread.
        """
        check_keep(keep)
        local_state, save_group = self.local_state, self.local_state.save_group
        root = Path(folder).absolute()
        description = f"saving to '{root}'"
        state, extra_bytes = save_group.run_on_each_rank(
            description,
            lambda: (_full_state(local_state, optimizer, with_model), _serialize_extra(extra)),
        )
        tied_keys = {
            f"{MODEL_KEY}.{alias}": f"{MODEL_KEY}.{saved_name}"
            for alias, saved_name in local_state.tied_names.items()
        }
        history, transactions = self.history, list[SaveTransaction]()  # one, on rank 0

        def begin() -> str:
            writer, known_id = identify_writer(history.token), history.known.get(root)
            transactions.append(begin_save(root, writer, known_id, keep, find_step(extra)))
            return str(transactions[0].directory)

        def commit(files: Mapping[str, FileRecord]) -> None:
            history.known[root] = transactions[0].commit(files)

        def abort() -> None:
            for transaction in transactions:
                transaction.abort()

        with save_group.clean_up_on_failure(abort):
            directory = Path(save_group.run_on_rank_zero(description, begin))
            writer = CheckpointWriter(directory, tied_keys, extra_bytes, commit)
            planned = plan_save(save_group, description, writer, state)
            if background:
                save_group.run_on_each_rank(
                    description, lambda: planned.planner.take_snapshot(planned.local_plan)
                )

        def write() -> None:
            with save_group.clean_up_on_failure(abort):
                execute_save(save_group, description, writer, planned)

        handle = SaveHandle(directory, write, abort, background)
        self.history.handle = handle if background else None
        handle.start()
        return handle

    @_one_at_a_time
    def load(
        self,
        path: PathLike,
        optimizer: OptimizerArgument,
        trust: bool = False,
        with_model: bool = True,
    ) -> Any:
        """Read the tensors that this process needs. Return the object that was saved as `extra`.

        First every rank reads and verifies everything that it needs. If all have succeeded, the
        model and the optimizers are changed. So after an error they are as they were.
        """
        local_state, save_group = self.local_state, self.local_state.save_group
        description = f"loading '{path}'"
        # One rank has only some of the names. To tell unknown names in the checkpoint from the
        # names of other ranks, every rank needs the names of all ranks.
        gathered = save_group.run_and_gather(description, lambda: list(local_state.unique_state()))
        names = [name for rank_names in gathered for name in rank_names]
        optimizers = save_group.run_on_each_rank(description, lambda: as_optimizer_list(optimizer))

        # Rank 0 resolves the path: a save that ends meanwhile could change it between ranks.
        def find() -> str:
            return save_group.run_on_rank_zero(
                description, lambda: str(reader.find_checkpoint(Path(path).absolute()))
            )

        checkpoint = find()
        while True:
            try:
                staged = save_group.run_on_each_rank(
                    description,
                    lambda: _read_all(
                        local_state,
                        Path(checkpoint),  # noqa: B023
                        names,
                        optimizers,
                        trust,
                        with_model,
                    ),
                )
                break
            except Exception as error:
                # Another process may save to the folder meanwhile, and remove what is being read.
                # Then there is a newer save.
                previous, checkpoint = checkpoint, _find_again(find, error)
                if checkpoint == previous:
                    raise
        try:
            save_group.run_on_each_rank(description, staged.apply)
        except BaseException:
            staged.undo()
            raise
        self._remember(Path(checkpoint), is_newest=Path(checkpoint) != Path(path).absolute())
        return staged.extra

    def _remember(self, checkpoint: Path, is_newest: bool) -> None:
        """Note the newest save of the folder, so that the next save there continues it.

        A save that was loaded by its own path may be an older one: the run goes back to it.
        """
        if self.local_state.save_group.rank or not checkpoint.is_dir():
            return
        entries = list_saves(checkpoint.parent)
        whole = [entry for entry in entries if entry.state == "whole"]
        seen_entries = [entry for entry in whole if entry.path == checkpoint or not is_newest]
        if seen_entries:
            self.history.known[checkpoint.parent] = seen_entries[-1].save_id

    @_one_at_a_time
    def export(self, file: PathLike) -> Path:
        """Write the model's tensors to one safetensors file. Each rank writes its own bytes."""
        path = Path(file).absolute()
        if path.suffix != ".safetensors":
            raise ArgumentError(
                f"export writes a .safetensors file, not '{path.name}'. Pass a file name that ends "
                "in .safetensors."
            )
        save_group, description = self.local_state.save_group, f"exporting to '{path}'"
        writer = SafetensorsWriter(path, self.local_state.tied_names)
        state = save_group.run_on_each_rank(description, lambda: _model_state(self.local_state))
        with save_group.clean_up_on_failure(writer.remove_partial_file):
            planned = plan_save(save_group, description, writer, state)
            execute_save(save_group, description, writer, planned)
        return path

    @_one_at_a_time
    def save_pretrained(self, folder: PathLike) -> Path:
        """Write the same folder as the model's own `save_pretrained`, and return its path."""
        path = Path(folder).absolute()
        pretrained.write_pretrained(
            self.local_state.pretrained_model,
            lambda: _model_state(self.local_state),
            self.local_state.save_group,
            path,
        )
        return path


def _find_again(find: Callable[[], str], error: Exception) -> str:
    """Resolve the path of a load again. If that fails, too, raise the first error."""
    try:
        return find()
    except Exception:
        raise error from None


def _read_all(
    local_state: LocalState,
    checkpoint: Path,
    names: list[str],
    optimizers: list[Optimizer],
    trust: bool,
    with_model: bool,
) -> reader.StagedLoad:
    """Read everything that this process needs from a checkpoint, and change nothing."""
    source = reader.open_checkpoint(checkpoint, names, local_state, trust)
    model = dict[str, Any]()
    if with_model:
        reader.check_stored_names(source, names, local_state.tied_names)
        model = reader.read_model(local_state, source)
    optimizer_states = list[dict[str, Any]]()
    rng_state = None
    # Restoring the optimizer means resuming a run, so the random state comes with it.
    if optimizers:
        optimizer_states = reader.read_optimizers(local_state, source, optimizers)
        rng_state = reader.read_rng_state(local_state, source)
    return reader.StagedLoad(
        local_state.module,
        model,
        list(zip(optimizers, optimizer_states, strict=True)),
        rng_state,
        reader.read_extra(source),
    )


def _model_state(local_state: LocalState) -> dict[str, Any]:
    """Return the tensors of the model that this process saves.

    A tied tensor that another rank saves under its first name is left out.
    """
    return {
        n: value
        for n, (_, value) in local_state.unique_state().items()
        if local_state.saved_name(n) == n
    }


def _full_state(
    local_state: LocalState, optimizer: OptimizerArgument, with_model: bool
) -> dict[str, Any]:
    """Return everything that this process saves: model, optimizers and random state."""
    state: dict[str, Any] = {MODEL_KEY: _model_state(local_state)} if with_model else {}
    optimizers = as_optimizer_list(optimizer)
    if optimizers:
        state[OPTIMIZER_KEY] = flatten_optimizer_state(local_state, optimizers)
    if local_state.saves_rng_state:
        state[RNG_KEY] = {str(local_state.replica): torch.get_rng_state()}
    return state


def _serialize_extra(extra: Any) -> bytes:
    """Return the bytes of `torch.save(extra)`. Raise if `torch.load` could not read them safely.

    `load` uses `weights_only=True`, which refuses pickles that could run code. Trying it here makes
    the save fail instead of a later load.
    """
    buffer = BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (PicklingError, UnpicklingError, AttributeError, TypeError) as error:
        raise PenstockTypeError(
            "extra takes numbers, strings, tensors, and lists and dicts of them. "
            f"torch.load(weights_only=True) cannot read this value: {error}"
        ) from None
    return buffer.getvalue()
