"""Random numbers of a captured step: new ones in every replay, the same in its recomputations.

Each computation of a cell has a generator that the recording knows. Before a replay, all those of
one cell get the seed that the cell would have in a step that is not captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from penstock.run.call import Draws
from penstock.run.capture.recording import Recording
from penstock.run.capture.watching import Uncapturable, Watch
from penstock.stage.randomness import Seeded, Source, move_on, next_seed, seed_of_cell

Cell = tuple[int, int]  # stage, micro-batch


class Asked:
    """In a step that is not captured: how often each cell has drawn random numbers."""

    def __init__(self) -> None:
        self.times: Counter[Cell] = Counter()
        self.moved_on = False  # was the caller's generator?
        self._given: list[tuple[Cell, Seeded]] = []

    @property
    def draws(self) -> Draws:
        """As ever."""
        return Draws(used=self._used, source=self._source)

    def _used(self) -> None:
        self.moved_on = True
        move_on()

    def _source(self, seed: int, stage: int, microbatch: int) -> Seeded:
        source = Seeded(seed_of_cell(seed, stage, microbatch))
        self._given.append(((stage, microbatch), source))
        return source

    def close(self) -> None:
        """The step has ended: who asked may have drawn nothing."""
        self.times.update(cell for cell, source in self._given if source.drew)
        self._given.clear()


class Nothing:
    """For a cell that has drawn nothing before."""

    drew = False

    def on(self, device: torch.device) -> torch.Generator:
        """It draws nothing now."""
        raise Uncapturable("it draws random numbers, which it had not done before")

    def lent(self, mine: torch.Generator) -> AbstractContextManager[None]:
        """Nor so."""
        raise AssertionError("there is none to lend")


class Registered:
    """Of one computation of a cell."""

    def __init__(self, recording: Recording, watch: Watch, device: torch.device) -> None:
        self._recording, self._watch = recording, watch
        self.generator = recording.generator(device)
        watch.repeats(self.generator)
        self.drew = False

    def on(self, device: torch.device) -> torch.Generator:
        """The one that the recording knows."""
        if device != self.generator.device:
            raise Uncapturable(f"it draws random numbers on {device}, where no replay draws any")
        self.drew = True
        return self.generator

    @contextmanager
    def lent(self, mine: torch.Generator) -> Iterator[None]:
        """As the recording does it."""
        with self._recording.lent(mine), self._watch.lending():
            yield


class Sources:
    """Those of one recording."""

    def __init__(
        self,
        recording: Recording,
        watch: Watch,
        asked: Asked,
        device_of: Callable[[int], torch.device],
    ) -> None:
        self._stock = {
            cell: [Registered(recording, watch, device_of(cell[0])) for _ in range(times)]
            for cell, times in asked.times.items()
        }
        self._used: list[tuple[Cell, Registered]] = []
        self._moves_on = asked.moved_on

    @property
    def draws(self) -> Draws:
        """For the capture: others cannot be watched, and the watch of the capture sees them."""
        return Draws(lambda: 0, lambda: None, self._source, watched=False)

    def _source(self, _: int, stage: int, microbatch: int) -> Source:
        stock = self._stock.get((stage, microbatch))
        if not stock:
            return Nothing()
        source = stock.pop()
        self._used.append(((stage, microbatch), source))
        return source

    def close(self) -> None:
        """The capture has ended: those that gave nothing are not seeded."""
        self._used = [(cell, source) for cell, source in self._used if source.drew]
        self._stock.clear()

    def seed(self) -> None:
        """Before a replay: as in a step that is not captured."""
        if self._used:
            seed = next_seed()
            for (stage, microbatch), source in self._used:
                source.generator.manual_seed(seed_of_cell(seed, stage, microbatch))
        if self._moves_on:
            move_on()
