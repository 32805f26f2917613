"""Measure how fast devices that share an accelerator are while all of them are busy.

Virtual GPUs have multiprocessors of their own, and share the memory, the power and the clock of one
GPU. So each unit of a model is timed while the neighbours do what they do in a step of training.
There they run other units, on parameters and gradients of their own. Here `a` to `d` are units, and
`start` and `end` are events with times:

    the device        [ b ][ c ] ... [ d ]start[ a ][ a ][ a ]end ... start[ b ][ b ][ b ]end
    a neighbour       [ c ][ d ] ... [ a ][ b ][ c ][ d ][ a ] ...    [ b ][ c ][ d ][ a ]
    a larger one      [d][a][b]  ...  [c][d][a][b][c][d][a][b] ...  [c][d][a][b][c][d][a][b]

Each of these matters. Units differ in how much memory they read, and what one of them leaves can be
used by the others. The parameters and gradients of all stages do not fit into a cache that one
stage might fit into. A GPU lowers its clock when it has drawn too much power for a while, so
nothing is timed before all devices have been busy for as long as some steps take. And numbers draw
less power if they are all the same, so gradients are random.

In a step, ranks are idle now and then, which leaves more to the others. So all is timed twice: with
neighbours that are always busy, and with neighbours that are idle for some of the time.

The work is captured as CUDA graphs for each device. Launching a graph takes the host microseconds,
so that it slows nothing down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from statistics import fmean
from time import perf_counter, sleep
from typing import Any, NamedTuple

from penstock.device.accelerator import get_free_memory, synchronize
from penstock.device.device import Device, Gpu
from penstock.device.recorded_graph import GraphMemoryPools, RecordedCudaGraph
from penstock.torch_compat import sleep_on_device

IDLE_SHARE = 0.25  # of the time of neighbours that are idle now and then

# On an H200, the clock falls for 90 ms, swings for some tenths of a second, and rises in 100 ms.
_BUSY_SECONDS = 0.5
# The clock swings by a tenth while the power is at its limit. So all units are timed in turns, a
# few milliseconds each, for a while.
_TIMED_SECONDS = 0.3
_TURN_SECONDS = 4e-3
_LEAST_ROUNDS = 3
_REST_SECONDS = 0.1  # The clock takes as long to rise again, before anything else is measured.
_AHEAD_SECONDS = 5e-3  # of work that is launched before it is needed
_GRAPH_SECONDS = 2e-3  # Shorter work is repeated in its graph: launches take time in between.
_MOST_TURNS = 16
_MEMORY_SHARE = 0.5  # of the free memory, for the tensors of all devices
_SLEEP_CYCLES = 1_000_000  # of a kernel that is timed to find out how long a cycle is

# Yields a function that launches the work on tensors of its own, and what has to be kept alive.
PreparedWork = AbstractContextManager[tuple[Callable[[], object], object]]


class Slowdowns(NamedTuple):
    """The factors by which busy neighbours make work longer, busy always or with pauses."""

    always: float
    with_pauses: float


@dataclass(frozen=True)
class SharedDevice:
    """A device of a rank, and those of other ranks on the same accelerator."""

    device: Gpu
    neighbours: tuple[Gpu, ...]

    @staticmethod
    def find(device: Device, devices: Sequence[Device]) -> SharedDevice | None:
        """Return the device with its neighbours among `devices`, or None if it has none."""
        neighbours = {
            id(other): other
            for other in devices
            if other is not device and other.device == device.device and isinstance(other, Gpu)
        }
        if not isinstance(device, Gpu) or not neighbours or not device.has_graphs:
            return None
        return SharedDevice(device, tuple(neighbours.values()))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The device, then its neighbours."""
        return self.device, *self.neighbours


@dataclass
class _CapturedWork:
    """The work of one unit, as a graph for each device."""

    turns: int  # how often the unit runs in the graph
    seconds: float  # of a replay on the device alone
    graphs: dict[Gpu, RecordedCudaGraph] = field(default_factory=dict)
    kept_values: list[object] = field(default_factory=list)


class ContentionMeter:
    """The units of a model, captured for a device and for its neighbours, to be timed together."""

    def __init__(self, shared: SharedDevice) -> None:
        self._shared = shared
        # A device replays one of its graphs at a time, so they share their memory.
        self._pools = [GraphMemoryPools() for _ in shared.gpus]
        self._works: dict[Hashable, _CapturedWork] = {}
        shared.device.module.empty_cache()  # What PyTorch keeps for later does not count as free.
        free = get_free_memory(shared.device.device)
        self._bytes_left = _MEMORY_SHARE * free[0] if free else 0.0

    def add(
        self, key: Hashable, prepare: Callable[[], PreparedWork], seconds: float, size: float
    ) -> None:
        """Capture the work of a unit for each device, if there is memory for it.

        Args:
            key: The name of the unit.
            prepare: A function that returns the work. It is called once for each device.
            seconds: How long the work takes on the device alone: more than 0.
            size: The bytes that it needs on each device, roughly.
        """
        needed = size * len(self._shared.gpus)
        if needed > self._bytes_left:
            return  # a smaller unit may still fit
        self._bytes_left -= needed
        turns = max(1, min(_MOST_TURNS, ceil(_GRAPH_SECONDS / max(seconds, 1e-9))))
        work = _CapturedWork(turns, turns * seconds)
        try:
            for gpu, pools in zip(self._shared.gpus, self._pools, strict=True):
                with prepare() as (run, values):
                    work.kept_values.append(values)
                    synchronize(gpu.device)  # They were made on another stream.
                    work.graphs[gpu] = _capture(gpu, pools, run, turns)
        except RuntimeError:  # It waits for the device, say, or there is no memory for it.
            self._bytes_left += needed
            return
        finally:
            synchronize(self._shared.device.device)
        self._works[key] = work

    def measure(self, counts: Mapping[Hashable, int]) -> dict[Hashable, Slowdowns]:
        """Return the slowdowns of each unit while all neighbours run all of them.

        Neighbours with pauses are idle for `IDLE_SHARE` of the time. Units that could not be
        captured are left out.

        Args:
            counts: How often each unit is in the model.
        """
        works = list(self._works.values())
        if not works:
            return {}
        device, *neighbours = (
            _DeviceQueue(
                gpu, works, [counts[key] for key in self._works], index / len(self._shared.gpus)
            )
            for index, gpu in enumerate(self._shared.gpus)
        )
        always = device.time_units(neighbours)
        cycles_per_second = _SLEEP_CYCLES / max(device.time_sleep(neighbours), 1e-9)
        for queue in (device, *neighbours):
            queue.add_sleep(cycles_per_second * IDLE_SHARE / (1 - IDLE_SHARE), always)
        with_pauses = device.time_units(neighbours)
        synchronize(self._shared.device.device)
        sleep(_REST_SECONDS)
        return {
            key: Slowdowns(*(seconds / work.seconds for seconds in both))
            for (key, work), *both in zip(self._works.items(), always, with_pauses, strict=True)
        }


