"""What `Pipe.save`, `load`, `export` and `save_pretrained` do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from threading import Thread
from typing import Any

import torch
from torch import nn

from penstock.checkpoint import pretrained, reader
from penstock.checkpoint.directory import create_save_directory, remove_incomplete_saves
from penstock.checkpoint.local_state import (
    LocalState,
    OptimizerArgument,
    as_optimizer_list,
    flatten_optimizer_state,
)
from penstock.checkpoint.pretrained_names import is_pretrained
from penstock.checkpoint.reader import MODEL_KEY, OPTIMIZER_KEY, RNG_KEY
from penstock.checkpoint.safetensors_io import SafetensorsWriter
from penstock.checkpoint.save_group import (
    DistributedSaveGroup,
    LocalSaveGroup,
    SaveGroup,
    run_and_gather,
    run_on_each_rank,
    run_on_rank_zero,
)
from penstock.checkpoint.writer import CheckpointWriter, execute_save, plan_save
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.placement import PlacedPartition
from penstock.model.tied import find_tied_names
from penstock.runtime.step_request import CheckpointPeers

# -------------------------------------------------------------------------------------------------
# A save that is under way, and the one that a pipe has to wait for.
# -------------------------------------------------------------------------------------------------

_log = logging.getLogger("penstock")


class SaveHandle:
    """A save on its way to the disk, or there. It counts when `wait` has returned."""

    def __init__(self, path: Path, write: Callable[[], None], background: bool) -> None:
        self.path = path
        self._write = write
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="penstock saving") if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            write()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            _log.error("penstock: a save in the background failed: %s", error)

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until it is on the disk; gives the path, or raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.path


class PendingSave:
    """One pipe's last save, if it is in the background. A copy of the pipe has its own."""

    def __init__(self) -> None:
        self.handle: SaveHandle | None = None

    def wait(self) -> None:
        """For the save that is under way; raises what went wrong with it."""
        last, self.handle = self.handle, None
        if last is not None:
            last.wait()

    def __reduce__(self) -> tuple[type[PendingSave], tuple[()]]:
        return PendingSave, ()


# -------------------------------------------------------------------------------------------------

PathLike = str | os.PathLike[str]


def build_saver(
    module: nn.Module, split: PlacedPartition, fellows: CheckpointPeers, pending: PendingSave
) -> Saver:
    """Of a pipe, which saves its part of a model with the processes of a group."""
    same = {**find_tied_names(module), **split.tied_names}
    savers = (
        LocalSaveGroup()
        if fellows.process_group is None
        else DistributedSaveGroup(fellows.process_group)
    )
    model = split.partition.model if is_pretrained(split.partition.model) else None
    return Saver(
        LocalState(module, same, savers, fellows.replica, split.is_local(0), model), pending
    )


