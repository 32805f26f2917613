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

from penstock.errors import ArgumentError, KindError
from penstock.partition.split import Split
from penstock.partition.tied import tied_names
from penstock.run.asking import Fellows
from penstock.saving import pretrained, reading, writing
from penstock.saving.folder import clean, next_place
from penstock.saving.holding import Holding
from penstock.saving.naming import is_pretrained
from penstock.saving.one_file import OneFileWriter
from penstock.saving.optimizers import Optimizers, listed, state_of
from penstock.saving.pending import Pending, Saving
from penstock.saving.reading import MODEL, OPTIMIZER, RANDOM
from penstock.saving.savers import Alone, Grouped, Savers, decided, each, together

PathLike = str | os.PathLike[str]


def saver_of(module: nn.Module, split: Split, fellows: Fellows, pending: Pending) -> Saver:
    """Of a pipe, which saves its part of a model with the processes of a group."""
    same = {**tied_names(module), **split.same}
    savers = Alone() if fellows.group is None else Grouped(fellows.group)
    model = split.partition.model if is_pretrained(split.partition.model) else None
    return Saver(Holding(module, same, savers, fellows.copy, split.is_here(0), model), pending)


@dataclass(frozen=True)
class Saver:
    """Saves what a process holds. Each waits for the save before it."""

    holding: Holding
    pending: Pending

    def save(self, folder: PathLike, optimizer: Optimizers, extra: Any, background: bool) -> Saving:
        """Plan and, for the background, copy; then write."""
        self.pending.wait()
        holding, savers, home = self.holding, self.holding.savers, Path(folder).absolute()
        doing = f"saving to '{home}'"
        state, packed = each(savers, doing, lambda: (_state(holding, optimizer), _packed(extra)))
        place = decided(savers, doing, lambda: next_place(home))
        same = {f"{MODEL}.{name}": f"{MODEL}.{kept}" for name, kept in holding.same.items()}
        writer = writing.CheckpointWriter(place, same, packed)

        def undo() -> None:
            clean(place.parent)

        with _undone_by(undo, savers):
            planned = writing.plan(savers, doing, writer, state)
            if background:
                each(savers, doing, lambda: planned.planner.copy(planned.mine))

        def write() -> None:
            with _undone_by(undo, savers):
                writing.write(savers, doing, writer, planned)

        saving = Saving(place, write, background)
        self.pending.last = saving if background else None
        return saving

    def load(self, path: PathLike, optimizer: Optimizers) -> Any:
        """Read what this process needs; gives what was saved as `extra`."""
        self.pending.wait()
        holding, savers = self.holding, self.holding.savers
        doing = f"loading '{path}'"
        place = decided(savers, doing, lambda: reading.found_at(Path(path).absolute()))
        told = together(savers, doing, lambda: list(holding.state()))
        names = [name for those in told for name in those]

        def work() -> Any:
            source = reading.opened(place, names, holding)
            reading.check_all(source, names, holding.same)
            reading.read_model(holding, source)
            optimizers = listed(optimizer)
            if optimizers:
                reading.read_optimizers(holding, source, optimizers)
                reading.read_random(holding, source)
            return reading.read_extra(source)

        return each(savers, doing, work)

    def export(self, file: PathLike) -> Path:
        """Write the model's tensors to one file, each rank its own bytes."""
        self.pending.wait()
        path = Path(file).absolute()
        if path.suffix != ".safetensors":
            raise ArgumentError(f"export writes a .safetensors file, and not '{path.name}'")
        savers, doing = self.holding.savers, f"exporting to '{path}'"
        writer = OneFileWriter(path, self.holding.same)
        state = each(savers, doing, lambda: _model(self.holding))
        with _undone_by(writer.undo, savers):
            planned = writing.plan(savers, doing, writer, state)
            writing.write(savers, doing, writer, planned)
        return path

    def save_pretrained(self, folder: PathLike) -> Path:
        """Write a folder as the model's own save_pretrained does."""
        self.pending.wait()
        path = Path(folder).absolute()
        pretrained.write(
            self.holding.model, lambda: _model(self.holding), self.holding.savers, path
        )
        return path


@contextmanager
def _undone_by(undo: Callable[[], None], savers: Savers) -> Iterator[None]:
    """What is half written when it fails is removed, by the first rank."""
    try:
        yield
    except BaseException:
        if savers.rank == 0:
            undo()
        raise


def _model(holding: Holding) -> dict[str, Any]:
    """What this process saves of the model: no copies of what another rank saves."""
    return {n: value for n, (_, value) in holding.state().items() if holding.name(n) == n}


def _state(holding: Holding, optimizer: Optimizers) -> dict[str, Any]:
    """All that this process saves."""
    state: dict[str, Any] = {MODEL: _model(holding)}
    optimizers = listed(optimizer)
    if optimizers:
        state[OPTIMIZER] = state_of(holding, optimizers)
    if holding.first:
        state[RANDOM] = {str(holding.replica): torch.get_rng_state()}
    return state


def _packed(extra: Any) -> bytes:
    """As `torch.load` reads it back, with nothing in it that could run code."""
    packed = BytesIO()
    try:
        torch.save(extra, packed)
        packed.seek(0)
        torch.load(packed, weights_only=True)
    except (PicklingError, UnpicklingError, AttributeError, TypeError) as error:
        raise KindError(
            "extra takes numbers, strings, tensors, and lists and dicts of them, as "
            f"torch.load(weights_only=True) does: {error}"
        ) from None
    return packed.getvalue()