class _DeviceQueue:
    """A device that runs the units of the model in turn, each as often as the model has it.

    Args:
        gpu: The device.
        works: The work of all units.
        counts: How often each unit is in the model.
        phase: Where in the model it begins, as a fraction.
    """

    def __init__(
        self, gpu: Gpu, works: Sequence[_CapturedWork], counts: Sequence[int], phase: float
    ) -> None:
        self._gpu, self._works, self._counts = gpu, works, counts
        # How often the model would have been run, by unit. The one that is behind comes next.
        self._progress = [(index / len(works) - phase) % 1.0 for index in range(len(works))]
        self._sleeps = [0] * len(works)  # cycles after each unit
        self._launched: deque[tuple[Any, float]] = deque()  # an event after it, and its seconds

    def add_sleep(self, cycles_per_second: float, seconds: Sequence[float]) -> None:
        """Sleep after each unit from now on, in proportion to the seconds that it takes."""
        self._sleeps = [int(cycles_per_second * unit_seconds) for unit_seconds in seconds]

    def keep_busy(self) -> None:
        """Launch work until there is enough for a while."""
        while self._launched and self._launched[0][0].query():
            self._launched.popleft()
        seconds = sum(seconds for _, seconds in self._launched)
        while len(self._launched) < 2 or seconds < _AHEAD_SECONDS:
            index = min(range(len(self._works)), key=self._progress.__getitem__)
            self._progress[index] += self._works[index].turns / self._counts[index]
            self._replay(index)
            if self._sleeps[index]:
                self._sleep(self._sleeps[index])
            self._launched.append((self._record(), self._works[index].seconds))
            seconds += self._works[index].seconds

    def time_units(self, neighbours: Sequence[_DeviceQueue]) -> list[float]:
        """Return the seconds of a replay of each unit, after all queues have worked for a while."""
        begin = perf_counter()
        while perf_counter() < begin + _BUSY_SECONDS:
            for queue in (self, *neighbours):
                queue.keep_busy()
        rounds: list[list[float]] = []
        begin = perf_counter()
        while len(rounds) < _LEAST_ROUNDS or perf_counter() < begin + _TIMED_SECONDS:
            rounds.append(
                [
                    self._time(
                        partial(self._replay, index),
                        ceil(_TURN_SECONDS / max(work.seconds, 1e-9)),
                        neighbours,
                    )
                    for index, work in enumerate(self._works)
                ]
            )
        return [fmean(seconds) for seconds in zip(*rounds, strict=True)]

    def time_sleep(self, neighbours: Sequence[_DeviceQueue]) -> float:
        """Return the seconds of a sleep, whose cycles are longer while the clock is lower."""
        return self._time(partial(self._sleep, _SLEEP_CYCLES), _LEAST_ROUNDS, neighbours)

    def _time(
        self, launch: Callable[[], object], count: int, neighbours: Sequence[_DeviceQueue]
    ) -> float:
        """Return the seconds of a launch on the device while the neighbours are busy."""
        start = self._record(timed=True)
        for _ in range(count):
            launch()
        end = self._record(timed=True)
        while not end.query():
            for neighbour in neighbours:
                neighbour.keep_busy()
        return float(start.elapsed_time(end)) / 1e3 / count

    def _replay(self, index: int) -> None:
        with self._gpu.activate():
            self._works[index].graphs[self._gpu].replay()

    def _sleep(self, cycles: int) -> None:
        with self._gpu.activate():
            sleep_on_device(cycles)

    def _record(self, timed: bool = False) -> Any:
        event = self._gpu.module.Event(enable_timing=timed)
        event.record(self._gpu.compute_stream)
        return event


def _capture(
    gpu: Gpu, pools: GraphMemoryPools, work: Callable[[], object], turns: int
) -> RecordedCudaGraph:
    """Return the work, some times in a row, as a graph that runs on a device."""
    with gpu.activate():
        work()  # the first run on a stream allocates what libraries keep for it
    graph = RecordedCudaGraph([gpu.device], pools)

    def run_on_device() -> None:
        origin = gpu.module.current_stream(gpu.device)
        gpu.compute_stream.wait_stream(origin)
        with gpu.activate():
            for _ in range(turns):
                work()
        origin.wait_stream(gpu.compute_stream)

    graph.capture(run_on_device, frees_memory=False)
    return graph