@dataclass(frozen=True)
class Saver:
    """Saves what a process holds. Each waits for the save before it."""

    local_state: LocalState
    pending: PendingSave

    def save(
        self, folder: PathLike, optimizer: OptimizerArgument, extra: Any, background: bool
    ) -> SaveHandle:
        """Plan and, for the background, copy; then write."""
        self.pending.wait()
        holding, savers, home = (
            self.local_state,
            self.local_state.save_group,
            Path(folder).absolute(),
        )
        doing = f"saving to '{home}'"
        state, packed = run_on_each_rank(
            savers, doing, lambda: (_full_state(holding, optimizer), _serialize_extra(extra))
        )
        place = run_on_rank_zero(savers, doing, lambda: create_save_directory(home))
        same = {
            f"{MODEL_KEY}.{name}": f"{MODEL_KEY}.{kept}"
            for name, kept in holding.tied_names.items()
        }
        writer = CheckpointWriter(place, same, packed)

        def cleanup() -> None:
            remove_incomplete_saves(place.parent)

        with _cleanup_on_failure(cleanup, savers):
            planned = plan_save(savers, doing, writer, state)
            if background:
                run_on_each_rank(
                    savers, doing, lambda: planned.planner.take_snapshot(planned.local_plan)
                )

        def write() -> None:
            with _cleanup_on_failure(cleanup, savers):
                execute_save(savers, doing, writer, planned)

        saving = SaveHandle(place, write, background)
        self.pending.handle = saving if background else None
        return saving

    def load(self, path: PathLike, optimizer: OptimizerArgument) -> Any:
        """Read what this process needs; gives what was saved as `extra`."""
        self.pending.wait()
        holding, savers = self.local_state, self.local_state.save_group
        doing = f"loading '{path}'"
        place = run_on_rank_zero(
            savers, doing, lambda: reader.find_checkpoint(Path(path).absolute())
        )
        told = run_and_gather(savers, doing, lambda: list(holding.unique_state()))
        names = [name for those in told for name in those]

        def work() -> Any:
            source = reader.open_checkpoint(place, names, holding)
            reader.check_stored_names(source, names, holding.tied_names)
            reader.load_model(holding, source)
            optimizers = as_optimizer_list(optimizer)
            if optimizers:
                reader.load_optimizers(holding, source, optimizers)
                reader.load_rng_state(holding, source)
            return reader.load_extra(source)

        return run_on_each_rank(savers, doing, work)

    def export(self, file: PathLike) -> Path:
        """Write the model's tensors to one file, each rank its own bytes."""
        self.pending.wait()
        path = Path(file).absolute()
        if path.suffix != ".safetensors":
            raise ArgumentError(f"export writes a .safetensors file, and not '{path.name}'")
        savers, doing = self.local_state.save_group, f"exporting to '{path}'"
        writer = SafetensorsWriter(path, self.local_state.tied_names)
        state = run_on_each_rank(savers, doing, lambda: _model_state(self.local_state))
        with _cleanup_on_failure(writer.remove_partial_file, savers):
            planned = plan_save(savers, doing, writer, state)
            execute_save(savers, doing, writer, planned)
        return path

    def save_pretrained(self, folder: PathLike) -> Path:
        """Write a folder as the model's own save_pretrained does."""
        self.pending.wait()
        path = Path(folder).absolute()
        pretrained.write_pretrained(
            self.local_state.pretrained_model,
            lambda: _model_state(self.local_state),
            self.local_state.save_group,
            path,
        )
        return path


@contextmanager
def _cleanup_on_failure(cleanup: Callable[[], None], save_group: SaveGroup) -> Iterator[None]:
    """What is half written when it fails is removed, by the first rank."""
    try:
        yield
    except BaseException:
        if save_group.rank == 0:
            cleanup()
        raise


def _model_state(local_state: LocalState) -> dict[str, Any]:
    """What this process saves of the model: no copies of what another rank saves."""
    return {
        n: value
        for n, (_, value) in local_state.unique_state().items()
        if local_state.saved_name(n) == n
    }


def _full_state(local_state: LocalState, optimizer: OptimizerArgument) -> dict[str, Any]:
    """All that this process saves."""
    state: dict[str, Any] = {MODEL_KEY: _model_state(local_state)}
    optimizers = as_optimizer_list(optimizer)
    if optimizers:
        state[OPTIMIZER_KEY] = flatten_optimizer_state(local_state, optimizers)
    if local_state.saves_rng_state:
        state[RNG_KEY] = {str(local_state.replica): torch.get_rng_state()}
    return state


def _serialize_extra(extra: Any) -> bytes:
    """As `torch.load` reads it back, with nothing in it that could run code."""
    packed = BytesIO()
    try:
        torch.save(extra, packed)
        packed.seek(0)
        torch.load(packed, weights_only=True)
    except (PicklingError, UnpicklingError, AttributeError, TypeError) as error:
        raise PenstockTypeError(
            "extra takes numbers, strings, tensors, and lists and dicts of them, as "
            f"torch.load(weights_only=True) does: {error}"
        ) from None
    return packed.getvalue()
