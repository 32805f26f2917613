"""Draws from `random` and `numpy.random`, which all threads share, inside the layers of a stage.

These generators belong to the whole process, and no call of them can be redirected. A cell whose
layers draw from them therefore has them for itself while it computes, with states of its own:

    stream of a stage     the layers, or the units of a traced model    (call, stage, micro-batch)
    stream of the parent  code between the units, which every stage     (call, micro-batch)
                          of a traced model runs

The forward and the recomputation of a cell begin with the same states, so they draw the same
numbers, and every stage of a traced model draws the same ones between the units. Afterwards the
generators have the state that they had before.

The first forward of a stage shows whether it draws (`ObservedBehavior`). One that does not never
comes here again.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from penstock.errors import RunError
from penstock.stage.rng import derive_cell_seed
from penstock.stage.stage import OUTSIDE


class HostRngState:
    """The states of the global generators of Python, and of NumPy if anything has imported it.

    Attributes:
        python_state: That of `random`.
    """

    def __init__(self) -> None:
        self.python_state = random.getstate()
        numpy_random = _get_numpy_random()
        self._numpy_state = None if numpy_random is None else numpy_random.get_state()

    def find_used(self) -> list[str]:
        """Return the names of the generators that were drawn from since."""
        return self.find_differences(HostRngState())

    def find_differences(self, other: HostRngState) -> list[str]:
        """Return the names of the generators that have another state in `other`."""
        names = []
        if self.python_state != other.python_state:
            names.append("random")
        # The state of NumPy contains an array, which `==` would compare element by element.
        if pickle.dumps(self._numpy_state) != pickle.dumps(other._numpy_state):
            names.append("numpy.random")
        return names

    def describe(self) -> bytes:
        """Return the states in a form that can be compared."""
        return pickle.dumps((self.python_state, self._numpy_state))

    def restore(self) -> None:
        """Set the states back."""
        random.setstate(self.python_state)
        if self._numpy_state is not None:
            sys.modules["numpy"].random.set_state(self._numpy_state)


def _get_numpy_random() -> Any:
    """Return the module `numpy.random`, or None. Nothing draws from it before it is imported."""
    return getattr(sys.modules.get("numpy"), "random", None)


def advance_host_rng(names: Iterable[str]) -> None:
    """Draw once from each of these generators, so that the caller sees that they were used."""
    for name in names:
        _ = random.random() if name == "random" else _get_numpy_random().random_sample()


# ---- one cell ------------------------------------------------------------------------------------

# Held by a cell that has the generators for itself.
host_rng_lock = threading.RLock()

# PyTorch puts the state of `random` back after it has compiled a function, also in a thread that
# has not drawn. If it began to compile before a cell of another thread got the generators, it sets
# a state that is not the cell's. It is one that they had between cells or at the beginning of one,
# and no draw leads to it. So the latest of these states are kept.
_latest_states: deque[Any] = deque(maxlen=64)


class _ThreadState(threading.local):
    """The cell that this thread computes with random numbers of its own, or None."""

    def __init__(self) -> None:
        self.cell: HostRngCell | None = None


_thread_state = _ThreadState()


def select_host_rng_lock() -> AbstractContextManager[object]:
    """Return the lock of the cells of one call.

    A pipe that is a layer of another pipe gets a lock of its own. The outer cell holds the common
    one, and waits for the threads of the inner pipe.
    """
    return host_rng_lock if _thread_state.cell is None else threading.RLock()


class HostRngCell:
    """A context in which one cell has the global generators for itself.

    Attributes:
        used: The names of the generators that were drawn from, after the context.
        was_overwritten: Whether another thread has set the state of `random` in the context, so
            that it does not show whether the cell has drawn from it.
    """

    def __init__(
        self, seed: int, stage: int, microbatch: int, lock: AbstractContextManager[object]
    ) -> None:
        self._seed, self._stage, self._microbatch, self._lock = seed, stage, microbatch, lock
        self._stream = stage
        self._initial_states: dict[int, HostRngState] = {}
        self._states: dict[int, HostRngState] = {}
        self.used: set[str] = set()
        self.was_overwritten = False

    def __enter__(self) -> HostRngCell:
        """Wait for the generators, and seed them."""
        self._lock.__enter__()
        self._outer_cell, _thread_state.cell = _thread_state.cell, self
        self._caller_state = HostRngState()
        _latest_states.append(self._caller_state.python_state)
        self._load(self._stage)
        return self

    def __exit__(self, *exception: object) -> None:
        self._states[self._stream] = HostRngState()
        self._caller_state.restore()
        _thread_state.cell = self._outer_cell
        for stream, state in self._states.items():
            used = set(self._initial_states[stream].find_differences(state))
            if "random" in used and state.python_state in _latest_states:
                self.was_overwritten = True
                used.remove("random")
            self.used |= used
        self._lock.__exit__(None, None, None)

    def _load(self, stream: int) -> None:
        """Continue a stream, or begin it."""
        self._stream = stream
        if stream in self._states:
            self._states[stream].restore()
            return
        seed = derive_cell_seed(self._seed, stream, self._microbatch)
        random.seed(seed)
        numpy_random = _get_numpy_random()
        if numpy_random is not None:
            numpy_random.seed(seed % 2**32)
        self._initial_states[stream] = HostRngState()
        _latest_states.append(self._initial_states[stream].python_state)

    @contextmanager
    def draw_from(self, stream: int) -> Iterator[None]:
        """Draw from another stream inside the context."""
        previous = self._stream
        self._states[previous] = HostRngState()
        self._load(stream)
        try:
            yield
        finally:
            self._states[stream] = HostRngState()
            self._load(previous)

    def describe_states(self) -> dict[int, bytes]:
        """Return the last state of each stream, after the context."""
        return {stream: state.describe() for stream, state in self._states.items()}

    def check_repeats(self, forward: HostRngCell) -> None:
        """Raise if this recomputation has drawn other numbers than the forward."""
        for stream in {*self._states, *forward._states}:
            states = self._states.get(stream), forward._states.get(stream)
            if states[0] is None or states[1] is None or states[0].find_differences(states[1]):
                raise RunError(
                    f"these layers draw from {' and '.join(sorted(self.used | forward.used))}, and "
                    "their recomputation drew other numbers than their forward. A layer draws in "
                    "one of the two only, or another thread draws at the same time. Draw with "
                    "torch, or set checkpoint='never'."
                )


def draw_between_units() -> AbstractContextManager[None]:
    """Return a context for code that every stage of a traced model runs."""
    cell = _thread_state.cell
    return nullcontext() if cell is None else cell.draw_from(OUTSIDE)


def draw_in_unit() -> AbstractContextManager[None]:
    """Return a context for a unit of a traced model, which one stage runs."""
    cell = _thread_state.cell
    return nullcontext() if cell is None else cell.draw_from(cell._stage)
