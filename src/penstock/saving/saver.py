"""What `Pipe.save`, `Pipe.load` and `Pipe.export` do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from threading import Thread
from typing import Any

import torch

from penstock.errors import ArgumentError, KindError
from penstock.saving import reading, writing
from penstock.saving.folder import clean, next_place
from penstock.saving.holding import Holding
from penstock.saving.one_file import OneFileWriter
from penstock.saving.optimizers import Optimizers, listed, state_of
from penstock.saving.reading import MODEL, OPTIMIZER, RANDOM
from penstock.saving.team import Team, decided, each, together

PathLike = str | os.PathLike[str]

_log = logging.getLogger("penstock")


class Saving:
    """A save on its way to the disk, or there. It counts when `wait` has returned."""

    def __init__(self, path: Path, work: Callable[[], None], background: bool) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._work = work
        self._thread: Thread | None = None
        if background:
            self._thread = Thread(target=self._run, name="penstock saving")
            self._thread.start()
        else:
            work()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            _log.error("penstock: a save in the background failed: %s", error)

    @property
    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until it is on the disk; gives the path, or raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.path


class Saver:
    """One pipe's saves, one after the other: each waits for the one before it."""

    def __init__(self) -> None:
        self._last: Saving | None = None

    def wait(self) -> None:
        """For the save that is under way; raises what went wrong with it."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def save(
        self,
        holding: Holding,
        folder: PathLike,
        optimizer: Optimizers,
        extra: Any,
        background: bool,
    ) -> Saving:
        """Plan and, for the background, copy; then write."""
        self.wait()
        team, home = holding.team, Path(folder).absolute()
        doing = f"saving to '{home}'"
        state, packed = each(team, doing, lambda: (_state(holding, optimizer), _packed(extra)))
        place = decided(team, doing, lambda: next_place(home))
        same = {f"{MODEL}.{name}": f"{MODEL}.{kept}" for name, kept in holding.same.items()}
        writer = writing.CheckpointWriter(place, same, packed)

        def undo() -> None:
            clean(place.parent)

        with _undone_by(undo, team):
            planned = writing.plan(team, doing, writer, state)
            if background:
                each(team, doing, lambda: planned.planner.copy(planned.mine))

        def write() -> None:
            with _undone_by(undo, team):
                writing.write(team, doing, writer, planned)

        saving = Saving(place, write, background)
        self._last = saving if background else None
        return saving

    def load(self, holding: Holding, path: PathLike, optimizer: Optimizers) -> Any:
        """Read what this process needs; gives what was saved as `extra`."""
        self.wait()
        team = holding.team
        doing = f"loading '{path}'"
        place = decided(team, doing, lambda: reading.found_at(Path(path).absolute()))
        names = together(team, doing, lambda: list(holding.state()))

        def work() -> Any:
            source = reading.opened(place)
            reading.check_all(source, [name for those in names for name in those], holding.same)
            reading.read_model(holding, source)
            optimizers = listed(optimizer)
            if optimizers:
                reading.read_optimizers(holding, source, optimizers)
                reading.read_random(holding, source)
            return reading.read_extra(source)

        return each(team, doing, work)

    def export(self, holding: Holding, file: PathLike) -> Path:
        """Write the model's tensors to one file, each rank its own bytes."""
        self.wait()
        path = Path(file).absolute()
        if path.suffix != ".safetensors":
            raise ArgumentError(f"export writes a .safetensors file, and not '{path.name}'")
        writer = OneFileWriter(path, holding.same)
        team, doing = holding.team, f"exporting to '{path}'"
        state = each(team, doing, lambda: _model(holding))
        with _undone_by(writer.undo, team):
            planned = writing.plan(team, doing, writer, state)
            writing.write(team, doing, writer, planned)
        return path


@contextmanager
def _undone_by(undo: Callable[[], None], team: Team) -> Iterator[None]:
    """What is half written when it fails is removed, by the first rank."""
    try:
        yield
    except BaseException:
        if team.rank == 0:
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
