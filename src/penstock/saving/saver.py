"""What `Pipe.save`, `load`, `export` and `save_pretrained` do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError, PenstockTypeError
from penstock.partition.split import PlacedPartition
from penstock.partition.tied import find_tied_names
from penstock.run.asking import CheckpointPeers
from penstock.saving import pretrained, reading, writing
from penstock.saving.folder import create_save_directory, remove_incomplete_saves
from penstock.saving.holding import LocalState
from penstock.saving.naming import is_pretrained
from penstock.saving.one_file import SafetensorsWriter
from penstock.saving.optimizers import OptimizerArgument, as_optimizer_list, flatten_optimizer_state
from penstock.saving.pending import PendingSave, SaveHandle
from penstock.saving.reading import MODEL_KEY, OPTIMIZER_KEY, RNG_KEY
from penstock.saving.savers import (
    DistributedSaveGroup,
    LocalSaveGroup,
    SaveGroup,
    run_and_gather,
    run_on_each_rank,
    run_on_rank_zero,
)

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
        writer = writing.CheckpointWriter(place, same, packed)

        def cleanup() -> None:
            remove_incomplete_saves(place.parent)

        with _cleanup_on_failure(cleanup, savers):
            planned = writing.plan_save(savers, doing, writer, state)
            if background:
                run_on_each_rank(
                    savers, doing, lambda: planned.planner.take_snapshot(planned.local_plan)
                )

        def write() -> None:
            with _cleanup_on_failure(cleanup, savers):
                writing.execute_save(savers, doing, writer, planned)

        saving = SaveHandle(place, write, background)
        self.pending.handle = saving if background else None
        return saving

    def load(self, path: PathLike, optimizer: OptimizerArgument) -> Any:
        """Read what this process needs; gives what was saved as `extra`."""
        self.pending.wait()
        holding, savers = self.local_state, self.local_state.save_group
        doing = f"loading '{path}'"
        place = run_on_rank_zero(
            savers, doing, lambda: reading.find_checkpoint(Path(path).absolute())
        )
        told = run_and_gather(savers, doing, lambda: list(holding.unique_state()))
        names = [name for those in told for name in those]

        def work() -> Any:
            source = reading.open_checkpoint(place, names, holding)
            reading.check_stored_names(source, names, holding.tied_names)
            reading.load_model(holding, source)
            optimizers = as_optimizer_list(optimizer)
            if optimizers:
                reading.load_optimizers(holding, source, optimizers)
                reading.load_rng_state(holding, source)
            return reading.load_extra(source)

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
            planned = writing.plan_save(savers, doing, writer, state)
            writing.execute_save(savers, doing, writer, planned)
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
